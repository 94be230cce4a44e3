"""The arrows between unit states: what there is, and that there is nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.policy.residency import (
    BUFFER_STATES,
    KV_STATES,
    PAYLOAD_STATES,
    SETTLED_STATES,
    TRANSITIONS,
    WEIGHT_STATES,
    Event,
    IllegalTransition,
    UnitState,
    advance,
    advance_all,
)

S, E = UnitState, Event


@pytest.mark.parametrize(
    ("start", "events", "end"),
    [
        (S.RESIDENT, [E.DROP, E.LOAD, E.LOAD_DONE], S.RESIDENT),
        (S.RESIDENT, [E.COMPRESS, E.COMPRESS_DONE, E.RESTORE, E.RESTORE_DONE], S.RESIDENT),
        (S.RESIDENT, [E.WRITE, E.WRITE_DONE, E.RESTORE, E.RESTORE_DONE], S.RESIDENT),
        (S.COMPRESSED, [E.SPILL, E.SPILL_DONE, E.RESTORE, E.RESTORE_DONE], S.RESIDENT),
        (S.RESIDENT, [E.DROP_TO_STORED], S.STORED),
        (S.ABSENT, [E.ALLOCATE], S.RESIDENT),
    ],
)
def test_the_ways_of_the_specification_are_there(start, events, end):
    state = start
    for event in events:
        state = advance(state, event)
    assert state is end


@pytest.mark.parametrize(
    ("source", "begin", "failure"),
    [
        (S.DROPPED, E.LOAD, E.LOAD_FAILED),
        (S.RESIDENT, E.COMPRESS, E.COMPRESS_FAILED),
        (S.RESIDENT, E.WRITE, E.WRITE_FAILED),
        (S.COMPRESSED, E.SPILL, E.SPILL_FAILED),
        (S.COMPRESSED, E.RESTORE, E.RESTORE_FAILED),
        (S.STORED, E.RESTORE, E.RESTORE_FAILED),
        (S.STORED_COMPRESSED, E.RESTORE, E.RESTORE_FAILED),
    ],
)
def test_work_that_fails_leaves_the_unit_where_its_content_still_is(source, begin, failure):
    assert advance(advance(source, begin), failure) is source


@given(st.sampled_from(S), st.sampled_from(E))
def test_an_arrow_outside_the_table_raises(state, event):
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=state.name):
            advance(state, event)


def test_unsettled_states_always_have_a_way_to_succeed_and_a_way_to_fail():
    for state in set(S) - SETTLED_STATES:
        ends = {to for (start, _), to in TRANSITIONS.items() if start is state}
        assert len(ends) >= 2
        assert ends <= SETTLED_STATES


def test_weights_never_reach_a_state_of_kv_and_kv_none_of_weights():
    weight_events = {E.DROP, E.LOAD, E.LOAD_DONE, E.LOAD_FAILED}
    for (start, event), end in TRANSITIONS.items():
        states = WEIGHT_STATES if event in weight_events else KV_STATES
        assert {start, end} <= states


def test_a_unit_with_content_in_memory_holds_a_buffer_or_a_payload():
    nowhere_in_ram = {S.ABSENT, S.DROPPED, S.STORED, S.STORED_COMPRESSED}
    assert set(S) - nowhere_in_ram == BUFFER_STATES | PAYLOAD_STATES


@pytest.mark.parametrize("event", list(Event))
def test_an_array_of_states_moves_as_its_states_do(event):
    legal = [state for state in UnitState if (state, event) in TRANSITIONS]
    moved = advance_all(np.array(legal, np.uint8), event)
    assert moved.tolist() == [advance(state, event) for state in legal]
    for state in set(UnitState) - set(legal):
        with pytest.raises(IllegalTransition, match=state.name):
            advance_all(np.array([*legal, state], np.uint8), event)
