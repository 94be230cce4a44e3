"""Owns the Jinja environment of chat templates: as transformers sets it up, sandboxed and bounded."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mzd.model.template_places import SpreadTemplate

LOOP_STEPS_MAX: Final = 1 << 20
"""Steps of all loops of one rendering: 15 for each message of the longest conversation that a frame holds."""

OUTPUT_CHARS_MAX: Final = 1 << 25
"""Twice the largest frame of the RPC."""

NUMBER_MAX: Final = 1 << 10
"""The largest exponent, indent, padding or batch: what the number alone can make large."""

_SOURCE_NAME: Final = "chat_template"
_BUDGET: Final = "loop budget"  # no template can name a variable with a space in it


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


class SandboxedTemplate:
    """One compiled template. It changes nothing, and its loops and its output end.

    What one expression may hold is bounded only where a number alone would make it large: a file that
    doubles a string in a loop can still use up memory.

    Raises:
        Exception: whatever Jinja finds wrong with the source; `failing_line` says where.
    """

    def __init__(self, source: SpreadTemplate) -> None:
        environment = _Environment()
        code = environment.compile_counted(source.text)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, Any], *, now: datetime) -> str:
        """The text for `variables`; `now` is what `strftime_now` shows.

        Raises:
            TemplateRefusal: the template called `raise_exception`.
            Exception: any other, Python's included, is the template's fault; `failing_line` says where.
        """
        names = {**variables, "strftime_now": now.strftime, _BUDGET: _Budget(LOOP_STEPS_MAX)}
        output = _Budget(OUTPUT_CHARS_MAX)
        parts = []
        for part in self._template.generate(names):
            output.spend(len(part), "characters of output")
            parts.append(part)
        return "".join(parts)


def spread_template(source: str) -> SpreadTemplate:
    """`source` as `SandboxedTemplate` takes it; never fails."""
    return SpreadTemplate(source, _Environment().lexer)


def failing_line(error: BaseException) -> int | None:
    """The line of `SpreadTemplate.text`, from 1, in which `error` arose, if Jinja knows it."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == _SOURCE_NAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


class _Budget:
    """A quantity that can only be used up."""

    def __init__(self, amount: int) -> None:
        self._amount = amount
        self._left = amount

    def spend(self, amount: int, what: str) -> None:
        self._left -= amount
        if self._left < 0:
            raise SecurityError(f"more than {self._amount} {what}")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _tojson
        self.filters["counted"] = _counted
        for name in ("batch", "center", "indent", "slice", "tojson", "wordwrap"):
            self.filters[name] = _with_small_numbers(name, self.filters[name])
        del self.globals["lipsum"]  # as much random text as one asks for

    def compile_counted(self, source: str) -> CodeType:
        """Compile with the input of every loop passed through `counted`."""
        tree = self.parse(source, filename=_SOURCE_NAME)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return self.compile(tree, filename=_SOURCE_NAME)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        too_large = right > NUMBER_MAX if operator == "**" else _product_size(left, right) > OUTPUT_CHARS_MAX
        if too_large:
            raise SecurityError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)


def _product_size(left: Any, right: Any) -> int:
    """Length of `left * right`; 0 for a product of numbers."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


def _with_small_numbers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks on the function
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, int) and arg > NUMBER_MAX for arg in (*args, *kwargs.values())):
            raise SecurityError(f"a number above {NUMBER_MAX} for the filter {name}")
        return function(*args, **kwargs)

    return checked


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: Any = context.resolve(_BUDGET)
    for item in items:
        budget.spend(1, "loop steps")
        yield item


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: Jinja's own would escape what HTML reserves."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
