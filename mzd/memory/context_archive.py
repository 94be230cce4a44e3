"""Owns what outlives the process: token logs beside the swap files, and their way back at a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.context_listing import FoundContext, list_contexts
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.token_log import TokenLog
from mzd.memory.unit_table import KvCache, chunks_of
from mzd.memory.workers import Workers
from mzd.policy.residency import UnitState
from mzd.policy.restore_planner import intact_tokens
from mzd.policy.snapshot import CopyKind


@dataclass(frozen=True, slots=True)
class RevivedContext:
    """A context of an earlier run. `tokens` are all its ids; `cache` holds those whose KV is on flash."""

    name: str
    tokens: NDArray[np.uint32]
    cache: KvCache


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
        self.stale: dict[str, int] = {}

    def revive(self, num_layers: int) -> list[RevivedContext]:
        """What earlier runs have left for this model; other models' contexts go into `stale`. Blocks."""
        revived = []
        for found in list_contexts(self._contexts):
            if found.model_id == self._model_id:
                revived.append(
                    RevivedContext(found.name, found.tokens, self._revive_cache(found, num_layers))
                )
            else:
                self.stale[found.name] = len(found.tokens)
        return revived

    def _revive_cache(self, found: FoundContext, num_layers: int) -> KvCache:
        """Only a chunk that was stored for just these tokens counts; its checksum is checked at the read."""
        cache = KvCache(found.name, num_layers)
        cache.set_tokens(found.tokens)
        cache.grow(chunks_of(len(found.tokens)))
        for record in found.stored:
            fits = record.layer < num_layers and record.chunk < cache.num_chunks
            kind = self._copy_kind(record.codec_name, record.codec_version)
            if not fits or kind is CopyKind.NONE or record.tokens_hash != cache.hashes[record.chunk]:
                continue
            raw = kind is CopyKind.STORED
            cache.states[record.layer, record.chunk] = (
                UnitState.STORED if raw else UnitState.STORED_COMPRESSED
            )
            cache.copies[record.layer, record.chunk] = kind
        intact = intact_tokens(cache.snapshot(), len(found.tokens))
        cache.cut(chunks_of(intact))
        cache.set_tokens(found.tokens[:intact])
        return cache

    def _copy_kind(self, codec_name: str, codec_version: int) -> CopyKind:
        if codec_name == "none":
            return CopyKind.STORED
        known = (codec_name, codec_version) == self._codec
        return CopyKind.STORED_COMPRESSED if known else CopyKind.NONE

    def check_not_stale(self, name: str) -> None:
        """Refuse a name that another model's context has.

        Raises:
            MzdError: `model_changed`.
        """
        if name in self.stale:
            raise MzdError(
                "model_changed", f"context {name!r} belongs to another model; drop it or use another name"
            )

    async def keep_tokens(self, name: str, tokens: Sequence[int]) -> None:
        """Bring a context's token log up to date.

        Raises:
            MzdError: `swap_full`, `internal`; the log is as it was.
        """
        await self._workers.run(self._keep_tokens, name, np.asarray(tokens, dtype=np.uint32))

    def _keep_tokens(self, name: str, tokens: NDArray[np.uint32]) -> None:
        log = self._logs.get(name) or self._open_log(name)
        self._logs[name] = log
        known = log.tokens()[: len(tokens)]
        differs = np.flatnonzero(known != tokens[: len(known)])
        common = int(differs[0]) if len(differs) else len(known)
        if common < log.num_tokens:
            log.truncate(common)
        if common < len(tokens):
            log.append(tokens[common:])

    def _open_log(self, name: str) -> TokenLog:
        try:
            log = TokenLog.open(self._contexts, name)
        except (FileNotFoundError, MzdError):
            return TokenLog.create(self._contexts, name, model_id=self._model_id)
        if log.model_id != self._model_id:
            return TokenLog.create(self._contexts, name, model_id=self._model_id)
        return log

    async def forget(self, name: str) -> None:
        """Remove all files of a context."""
        self._logs.pop(name, None)
        self.stale.pop(name, None)
        await self._workers.run(self._storage.drop_context, name)
