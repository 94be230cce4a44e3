"""Hashes of token prefixes: equal exactly for equal prefixes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mzd.formats.prefix_hash import HASH_BYTES, extend_prefix_hash, prefix_hashes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


@given(tokens, st.integers(1, 9))
def test_one_hash_a_chunk_the_last_one_partial(ids, chunk_tokens):
    hashes = prefix_hashes(ids, chunk_tokens=chunk_tokens)
    assert len(hashes) == -(-len(ids) // chunk_tokens)
    assert all(len(digest) == HASH_BYTES for digest in hashes)
    assert len(set(hashes)) == len(hashes)


@given(tokens, st.integers(1, 9), st.data())
def test_a_changed_token_changes_its_chunk_and_all_behind_it(ids, chunk_tokens, data):
    if not len(ids):
        return
    at = data.draw(st.integers(0, len(ids) - 1))
    other = ids.copy()
    other[at] ^= 1
    same = [
        a == b
        for a, b in zip(
            prefix_hashes(ids, chunk_tokens=chunk_tokens),
            prefix_hashes(other, chunk_tokens=chunk_tokens),
            strict=True,
        )
    ]
    assert same == [i < at // chunk_tokens for i in range(len(same))]


@given(tokens, st.integers(1, 9))
def test_a_cut_context_keeps_the_hashes_of_its_full_chunks(ids, chunk_tokens):
    hashes = prefix_hashes(ids, chunk_tokens=chunk_tokens)
    for cut in range(0, len(ids), chunk_tokens):
        assert prefix_hashes(ids[:cut], chunk_tokens=chunk_tokens) == hashes[: cut // chunk_tokens]


def test_the_dtype_of_the_ids_does_not_matter():
    ids = [1, 70000, 3]
    assert extend_prefix_hash(b"", np.array(ids, np.int64)) == extend_prefix_hash(
        b"", np.array(ids, np.uint32)
    )
