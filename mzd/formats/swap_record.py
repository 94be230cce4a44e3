"""Owns the encoding of `swap.journal`: what lies where in a context's swap file.

The file is a header record and then records, all of 128 bytes, little-endian, each with its own CRC-32.
A record that overrides an earlier one of the same chunk has a higher generation. Nothing is ever changed
in place, so after a crash the file is what it was plus, perhaps, a torn record at its end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from mzd.errors import FormatError
from mzd.formats.prefix_hash import HASH_BYTES

RECORD_BYTES = 128
FORMAT_VERSION = 1

_MAGIC = b"MZDSWAPJ"
_HEADER = struct.Struct("<8sI112xI")
_STORED = struct.Struct("<HHIIIIQQII16s32s16s16xI")
_FREED = struct.Struct("<HHIIQ104xI")
_CRC = struct.Struct("<I")
_KIND_STORED = 1
_KIND_FREED = 2
_CODEC_NAME_BYTES = 16
_MODEL_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One chunk lies in the swap file.

    Attributes:
        layer, chunk: which one.
        generation: rises with every record of the file; the highest of a chunk counts.
        num_tokens: tokens that the chunk holds, 1 to the size of a chunk.
        tokens_hash: `prefix_hash` of all tokens up to the chunk's last one.
        model_id: 64 hex digits.
        codec_name, codec_version: how the payload is encoded; a name is 1 to 16 ASCII characters.
        offset_bytes: of the slot, in the swap file.
        slot_bytes: distance between the slots of one layer's consecutive chunks.
        payload_bytes: what was written, without the zeros up to the next page.
        payload_crc: CRC-32C of the payload, seeded with `place_seed`.
    """

    layer: int
    chunk: int
    generation: int
    num_tokens: int
    tokens_hash: bytes
    model_id: str
    codec_name: str
    codec_version: int
    offset_bytes: int
    slot_bytes: int
    payload_bytes: int
    payload_crc: int


@dataclass(frozen=True, slots=True)
class FreedRecord:
    """The chunk's copy in the swap file is void."""

    layer: int
    chunk: int
    generation: int


SwapRecord = StoredRecord | FreedRecord


@dataclass(frozen=True, slots=True)
class SwapJournal:
    """What a journal holds.

    Attributes:
        records: in file order.
        valid_bytes: where the next record goes: behind the last good one. Zero: the header is not there.
        num_damaged: bad records before that point. Each loses its chunk and nothing else.
    """

    records: tuple[SwapRecord, ...]
    valid_bytes: int
    num_damaged: int


def place_seed(
    *, context: str, layer: int, chunk: int, codec_name: str, codec_version: int, model_id: str
) -> int:
    """Seed of a payload's CRC-32C, so that good content at the wrong place fails the check as well.

    A CRC is a bijection of its seed for given content: two places never share a checksum unless they
    share a seed, whatever the payload.
    """
    place = f"{context}\0{layer}\0{chunk}\0{codec_name}\0{codec_version}\0{model_id}"
    return zlib.crc32(place.encode())


def encode_header(*, context: str) -> bytes:
    """The first record of a journal."""
    return _seal(_HEADER.pack(_MAGIC, FORMAT_VERSION, 0), context)


def encode_record(record: SwapRecord, *, context: str) -> bytes:
    """Encode one record for the journal of `context`.

    Raises:
        ValueError: a field does not fit: a name too long, a hash of another size, a number out of range.
    """
    try:
        body = _pack_stored(record) if isinstance(record, StoredRecord) else _pack_freed(record)
    except struct.error as error:
        raise ValueError(f"{record} does not fit into a record: {error}") from error
    return _seal(body, context)


def _pack_stored(record: StoredRecord) -> bytes:
    name, model_id = record.codec_name.encode("ascii"), bytes.fromhex(record.model_id)
    sizes = (len(model_id), len(record.tokens_hash))
    if not 1 <= len(name) <= _CODEC_NAME_BYTES or sizes != (_MODEL_ID_BYTES, HASH_BYTES):
        raise ValueError(f"{record} has a name or a hash of the wrong size")
    return _STORED.pack(
        _KIND_STORED,
        record.codec_version,
        record.layer,
        record.chunk,
        record.num_tokens,
        record.slot_bytes,
        record.generation,
        record.offset_bytes,
        record.payload_bytes,
        record.payload_crc,
        record.tokens_hash,
        model_id,
        name,
        0,
    )


