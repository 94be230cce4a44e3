"""Owns the storage swap: the swap files of all contexts under one quota."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mzd.errors import FormatError, MzdError
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.swap_file import (
    NewChunk,
    SlotWrite,
    StoredChunk,
    SwapFile,
    unknown_context,
    whole_pages,
)
from mzd.policy.units import KvUnit


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """Attributes:
    swap_bytes: slots in use, of all contexts and models, those being written included.
    quota_bytes: what they may grow to.
    written_bytes: chunks and records written to flash since the start.
    """

    swap_bytes: int
    quota_bytes: int
    written_bytes: int


class StorageSwap:
    """Chunks on flash. It keeps the books; the caller moves the bytes, in a thread, between two calls:

        writes = swap.allocate(chunks)                    # slots, within the quota
        native.write_extents(...), write.checksum(...)    # content
        swap.commit(list(zip(writes, checksums)))         # record: now it counts
        swap.cancel(failed_writes)

        stored = swap.locate(unit)                        # None: compute it again
        native.read_extents(...), stored.is_intact(...)   # False: `free` it, compute it again

    Nothing is synced, on purpose. What is written outlives SIGKILL, because the page cache does (and most
    content goes past it). After a power cut a record may name content that never reached the flash; its
    checksum then fails and the chunk is computed again. Syncing would stall an eviction that the system
    waits for, to save work that costs seconds.

    May be called from any thread. Calls block for microseconds; `commit` and `free` for milliseconds when
    blocks are given back or a journal is written anew.

    Args:
        contexts: where contexts have their directories.
        model_id: of the model that chunks belong to; others' chunks are kept, counted and never located.
        quota_bytes: bound on the slots of all contexts; 0 turns flash off.

    Attributes:
        problems: by context, why its swap file could not be read. Its chunks are computed again.
    """

    def __init__(self, contexts: ContextDirectory, *, model_id: str, quota_bytes: int) -> None:
        self._contexts = contexts
        self._model_id = model_id
        self._quota_bytes = quota_bytes
        self._lock = threading.Lock()
        self._files: dict[str, SwapFile] = {}
        self._written_bytes = 0
        self.problems: dict[str, str] = {}
        for context in contexts.names():
            self._open_existing(context)

    def _open_existing(self, context: str) -> None:
        try:
            file = SwapFile.open(self._contexts, context, self._model_id)
        except FileNotFoundError:
            return  # nothing was ever stored
        except MzdError as error:
            self.problems[context] = error.message
            return
        self._files[context] = file
        if file.num_damaged:
            self.problems[context] = f"{file.num_damaged} records of the swap journal are damaged"

    def allocate(self, chunks: Sequence[NewChunk]) -> list[SlotWrite]:
        """Take a slot for each chunk, in order: all or none.

        Raises:
            MzdError: `swap_full`; the quota, or the file system has no room for the files.
        """
        with self._lock:
            self._check_quota(sum(whole_pages(chunk.payload_bytes) for chunk in chunks))
            files = {context: self._writable(context) for context in {chunk.unit.context for chunk in chunks}}
            groups = groupby(chunks, key=lambda chunk: chunk.unit.context)
            return [write for context, group in groups for write in files[context].allocate(group)]

    def _check_quota(self, size_bytes: int) -> None:
        used_bytes = self._used_bytes()
        if used_bytes + size_bytes > self._quota_bytes:
            raise MzdError(
                "swap_full",
                f"{size_bytes} bytes more than the {used_bytes} in use exceed the swap's quota",
                requested_bytes=size_bytes,
                used_bytes=used_bytes,
                quota_bytes=self._quota_bytes,
            )

    def _used_bytes(self) -> int:
        return sum(file.used_bytes for file in self._files.values())

    def _writable(self, context: str) -> SwapFile:
        file = self._files.get(context)
        if file is None:
            file = self._files[context] = self._open_or_create(context)
        return file

    def _open_or_create(self, context: str) -> SwapFile:
        try:
            return SwapFile.open(self._contexts, context, self._model_id)
        except (FileNotFoundError, FormatError):  # none, or one that nobody can read any more
            return SwapFile.create(self._contexts, context, self._model_id)

    def commit(self, written: Sequence[tuple[SlotWrite, int]]) -> None:
        """Let written slots count: `(write, CRC-32C of its payload)`. All of one context.

        Raises:
            MzdError: `unknown_context`; it was dropped. `swap_full`, `internal`; no record could be
                written: nothing counts, `cancel` the writes.
        """
        with self._lock:
            file = self._file_of([write for write, _ in written])
            if file is None:
                return
            before = file.written_bytes
            file.commit(written)
            self._written_bytes += sum(write.size_bytes for write, _ in written)
            self._written_bytes += file.written_bytes - before

    def cancel(self, writes: Sequence[SlotWrite]) -> None:
        """Give the slots of failed writes back. Those of a dropped context are gone already."""
        with self._lock:
            for context in {write.chunk.unit.context for write in writes}:
                file = self._files.get(context)
                if file is not None:
                    file.cancel([write for write in writes if file.owns(write)])

    def _file_of(self, writes: Sequence[SlotWrite]) -> SwapFile | None:
        """The file that all writes belong to; None for no writes."""
        if not writes:
            return None
        context = writes[0].chunk.unit.context
        file = self._files.get(context)
        if file is None or not all(file.owns(write) for write in writes):
            raise unknown_context(context)
        return file

    def locate(self, unit: KvUnit) -> StoredChunk | None:
        """Where a chunk lies; None if it is not stored for this model."""
        with self._lock:
            file = self._files.get(unit.context)
            return None if file is None else file.locate(unit.layer, unit.chunk)

    def has_clean_copy(self, unit: KvUnit, tokens_hash: bytes) -> bool:
        """Whether flash holds the chunk for just these tokens, so that evicting it writes nothing."""
        stored = self.locate(unit)
        return stored is not None and stored.record.tokens_hash == tokens_hash

    def stored_chunks(self, context: str) -> list[StoredChunk]:
        """All of a context's chunks for this model, by layer, then chunk."""
        with self._lock:
            file = self._files.get(context)
            return [] if file is None else file.stored_chunks()

    def stored_bytes(self, context: str) -> int:
        """Bytes that a context's chunks take on flash, of whatever model."""
        with self._lock:
            file = self._files.get(context)
            return 0 if file is None else file.stored_bytes

    def free(self, units: Iterable[KvUnit]) -> None:
        """Void the copies of chunks whose tokens are forgotten, or that failed their check.

        Raises:
            MzdError: `swap_full` or `internal`; some copies still count. They are harmless: their
                `tokens_hash` or checksum does not match.
        """
        with self._lock:
            by_context: dict[str, list[tuple[int, int]]] = {}
            for unit in units:
                by_context.setdefault(unit.context, []).append((unit.layer, unit.chunk))
            for context, places in by_context.items():
                self._free_places(context, places)

    def _free_places(self, context: str, places: list[tuple[int, int]]) -> None:
        file = self._files.get(context)
        if file is None:
            return
        before = file.written_bytes
        file.free(places)
        self._written_bytes += file.written_bytes - before

    def drop_context(self, context: str) -> bool:
        """Remove a context with all its files, the token log too. False: there was none.

        Reads and writes in flight end on the removed file, which goes with the last of them.

        Raises:
            MzdError: `internal`; a file cannot be removed.
        """
        with self._lock:
            self._files.pop(context, None)
            self.problems.pop(context, None)
            return self._contexts.remove(context)

    def statistics(self) -> StorageStatistics:
        """Count what is held now."""
        with self._lock:
            return StorageStatistics(self._used_bytes(), self._quota_bytes, self._written_bytes)
