"""Owns KV drawn from a seed: chunks that the codec has seen, so that no later round trip changes a bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mzd import native
from mzd.codec import Codec

_PATTERNS: Final = 16
"""Chunks drawn; the others repeat them. Speed does not depend on the values."""


def draw_chunks(codec: Codec, chunk_bytes: int, *, seed: int) -> NDArray[np.uint8]:
    """Draw chunks and pass each through the codec once: codecs are idempotent, so it is exact from here on.

    Returns:
        (16, chunk_bytes) uint8: normally distributed float16.
    """
    values = np.random.default_rng(seed).standard_normal((_PATTERNS, chunk_bytes // 2), dtype=np.float32)
    chunks = values.astype(np.float16).view(np.uint8)
    payloads = np.zeros((_PATTERNS, codec.payload_bytes(chunk_bytes)), np.uint8)
    codec.encode_batch(row_addresses(chunks), row_addresses(payloads), chunk_bytes)
    codec.decode_batch(row_addresses(payloads), row_addresses(chunks), chunk_bytes)
    return chunks


def row_addresses(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(len(rows),) uint64: where each row of a C-contiguous array lies."""
    return rows.ctypes.data + rows.strides[0] * np.arange(len(rows), dtype=np.uint64)


def lay_out(chunks: NDArray[np.uint8], addresses: Sequence[int]) -> None:
    """Copy drawn chunks in turn to all of `addresses`; the same number of addresses gets the same content."""
    sources = row_addresses(chunks).tolist()
    for i, address in enumerate(addresses):
        native.copy(address, sources[i % len(sources)], chunks.shape[1])
