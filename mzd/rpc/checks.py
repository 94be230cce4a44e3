"""Owns the checks of single parameter values: each returns the final value, or says what is expected.

`bool` is never a number, a float is never an integer, NaN and infinity are no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from mzd.messages.requests import ChatMessage, TrimLevel

Check = Callable[[Any], Any]

CONTEXT_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN_MAX: Final = (1 << 31) - 1
ROLES: Final = ("system", "user", "assistant")
_REQUEST_NAME_MAX = 128
_STOP_MAX = 16
_DEFAULT_REQUEST_NAME = re.compile(r"[0-9]+:[0-9]+")


class MismatchError(Exception):
    """A value is not what its parameter takes.

    Args:
        expected: ends the sentence "PARAMETER must be ...".
        place: where inside the value, e.g. ``[3].role``.
    """

    def __init__(self, expected: str, place: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.place = place


def integer(low: int, high: int) -> Check:
    """An int from `low` to `high`, both included."""

    def check(value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise MismatchError(f"an integer from {low} to {high}")

    return check


def number(low: float, high: float) -> Check:
    """An int or float from `low` to `high`, both included; becomes a float."""

    def check(value: Any) -> float:
        if type(value) in (int, float) and low <= value <= high:  # NaN is in no range
            return float(value)
        raise MismatchError(f"a number from {low:g} to {high:g}")

    return check


def boolean(value: Any) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise MismatchError("true or false")


def text(value: Any) -> str:
    """A str that was UTF-8 on the wire."""
    if not isinstance(value, str):
        raise MismatchError("a string")
    if not _is_utf8(value):
        raise MismatchError("a string in UTF-8")
    return value


def _is_utf8(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:  # the surrogates that unpack_frame put in place of wrong bytes
        return False
    return True


def context_name(value: Any) -> str:
    """A name that is safe as a file name."""
    if isinstance(value, str) and CONTEXT_NAME.fullmatch(value) and value not in (".", ".."):
        return value
    raise MismatchError("a context name: 1 to 64 of A-Z a-z 0-9 . _ -, not . or ..")


def request_name(value: Any) -> str:
    """A name for a request, as `cancel` and `trace` take it."""
    if 0 < len(name := text(value)) <= _REQUEST_NAME_MAX:
        return name
    raise MismatchError(f"a string of 1 to {_REQUEST_NAME_MAX} characters")


def new_request_name(value: Any) -> str:
    """A name that a client gives; NUMBER:NUMBER is how the daemon names those that have none."""
    if _DEFAULT_REQUEST_NAME.fullmatch(name := request_name(value)):
        raise MismatchError("a name that is not NUMBER:NUMBER, the form of the daemon's own")
    return name


def tokens(value: Any) -> tuple[int, ...]:
    """A list of token ids."""
    if not isinstance(value, list):
        raise MismatchError("a list of token ids")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= TOKEN_MAX:
            raise MismatchError(f"an integer from 0 to {TOKEN_MAX}", f"[{index}]")
    return tuple(value)


def stop_strings(value: Any) -> tuple[str, ...]:
    """One string or a list of them."""
    strings = value if isinstance(value, list) else [value]
    if len(strings) > _STOP_MAX:
        raise MismatchError(f"a list of at most {_STOP_MAX} strings")
    for index, string in enumerate(strings):
        if not _within(f"[{index}]" if strings is value else "", text, string):
            raise MismatchError("a string that is not empty", f"[{index}]" if strings is value else "")
    return tuple(strings)


def messages(value: Any) -> tuple[ChatMessage, ...]:
    """A conversation: a list of maps with `role` and `content`, not empty."""
    if not isinstance(value, list) or not value:
        raise MismatchError("a list of messages, not empty")
    return tuple(_within(f"[{index}]", _message, message) for index, message in enumerate(value))


def _message(value: Any) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise MismatchError("a map with role and content")
    for key in value:
        if key not in ("role", "content"):
            raise MismatchError("left out: a message has role and content", f".{key}")
    role = value.get("role")
    if role not in ROLES:
        raise MismatchError(f"one of {', '.join(ROLES)}", ".role")
    return ChatMessage(role, _within(".content", _content, value.get("content")))


def _content(value: Any) -> str:
    """Text, or a list of parts `{type: "text", text}`, as clients of OpenAI's interface send it."""
    if not isinstance(value, list):
        return text(value)
    parts: list[str] = [_within(f"[{index}]", _text_part, part) for index, part in enumerate(value)]
    return "".join(parts)


def _text_part(value: Any) -> str:
    if not isinstance(value, Mapping) or set(value) != {"type", "text"} or value["type"] != "text":
        raise MismatchError('a map {type: "text", text}')
    part: str = _within(".text", text, value["text"])
    return part


def _within(place: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except MismatchError as mismatch:
        raise MismatchError(mismatch.expected, place + mismatch.place) from None


# Short names that app authors use besides Android's own.
_LEVEL_ALIASES: Final = {"LOW": TrimLevel.RUNNING_LOW, "CRITICAL": TrimLevel.RUNNING_CRITICAL}
_LEVEL_NUMBER_MAX = 1000


def trim_level(value: Any) -> TrimLevel:
    """Android's name (any case, with or without TRIM_MEMORY_) or number.

    A number between two levels is the lower one: Android reserves the right to add levels in between.
    """
    if isinstance(value, str):
        name = value.upper().removeprefix("TRIM_MEMORY_")
        if name in TrimLevel.__members__:
            return TrimLevel[name]
        if name in _LEVEL_ALIASES:
            return _LEVEL_ALIASES[name]
    elif type(value) is int and TrimLevel.RUNNING_MODERATE <= value <= _LEVEL_NUMBER_MAX:
        return max(level for level in TrimLevel if level <= value)
    raise MismatchError(f"a level of Android's: {', '.join(TrimLevel.__members__)}, or its number")


def model(value: Any) -> str | bool:
    """A model's name, or true for the one that is loaded."""
    if value is True:
        return True
    if isinstance(value, str) and value:
        return text(value)
    raise MismatchError("a model's name, or true")
