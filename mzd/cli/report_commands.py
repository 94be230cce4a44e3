"""Owns the commands that only look: status, top, contexts, profile, metrics, trace."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mzd.cli.output import Exit, Output, console, note, print_json
from mzd.rpc.blocking_client import BlockingClient, call_daemon


def status(arguments: Namespace, output: Output) -> int:
    """`mzd status`: memory and flash by class, and how to free each."""
    output.result(call_daemon(arguments.socket, "status"), _show_status)
    return Exit.DONE


def _show_status(result: Mapping[str, Any]) -> None:
    from mzd.cli.tables import status_view

    console().print(status_view(result))


def top(arguments: Namespace, output: Output) -> int:
    """`mzd top`: the status, live, until Ctrl-C. It never wakes the model."""
    with BlockingClient(arguments.socket) as client:
        try:
            _follow(_poll(client, arguments.interval), output)
        except KeyboardInterrupt:
            return Exit.DONE  # the way out of a live view, not a failure
    return Exit.DONE


def _poll(client: BlockingClient, interval_s: float) -> Iterator[Mapping[str, Any]]:
    while True:
        yield client.call("status")
        time.sleep(interval_s)


def _follow(statuses: Iterator[Mapping[str, Any]], output: Output) -> None:
    if output.as_json:
        for result in statuses:
            print_json(result)
        return
    from rich.live import Live

    from mzd.cli.tables import status_view

    with Live(console=console(), auto_refresh=False, screen=True) as live:
        for result in statuses:
            live.update(status_view(result), refresh=True)


def contexts(arguments: Namespace, output: Output) -> int:
    """`mzd contexts`: every context, where its KV is, when it was used."""
    output.result(call_daemon(arguments.socket, "contexts"), _show_contexts)
    return Exit.DONE


def _show_contexts(result: Mapping[str, Any]) -> None:
    from mzd.cli.tables import contexts_table

    console().print(contexts_table(result["contexts"]))


def profile(arguments: Namespace, output: Output) -> int:
    """`mzd profile`: the device's measured throughputs, which the split of every eviction follows."""
    result = {"profile": call_daemon(arguments.socket, "status")["profile"]}
    output.result(result, lambda shown: print(json.dumps(shown["profile"], indent=2, default=str)))
    return Exit.DONE


def metrics(arguments: Namespace, output: Output) -> int:
    """`mzd metrics`: the daemon's figures as Prometheus reads them."""
    result = call_daemon(arguments.socket, "metrics")
    output.result(result, lambda shown: print(shown["text"], end=""))
    return Exit.DONE


def trace(arguments: Namespace, output: Output) -> int:
    """`mzd trace [REQUEST]`: a restore as Chrome trace events, or as a picture of its lanes."""
    result = call_daemon(arguments.socket, "trace", {"request": arguments.request})
    if arguments.png is not None:
        _draw(result["events"], arguments.png)
        result = {"png": str(arguments.png), "num_events": len(result["events"])}
        output.result(result, lambda shown: note(f"{shown['num_events']} events drawn to {shown['png']}"))
    else:
        output.result(result, lambda shown: print_json(shown["events"]))  # Chrome loads the bare list
    return Exit.DONE


def _draw(events: list[Mapping[str, Any]], path: Path) -> None:
    from mzd.cli.trace_picture import draw_trace

    draw_trace(events, path)
