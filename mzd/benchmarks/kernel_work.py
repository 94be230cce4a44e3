"""Owns what the bench `kernels` takes of a kernel: its work, its variants, and that its result is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.plain_read import PlainRead
from mzd.device.trial_memory import TrialArray
from mzd.errors import MzdError
from mzd.formats.ggml_types import GgmlType

ROTATION_BYTES: Final = 128 << 20
"""Launches take turns over so many bytes of copies of what they read, for a model's layers do not find their
weights and KV in a cache either. A processor's last-level cache may still hold some."""

SWEEP_FLOPS_MAX: Final = 4e9
SWEEP_LAUNCHES_MAX: Final = 256
"""Of one measurement: a tenth of a second or two on a small processor."""

EXACT_TOLERANCE: Final = 2e-5
HALF_TOLERANCE: Final = 1e-3
INT8_TOLERANCE: Final = 1e-2
"""Of the largest result; as the self-test's, for float results, float16 results, int8 activations."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does.

    Attributes:
        kernel: which, e.g. `matmul q8_0`.
        shape: of what it works on.
        tokens: new tokens.
        size_bytes: of what it has to read, a matrix or KV; of activations, where it has nothing else,
            what it reads and writes.
        flops: additions and multiplications, each one.
    """

    kernel: str
    shape: str
    tokens: int
    size_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel that does the work.

    Attributes:
        name: in rows.
        enqueue: all launches of a measurement.
        check: run it and compare with NumPy. Raises MzdError `device_lost`, naming the kernel.
    """

    name: str
    enqueue: Callable[[], None]
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class PeerOperands:
    """What the peer of a matrix product gets.

    Attributes:
        raw: (rows, row bytes) uint8, GGUF blocks.
        x: (tokens, cols) float32.
        expected: (tokens, rows) float64.
    """

    type: GgmlType
    raw: NDArray[np.uint8]
    x: NDArray[np.float32]
    expected: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Variants that do the same work on the same memory, and the plain read of it.

    Attributes:
        num_launches: of one measurement, of each variant and of the read.
        peer: makes what llama.cpp is given; None where it is not asked.
    """

    work: Work
    num_launches: int
    variants: tuple[Variant, ...]
    read: PlainRead
    peer: Callable[[], PeerOperands] | None = None


def sweep_launches(size_bytes: int, flops: int) -> int:
    """Launches of one measurement, each on a copy of its own of `size_bytes`."""
    copies = -(-ROTATION_BYTES // size_bytes)
    return max(1, min(copies, int(SWEEP_FLOPS_MAX / flops), SWEEP_LAUNCHES_MAX))


def repeated(pattern: NDArray[Any], array: TrialArray) -> None:
    """Fill `array`, (n, ...), with the rows of `pattern`, (m, ...), over and over, and upload it."""
    for start in range(0, len(array.values), len(pattern)):
        part = array.values[start : start + len(pattern)]
        part[...] = pattern[: len(part)]
    array.upload()


def require_near(what: str, result: NDArray[Any], expected: NDArray[Any], tolerance: float) -> None:
    """Check `result` against `expected`.

    Raises:
        MzdError: `device_lost`; it is further away than `tolerance` times the largest value.
    """
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    if not error <= tolerance:  # not-a-number too
        message = f"{what} is computed wrongly: error {error:.1e}, allowed {tolerance:.0e}"
        raise MzdError("device_lost", message, kernel=what, error=error)
