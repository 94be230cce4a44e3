"""KV codecs: a chunk to bytes and back, natively and without the GIL.

A codec works on batches of addresses, so that a call from Python costs nothing beside its work, and every
payload of one codec and chunk size has the same size, so that a swap needs no allocation for a chunk.
"""

from __future__ import annotations

from typing import Protocol

from mzd.codec.addresses import Addresses
from mzd.codec.int8 import Int8Codec
from mzd.codec.none import NoneCodec
from mzd.errors import MzdError

__all__ = ["Codec", "Int8Codec", "NoneCodec", "codec_by_name", "codec_names"]


class Codec(Protocol):
    """What a codec says of itself and does. Safe to call from several threads on chunks that differ."""

    @property
    def name(self) -> str:
        """The stable word of the configuration."""

    @property
    def version(self) -> int:
        """Changes when a payload of the version before would decode to other bits."""

    @property
    def exact(self) -> bool:
        """Whether a chunk comes back bit for bit."""

    @property
    def ratio(self) -> float:
        """Payload bytes per chunk byte."""

    def payload_bytes(self, chunk_bytes: int) -> int:
        """Size of every payload of chunks of this size.

        Raises:
            ValueError: the codec cannot take chunks of this size.
        """

    def encode_batch(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        chunk_bytes: int,
    ) -> list[bool]:
        """Encode each chunk into the payload at the address of the same index.

        Returns:
            One flag a chunk. False: the codec cannot represent it (int8: an infinity or NaN), its payload is
            unspecified, and the chunk is to be kept by the `none` codec.

        Raises:
            ValueError: lengths differ, or an address or size cannot be.
        """

    def encode_release_batch(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        chunk_bytes: int,
        release_bytes: int,
    ) -> list[bool]:
        """As `encode_batch`, but each chunk that was encoded gives its pages back before the next is begun.

        Eviction so needs room for one payload only, and memory falls at every step. Chunks with False keep
        their pages.

        Args:
            release_bytes: from each source address on, at least the chunk; pages that it covers in part stay.

        Raises:
            OSError: the kernel refused to take pages back; all payloads are written.
        """

    def decode_batch(
        self,
        payload_addresses: Addresses,
        dst_addresses: Addresses,
        chunk_bytes: int,
    ) -> None:
        """Decode each payload into the chunk at the address of the same index.

        The payload is trusted: check its CRC first. Damage gives other values, never a stray access.

        Raises:
            ValueError: lengths differ, or an address or size cannot be.
        """


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Int8Codec(), NoneCodec())}


def codec_names() -> tuple[str, ...]:
    """Names that `codec_by_name` knows, the default first."""
    return tuple(_CODECS)


def codec_by_name(name: str) -> Codec:
    """The codec of that name.

    Raises:
        MzdError: ``invalid_params``, no codec is called so.
    """
    if name not in _CODECS:
        raise MzdError("invalid_params", f"no codec is called {name!r}", codec=name, known=list(_CODECS))
    return _CODECS[name]
