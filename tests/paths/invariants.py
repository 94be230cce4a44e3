"""Owns what must hold between two operations: states, leases, payloads, copies on flash and tokens agree."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mzd.formats.prefix_hash import prefix_hashes
from mzd.memory.unit_table import KvCache, chunks_of
from mzd.policy.residency import BUFFER_STATES, PAYLOAD_STATES, SETTLED_STATES, UnitState
from mzd.policy.snapshot import CopyKind
from mzd.policy.units import CHUNK_TOKENS

FLASH_STATES = {
    UnitState.STORED: CopyKind.STORED,
    UnitState.STORED_COMPRESSED: CopyKind.STORED_COMPRESSED,
}


class BooksError(AssertionError):
    """Two accounts of the same thing differ."""


def check(condition: bool, what: str) -> None:
    """Raise BooksError unless the condition holds."""
    if not condition:
        raise BooksError(what)


def check_books(daemon) -> None:
    """Check all of it; nothing may be running.

    Raises:
        BooksError: what does not agree.
    """
    parts = daemon.opened.parts
    for unit in [*parts.units.weights, parts.units.head]:
        check((unit.state is UnitState.RESIDENT) == (unit.lease is not None), f"{unit} and its lease")
        check(unit.state in SETTLED_STATES, f"{unit} is not settled")
    for cache in parts.units.caches.values():
        check_cache(cache)
        check_copies(cache, parts)
    check_memory(parts)


def check_cache(cache: KvCache) -> None:
    """States say what the leases, the payloads and the tokens say."""
    check(not cache.in_use, f"{cache.name} is in use by nobody")
    check(cache.num_chunks == chunks_of(len(cache.tokens)), f"{cache.name} has chunks without tokens")
    hashes = prefix_hashes(cache.tokens, chunk_tokens=CHUNK_TOKENS)
    check(cache.hashes == hashes, f"the hashes of {cache.name} are not those of its tokens")
    places = {place: cache.state(place) for place in np.ndindex(cache.states.shape)}
    with_buffer = {place for place, state in places.items() if state in BUFFER_STATES}
    with_payload = {place for place, state in places.items() if state in PAYLOAD_STATES}
    check(set(cache.leases) == with_buffer, f"the leases of {cache.name} are not its chunks in buffers")
    check(set(cache.payloads) == with_payload, f"the payloads of {cache.name} are not its compressed chunks")
    for place, state in places.items():
        check(state in SETTLED_STATES, f"{place} of {cache.name} is {state.name}, and nobody works on it")
        check(state is not UnitState.ABSENT, f"{place} of {cache.name} holds nothing")


def check_copies(cache: KvCache, parts) -> None:
    """Flash holds exactly the copies that the table knows, each for the chunk's present tokens."""
    stored = {
        (chunk.unit.layer, chunk.unit.chunk): chunk for chunk in parts.storage.stored_chunks(cache.name)
    }
    known = {tuple(int(i) for i in place) for place in np.argwhere(cache.copies)}
    check(set(stored) == known, f"flash and table differ on the copies of {cache.name}")
    for place, chunk in stored.items():
        state, kind = cache.state(place), CopyKind(int(cache.copies[place]))
        check(
            FLASH_STATES.get(state, kind) is kind, f"{place} of {cache.name} is {state.name}, its copy {kind}"
        )
        raw = chunk.record.codec_name == "none"
        check(raw == (kind is CopyKind.STORED), f"the copy of {place} of {cache.name} is of another kind")
        check(chunk.record.tokens_hash == cache.hashes[place[1]], f"{place} of {cache.name}: an old copy")
    on_flash = {place for place in np.ndindex(cache.states.shape) if cache.state(place) in FLASH_STATES}
    check(on_flash <= known, f"chunks of {cache.name} are on flash, and flash does not know them")


def check_memory(parts) -> None:
    """Every byte that is leased belongs to one unit, and nothing else is held."""
    units = parts.units
    leases = [unit.lease for unit in [*units.weights, units.head] if unit.lease is not None]
    leases += [lease for cache in units.caches.values() for lease in cache.leases.values()]
    spans = sorted((lease.address, lease.address + lease.size_bytes) for lease in leases)
    check(all(a[1] <= b[0] for a, b in pairwise(spans)), "two units share memory")
    leased_bytes = sum(lease.size_bytes for lease in leases)
    statistics = parts.memory.statistics()
    check(statistics.leased_bytes == leased_bytes, "memory is leased that no unit has")
    check(statistics.populated_bytes == leased_bytes, "resident memory and units differ")
    num_payloads = sum(len(cache.payloads) for cache in units.caches.values())
    check(parts.payloads.statistics().num_payloads == num_payloads, "payloads are held that no chunk has")
    check(parts.staging.size_bytes == 0, "staging memory is held between restores")
    used_bytes = sum(parts.storage.stored_bytes(name) for name in units.caches)
    check(parts.storage.statistics().swap_bytes == used_bytes, "flash is used that no chunk has")