def _pack_freed(record: FreedRecord) -> bytes:
    return _FREED.pack(_KIND_FREED, 0, record.layer, record.chunk, record.generation, 0)


def _seal(body: bytes, context: str) -> bytes:
    """Put the CRC into the last four bytes; it covers the context too: journals cannot change places."""
    return body[: -_CRC.size] + _CRC.pack(_record_crc(body, context))


def _record_crc(body: bytes, context: str) -> int:
    return zlib.crc32(body[: -_CRC.size], zlib.crc32(context.encode()))


def decode_journal(data: bytes, *, context: str) -> SwapJournal:
    """Read a journal, whatever state a crash has left it in.

    Raises:
        FormatError: `corrupt_chunk`; the header is whole, but of another format, version or context.
    """
    if len(data) < RECORD_BYTES:
        return SwapJournal((), 0, 0)
    _check_header(data[:RECORD_BYTES], context)
    records: list[SwapRecord] = []
    valid_bytes, damaged, damaged_before = RECORD_BYTES, 0, 0
    for offset in range(RECORD_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = _decode_record(data[offset : offset + RECORD_BYTES], context)
        if record is None:
            damaged += 1
            continue
        records.append(record)
        valid_bytes, damaged_before = offset + RECORD_BYTES, damaged
    return SwapJournal(tuple(records), valid_bytes, damaged_before)


def _check_header(header: bytes, context: str) -> None:
    magic, version, crc = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise FormatError(
            "this is no swap journal", code="corrupt_chunk", offset=0, expected=_MAGIC, found=magic
        )
    if version != FORMAT_VERSION:
        raise FormatError(
            f"the swap journal has format version {version}, this program reads {FORMAT_VERSION}",
            code="corrupt_chunk",
            expected=FORMAT_VERSION,
            found=version,
        )
    expected = _record_crc(header, context)
    if crc != expected:
        raise FormatError(
            f"the swap journal's header is damaged, or not of context {context}",
            code="corrupt_chunk",
            expected=expected,
            found=crc,
        )


def _decode_record(data: bytes, context: str) -> SwapRecord | None:
    """One record, or None if its checksum is wrong or a later program wrote it."""
    if _CRC.unpack_from(data, RECORD_BYTES - _CRC.size)[0] != _record_crc(data, context):
        return None
    kind = int.from_bytes(data[:2], "little")
    if kind == _KIND_STORED:
        return _unpack_stored(data)
    if kind == _KIND_FREED:
        _, _, layer, chunk, generation, _ = _FREED.unpack(data)
        return FreedRecord(layer, chunk, generation)
    return None


def _unpack_stored(data: bytes) -> StoredRecord:
    (
        _,
        version,
        layer,
        chunk,
        num_tokens,
        slot,
        generation,
        offset,
        payload,
        crc,
        tokens_hash,
        model,
        name,
        _,
    ) = _STORED.unpack(data)
    return StoredRecord(
        layer=layer,
        chunk=chunk,
        generation=generation,
        num_tokens=num_tokens,
        tokens_hash=tokens_hash,
        model_id=model.hex(),
        codec_name=name.rstrip(b"\0").decode("ascii", "replace"),
        codec_version=version,
        offset_bytes=offset,
        slot_bytes=slot,
        payload_bytes=payload,
        payload_crc=crc,
    )


def live_records(records: Iterable[SwapRecord]) -> dict[tuple[int, int], StoredRecord]:
    """Replay records: what each ``(layer, chunk)`` is stored as in the end."""
    latest: dict[tuple[int, int], SwapRecord] = {}
    for record in records:
        place = (record.layer, record.chunk)
        known = latest.get(place)
        if known is None or known.generation <= record.generation:
            latest[place] = record
    return {place: record for place, record in latest.items() if isinstance(record, StoredRecord)}
