"""Owns the one-shot answer to a message: set once by an actor, awaited once by the asker."""

from __future__ import annotations

from typing import Generic, TypeVar

import trio

from mzd.errors import MzdError

T = TypeVar("T")


class Reply(Generic[T]):
    """The answer to one message; the only way back that is not a channel of `daemon/wiring.py`.

    An actor never waits on a reply, so replies cannot close a cycle of bounded channels.
    """

    __slots__ = ("_done", "_error", "_value")

    def __init__(self) -> None:
        self._done = trio.Event()
        self._value: T | None = None
        self._error: MzdError | None = None

    @property
    def is_settled(self) -> bool:
        """It was answered, one way or the other."""
        return self._done.is_set()

    def set(self, value: T) -> None:
        """Answer. A second answer is a broken invariant and raises RuntimeError."""
        self._settle()
        self._value = value

    def fail(self, error: MzdError) -> None:
        """Answer with an error that the asker will raise."""
        self._settle()
        self._error = error

    def _settle(self) -> None:
        if self._done.is_set():
            raise RuntimeError("a reply was answered twice")
        self._done.set()

    async def get(self) -> T:
        """Wait for the answer.

        Raises:
            MzdError: the actor answered with `fail`.

        Cancelled: the answer is lost, nothing else happens; whoever cancels cleans up.
        """
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set() stored a T
