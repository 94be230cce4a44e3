"""Owns a model with every unit in memory, driven without a daemon: the real engine over the real memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mzd import native
from mzd.daemon.unit_memory import open_unit_memory
from mzd.daemon.wiring import UBATCH_TOKENS
from mzd.device.engine import Engine
from mzd.device.matmul import Activations
from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError
from mzd.formats.weight_store import UnitExtent
from mzd.memory.backend import Lease, MemoryBackend
from mzd.model.weight_store import WeightStore
from mzd.policy.units import CHUNK_TOKENS

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Read at a time: what passes through pinned memory on its way to a device with memory of its own."""


class ResidentModel:
    """Weights, head and one context of `context_tokens`, all populated and bound.

    Attributes:
        name: what rows call it.
        engine: between steps the caller may bind other addresses.

    Raises:
        MzdError: `insufficient_memory`, `weights_unavailable`.
    """

    def __init__(
        self,
        device: OpenClDevice,
        store: WeightStore,
        *,
        context_tokens: int,
        activations: Activations,
        name: str = "mzd",
    ) -> None:
        self.name = name
        self._stack = ExitStack()
        self._memory: MemoryBackend = open_unit_memory(
            device, self._stack, huge_pages=True, lock_memory=False
        )
        self.engine = Engine(
            device,
            store.index,
            context_tokens_max=context_tokens,
            ubatch_tokens_max=UBATCH_TOKENS,
            activations=activations,
        )
        self._leases: list[Lease] = []
        self._bind(store, -(-context_tokens // CHUNK_TOKENS))

    def _bind(self, store: WeightStore, num_chunks: int) -> None:
        """Lay each layer's chunks behind its weights, as a restore does."""
        extents = (*store.index.layers, store.index.head)
        chunk_bytes = store.index.config.kv_chunk_bytes(CHUNK_TOKENS)
        units = self._take([extent.size_bytes for extent in extents])
        read_units(self._memory, store, extents, units)
        for layer, weights in enumerate(units[:-1]):
            chunks = self._take([chunk_bytes] * num_chunks)
            self.engine.bind_layer(layer, weights.address, np.array([c.address for c in chunks], np.uint64))
        self.engine.bind_head(units[-1].address)

    def _take(self, sizes: Sequence[int]) -> list[Lease]:
        leases = self._memory.reserve_run(sizes)
        self._leases += leases
        self._memory.populate(leases)
        return leases

    async def fill(self, tokens: NDArray[np.int32], start: int = 0) -> None:
        """Make `tokens` the context, whose first `start` tokens are there, one ubatch after the other."""
        for position in range(start, len(tokens), UBATCH_TOKENS):
            await self._step(tokens[position : position + UBATCH_TOKENS], position, with_logits=False)

    async def answer(self, tokens: NDArray[np.int32], position: int) -> int:
        """Compute at most a ubatch of `tokens` at `position` and return the greedy next id."""
        await self._step(tokens, position, with_logits=True)
        return int(self.logits().argmax())

    def logits(self) -> NDArray[np.float32]:
        """(vocab,) float32 of the last answer: a view, valid until the next one."""
        row: NDArray[np.float32] = self.engine.logits()[0]
        return row

    async def _step(self, tokens: NDArray[np.int32], position: int, *, with_logits: bool) -> None:
        self.engine.begin(tokens, position)
        self.engine.enqueue_layers()
        if with_logits:
            self.engine.enqueue_head("last")
        await self.engine.wait(self.engine.mark())

    def close(self) -> None:
        """Free scratch, units and address space; no step may be running."""
        self.engine.close()
        self._memory.release(self._leases)
        self._memory.close()
        self._stack.close()


def read_units(
    memory: MemoryBackend, store: WeightStore, extents: Sequence[UnitExtent], leases: Sequence[Lease]
) -> None:
    """Read units from the store into populated memory and check them.

    Raises:
        MzdError: `weights_unavailable`; a read fell short, or a checksum is wrong.
    """
    for extent, lease in zip(extents, leases, strict=True):
        crc = 0
        for start in range(0, extent.size_bytes, PIECE_BYTES):
            piece = min(PIECE_BYTES, extent.size_bytes - start)
            crc = _read_piece(memory, store, extent.offset_bytes + start, lease.address + start, piece, crc)
        if crc != extent.crc32c:
            raise _damaged(store, extent.offset_bytes)


def _read_piece(
    memory: MemoryBackend, store: WeightStore, offset_bytes: int, address: int, size_bytes: int, crc: int
) -> int:
    """Read a part of a unit; the checksum up to its end, from that of what lies before it."""
    sizes = np.array([size_bytes], np.uint64)
    with memory.writing(np.array([address], np.uint64), sizes) as host:
        (code,) = native.read_extents(store.fd, np.array([offset_bytes], np.uint64), host, sizes)
        if code:
            raise _damaged(store, offset_bytes)
        return native.crc32c(int(host[0]), size_bytes, crc)


def _damaged(store: WeightStore, offset_bytes: int) -> MzdError:
    return MzdError(
        "weights_unavailable", f"{store.path} cannot be read, or is damaged, at byte {offset_bytes}"
    )
