"""Owns the int8 codec: groups of 32 with an FP16 scale, 46.875 % saved; the bits are `mzd.native`'s."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from mzd import native
from mzd.codec.addresses import Addresses, address_array

_ELEMENT_BYTES: Final = 2


def _num_elements(chunk_bytes: int) -> int:
    if chunk_bytes <= 0 or chunk_bytes % (native.INT8_GROUP * _ELEMENT_BYTES):
        raise ValueError(f"a chunk of {chunk_bytes} bytes is no whole number of groups of 32 FP16 elements")
    return chunk_bytes // _ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """The paper's 8-bit setting, with a signed scale that makes a second round trip change no bit.

    Error before the rounding to FP16: at most half a code step (1/256 of the group's largest magnitude), and
    a whole one for elements within half a step of minus the largest. See `Codec` for the methods.
    """

    name: ClassVar[str] = "int8"
    version: ClassVar[int] = 1
    exact: ClassVar[bool] = False
    ratio: ClassVar[float] = 0.53125

    def payload_bytes(self, chunk_bytes: int) -> int:
        return native.int8_payload_bytes(_num_elements(chunk_bytes))

    def encode_batch(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        chunk_bytes: int,
    ) -> list[bool]:
        src, dst = address_array(src_addresses), address_array(dst_addresses)
        status = np.empty(len(src), np.uint8)
        native.int8_encode_batch(src, dst, _num_elements(chunk_bytes), status)
        return [code == native.INT8_OK for code in status.tolist()]

    def encode_release_batch(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        chunk_bytes: int,
        release_bytes: int,
    ) -> list[bool]:
        src, dst = address_array(src_addresses), address_array(dst_addresses)
        status = np.empty(len(src), np.uint8)
        native.int8_encode_release_batch(src, dst, _num_elements(chunk_bytes), release_bytes, status)
        if native.INT8_NOT_RELEASED in status:
            raise OSError(errno.EINVAL, "the kernel did not take the pages of an encoded chunk back")
        return [code == native.INT8_OK for code in status.tolist()]

    def decode_batch(
        self,
        payload_addresses: Addresses,
        dst_addresses: Addresses,
        chunk_bytes: int,
    ) -> None:
        src, dst = address_array(payload_addresses), address_array(dst_addresses)
        native.int8_decode_batch(src, dst, _num_elements(chunk_bytes))
