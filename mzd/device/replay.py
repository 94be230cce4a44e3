"""Owns a row of launches that repeats from step to step: it is enqueued in one call while nothing changed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter

from mzd.device.launch_queue import Launch, LaunchQueue

_changes = attrgetter("changes")


class Replay:
    """Enqueues a row of launches anew, or as it was the last time where that is the same.

    It is the same if the sizes and arguments would be. Both are chosen by the caller's code from what it is
    given, which is the caller's to compare (`key`, `forget`). Arguments also change behind its back, since
    kernels are shared among rows: so each kernel counts its changes, and buffers theirs.

    A launch costs the host 4 to 10 us from Python and less than one from C.
    """

    def __init__(self, queue: LaunchQueue) -> None:
        self._queue = queue
        self._key: object = None
        self._row: _Row | None = None

    def forget(self) -> None:
        """Enqueue anew the next time: what `enqueue` goes by has changed, and the key does not tell it."""
        self._row = None

    def run(self, key: object, enqueue: Callable[[], None]) -> None:
        """Call `enqueue`, or do again what it did.

        Args:
            key: equal to the last one only if `enqueue` would choose the same sizes and arguments.
            enqueue: enqueues kernels in this queue, and nothing else.

        Raises:
            MzdError: the driver refused a launch.
        """
        row, self._row = self._row, None  # whatever fails below, the next time begins anew
        if row is not None and self._key == key and row.is_current():
            row.enqueue()
        else:
            row = self._enqueue_anew(enqueue)
        self._key, self._row = key, row

    def _enqueue_anew(self, enqueue: Callable[[], None]) -> _Row:
        generation = _generation(self._queue)  # before: a buffer that goes meanwhile is one change more
        with self._queue.noting() as launches:
            enqueue()
        return _Row(self._queue, launches, generation)


class _Row:
    """Launches that have been enqueued once, and what tells whether they may be again."""

    def __init__(self, queue: LaunchQueue, launches: Sequence[Launch], generation: int) -> None:
        self._queue = queue
        self._launches = launches
        self._generation = generation
        self._kernels = [launch.kernel for launch in launches]
        self._followers = [kernel for kernel in self._kernels if kernel.follows_pointers]
        self._changes = sum(launch.changes for launch in launches)
        self._words = array("Q", (word for launch in launches for word in launch.words))

    def is_current(self) -> bool:
        """Whether every kernel has the arguments that it was enqueued with.

        Counts only grow, so their sum is the same only if each is.
        """
        return (
            sum(map(_changes, self._kernels)) == self._changes
            and _generation(self._queue) == self._generation
        )

    def enqueue(self) -> None:
        """Enqueue all of them. Raises MzdError: the driver refused one."""
        for kernel in self._followers:
            kernel.declare_pointers()
        self._queue.enqueue_words(self._words, self._launches)


def _generation(queue: LaunchQueue) -> int:
    return 0 if queue.buffers is None else queue.buffers.generation
