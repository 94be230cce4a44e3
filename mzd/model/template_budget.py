"""Owns how much text a chat template may make: sizes are known before anything of them is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from jinja2.exceptions import SecurityError

MADE_CHARS_MIN: Final = 1 << 22
"""What a template may make of itself, all expressions of one rendering together: some 16 MB at worst."""

MADE_CHARS_PER_CHAR: Final = 1 << 11
"""What each character of the conversation adds: a template may append hundreds of messages, each by several
operators, to one growing text."""

MADE_CHARS_MAX: Final = 1 << 30
"""However long the conversation."""

NUMBER_MAX: Final = 1 << 10
"""The largest exponent, indent, padding or batch: what the number alone can make large."""

INTEGER_BITS_MAX: Final = 1 << 12

_PIECE_CHARS: Final = 16  # an element of a list costs about as much as so many characters
_TEXT_SIZE_MAX: Final = 1 << 27  # counting ends there: lists that share lists are larger than they look
_PERCENT_WIDTH: Final = re.compile(r"%(\([^)]*\))?[^a-zA-Z%(]*(\*|\d{4})")
_BRACE_WIDTH: Final = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{4})")
_LOOKS: Final = frozenset({"count", "d", "default", "first", "last", "length"})
_TELLS: Final = frozenset({"pprint", "string", "tojson", "urlencode", "urlize", "xmlattr"})
_PADDING: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class Budget:
    """A quantity that can only be used up; `left` is what there still is."""

    def __init__(self, amount: int) -> None:
        self._amount = amount
        self.left = amount

    def spend(self, amount: int, what: str) -> None:
        """Use up some of it. Raises SecurityError if there is less."""
        self.left -= amount
        if self.left < 0:
            raise SecurityError(f"more than {self._amount} {what}")


_MADE: ContextVar[Budget | None] = ContextVar("made", default=None)


@contextmanager
def budget_for(variables: Mapping[str, Any]) -> Iterator[None]:
    """Within it `spend_size` counts what is made of these variables."""
    amount = MADE_CHARS_MIN + MADE_CHARS_PER_CHAR * text_size(variables)
    token = _MADE.set(Budget(min(amount, MADE_CHARS_MAX)))
    try:
        yield
    finally:
        _MADE.reset(token)


def spend_size(chars: int) -> None:
    """Count what is about to be made. Raises SecurityError beyond the budget; counts nothing outside one."""
    budget = _MADE.get()
    if budget is not None:
        budget.spend(chars, "characters made in expressions")


def text_size(value: Any) -> int:
    """About how many characters `str(value)` has, counted without making it.

    Raises:
        SecurityError: more than this rendering may still make.
    """
    budget = _MADE.get()
    chars_max = _TEXT_SIZE_MAX if budget is None else budget.left
    chars, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        chars += len(item) if isinstance(item, str | bytes) else _PIECE_CHARS
        if isinstance(item, dict):  # not Mapping, which is slow to ask for
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        if chars + len(waiting) > chars_max:
            raise SecurityError(f"more than {chars_max} characters in one value")
    return chars


def shallow_size(value: Any) -> int:
    """What one more copy of a string or list takes; an element counts as what refers to it."""
    if isinstance(value, str | bytes):
        return len(value)
    return len(value) * _PIECE_CHARS if isinstance(value, list | tuple | dict) else 0


def operator_size(operator: str, left: Any, right: Any) -> int:
    """Characters of `left operator right`.

    Raises:
        SecurityError: a number that grows without end, or a format with a long number in it.
    """
    if isinstance(left, str) and operator == "%":
        return format_size(left, (right,))
    if operator == "*":
        _check_product(left, right)
        return _repeated(left, right) or _repeated(right, left)
    if operator == "**":
        _check_power(left, right)
    return shallow_size(left) + shallow_size(right) if operator == "+" else 0


def _repeated(sequence: Any, count: Any) -> int:
    return shallow_size(sequence) * max(count, 0) if isinstance(count, int) else 0


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if not isinstance(right, int | float) or right > NUMBER_MAX:
        raise SecurityError(f"an exponent above {NUMBER_MAX}")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 1))


def _check_bits(bits: int) -> None:
    if bits > INTEGER_BITS_MAX:
        raise SecurityError(f"a number of more than {INTEGER_BITS_MAX} bits")


def format_size(template: str, values: Iterable[Any]) -> int:
    """At most so many characters come of formatting, by `%` or by braces.

    Raises:
        SecurityError: a width or precision that is long, or comes from a value.
    """
    if _PERCENT_WIDTH.search(template) or _BRACE_WIDTH.search(template.replace("{{", "")):
        raise SecurityError("a width in a format that is large, or not known")
    fields = template.count("%") + template.count("{")
    return len(template) + fields * (sum(map(text_size, values)) + NUMBER_MAX)


def method_size(text: str, method: str, values: tuple[Any, ...]) -> int:
    """Characters, at most, of what a method of `text` gives.

    Raises:
        SecurityError: a large padding, or a method that no template needs.
    """
    if method in ("translate", "encode"):
        raise SecurityError(f"the method {method} of a string")
    if method in _PADDING:
        check_numbers(method, values)
    if method == "expandtabs":
        return len(text) + text.count("\t") * NUMBER_MAX
    if method in ("format", "format_map"):
        return format_size(text, values)
    if method == "join" and values:
        return joined_size(values[0], text)
    if method == "replace" and len(values) > 1:
        return replaced_size(text, values[0], values[1])
    if method in ("split", "rsplit", "splitlines"):
        return len(text) + _pieces(text, *values[:1]) * _PIECE_CHARS
    return len(text) + NUMBER_MAX


def _pieces(text: str, separator: Any = None) -> int:
    if isinstance(separator, str) and separator:
        return text.count(separator) + 1
    return len(text) // 2 + 1


def filter_size(name: str, value: Any, values: tuple[Any, ...]) -> int:
    """Characters, about, of what a filter gives for `value` and its other arguments."""
    if name in _LOOKS:
        return 0
    if name == "join":
        return joined_size(value, values[0] if values else "")
    if name == "replace" and len(values) > 1:
        return replaced_size(str(value), values[0], values[1])
    if name == "format":
        return format_size(str(value), values)
    if name == "indent":
        return text_size(value) + (str(value).count("\n") + 1) * _indent(values)
    return text_size(value) if name in _TELLS else shallow_size(value)


def _indent(values: tuple[Any, ...]) -> int:
    width = values[0] if values else 4
    return len(width) if isinstance(width, str) else NUMBER_MAX if width > _PIECE_CHARS else _PIECE_CHARS


def joined_size(items: Any, separator: Any) -> int:
    """Characters of a list joined; 0 for what is no list."""
    if not isinstance(items, list | tuple | str | Mapping):
        return 0
    return text_size(items) + len(items) * text_size(separator)


def replaced_size(text: str, old: Any, new: Any) -> int:
    """Characters of `text` with `old` replaced."""
    count = text.count(str(old))
    return len(text) + count * len(str(new))


def check_numbers(name: str, values: Iterable[Any]) -> None:
    """Raise SecurityError for a number that alone makes something large."""
    if any(isinstance(value, int) and value > NUMBER_MAX for value in values):
        raise SecurityError(f"a number above {NUMBER_MAX} for {name}")
