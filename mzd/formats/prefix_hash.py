"""Owns the hashes that tie a KV chunk to all the tokens up to its end."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16

_PERSON = b"mzd-prefix-v1"


def prefix_hashes(tokens: NDArray[np.uint32], *, chunk_tokens: int) -> list[bytes]:
    """Hash every prefix that ends where a chunk ends; the last chunk may be filled in part.

    KV of a token depends on all tokens before it, so a chunk is the same chunk only if its whole prefix
    is. Each hash covers the one before it: a context of n tokens is hashed in O(n), not O(n * chunks).

    Args:
        tokens: (n,) token ids.
        chunk_tokens: tokens of a full chunk.

    Returns:
        ceil(n / chunk_tokens) hashes of 16 bytes; entry i is for tokens ``[0, min((i+1)*chunk_tokens, n))``.
    """
    hashes: list[bytes] = []
    previous = b""
    for start in range(0, len(tokens), chunk_tokens):
        previous = extend_prefix_hash(previous, tokens[start : start + chunk_tokens])
        hashes.append(previous)
    return hashes


def extend_prefix_hash(previous: bytes, chunk: NDArray[np.uint32]) -> bytes:
    """Hash of the prefix that ends with `chunk`'s tokens, from the hash of what lies before the chunk.

    Args:
        previous: the hash up to the chunk's first token; empty for the first chunk.
        chunk: (n,) token ids of this chunk, as far as it is filled.
    """
    content = np.ascontiguousarray(chunk, dtype="<u4").tobytes()
    return blake2b(previous + content, digest_size=HASH_BYTES, person=_PERSON).digest()
