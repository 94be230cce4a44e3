"""The table: growing, cutting and counting keep states, leases and payloads together."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.formats.prefix_hash import prefix_hashes
from mzd.memory.backend import Lease
from mzd.memory.unit_table import KvCache, UnitTable, WholeUnit, chunks_of
from mzd.policy.residency import Event, IllegalTransition, UnitState
from mzd.policy.snapshot import CopyKind, KvSizes
from mzd.policy.units import CHUNK_TOKENS, HeadUnit, KvUnit, WeightUnit

SIZES = KvSizes(chunk_bytes=100, compressed_bytes=60, slot_bytes=4096, compressed_slot_bytes=4096)


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2)])
def test_chunks_of(tokens, chunks):
    assert chunks_of(tokens) == chunks


def resident_cache(num_layers, num_chunks):
    """Every chunk resident, each with a lease whose address tells its place."""
    cache = KvCache("c", num_layers)
    cache.grow(num_chunks)
    for layer, chunk in np.ndindex(cache.states.shape):
        cache.apply((layer, chunk), Event.ALLOCATE)
        cache.leases[layer, chunk] = Lease(1000 * layer + chunk, 100)
    return cache


def test_a_whole_units_lease_is_handed_out_once():
    unit = WholeUnit(64)
    unit.apply(Event.LOAD)
    unit.lease = Lease(0, 64)
    unit.apply(Event.LOAD_DONE)
    assert unit.take_lease().size_bytes == 64
    with pytest.raises(RuntimeError, match="without a lease"):
        unit.take_lease()


def test_an_arrow_that_is_not_in_the_table_changes_nothing():
    cache = resident_cache(1, 1)
    with pytest.raises(IllegalTransition):
        cache.apply((0, 0), Event.RESTORE)
    assert cache.state((0, 0)) is UnitState.RESIDENT


def test_growing_keeps_what_is_there_and_never_shrinks():
    cache = resident_cache(2, 2)
    cache.copies[1, 1] = CopyKind.STORED
    cache.incompressible[0, 1] = True
    cache.grow(4)
    cache.grow(3)
    assert cache.num_chunks == 4
    assert (cache.states[:, :2] == UnitState.RESIDENT).all()
    assert (cache.states[:, 2:] == UnitState.ABSENT).all()
    assert cache.copies[1, 1] == CopyKind.STORED
    assert cache.copies.sum() == CopyKind.STORED
    assert np.argwhere(cache.incompressible).tolist() == [[0, 1]]


@given(num_chunks=st.integers(0, 5), cut=st.integers(0, 6), data=st.data())
def test_cutting_hands_out_what_lay_behind_and_only_that(num_chunks, cut, data):
    cache = resident_cache(3, num_chunks)
    compressed = data.draw(st.sets(st.sampled_from(list(np.ndindex(3, num_chunks)) or [None])))
    for place in compressed - {None}:
        cache.apply(place, Event.COMPRESS)
        cache.apply(place, Event.COMPRESS_DONE)
        cache.leases.pop(place)
        cache.payloads[place] = SimpleNamespace(place=place)
    leases, slots = cache.cut(cut)
    behind = {place for place in np.ndindex(3, num_chunks) if place[1] >= cut}
    assert {slot.place for slot in slots} == behind & compressed
    assert {divmod(lease.address, 1000) for lease in leases} == behind - compressed
    assert cache.num_chunks == min(cut, num_chunks)
    assert all(place[1] < cut for place in [*cache.leases, *cache.payloads])


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, [0, 0]), (1, [1, 0]), (300, [256, 44]), (512, [256, 256])]
)
def test_tokens_in_a_chunk(num_tokens, expected):
    cache = KvCache("c", 1)
    cache.set_tokens(np.arange(num_tokens, dtype=np.uint32))
    assert [cache.tokens_in(chunk) for chunk in range(2)] == expected


def test_hashes_follow_the_tokens():
    cache = KvCache("c", 1)
    tokens = np.arange(600, dtype=np.uint32)
    cache.set_tokens(tokens)
    assert [cache.prefix_hash(i) for i in range(3)] == prefix_hashes(tokens, chunk_tokens=CHUNK_TOKENS)
    before = list(cache.hashes)
    cache.set_tokens(np.where(tokens == 300, 9, tokens).astype(np.uint32))
    assert [a == b for a, b in zip(before, cache.hashes, strict=True)] == [True, False, False]


def test_the_chunk_table_is_in_the_order_of_chunks():
    cache = resident_cache(2, 3)
    cache.leases = dict(reversed(cache.leases.items()))
    assert cache.chunk_addresses(1).tolist() == [1000, 1001, 1002]
    assert cache.chunk_addresses(1).dtype == np.uint64
    del cache.leases[1, 1]
    with pytest.raises(KeyError):
        cache.chunk_addresses(1)


@pytest.fixture
def table():
    """Two layers of 10 and 20 bytes, a head of 5, one context of two chunks in each layer; all resident."""
    table = UnitTable([10, 20], 5, SIZES)
    for unit in [*table.weights, table.head]:
        unit.apply(Event.LOAD)
        unit.apply(Event.LOAD_DONE)
    table.caches["c"] = resident_cache(2, 2)
    table.caches["c"].name = "c"
    return table


def test_bytes_are_those_of_units_that_hold_a_buffer(table):
    assert (table.weights_bytes, table.head_bytes, table.kv_bytes) == (30, 5, 400)
    assert table.resident_bytes() == 435
    table.apply(WeightUnit(1), Event.DROP)
    table.apply(HeadUnit(), Event.DROP)
    table.apply(KvUnit("c", 0, 1), Event.WRITE)  # still in its buffer
    table.apply(KvUnit("c", 1, 1), Event.COMPRESS)
    table.apply(KvUnit("c", 1, 1), Event.COMPRESS_DONE)
    assert (table.weights_bytes, table.head_bytes, table.kv_bytes) == (10, 0, 300)


def test_a_snapshot_is_a_copy_with_the_oldest_context_first(table):
    table.caches["c"].last_used_s = 2.0
    table.cache("older").last_used_s = 1.0
    snapshot = table.snapshot(77)
    assert [context.context for context in snapshot.contexts] == ["older", "c"]
    assert snapshot.storage_left_bytes == 77
    table.apply(KvUnit("c", 0, 0), Event.WRITE)
    table.apply(WeightUnit(0), Event.DROP)
    assert snapshot.context("c").states[0, 0] == UnitState.RESIDENT
    assert snapshot.weights.states[0] == UnitState.RESIDENT


def test_a_context_in_use_protects_itself_the_weights_and_the_head(table):
    table.cache("other")
    table.caches["c"].in_use = True
    snapshot = table.snapshot(0)
    assert table.in_use
    assert snapshot.weights.protected.all()
    assert snapshot.head.protected
    assert snapshot.context("c").protected.all()
    assert not snapshot.context("other").protected.any()


def test_a_context_is_made_once(table):
    assert table.cache("new") is table.cache("new")
    assert table.cache("new").num_layers == 2
