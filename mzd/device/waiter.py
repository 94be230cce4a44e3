"""Owns the thread that waits for a queue's events, so that Trio never does."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import pyopencl as cl
import trio

from mzd.device.libopencl import opencl_error
from mzd.errors import MzdError


@dataclass(slots=True)
class _Wait:
    """One waiting task: woken through its Trio token, with the error that the event ended in, if any."""

    event: cl.Event
    token: trio.lowlevel.TrioToken
    done: trio.Event = field(default_factory=trio.Event)
    error: MzdError | None = None

    def block(self) -> None:
        """Wait on the calling thread, with the GIL released, then wake the task."""
        try:
            self.event.wait()
        except cl.Error as error:
            self.error = opencl_error(error.code, "clWaitForEvents")
        with suppress(trio.RunFinishedError):  # nobody is left to be told
            self.token.run_sync_soon(self.done.set)


class EventWaiter:
    """Waits for events of ONE in-order queue, in the order in which they were enqueued.

    One thread is enough there, because an event never ends before an earlier one. pyopencl's own callbacks
    start a thread each, hence this one.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[_Wait | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"wait-{name}", daemon=True)
        self._thread.start()

    async def wait(self, event: cl.Event) -> None:
        """Return when `event` has completed.

        Raises:
            MzdError: the commands up to the event failed.

        Cancelled: still waits for the event first. A kernel cannot be recalled, and who cancels is about
            to release what it reads.
        """
        wait = _Wait(event, trio.lowlevel.current_trio_token())
        self._inbox.put(wait)
        with trio.CancelScope(shield=True):
            await wait.done.wait()
        if wait.error is not None:
            raise wait.error
        await trio.lowlevel.checkpoint_if_cancelled()

    def close(self) -> None:
        """End the thread after the waits that it has taken."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (wait := self._inbox.get()) is not None:
            wait.block()
