"""What a request gets back: everything it needs, nothing else, in the order of need."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.policy.eviction_planner import plan_eviction
from mzd.policy.profile import UnitTimes
from mzd.policy.residency import UnitState
from mzd.policy.restore_planner import (
    LostContentError,
    UnsettledUnitError,
    intact_tokens,
    plan_restore,
)
from mzd.policy.units import CHUNK_TOKENS, HeadUnit, KvUnit, WeightUnit
from tests.policy.snapshots import MIB, UNLIMITED, context_of, snapshot_of, snapshots

TIMES = UnitTimes(t_dkv_s=1e-3, t_rkv_s=2e-3, t_rw_s=4e-3)
WAYS = {
    UnitState.COMPRESSED: "decode",
    UnitState.STORED: "read",
    UnitState.STORED_COMPRESSED: "read_decode",
}


@st.composite
def requests(draw):
    """(snapshot, context name, keep_tokens, capacity_tokens) that can be served."""
    snapshot = draw(snapshots().filter(lambda s: s.contexts))
    context = draw(st.sampled_from(snapshot.contexts))
    intact = intact_tokens(context, context.num_chunks * CHUNK_TOKENS)
    keep_tokens = draw(st.integers(0, intact))
    return snapshot, context.context, keep_tokens, keep_tokens + draw(st.integers(0, 3 * CHUNK_TOKENS))


@given(requests())
def test_every_kept_chunk_that_is_out_comes_back_by_its_own_way(request_):
    snapshot, name, keep_tokens, capacity_tokens = request_
    plan = plan_restore(
        snapshot, name, keep_tokens=keep_tokens, capacity_tokens=capacity_tokens, need_head=True
    )
    states = snapshot.context(name).states
    for layer in plan.layers:
        for chunk in range(-(-keep_tokens // CHUNK_TOKENS)):
            way = WAYS.get(UnitState(states[layer.layer, chunk]))
            found = [w for w in WAYS.values() if chunk in getattr(layer, w)]
            assert found == ([way] if way else [])
            assert chunk not in layer.forget
            assert chunk not in layer.allocate


@given(requests())
def test_afterwards_there_is_room_for_all_tokens_and_content_only_for_the_kept_ones(request_):
    snapshot, name, keep_tokens, capacity_tokens = request_
    plan = plan_restore(
        snapshot, name, keep_tokens=keep_tokens, capacity_tokens=capacity_tokens, need_head=False
    )
    states = snapshot.context(name).states
    for layer in plan.layers:
        resident = set(np.flatnonzero(states[layer.layer] == UnitState.RESIDENT).tolist())
        resident -= set(layer.forget)
        assert resident | set(layer.chunks) == set(range(-(-capacity_tokens // CHUNK_TOKENS)))
        behind = np.flatnonzero(states[layer.layer] != UnitState.ABSENT)
        assert set(layer.forget) == {int(c) for c in behind if c * CHUNK_TOKENS >= keep_tokens}


@given(requests(), st.booleans())
def test_allocations_are_in_forward_order_with_the_head_last(request_, need_head):
    snapshot, name, keep_tokens, capacity_tokens = request_
    plan = plan_restore(
        snapshot, name, keep_tokens=keep_tokens, capacity_tokens=capacity_tokens, need_head=need_head
    )
    units = [allocation.unit for allocation in plan.allocations]
    place = {WeightUnit: lambda u: (u.layer, -1), KvUnit: lambda u: (u.layer, u.chunk)}
    last = (snapshot.weights.num_layers, 0)
    places = [place[type(u)](u) if not isinstance(u, HeadUnit) else last for u in units]
    assert places == sorted(set(places))
    assert plan.allocate_bytes == sum(allocation.size_bytes for allocation in plan.allocations)
    assert (HeadUnit() in units) == (need_head and snapshot.head.state is UnitState.DROPPED)
    dropped = np.flatnonzero(snapshot.weights.states == UnitState.DROPPED).tolist()
    assert [u.layer for u in units if isinstance(u, WeightUnit)] == dropped


@given(requests())
def test_chunks_are_popped_in_the_opposite_of_the_order_in_which_they_were_pushed(request_):
    snapshot, name, *_ = request_
    context = snapshot.context(name)
    resident = replace(
        context,
        states=np.full_like(context.states, UnitState.RESIDENT),
        protected=np.zeros_like(context.protected),
        pinned=False,
    )
    snapshot = replace(snapshot, contexts=(resident,), storage_left_bytes=0)
    pushed = [s.unit for s in plan_eviction(snapshot, UNLIMITED, TIMES).steps if s.to == "ram"]
    for unit in pushed:
        resident.states[unit.layer, unit.chunk] = UnitState.COMPRESSED
    tokens = context.num_chunks * CHUNK_TOKENS
    plan = plan_restore(snapshot, name, keep_tokens=tokens, capacity_tokens=tokens, need_head=True)
    popped = [KvUnit(name, layer.layer, chunk) for layer in plan.layers for chunk in layer.decode]
    assert popped == pushed[::-1]


def test_a_partly_kept_chunk_is_kept_and_new_ones_follow():
    context = context_of("c", 1, 3, state=UnitState.STORED)
    snapshot = snapshot_of(context, num_layers=1)
    (layer,) = plan_restore(snapshot, "c", keep_tokens=257, capacity_tokens=1025, need_head=True).layers
    assert layer.read == (0, 1)
    assert layer.forget == (2,)
    assert layer.allocate == (2, 3, 4)
    assert layer.chunks == (0, 1, 2, 3, 4)
    assert layer.weights_bytes or layer.chunks


def test_nothing_to_do_for_what_is_resident():
    snapshot = snapshot_of(context_of("c", 2, 2), num_layers=2, head_bytes=MIB)
    plan = plan_restore(snapshot, "c", keep_tokens=512, capacity_tokens=512, need_head=True)
    assert not any(layer.weights_bytes or layer.chunks for layer in plan.layers)
    assert plan.allocations == ()


def test_a_new_context_has_no_chunks_yet():
    snapshot = snapshot_of(context_of("c", 2, 0), num_layers=2)
    plan = plan_restore(snapshot, "c", keep_tokens=0, capacity_tokens=300, need_head=True)
    assert [layer.allocate for layer in plan.layers] == [(0, 1), (0, 1)]


def test_lost_content_is_not_planned_over():
    context = context_of("c", 2, 4, state=UnitState.STORED)
    context.states[1, 2] = UnitState.ABSENT
    assert intact_tokens(context, 1000) == 512
    assert intact_tokens(context, 100) == 100
    snapshot = snapshot_of(context, num_layers=2)
    with pytest.raises(LostContentError, match="first 513 tokens"):
        plan_restore(snapshot, "c", keep_tokens=513, capacity_tokens=600, need_head=True)
    plan = plan_restore(snapshot, "c", keep_tokens=512, capacity_tokens=600, need_head=True)
    assert [layer.forget for layer in plan.layers] == [(2, 3), (3,)]


@pytest.mark.parametrize("state", [UnitState.WRITING, UnitState.READING, UnitState.SPILLING])
def test_units_in_flight_must_settle_first(state):
    snapshot = snapshot_of(context_of("c", 1, 1, state=state), num_layers=1)
    with pytest.raises(UnsettledUnitError, match=state.name):
        plan_restore(snapshot, "c", keep_tokens=256, capacity_tokens=256, need_head=True)


def test_bad_requests_are_refused():
    snapshot = snapshot_of(context_of("c", 1, 1), num_layers=1)
    with pytest.raises(KeyError):
        plan_restore(snapshot, "d", keep_tokens=0, capacity_tokens=1, need_head=True)
    with pytest.raises(ValueError, match="cannot hold"):
        plan_restore(snapshot, "c", keep_tokens=10, capacity_tokens=9, need_head=True)
