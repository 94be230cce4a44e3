"""Owns joining CRC32C checksums: pieces are summed where they are made, and never read again."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed: bit 31 is the coefficient of x^0
_ONE = 1 << 31
_BYTE = 1 << 23  # x^8: one byte further


def concatenated(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of A + B, from that of A (`first`) and of B (`second`, `second_bytes` long).

    A CRC is the remainder of a polynomial: putting B behind A multiplies A by x^(8 * second_bytes).
    """
    return _product(first, _power(second_bytes)) ^ second


@lru_cache(maxsize=32)  # pieces of a read have few different lengths
def _power(num_bytes: int) -> int:
    """x^(8 * num_bytes) modulo the polynomial, by squaring."""
    result, factor = _ONE, _BYTE
    while num_bytes:
        if num_bytes & 1:
            result = _product(result, factor)
        factor = _product(factor, factor)
        num_bytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    """a * b modulo the polynomial, over GF(2)."""
    result = 0
    for shift in range(31, -1, -1):
        if a >> shift & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
