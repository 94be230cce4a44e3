"""Owns what a command prints and its exit status; with `--json` only JSON goes to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from mzd.errors import MzdError
from mzd.rpc.endpoint import NoDaemonError

if TYPE_CHECKING:
    from rich.console import Console


class Exit(IntEnum):
    """Exit status of every command."""

    DONE = 0
    REFUSED = 1
    WRONG_USE = 2
    NO_DAEMON = 3


class Output:
    """Where a command's result and its errors go."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, result: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None]) -> None:
        """Print a result: as one line of JSON, or by `show` for a person."""
        if self.as_json:
            print_json(result)
        else:
            show(result)

    def error(self, error: MzdError) -> Exit:
        """Print an error and say how to exit."""
        if self.as_json:
            print_json({"error": {"code": error.code, "message": error.message, "data": dict(error.data)}})
        else:
            note(f"mzd: {error.code}: {error.message}")
        return Exit.NO_DAEMON if isinstance(error, NoDaemonError) else Exit.REFUSED


def print_json(value: Any) -> None:
    """One line of JSON on stdout; ASCII, so that no locale can spoil it. Bytes become text."""
    print(json.dumps(value, default=str), flush=True)


def note(text: str) -> None:
    """A line for a person, beside the result."""
    print(text, file=sys.stderr, flush=True)


def console(*, stderr: bool = False) -> Console:
    """A rich console that takes text as it is: names and messages are not ours, so no markup."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
