"""Owns how amounts of memory are written and read on the command line."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from fractions import Fraction
from typing import Final

_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(%|(?:([KMGT])(i?))?B?)", re.IGNORECASE | re.ASCII)
_POWER: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
AMOUNT_HELP: Final = (
    "bytes, or with a unit: K M G T are powers of 1000, Ki Mi Gi Ti of 1024; "
    "or a percentage of the whole model memory"
)


def evict_amount(text: str) -> dict[str, int | float]:
    """`500M`, `1.5Gi`, `4096` or `50%` as the parameter of `evict`: `{bytes: ...}` or `{fraction: ...}`.

    Bytes are rounded up, so that at least what was asked is freed.

    Raises:
        ArgumentTypeError: neither, or more than 100 %.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no amount; write 500M, 1.5Gi or 50%")
    number, unit, prefix, binary = match.groups()
    if unit == "%":
        return {"fraction": _fraction(float(number))}
    scale = (1024 if binary else 1000) ** _POWER[(prefix or "").upper()]
    return {"bytes": math.ceil(Fraction(number) * scale)}


def unsigned_64(text: str) -> int:
    """A whole number that a message can carry.

    Raises:
        ArgumentTypeError: it is none, negative, or above 2^64 - 1.
    """
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 64:
        raise ArgumentTypeError(f"{text!r:.40} is no whole number from 0 to 2^64 - 1")
    return value


def _fraction(percent: float) -> float:
    if percent > 100:
        raise ArgumentTypeError("more than 100 % cannot be evicted")
    return percent / 100


def format_bytes(size_bytes: float) -> str:
    """Decimal, as `evict` reads it back: 512 B, 1.5 kB, 98.0 MB."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
