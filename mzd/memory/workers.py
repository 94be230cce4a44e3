"""Owns the threads of restoration and eviction: how many, and on which cores."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import trio

from mzd.errors import MzdError

log = logging.getLogger(__name__)

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
            self._pin()
        return work(*args)

    def _pin(self) -> None:
        """Pin this thread; where the cores are gone (unplugged, a cgroup's set changed), use what is left."""
        try:
            os.sched_setaffinity(0, self._cores)
        except OSError as error:
            left = available_cores()
            log.warning(
                "cores are gone: threads=%s cores=%s now=%s reason=%s",
                self.name,
                _told(self._cores),
                _told(left),
                error.strerror,
            )
            # Before the thread is moved: should it fail again, the thread runs where it is, and nothing is
            # said a second time.
            self._cores = left
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, left)
        _thread.cores = self._cores


def available_cores() -> frozenset[int]:
    """The cores that this process may run on now: its main thread's, which is never pinned."""
    return frozenset(os.sched_getaffinity(os.getpid()))


def check_cores(cores: Iterable[int]) -> None:
    """Refuse cores that this process cannot run on.

    Raises:
        MzdError: `invalid_params`, with the cores that there are.
    """
    available = available_cores()
    missing = set(cores) - available
    if missing:
        raise MzdError(
            "invalid_params",
            f"threads.cores names {_told(missing)}, and this process may use {_told(available)}",
            parameter="threads.cores",
            cores=sorted(available),
        )


def _told(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
