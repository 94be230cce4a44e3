"""Owns one context's swap file: which chunk lies where in it, and the order of write and record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mzd import native
from mzd.errors import MzdError
from mzd.formats.swap_record import FreedRecord, StoredRecord, place_seed
from mzd.memory.context_directory import SWAP_DATA, ContextDirectory, OpenFile
from mzd.memory.file_space import punch_hole
from mzd.memory.slot_allocator import SlotAllocator, SwapSlot
from mzd.memory.swap_journal import SwapJournal
from mzd.policy.units import PAGE_BYTES, ChunkIndex, KvUnit, LayerIndex

ChunkPlace = tuple[int, int]


def whole_pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to pages: direct I/O moves nothing smaller."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk that is to be written.

    Attributes:
        unit: which one.
        num_tokens: tokens that it holds.
        tokens_hash: `prefix_hash` up to the last of them.
        codec_name, codec_version: how the payload is encoded (`none` for a raw chunk).
        payload_bytes: what will be written.
        slot_bytes: size class: the codec's longest payload in whole pages, the same for all chunks of a
            model and codec, so that neighbours lie side by side. Slack is never written.
    """

    unit: KvUnit
    num_tokens: int
    tokens_hash: bytes
    codec_name: str
    codec_version: int
    payload_bytes: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.slot_bytes % PAGE_BYTES or not 0 < self.payload_bytes <= self.slot_bytes:
            raise ValueError(f"{self.payload_bytes} bytes do not go into a slot of {self.slot_bytes}")


@dataclass(frozen=True, slots=True, eq=False)
class SlotWrite:
    """A slot that waits for its content. It counts for nothing before `commit`; keep it until the write ends.

    Attributes:
        chunk: what goes there.
        file: keeps `fd` open, even if the context is dropped meanwhile.
        crc_seed: of the payload's checksum.
    """

    chunk: NewChunk
    slot: SwapSlot
    file: OpenFile
    crc_seed: int

    @property
    def fd(self) -> int:
        """Where to write."""
        return self.file.fd

    @property
    def offset_bytes(self) -> int:
        """Where in the file; whole pages."""
        return self.slot.offset_bytes

    @property
    def size_bytes(self) -> int:
        """What to write: the payload and the rest of its last page."""
        return whole_pages(self.chunk.payload_bytes)

    def checksum(self, address: int) -> int:
        """CRC-32C of the payload at `address`, for `commit`; works without the GIL."""
        return native.crc32c(address, self.chunk.payload_bytes, self.crc_seed)


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """Where a chunk lies and what it must be. Keep it until the read ends.

    Attributes:
        unit: which one.
        record: all that the journal knows.
        file: keeps `fd` open, even if the context is dropped meanwhile.
        crc_seed: of the payload's checksum.
    """

    unit: KvUnit
    record: StoredRecord
    file: OpenFile
    crc_seed: int

    @property
    def fd(self) -> int:
        """Where to read."""
        return self.file.fd

    @property
    def offset_bytes(self) -> int:
        """Where in the file; whole pages."""
        return self.record.offset_bytes

    @property
    def size_bytes(self) -> int:
        """What to read: the payload and the rest of its last page."""
        return whole_pages(self.record.payload_bytes)

    @property
    def payload_bytes(self) -> int:
        """What the checksum covers."""
        return self.record.payload_bytes

    @property
    def crc(self) -> int:
        """Checksum that the payload must have."""
        return self.record.payload_crc

    def is_intact(self, address: int) -> bool:
        """Whether the payload read to `address` is this chunk's; works without the GIL."""
        return native.crc32c(address, self.payload_bytes, self.crc_seed) == self.crc


