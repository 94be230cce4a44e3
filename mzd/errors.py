"""Owns the errors that a user may see: each has a stable code of the RPC's list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MzdError(Exception):
    """A failure with a stable code, one clear sentence, and facts as data.

    Args:
        code: a stable word, e.g. ``invalid_model``; clients may match on it.
        message: one sentence for a person.
        data: msgpack-able facts (paths, counts, names) for a program.
    """

    def __init__(self, code: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data: Mapping[str, Any] = data

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class FormatError(MzdError):
    """A file or a block of bytes is not what its format says; code ``invalid_model`` unless given."""

    def __init__(self, message: str, *, code: str = "invalid_model", **data: Any) -> None:
        super().__init__(code, message, **data)
