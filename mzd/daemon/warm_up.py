"""Owns the first steps: they compile the kernels and touch the scratch memory before anybody waits."""

from __future__ import annotations

from typing import Final

import numpy as np

from mzd import native
from mzd.daemon.wiring import UBATCH_TOKENS, Parts
from mzd.memory.backend import Lease
from mzd.policy.units import CHUNK_TOKENS

STEP_TOKENS: Final = (1, 8, UBATCH_TOKENS)
"""One step of each shape that kernels are made for: decode, a short question, a long prefill."""


async def warm_up(parts: Parts) -> None:
    """Run steps over zeros and give all of it back.

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
        for num_tokens in STEP_TOKENS:
            await _run_step(parts, num_tokens)
    finally:
        parts.engine.unbind_all()
        parts.memory.release(leases)
    native.trim_heap()


def _bind(parts: Parts, leases: list[Lease]) -> None:
    layer, head, *chunks = leases
    addresses = np.array([chunk.address for chunk in chunks], np.uint64)
    for index in range(parts.engine.num_layers):
        parts.engine.bind_layer(index, layer.address, addresses)
    parts.engine.bind_head(head.address)


async def _run_step(parts: Parts, num_tokens: int) -> None:
    parts.engine.begin(np.zeros(num_tokens, np.int32), 0)
    parts.engine.enqueue_layers()
    parts.engine.enqueue_head("last")
    await parts.engine.wait(parts.engine.mark())