class SwapFile:
    """The swap space of one context. `StorageSwap` calls it under its lock.

    Order of a write: slot, content, record. A crash before the record leaves a slot that nobody knows.
    Order of a release: record, then slot. So a record never names a slot that has been given to another
    chunk - and if the page cache is lost with the power, the checksum of content and place tells.
    """

    def __init__(self, context: str, model_id: str, file: OpenFile, journal: SwapJournal) -> None:
        self._context = context
        self._model_id = model_id
        self._file = file
        self._journal = journal
        self._allocator = SlotAllocator()
        self._slots: dict[ChunkPlace, SwapSlot] = {}
        self._pending: set[SlotWrite] = set()
        self.used_bytes = 0
        self._adopt_records()

    @classmethod
    def create(cls, contexts: ContextDirectory, context: str, model_id: str) -> SwapFile:
        """Begin empty; what is there already is given up.

        Raises:
            MzdError: `swap_full` or `internal`.
        """
        journal = SwapJournal.create(contexts, context)
        file = contexts.open_file(context, SWAP_DATA, create=True, direct=True)
        os.ftruncate(file.fd, 0)
        return cls(context, model_id, file, journal)

    @classmethod
    def open(cls, contexts: ContextDirectory, context: str, model_id: str) -> SwapFile:
        """Open what is there.

        Raises:
            FileNotFoundError: there is no journal, or no data.
            FormatError: `corrupt_chunk`; the journal is damaged at its head, or of another version.
        """
        journal = SwapJournal.open(contexts, context)
        file = contexts.open_file(context, SWAP_DATA, create=False, direct=True)
        return cls(context, model_id, file, journal)

    @property
    def written_bytes(self) -> int:
        """Bytes of records written so far."""
        return self._journal.written_bytes

    @property
    def num_damaged(self) -> int:
        """Records that were lost to damage."""
        return self._journal.num_damaged

    @property
    def stored_bytes(self) -> int:
        """Bytes of chunks that count."""
        return sum(whole_pages(record.payload_bytes) for record in self._journal.live.values())

    def _adopt_records(self) -> None:
        """Take the slots that the journal names; where two records claim one place, the newer is right."""
        for place, record in sorted(self._journal.live.items(), key=lambda item: -item[1].generation):
            slot = SwapSlot(*place, record.offset_bytes, record.slot_bytes)
            if self._allocator.adopt(slot):
                self._slots[place] = slot
                self.used_bytes += whole_pages(record.payload_bytes)
            else:
                del self._journal.live[place]

    def allocate(self, chunks: Iterable[NewChunk]) -> list[SlotWrite]:
        """Take a slot for each chunk."""
        writes = [self._plan(chunk) for chunk in chunks]
        self._pending.update(writes)
        self.used_bytes += sum(write.size_bytes for write in writes)
        return writes

    def _plan(self, chunk: NewChunk) -> SlotWrite:
        unit = chunk.unit
        slot = self._allocator.allocate(unit.layer, unit.chunk, chunk.slot_bytes)
        seed = self._seed(unit.layer, unit.chunk, chunk.codec_name, chunk.codec_version)
        return SlotWrite(chunk, slot, self._file, seed)

    def _seed(self, layer: int, chunk: int, codec_name: str, codec_version: int) -> int:
        return place_seed(
            context=self._context,
            layer=layer,
            chunk=chunk,
            codec_name=codec_name,
            codec_version=codec_version,
            model_id=self._model_id,
        )

    def owns(self, write: SlotWrite) -> bool:
        """Whether the write was allocated here and is neither committed nor cancelled."""
        return write in self._pending

    def cancel(self, writes: Sequence[SlotWrite]) -> None:
        """Give the slots of failed writes back."""
        self._pending.difference_update(writes)
        for write in writes:
            self._give_back(write.slot, write.size_bytes)

    def commit(self, written: Sequence[tuple[SlotWrite, int]]) -> None:
        """Let written slots count, each with its payload's checksum; older copies of the chunks go.

        Raises:
            MzdError: `swap_full` or `internal`; none counts, all stay pending.
            ValueError: a chunk appears twice.
        """
        records = [self._record(write, crc) for write, crc in written]
        if len({(record.layer, record.chunk) for record in records}) != len(records):
            raise ValueError("a chunk appears twice in one commit")
        replaced = [self._journal.live.get((record.layer, record.chunk)) for record in records]
        self._journal.append(records)
        for old in replaced:
            if old is not None:
                self._give_back(self._slots.pop((old.layer, old.chunk)), whole_pages(old.payload_bytes))
        for write, _ in written:
            self._pending.discard(write)
            self._slots[write.chunk.unit.layer, write.chunk.unit.chunk] = write.slot

    def _record(self, write: SlotWrite, crc: int) -> StoredRecord:
        chunk = write.chunk
        return StoredRecord(
            layer=chunk.unit.layer,
            chunk=chunk.unit.chunk,
            generation=self._journal.next_generation(),
            num_tokens=chunk.num_tokens,
            tokens_hash=chunk.tokens_hash,
            model_id=self._model_id,
            codec_name=chunk.codec_name,
            codec_version=chunk.codec_version,
            offset_bytes=write.slot.offset_bytes,
            slot_bytes=write.slot.slot_bytes,
            payload_bytes=chunk.payload_bytes,
            payload_crc=int(crc),
        )

    def locate(self, layer: int, chunk: int) -> StoredChunk | None:
        """Where this model's copy of a chunk lies; None if there is none."""
        record = self._journal.live.get((layer, chunk))
        if record is None or record.model_id != self._model_id:
            return None
        seed = self._seed(layer, chunk, record.codec_name, record.codec_version)
        unit = KvUnit(self._context, LayerIndex(layer), ChunkIndex(chunk))
        return StoredChunk(unit, record, self._file, seed)

    def stored_chunks(self) -> list[StoredChunk]:
        """This model's chunks in the order in which they are restored: by layer, then chunk."""
        located = (self.locate(*place) for place in sorted(self._journal.live))
        return [stored for stored in located if stored is not None]

    def free(self, places: Iterable[ChunkPlace]) -> None:
        """Void the copies of chunks; those that are not stored are passed over.

        Raises:
            MzdError: `swap_full` or `internal`; nothing is freed.
        """
        known = {place: self._journal.live[place] for place in places if place in self._journal.live}
        if not known:
            return
        self._journal.append([FreedRecord(*place, self._journal.next_generation()) for place in known])
        for place, record in known.items():
            self._give_back(self._slots.pop(place), whole_pages(record.payload_bytes))

    def _give_back(self, slot: SwapSlot, size_bytes: int) -> None:
        self._allocator.free(slot)
        self.used_bytes -= size_bytes
        # The slot is free whether or not its blocks go: a failing punch only costs disk space until reuse.
        with contextlib.suppress(OSError):
            punch_hole(self._file.fd, slot.offset_bytes, size_bytes)


def unknown_context(context: str) -> MzdError:
    """The error for a write whose context was dropped meanwhile."""
    return MzdError("unknown_context", f"context {context} was dropped while its chunks were written")
