"""Owns the look at what contexts an earlier run has left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError
from mzd.formats.swap_record import StoredRecord, decode_journal, live_records
from mzd.formats.token_record import decode_log
from mzd.memory.context_directory import SWAP_JOURNAL, TOKEN_LOG, ContextDirectory


@dataclass(frozen=True, slots=True)
class FoundContext:
    """One context as its files tell.

    Attributes:
        name: of the context.
        model_id: whose tokens and chunks these are; None when the token log is gone.
        tokens: (n,) uint32; empty when the token log is gone.
        stored: chunks on flash, by (layer, chunk); nobody has checked their content yet.
        problems: what could not be read, one sentence each.
    """

    name: str
    model_id: str | None
    tokens: NDArray[np.uint32]
    stored: tuple[StoredRecord, ...]
    problems: tuple[str, ...]


def list_contexts(contexts: ContextDirectory) -> list[FoundContext]:
    """Read what every context has left. Damage in one of them is its problem, never an error."""
    return [_read_context(contexts, name) for name in contexts.names()]


def _read_context(contexts: ContextDirectory, name: str) -> FoundContext:
    problems: list[str] = []
    model_id, tokens = _read_tokens(contexts, name, problems)
    return FoundContext(name, model_id, tokens, _read_stored(contexts, name, problems), tuple(problems))


def _read_tokens(
    contexts: ContextDirectory, name: str, problems: list[str]
) -> tuple[str | None, NDArray[np.uint32]]:
    try:
        log = decode_log(contexts.read_file(name, TOKEN_LOG), context=name)
    except FileNotFoundError:
        problems.append("there is no token log")
    except MzdError as error:
        problems.append(error.message)
    else:
        return log.model_id, log.tokens
    return None, np.empty(0, np.uint32)


def _read_stored(contexts: ContextDirectory, name: str, problems: list[str]) -> tuple[StoredRecord, ...]:
    try:
        journal = decode_journal(contexts.read_file(name, SWAP_JOURNAL), context=name)
    except FileNotFoundError:
        return ()
    except MzdError as error:
        problems.append(error.message)
        return ()
    if journal.num_damaged:
        problems.append(f"{journal.num_damaged} records of the swap journal are damaged")
    live = live_records(journal.records)
    return tuple(live[place] for place in sorted(live))
