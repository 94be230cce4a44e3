"""Owns the threads of restoration and eviction: how many, and on which cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import trio

T = TypeVar("T")

_thread = threading.local()


class Workers:
    """A bounded group of threads for work that drops the GIL: reads, decoding, populating.

    Args:
        name: of the group; its threads carry it.
        threads: how many run at once.
        cores: the cores they may run on; empty means any.
    """

    def __init__(self, name: str, threads: int, cores: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.threads = threads
        self._cores = cores or frozenset(os.sched_getaffinity(0))
        self._limiter = trio.CapacityLimiter(threads)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in a thread and return its result.

        Cancelled: the thread ends its work first; memory that it writes to outlives it.
        """
        return await trio.to_thread.run_sync(
            partial(self._pinned_call, work, *args),
            thread_name=f"mzd-{self.name}",
            abandon_on_cancel=False,
            limiter=self._limiter,
        )

    def _pinned_call(self, work: Callable[..., T], *args: Any) -> T:
        # Trio's cache hands one thread to several groups: pin it anew when it changes hands.
        if getattr(_thread, "cores", None) != self._cores:
            os.sched_setaffinity(0, self._cores)
            _thread.cores = self._cores
        return work(*args)
