"""Owns the states that a unit can be in, and the only arrows between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class UnitState(IntEnum):
    """Where a unit's content is. The numbers fit uint8 arrays (`policy/snapshot.py`).

    Weight layers and the head unit use RESIDENT, DROPPED and LOADING; KV chunks use all others and
    RESIDENT. "Restoring" is three states here, because a restore that is
    cancelled must know where the content still lies.
    """

    ABSENT = 0
    """KV: no content anywhere. A chunk for tokens to come, or one that was lost or forgotten."""
    RESIDENT = 1
    """In a shared buffer, ready for the device."""
    DROPPED = 2
    """Weights, head: only in the weight store."""
    LOADING = 3
    """Weights, head: a buffer is being filled from the weight store."""
    COMPRESSING = 4
    """KV: the buffer is intact, its payload is being made."""
    COMPRESSED = 5
    """KV: only a payload in the in-memory swap."""
    WRITING = 6
    """KV: the buffer is intact, its copy on flash is not yet."""
    STORED = 7
    """KV: FP16 on flash."""
    SPILLING = 8
    """KV: the payload in RAM is intact, its copy on flash is not yet."""
    STORED_COMPRESSED = 9
    """KV: a payload on flash."""
    DECODING = 10
    """KV: coming back from a payload in RAM."""
    READING = 11
    """KV: coming back from FP16 on flash."""
    READING_COMPRESSED = 12
    """KV: coming back from a payload on flash."""


class Event(Enum):
    """What can happen to a unit. `*_FAILED` also stands for given up: the source is intact."""

    DROP = "weights let go"
    LOAD = "load started"
    LOAD_DONE = "load done"
    LOAD_FAILED = "load failed"

    ALLOCATE = "room made for tokens to come"
    FORGET = "content no longer wanted"
    LOST = "the checksum failed or the file is gone"
    COMPRESS = "compression started"
    COMPRESS_DONE = "compression done"
    COMPRESS_FAILED = "compression failed"
    WRITE = "write started"
    WRITE_DONE = "write done"
    WRITE_FAILED = "write failed"
    SPILL = "write of the payload started"
    SPILL_DONE = "write of the payload done"
    SPILL_FAILED = "write of the payload failed"
    DROP_TO_STORED = "let go: a clean FP16 copy is on flash"
    DROP_TO_STORED_COMPRESSED = "let go: a clean payload is on flash"
    RESTORE = "restore started"
    RESTORE_DONE = "restore done"
    RESTORE_FAILED = "restore failed"


class IllegalTransition(RuntimeError):  # noqa: N818 - what happened, said plainly
    """An arrow that is not in the table: a broken invariant, never bad luck."""


_S = UnitState
_E = Event

TRANSITIONS: Final[Mapping[tuple[UnitState, Event], UnitState]] = {
    # Weight layers and the head unit.
    (_S.RESIDENT, _E.DROP): _S.DROPPED,
    (_S.DROPPED, _E.LOAD): _S.LOADING,
    (_S.LOADING, _E.LOAD_DONE): _S.RESIDENT,
    (_S.LOADING, _E.LOAD_FAILED): _S.DROPPED,
    # KV: from nothing, and back to nothing.
    (_S.ABSENT, _E.ALLOCATE): _S.RESIDENT,
    (_S.RESIDENT, _E.FORGET): _S.ABSENT,
    (_S.COMPRESSED, _E.FORGET): _S.ABSENT,
    (_S.STORED, _E.FORGET): _S.ABSENT,
    (_S.STORED_COMPRESSED, _E.FORGET): _S.ABSENT,
    # KV: out.
    (_S.RESIDENT, _E.COMPRESS): _S.COMPRESSING,
    (_S.COMPRESSING, _E.COMPRESS_DONE): _S.COMPRESSED,
    (_S.COMPRESSING, _E.COMPRESS_FAILED): _S.RESIDENT,
    (_S.RESIDENT, _E.WRITE): _S.WRITING,
    (_S.WRITING, _E.WRITE_DONE): _S.STORED,
    (_S.WRITING, _E.WRITE_FAILED): _S.RESIDENT,
    (_S.RESIDENT, _E.DROP_TO_STORED): _S.STORED,
    (_S.RESIDENT, _E.DROP_TO_STORED_COMPRESSED): _S.STORED_COMPRESSED,
    # KV: the payload leaves RAM too (CompKV).
    (_S.COMPRESSED, _E.SPILL): _S.SPILLING,
    (_S.SPILLING, _E.SPILL_DONE): _S.STORED_COMPRESSED,
    (_S.SPILLING, _E.SPILL_FAILED): _S.COMPRESSED,
    (_S.COMPRESSED, _E.DROP_TO_STORED): _S.STORED,
    (_S.COMPRESSED, _E.DROP_TO_STORED_COMPRESSED): _S.STORED_COMPRESSED,
    # KV: in.
    (_S.COMPRESSED, _E.RESTORE): _S.DECODING,
    (_S.DECODING, _E.RESTORE_DONE): _S.RESIDENT,
    (_S.DECODING, _E.RESTORE_FAILED): _S.COMPRESSED,
    (_S.DECODING, _E.LOST): _S.ABSENT,
    (_S.STORED, _E.RESTORE): _S.READING,
    (_S.READING, _E.RESTORE_DONE): _S.RESIDENT,
    (_S.READING, _E.RESTORE_FAILED): _S.STORED,
    (_S.READING, _E.LOST): _S.ABSENT,
    (_S.STORED_COMPRESSED, _E.RESTORE): _S.READING_COMPRESSED,
    (_S.READING_COMPRESSED, _E.RESTORE_DONE): _S.RESIDENT,
    (_S.READING_COMPRESSED, _E.RESTORE_FAILED): _S.STORED_COMPRESSED,
    (_S.READING_COMPRESSED, _E.LOST): _S.ABSENT,
}
"""Every arrow there is."""

WEIGHT_STATES: Final = frozenset({_S.RESIDENT, _S.DROPPED, _S.LOADING})
KV_STATES: Final = frozenset(_S) - {_S.DROPPED, _S.LOADING}

BUFFER_STATES: Final = frozenset(
    {
        _S.RESIDENT,
        _S.LOADING,
        _S.COMPRESSING,
        _S.WRITING,
        _S.DECODING,
        _S.READING,
        _S.READING_COMPRESSED,
    }
)
"""States in which a unit holds a shared buffer of its full size."""

PAYLOAD_STATES: Final = frozenset({_S.COMPRESSING, _S.COMPRESSED, _S.SPILLING, _S.DECODING})
"""States in which a chunk holds a slot of the in-memory swap."""

SETTLED_STATES: Final = frozenset(
    {_S.ABSENT, _S.RESIDENT, _S.DROPPED, _S.COMPRESSED, _S.STORED, _S.STORED_COMPRESSED}
)
"""States in which nobody is at work on the unit: the ones a plan starts from."""


def advance(state: UnitState, event: Event) -> UnitState:
    """The state after `event`; the only way to change a unit's state.

    Raises:
        IllegalTransition: the table has no such arrow.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a unit that is {state.name} cannot take {event.name}") from None


_ILLEGAL: Final = 255
_ROWS: Final = {event: row for row, event in enumerate(Event)}


def _arrow_table() -> NDArray[np.uint8]:
    table = np.full((len(Event), len(UnitState)), _ILLEGAL, np.uint8)
    for (state, event), after in TRANSITIONS.items():
        table[_ROWS[event], state] = after
    return table


_ARROWS: Final = _arrow_table()


def advance_all(states: NDArray[np.uint8], event: Event) -> NDArray[np.uint8]:
    """`advance` for an array of states, of one event that happens to all of them.

    Args:
        states: any shape, uint8 of `UnitState`.

    Raises:
        IllegalTransition: for one of them the table has no such arrow; nothing has changed.
    """
    after: NDArray[np.uint8] = _ARROWS[_ROWS[event]][states]
    if (after == _ILLEGAL).any():
        wrong = UnitState(int(states[after == _ILLEGAL][0]))
        raise IllegalTransition(f"a unit that is {wrong.name} cannot take {event.name}")
    return after
