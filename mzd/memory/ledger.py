"""Owns the account of every byte that the daemon holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class MemoryKind(Enum):
    """What memory is held for. Everything resident belongs to exactly one kind."""

    WEIGHTS = "weights"
    """Resident weight layers."""
    KV = "kv"
    """Resident KV chunks."""
    HEAD = "head"
    """The head unit, when resident."""
    COMPRESSED = "compressed"
    """Payloads of the in-memory swap."""
    SCRATCH = "scratch"
    """Activations, logits and tables of the engine."""
    STAGING = "staging"
    """Buffers that payloads pass through on their way from flash."""
    METADATA = "metadata"
    """Token logs, indices, plans: what grows with contexts."""
    BASELINE = "baseline"
    """The resident set just before the first unit: interpreter, libraries, driver."""


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The account at one moment: bytes of every kind."""

    kinds: Mapping[MemoryKind, int]

    def __getitem__(self, kind: MemoryKind) -> int:
        return self.kinds[kind]

    @property
    def total_bytes(self) -> int:
        """Sum of all kinds."""
        return sum(self.kinds.values())

    def fields(self) -> dict[str, int]:
        """`{"weights_bytes": ..., ..., "total_bytes": ...}`, as `status` shows it."""
        return {f"{kind.value}_bytes": size for kind, size in self.kinds.items()} | {
            "total_bytes": self.total_bytes
        }

    def drift(self, kernel_bytes: int) -> float:
        """How far the account is from the kernel's figure, as a signed fraction of that figure.

        Above zero, the account claims memory that is not there; below, somebody holds memory that
        nobody counts.

        Args:
            kernel_bytes: resident set plus device memory outside it; above zero.
        """
        if kernel_bytes <= 0:
            raise ValueError("the kernel's figure must be above zero")
        return (self.total_bytes - kernel_bytes) / kernel_bytes


class Ledger:
    """One writer (the allocator) tells it what comes and goes; anybody may take a snapshot."""

    def __init__(self) -> None:
        self._kinds = dict.fromkeys(MemoryKind, 0)

    def add(self, kind: MemoryKind, size_bytes: int) -> None:
        """Account for `size_bytes` (not negative) that became resident."""
        if size_bytes < 0:
            raise ValueError(f"cannot add {size_bytes} bytes of {kind.value}")
        self._kinds[kind] += size_bytes

    def remove(self, kind: MemoryKind, size_bytes: int) -> None:
        """Account for `size_bytes` that left.

        Raises:
            ValueError: more than the kind holds: something was released twice.
        """
        if not 0 <= size_bytes <= self._kinds[kind]:
            raise ValueError(f"cannot remove {size_bytes} of {self._kinds[kind]} bytes of {kind.value}")
        self._kinds[kind] -= size_bytes

    def set(self, kind: MemoryKind, size_bytes: int) -> None:
        """Replace the figure of a kind that its owner measures as a whole (scratch, staging, baseline)."""
        if size_bytes < 0:
            raise ValueError(f"{size_bytes} is no number of bytes of {kind.value}")
        self._kinds[kind] = size_bytes

    def snapshot(self) -> LedgerSnapshot:
        """The account as it stands; later changes do not show in it."""
        return LedgerSnapshot(MappingProxyType(dict(self._kinds)))
