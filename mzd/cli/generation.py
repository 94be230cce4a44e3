"""Owns one streamed answer on the terminal: text to stdout, progress to stderr, Ctrl-C to the daemon."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from mzd.rpc.blocking_client import BlockingClient

# A model must not drive the user's terminal: all C0 and C1 controls but newline and tab are dropped.
_CONTROLS: Final = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_ERASE_LINE: Final = "\r\x1b[K"


def sampling_params(arguments: Namespace) -> dict[str, Any]:
    """The parameters of `generate` that `run` and `chat` share; None is left to the daemon."""
    names = ("context", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    return {name: getattr(arguments, name) for name in names}


def generate(client: BlockingClient, params: Mapping[str, Any], *, stream: bool) -> Mapping[str, Any]:
    """Call `generate` and show what comes, if `stream`. Ctrl-C cancels the request, a second one the program.

    Raises:
        MzdError: the daemon's error, `cancelled` after Ctrl-C.
    """
    request = f"cli-{os.getpid()}-{os.urandom(4).hex()}"
    msgid = client.start("generate", {**params, "stream": stream, "request": request})
    with _interrupt_cancels(client, request), AnswerView() as view:
        result: Mapping[str, Any] = client.wait(msgid, view.take)
        if stream:
            view.complete(result["text"])
    return result


@contextmanager
def _interrupt_cancels(client: BlockingClient, request: str) -> Iterator[None]:
    """Until the block ends, the first SIGINT tells the daemon; the answer then is `cancelled`."""

    def cancel(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        client.notify("cancel", {"request": request})

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class AnswerView:
    """What the user sees of one answer; leaves the cursor at the start of a line."""

    def __init__(self) -> None:
        self._text = ""
        self._phase = ""
        self._on_terminal = sys.stderr.isatty()

    def __enter__(self) -> AnswerView:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_progress()
        if self._text and not self._text.endswith("\n"):
            self._write("\n")

    def take(self, method: str, params: Mapping[str, Any]) -> None:
        """Show a notification."""
        if method == "token":
            self._end_progress()
            self._write(params["text"])
        elif method == "progress":
            self._progress(params["phase"], params["done"], params["total"])

    def complete(self, text: str) -> None:
        """Show what the whole text has beyond the notifications."""
        if text.startswith(self._text):
            self._write(text[len(self._text) :])

    def _write(self, text: str) -> None:
        self._text += text
        sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def _progress(self, phase: str, done: int, total: int) -> None:
        if self._on_terminal:
            sys.stderr.write(f"{_ERASE_LINE}{phase}… {done}/{total}")
        elif phase != self._phase:  # a log wants one line a phase
            sys.stderr.write(f"{phase}…\n")
        sys.stderr.flush()
        self._phase = phase

    def _end_progress(self) -> None:
        if self._on_terminal and self._phase:
            sys.stderr.write(_ERASE_LINE)
            sys.stderr.flush()
        self._phase = ""
