"""Owns what outlives the process: token logs beside the swap files, and their way back at a start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError
from mzd.formats.prefix_hash import extend_prefix_hash, prefix_hashes
from mzd.formats.swap_record import StoredRecord
from mzd.memory.context_directory import TOKEN_LOG, ContextDirectory
from mzd.memory.context_listing import FoundContext, list_contexts
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import StoredChunk
from mzd.memory.token_log import TokenLog
from mzd.memory.unit_table import KvCache, chunks_of
from mzd.memory.workers import Workers
from mzd.policy.residency import UnitState
from mzd.policy.snapshot import CopyKind
from mzd.policy.units import CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class RevivedContext:
    """A context of an earlier run.

    Attributes:
        tokens: (n,) uint32: all its ids.
        cache: of those whose KV is on flash.
        written_s: when its last tokens were logged, by the wall clock.
    """

    name: str
    tokens: NDArray[np.uint32]
    cache: KvCache
    written_s: float


log = logging.getLogger(__name__)

RECORD_TOKENS: Final = CHUNK_TOKENS
"""Tokens of one record of the log: damage costs no more than what follows in a conversation."""

_STATE_ON_FLASH: Final = {
    CopyKind.STORED: UnitState.STORED,
    CopyKind.STORED_COMPRESSED: UnitState.STORED_COMPRESSED,
}


class ContextArchive:
    """The contexts' files, for one model.

    Args:
        codec_name, codec_version: payloads of other codecs are not used; their tokens are computed again.
    """

    def __init__(
        self,
        contexts: ContextDirectory,
        storage: StorageSwap,
        workers: Workers,
        *,
        model_id: str,
        codec_name: str,
        codec_version: int,
    ) -> None:
        self._contexts = contexts
        self._storage = storage
        self._workers = workers
        self._model_id = model_id
        self._codec = (codec_name, codec_version)
        self._logs: dict[str, TokenLog] = {}
        self.unusable: dict[str, MzdError] = {}

    def revive(self, num_layers: int) -> list[RevivedContext]:
        """What earlier runs have left for this model; what cannot be used goes into `unusable`. Blocks."""
        revived = []
        for found in list_contexts(self._contexts):
            stored = self._storage.stored_chunks(found.name)
            refusal = self._refusal(found, has_chunks=bool(found.stored))
            for problem in found.problems:
                log.warning("context %s: %s", found.name, problem)
            if refusal is not None:
                self.unusable[found.name] = refusal
            elif len(found.tokens):
                cache = self._revive_cache(found, stored, num_layers)
                # The token log, not the swap: an eviction writes that, long after the last use.
                written_s = self._contexts.modified_s(found.name, TOKEN_LOG)
                revived.append(RevivedContext(found.name, found.tokens, cache, written_s))
            else:
                self._storage.drop_context(found.name)  # a request that was refused has left its directory
        return revived

    def _refusal(self, found: FoundContext, *, has_chunks: bool) -> MzdError | None:
        """Why a context of an earlier run cannot go on; None if it can."""
        if found.model_id not in (None, self._model_id):
            return MzdError(
                "model_changed",
                f"context {found.name!r} belongs to another model; drop it or use another name",
                tokens=len(found.tokens),
            )
        if has_chunks and not len(found.tokens):
            return MzdError(
                "corrupt_chunk", f"the tokens of context {found.name!r} are lost; drop it to begin anew"
            )
        return None

    def _revive_cache(self, found: FoundContext, stored: Sequence[StoredChunk], num_layers: int) -> KvCache:
        """Only a chunk that was stored for just these tokens counts; its checksum is checked at the read.

        The swap is asked, not the journal: a chunk whose data file is gone is not stored, whatever that says.
        """
        cache = KvCache(found.name, num_layers)
        cache.grow(chunks_of(len(found.tokens)))
        hashes = prefix_hashes(found.tokens, chunk_tokens=CHUNK_TOKENS)
        ends = np.zeros(cache.states.shape, np.int64)
        for record in (chunk.record for chunk in stored):
            kind = self._copy_kind(record.codec_name, record.codec_version)
            place = (record.layer, record.chunk)
            if kind is not CopyKind.NONE and _fits(record, found.tokens, hashes, cache):
                cache.states[place] = _STATE_ON_FLASH[kind]
                cache.copies[place] = kind
                ends[place] = record.chunk * CHUNK_TOKENS + record.num_tokens
        num_tokens = _intact_end(ends)
        cache.cut(chunks_of(num_tokens))
        cache.set_tokens(found.tokens[:num_tokens])
        _warn_of_lost_tokens(found)
        return cache

    def _copy_kind(self, codec_name: str, codec_version: int) -> CopyKind:
        if codec_name == "none":
            return CopyKind.STORED
        known = (codec_name, codec_version) == self._codec
        return CopyKind.STORED_COMPRESSED if known else CopyKind.NONE

    def check_usable(self, name: str) -> None:
        """Refuse a name whose context is kept and cannot go on.

        Raises:
            MzdError: `model_changed`, `corrupt_chunk`.
        """
        if name in self.unusable:
            raise self.unusable[name]

    async def keep_tokens(self, name: str, tokens: Sequence[int]) -> None:
        """Bring a context's token log up to date, as far as the disk allows: an answer goes on without."""
        try:
            await self._workers.run(self._keep_tokens, name, np.asarray(tokens, dtype=np.uint32))
        except MzdError as error:
            log.warning("the tokens of context %s are not on disk: %s", name, error)

    def _keep_tokens(self, name: str, tokens: NDArray[np.uint32]) -> None:
        token_log = self._logs.get(name) or self._open_log(name)
        self._logs[name] = token_log
        known = token_log.tokens()[: len(tokens)]
        differs = np.flatnonzero(known != tokens[: len(known)])
        common = int(differs[0]) if len(differs) else len(known)
        if common < token_log.num_tokens:
            token_log.truncate(common)
        for start in range(common, len(tokens), RECORD_TOKENS):
            token_log.append(tokens[start : start + RECORD_TOKENS])

    def _open_log(self, name: str) -> TokenLog:
        try:
            found = TokenLog.open(self._contexts, name)
        except (FileNotFoundError, MzdError):
            return TokenLog.create(self._contexts, name, model_id=self._model_id)
        if found.model_id != self._model_id:
            return TokenLog.create(self._contexts, name, model_id=self._model_id)
        return found

    async def forget(self, name: str) -> None:
        """Remove all files of a context."""
        self._logs.pop(name, None)
        self.unusable.pop(name, None)
        await self._workers.run(self._storage.drop_context, name)


