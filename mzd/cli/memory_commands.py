"""Owns the commands that change what is in memory: evict, trim, restore, pin, drop."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from mzd.cli.output import Exit, Output, note
from mzd.cli.sizes import format_bytes
from mzd.cli.transcript import Transcript
from mzd.errors import MzdError
from mzd.rpc.blocking_client import call_daemon


def evict(arguments: Namespace, output: Output) -> int:
    """`mzd evict 500M | 50%`: give memory back."""
    params = {**arguments.amount, "context": arguments.context, "dry_run": arguments.dry_run}
    output.result(call_daemon(arguments.socket, "evict", params), _show_eviction)
    return Exit.DONE


def trim(arguments: Namespace, output: Output) -> int:
    """`mzd trim LEVEL`: give back what one of Android's levels stands for."""
    level = int(arguments.level) if arguments.level.isdecimal() else arguments.level
    output.result(call_daemon(arguments.socket, "trim", {"level": level}), _show_eviction)
    return Exit.DONE


def _show_eviction(result: Mapping[str, Any]) -> None:
    for warning in result["warnings"]:
        note(f"warning: {warning}")
    end = "; nothing more can go" if result["exhausted"] else ""
    print(
        f"freed {format_bytes(result['freed_bytes'])} of {format_bytes(result['requested_bytes'])} asked{end}"
    )
    for (stage, unit, to), run in groupby(result["steps"], key=itemgetter("stage", "unit", "to")):
        steps = list(run)
        print(f"  {stage}: {unit}{_layers(steps)} -> {to}, {format_bytes(_total(steps))}")
    print(f"resident now: {format_bytes(result['resident_bytes'])}")


def _layers(steps: Sequence[Mapping[str, Any]]) -> str:
    """Which layers a run of steps went through, and in how many units; --json has them one by one."""
    layers = [step["layer"] for step in steps if step.get("layer") is not None]
    if not layers:
        return ""
    if len(steps) == 1:
        return f" layer {layers[0]}"
    return f" layers {layers[0]} to {layers[-1]} ({len(steps)} units)"


def _total(steps: Sequence[Mapping[str, Any]]) -> int:
    return sum(step["bytes"] for step in steps)


def restore(arguments: Namespace, output: Output) -> int:
    """`mzd restore [CONTEXT]`: bring a context back before it is asked for."""
    output.result(call_daemon(arguments.socket, "restore", {"context": arguments.context}), _show_restore)
    return Exit.DONE


def _show_restore(result: Mapping[str, Any]) -> None:
    restored, resident = format_bytes(result["restored_bytes"]), format_bytes(result["resident_bytes"])
    print(f"restored {restored}; resident now: {resident}")


def pin(arguments: Namespace, output: Output) -> int:
    """`mzd pin [CONTEXT | --model] [--off]`: keep a context or the model in memory."""
    target = {"model": True} if arguments.model else {"context": arguments.context}
    params = {**target, "pinned": not arguments.off}
    name = "the model" if arguments.model else f"context {arguments.context}"
    state = "no longer pinned" if arguments.off else "pinned"
    output.result(call_daemon(arguments.socket, "pin", params), lambda _: print(f"{name} is {state}"))
    return Exit.DONE


def drop(arguments: Namespace, output: Output) -> int:
    """`mzd drop CONTEXT`: forget a context for good, and its turns."""
    transcript = Transcript(arguments.socket, arguments.context)
    try:
        result = call_daemon(arguments.socket, "drop", {"context": arguments.context})
    except MzdError as error:
        # The daemon may have lost what this side still keeps: else nobody could be rid of it.
        if error.code != "unknown_context" or not transcript.forget():
            raise
        result = {"dropped": arguments.context}
    transcript.forget()
    output.result(result, lambda _: print(f"context {arguments.context} is forgotten"))
    return Exit.DONE
