"""Owns the queue before the engine: one generation at a time, in order of arrival."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from mzd.errors import MzdError


class Turnstile:
    """A fair lock with a bounded queue.

    Args:
        waiting_max: requests that may wait; one more is refused with `busy`.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._lock = trio.Lock()

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._lock.statistics().tasks_waiting

    @property
    def occupied(self) -> bool:
        """A request is being served."""
        return self._lock.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, hold it for the block.

        Raises:
            MzdError: `busy` when the queue is full.

        Cancelled: while waiting, the place in the queue is given up.
        """
        if self._lock.locked() and self.waiting >= self._waiting_max:
            raise MzdError("busy", f"{self._waiting_max} requests are waiting already", waiting=self.waiting)
        async with self._lock:
            yield
