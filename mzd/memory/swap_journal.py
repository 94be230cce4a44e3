"""Owns one context's `swap.journal`: appended to while chunks come and go, written anew when mostly stale."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from mzd.errors import MzdError
from mzd.formats.swap_record import (
    RECORD_BYTES,
    StoredRecord,
    SwapRecord,
    decode_journal,
    encode_header,
    encode_record,
    live_records,
)
from mzd.memory.context_directory import SWAP_JOURNAL, ContextDirectory, OpenFile, storage_error, write_all

_STALE_RECORDS_MAX = 4096
"""Records that count no more (512 KiB) before the journal is written anew: about once per GB of chunks."""


class SwapJournal:
    """The journal and what it says in the end.

    Attributes:
        live: by (layer, chunk), the record that counts.
        num_damaged: records that were unreadable when the journal was opened.
        written_bytes: what appending and rewriting cost so far.
    """

    def __init__(self, contexts: ContextDirectory, context: str, file: OpenFile) -> None:
        self._contexts = contexts
        self._context = context
        self._file = file
        self.live: dict[tuple[int, int], StoredRecord] = {}
        self.num_damaged = 0
        self.written_bytes = 0
        self._end_bytes = RECORD_BYTES
        self._generation = 0

    @classmethod
    def create(cls, contexts: ContextDirectory, context: str) -> SwapJournal:
        """Begin an empty journal; one that is there already is replaced.

        Raises:
            MzdError: `swap_full`; there is no space.
        """
        return cls(
            contexts, context, contexts.replace_file(context, SWAP_JOURNAL, encode_header(context=context))
        )

    @classmethod
    def open(cls, contexts: ContextDirectory, context: str) -> SwapJournal:
        """Read a journal up to its last good record.

        Raises:
            FileNotFoundError: there is none, or it was torn before its header was whole.
            FormatError: `corrupt_chunk`; it is damaged at the head, or of another version.
        """
        content = decode_journal(contexts.read_file(context, SWAP_JOURNAL), context=context)
        if content.valid_bytes == 0:
            raise FileNotFoundError(errno.ENOENT, "the journal has no header", SWAP_JOURNAL)
        journal = cls(contexts, context, contexts.open_file(context, SWAP_JOURNAL, create=False))
        journal.live = live_records(content.records)
        journal.num_damaged = content.num_damaged
        journal._generation = max((record.generation for record in content.records), default=0)
        journal._end_bytes = content.valid_bytes  # a torn tail is overwritten by the next record
        return journal

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._end_bytes

    def next_generation(self) -> int:
        """A number above that of every record before."""
        self._generation += 1
        return self._generation

    def append(self, records: Sequence[SwapRecord]) -> None:
        """Add records; they count once they are in the page cache, and so outlive the process.

        Raises:
            MzdError: `swap_full` or `internal`; none of the records counts.
        """
        content = b"".join(encode_record(record, context=self._context) for record in records)
        try:
            write_all(self._file.fd, content, self._end_bytes)
        except OSError as error:
            self._cut_tail()
            raise storage_error(f"the swap journal of {self._context}", error.errno or errno.EIO) from error
        self._end_bytes += len(content)
        self.written_bytes += len(content)
        self._apply(records)
        self._compact_if_stale()

    def _apply(self, records: Sequence[SwapRecord]) -> None:
        for record in records:
            if isinstance(record, StoredRecord):
                self.live[record.layer, record.chunk] = record
            else:
                self.live.pop((record.layer, record.chunk), None)

    def _cut_tail(self) -> None:
        # Records of a failed append must not come to life behind a later, shorter one.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fd, self._end_bytes)

    def _compact_if_stale(self) -> None:
        num_records = self._end_bytes // RECORD_BYTES - 1
        if num_records - len(self.live) > len(self.live) + _STALE_RECORDS_MAX:
            # No space to write it anew is no reason to fail what has been recorded: later, then.
            with contextlib.suppress(MzdError):
                self.compact()

    def compact(self) -> None:
        """Write the journal anew with the records that count, by rename; takes a sync of some milliseconds.

        Raises:
            MzdError: `swap_full` or `internal`; the journal is as it was.
        """
        header = encode_header(context=self._context)
        records = [encode_record(record, context=self._context) for record in self.live.values()]
        content = b"".join([header, *records])
        self._file = self._contexts.replace_file(self._context, SWAP_JOURNAL, content)
        self._end_bytes = len(content)
        self.written_bytes += len(content)
