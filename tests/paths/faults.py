"""Owns what tests break: poisoned pages, and calls to the kernel that fail or lie."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from unittest import mock

import numpy as np

from mzd import native
from mzd.actors.restore_operation import RestoreOperation
from mzd.policy.units import KvUnit

POISON = 0xFF
"""As FP16 and as float32 a NaN that goes through every product and sum."""


class PoisonedPages:
    """Pages that hold NaN whenever they are not resident, and until their content has come.

    They stay in memory: what would read as zeros after a release is NaN too. Give the arena
    `poisoned(reserve)` as well, for what was never populated.
    """

    def populate(self, address: int, size_bytes: int, huge: bool, /) -> int:
        code = native.populate(address, size_bytes, huge)
        native.fill(address, size_bytes, POISON)
        return code

    def release(self, address: int, size_bytes: int, /) -> int:
        native.fill(address, size_bytes, POISON)
        return 0

    def lock(self, address: int, size_bytes: int, /) -> int:
        return native.lock(address, size_bytes)

    def unlock(self, address: int, size_bytes: int, /) -> int:
        return native.unlock(address, size_bytes)


def poisoned(reserve: Callable[[int], Any]) -> Callable[[int], Any]:
    """A `reserve` whose address space is poisoned from the first byte to the last."""

    def reserve_poisoned(size_bytes: int) -> Any:
        reservation = reserve(size_bytes)
        native.fill(reservation.address, reservation.size_bytes, POISON)
        return reservation

    return reserve_poisoned


@contextlib.contextmanager
def fresh_chunks_are_zero() -> Iterator[None]:
    """Chunks for tokens to come are zeros once they are populated, as fresh pages would be."""
    populate = RestoreOperation._populate

    async def populate_and_zero(operation: RestoreOperation, units: Any) -> None:
        await populate(operation, units)
        for unit in units:
            if isinstance(unit, KvUnit) and unit.chunk in operation.plan.layers[unit.layer].allocate:
                lease = operation._leases[unit]
                native.fill(lease.address, lease.size_bytes, 0)

    with mock.patch.object(RestoreOperation, "_populate", populate_and_zero):
        yield


@contextlib.contextmanager
def failing_extents(
    name: str,
    error: int,
    *,
    after: int = 0,
    times: int = 1 << 30,
    wanted: Callable[[int], bool] = lambda fd: True,
) -> Iterator[None]:
    """`native.read_extents` or `native.write_extents` gives `-error`.

    Args:
        after: extents that are spared first.
        times: extents that fail then.
        wanted: whether extents of a file count at all.
    """
    real, lock, numbers = getattr(native, name), threading.Lock(), count()

    def fail_some(fd: int, offsets: Any, addresses: Any, sizes: Any) -> Any:
        results = np.asarray(real(fd, offsets, addresses, sizes)).copy()
        if wanted(fd):
            with lock:
                extents = [next(numbers) for _ in results]
            results[[after <= number < after + times for number in extents]] = -error
        return results

    with mock.patch.object(native, name, fail_some):
        yield
