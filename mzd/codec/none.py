"""Owns the codec that keeps a chunk as it is: for `--codec none`, and for what int8 cannot represent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from mzd import native
from mzd.codec.addresses import Addresses


def _whole_pages(address: int, size_bytes: int) -> tuple[int, int]:
    """Start and size of the whole pages inside a range; size 0 if there is none."""
    page = native.PAGE_BYTES
    first = -(-address // page) * page
    return first, max(0, (address + size_bytes) // page * page - first)


def _check(chunk_bytes: int, src_addresses: Addresses, dst_addresses: Addresses) -> None:
    if chunk_bytes <= 0:
        raise ValueError(f"a chunk cannot have {chunk_bytes} bytes")
    if len(src_addresses) != len(dst_addresses):
        raise ValueError(f"{len(src_addresses)} sources and {len(dst_addresses)} targets")


@dataclass(frozen=True, slots=True)
class NoneCodec:
    """The chunk is its own payload. See `Codec` for the methods."""

    name: ClassVar[str] = "none"
    version: ClassVar[int] = 1
    exact: ClassVar[bool] = True
    ratio: ClassVar[float] = 1.0

    def payload_bytes(self, chunk_bytes: int) -> int:
        _check(chunk_bytes, (), ())
        return chunk_bytes

    def encode_batch(
        self, src_addresses: Addresses, dst_addresses: Addresses, chunk_bytes: int
    ) -> list[bool]:
        self.decode_batch(src_addresses, dst_addresses, chunk_bytes)
        return [True] * len(src_addresses)

    def encode_release_batch(
        self, src_addresses: Addresses, dst_addresses: Addresses, chunk_bytes: int, release_bytes: int
    ) -> list[bool]:
        _check(chunk_bytes, src_addresses, dst_addresses)
        refused = 0
        for src, dst in zip(src_addresses, dst_addresses, strict=True):
            native.copy(int(dst), int(src), chunk_bytes)
            refused = native.release(*_whole_pages(int(src), release_bytes)) or refused
        if refused:
            raise OSError(-refused, f"cannot give pages back: {os.strerror(-refused)}")
        return [True] * len(src_addresses)

    def decode_batch(self, payload_addresses: Addresses, dst_addresses: Addresses, chunk_bytes: int) -> None:
        _check(chunk_bytes, payload_addresses, dst_addresses)
        for src, dst in zip(payload_addresses, dst_addresses, strict=True):
            native.copy(int(dst), int(src), chunk_bytes)
