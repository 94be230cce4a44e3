"""Owns a device whose scratch memory the host and the device see alike, in every kind of memory.

A kernel's tests write to views, launch and look at views again. Where memory is not shared, here each
launch is framed by copies of all scratch, which is slow and leaves nothing to forget.
"""

from __future__ import annotations

from typing import Any

from mzd.device.kernel import BoundKernel
from mzd.device.opencl import OpenClDevice, Program
from mzd.device.scratch import ScratchBuffer


class CoherentDevice(OpenClDevice):
    """Not for an engine: what that enqueues in one piece is not seen here."""

    _scratch: list[ScratchBuffer]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._scratch = []
        super().__init__(*args, **kwargs)

    def allocate_scratch(self, size_bytes: int) -> ScratchBuffer:
        scratch = super().allocate_scratch(size_bytes)
        free = scratch.free

        def forget_and_free() -> None:
            free()
            self._scratch.remove(scratch)

        scratch.free = forget_and_free  # type: ignore[method-assign]
        self._scratch.append(scratch)
        return scratch

    def kernel(self, program: Program, name: str, **options: Any) -> BoundKernel:
        kernel = super().kernel(program, name, **options)
        enqueue = kernel.enqueue

        def enqueue_between_copies(*args: Any, **kwargs: Any) -> None:
            for scratch in self._scratch:
                scratch.upload()
            enqueue(*args, **kwargs)
            for scratch in self._scratch:
                scratch.download()
            self.finish()

        if self.memory_kind != "fine_svm":
            kernel.enqueue = enqueue_between_copies  # type: ignore[method-assign]
        return kernel
