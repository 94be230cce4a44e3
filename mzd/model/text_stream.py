"""Owns text that comes token by token: whole characters only, and nothing that belongs to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

from mzd.errors import MzdError

STOPS_MAX: Final = 64
STOP_CHARS_MAX: Final = 1024
"""Bounds of the search after every token: all stops are looked for in what is held back."""


class TokenBytes(Protocol):
    """What `TextStream` needs of a tokenizer."""

    def token_bytes(self, token_id: int, *, show_control: bool = False) -> bytes:
        """The bytes of one token, often no whole character."""
        ...


class TextStream:
    """Turns token ids into text as they come; bytes of an unfinished character wait for the next token.

    Joined, what it returns is what all bytes at once decode to, each maximal invalid part replaced by one
    U+FFFD (Unicode, "U+FFFD Substitution of Maximal Subparts"), wherever the tokens split the bytes.
    """

    def __init__(self, tokenizer: TokenBytes, *, show_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that are whole with this token; raises as `token_bytes`."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, show_control=self._show_control))

    def finish(self) -> str:
        """U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text before the first stop string in it and lets nothing of that string through.

    The stop that is complete first wins, the longest of those that end together, so the result does not
    depend on how the text is split. Text that may yet become a stop is held back.

    Raises:
        MzdError: `invalid_params`: a stop is empty or longer than `STOP_CHARS_MAX`, or there are more than
            `STOPS_MAX`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > STOPS_MAX:
            raise MzdError("invalid_params", f"more than {STOPS_MAX} stop strings", parameter="stop")
        if any(not 0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
            message = f"a stop string has 1 to {STOP_CHARS_MAX} characters"
            raise MzdError("invalid_params", message, parameter="stop")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns:
            What may be shown of all that was not shown yet, and whether a stop has ended the text. After
            that, nothing more comes.
        """
        if self._stopped:
            return "", True
        pending = self._held + text
        start = self._first_stop(pending)
        self._stopped = start is not None
        shown = len(pending) - self._num_held(pending) if start is None else start
        self._held = "" if self._stopped else pending[shown:]
        return pending[:shown], self._stopped

    def finish(self) -> str:
        """The text that was held back for a stop that never came."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, pending: str) -> int | None:
        """Where the stop begins that ends first, if one is complete."""
        starts = ((pending.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(found)[1] if found else None

    def _num_held(self, pending: str) -> int:
        """Length of the longest end of `pending` that is the beginning of a stop."""
        return max((_overlap(pending, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
