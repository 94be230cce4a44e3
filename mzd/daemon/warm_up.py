"""Owns the first steps: they compile the kernels and touch the scratch memory before anybody waits."""

from __future__ import annotations

from typing import Final

import numpy as np

from mzd import native
from mzd.daemon.wiring import UBATCH_TOKENS, Parts
from mzd.formats.weight_store import StoreIndex
from mzd.memory.backend import Lease
from mzd.policy.units import CHUNK_TOKENS

LONGER_STEP_TOKENS: Final = (8, UBATCH_TOKENS)
"""A short question and a long prefill: kernels have shapes of their own for them, beside that of decode."""


async def warm_up(parts: Parts) -> None:
    """Run steps over zeros and give all of it back.

    A step of one token runs whole. The longer ones end with the last layer that takes another kernel than
    those before it: a whole prefill would be most of a start.

    The layers share one piece of zeros, so that no more is resident than one layer, its chunks and the head.
    """
    extents = parts.store.index.layers
    chunks = -(-UBATCH_TOKENS // CHUNK_TOKENS)
    sizes = [max(extent.size_bytes for extent in extents), parts.store.index.head.size_bytes]
    sizes += [parts.units.kv_sizes.chunk_bytes] * chunks
    leases = parts.memory.reserve_run(sizes)
    try:
        parts.memory.populate(leases)
        _bind(parts, leases)
        await _run_decode_step(parts)
        for num_tokens in LONGER_STEP_TOKENS:
            await _run_first_layers(parts, num_tokens)
    finally:
        parts.engine.unbind_all()
        parts.memory.release(leases)
    native.trim_heap()


def distinct_layers(index: StoreIndex) -> int:
    """The number of first layers that take every kernel: those after them are like one of them."""
    kinds = [
        (layer, *((spec.role, spec.type, spec.rows, spec.cols) for spec in extent.tensors))
        for layer, extent in zip(index.config.layers, index.layers, strict=True)
    ]
    return 1 + max(map(kinds.index, kinds))


def _bind(parts: Parts, leases: list[Lease]) -> None:
    layer, head, *chunks = leases
    addresses = np.array([chunk.address for chunk in chunks], np.uint64)
    for index in range(parts.engine.num_layers):
        parts.engine.bind_layer(index, layer.address, addresses)
    parts.engine.bind_head(head.address)


async def _run_decode_step(parts: Parts) -> None:
    parts.engine.begin(np.zeros(1, np.int32), 0)
    parts.engine.enqueue_layers()
    parts.engine.enqueue_head("last")
    await parts.engine.wait(parts.engine.mark())


async def _run_first_layers(parts: Parts, num_tokens: int) -> None:
    parts.engine.begin(np.zeros(num_tokens, np.int32), 0)
    for layer in range(distinct_layers(parts.store.index)):
        parts.engine.enqueue_layer(layer)
    await parts.engine.wait(parts.engine.mark())