def _fits(record: StoredRecord, tokens: NDArray[np.uint32], hashes: Sequence[bytes], cache: KvCache) -> bool:
    """Whether a record is of these tokens; the last chunk may hold fewer of them than the log does."""
    start = record.chunk * CHUNK_TOKENS
    if record.layer >= cache.num_layers or start + record.num_tokens > len(tokens):
        return False
    previous = hashes[record.chunk - 1] if record.chunk else b""
    return record.tokens_hash == extend_prefix_hash(previous, tokens[start : start + record.num_tokens])


def _intact_end(ends: NDArray[np.int64]) -> int:
    """How many leading tokens have their KV in every layer; `ends`: (layers, chunks), 0 where nothing is."""
    end = 0
    for chunk in range(ends.shape[1]):
        lowest, highest = int(ends[:, chunk].min()), int(ends[:, chunk].max())
        if lowest != highest or lowest == 0:
            break
        end = lowest
        if end % CHUNK_TOKENS:
            break
    return end


def _warn_of_lost_tokens(found: FoundContext) -> None:
    """Chunks on flash tell how long the context once was; a shorter log has lost its end."""
    once = max((record.chunk * CHUNK_TOKENS + record.num_tokens for record in found.stored), default=0)
    if once > len(found.tokens):
        log.warning(
            "context %s: the token log is damaged: %d of at least %d tokens are left",
            found.name,
            len(found.tokens),
            once,
        )
