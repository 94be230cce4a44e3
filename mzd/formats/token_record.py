"""Owns the encoding of a context's token log.

The file is a header of 64 bytes and then records, little-endian: position (u32), count (u32), CRC-32 (u32),
`count` token ids (u32). A record says: the tokens from `position` on are these. So one kind of record serves
to append (position = length), to forget (count = 0) and to do both. Each CRC continues the one before it:
records cannot be skipped, repeated or exchanged.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError

HEADER_BYTES = 64
RECORD_HEAD_BYTES = 12
TOKEN_BYTES = 4
FORMAT_VERSION = 1

_MAGIC = b"MZDTOKEN"
_HEADER = struct.Struct("<8sI32s16xI")
_PLACE = struct.Struct("<II")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class TokenLogContent:
    """What a token log holds.

    Attributes:
        model_id: 64 hex digits; the ids mean something only to this model.
        tokens: (n,) uint32, all tokens of the context.
        valid_bytes: where the next record goes; what lies behind is a torn tail.
        crc: of the last good record (or the header): the next record continues it.
    """

    model_id: str
    tokens: NDArray[np.uint32]
    valid_bytes: int
    crc: int


def encode_header(*, context: str, model_id: str) -> bytes:
    """The first 64 bytes of a log. `model_id` is 64 hex digits."""
    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, bytes.fromhex(model_id), 0)[: -_CRC.size]
    return body + _CRC.pack(_header_crc(body, context))


def _header_crc(body: bytes, context: str) -> int:
    return zlib.crc32(body, zlib.crc32(context.encode()))


def header_crc(header: bytes) -> int:
    """The CRC that the first record continues."""
    return int.from_bytes(header[-_CRC.size :], "little")


def encode_record(position: int, tokens: NDArray[np.uint32], *, previous_crc: int) -> tuple[bytes, int]:
    """One record and its CRC: from `position` on the tokens are `tokens`, (n,) uint32."""
    content = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    place = _PLACE.pack(position, len(tokens))
    crc = zlib.crc32(content, zlib.crc32(place, previous_crc))
    return place + _CRC.pack(crc) + content, crc


def decode_log(data: bytes, *, context: str) -> TokenLogContent:
    """Read a log as far as it is good.

    Raises:
        FormatError: `corrupt_chunk`; the header is missing, damaged, or of another version or context.
    """
    model_id = _decode_header(data, context)
    tokens = array("I")
    offset, crc = HEADER_BYTES, header_crc(data[:HEADER_BYTES])
    while (record := _decode_record(data, offset, crc, len(tokens))) is not None:
        position, content, crc = record
        del tokens[position:]
        tokens.frombytes(content)
        offset += RECORD_HEAD_BYTES + len(content)
    return TokenLogContent(model_id, np.array(tokens, dtype=np.uint32), offset, crc)


def _decode_header(data: bytes, context: str) -> str:
    if len(data) < HEADER_BYTES:
        raise FormatError(f"the token log of {context} has no header", code="corrupt_chunk", found=len(data))
    magic, version, model_id, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise FormatError(
            "this is no token log", code="corrupt_chunk", offset=0, expected=_MAGIC, found=magic
        )
    if version != FORMAT_VERSION:
        raise FormatError(
            f"the token log has format version {version}, this program reads {FORMAT_VERSION}",
            code="corrupt_chunk",
            expected=FORMAT_VERSION,
            found=version,
        )
    if crc != _header_crc(data[: HEADER_BYTES - _CRC.size], context):
        raise FormatError(
            f"the token log's header is damaged, or not of context {context}", code="corrupt_chunk", found=crc
        )
    return bytes(model_id).hex()


def _decode_record(data: bytes, offset: int, previous_crc: int, length: int) -> tuple[int, bytes, int] | None:
    """Position, content and CRC of the record at `offset`; None where the good part of the log ends."""
    start = offset + RECORD_HEAD_BYTES
    if start > len(data):
        return None
    position, count = _PLACE.unpack_from(data, offset)
    end = start + count * TOKEN_BYTES
    if position > length or end > len(data):
        return None
    content = data[start:end]
    crc = zlib.crc32(content, zlib.crc32(data[offset : offset + _PLACE.size], previous_crc))
    (expected,) = _CRC.unpack_from(data, offset + _PLACE.size)
    return (position, content, crc) if crc == expected else None
