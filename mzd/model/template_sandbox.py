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
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mzd.model.template_budget import (
    Budget,
    budget_for,
    check_numbers,
    filter_size,
    method_size,
    operator_size,
    shallow_size,
    spend_size,
    text_size,
)
from mzd.model.template_places import SpreadTemplate

LOOP_STEPS_MAX: Final = 1 << 20
"""Steps of all loops of one rendering: 15 for each message of the longest conversation that a frame holds."""

OUTPUT_CHARS_MAX: Final = 1 << 25
"""Twice the largest frame of the RPC."""

_SOURCE_NAME: Final = "chat_template"
_NUMBERED: Final = frozenset({"batch", "center", "indent", "slice", "tojson", "wordwrap"})
_BUDGET: Final = "loop budget"  # no template can name a variable with a space in it


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


class SandboxedTemplate:
    """One compiled template. It changes nothing; its loops, its output and all that it makes on the way end.

    Raises:
        Exception: whatever Jinja finds wrong with the source; `failing_line` says where.
    """

    def __init__(self, source: SpreadTemplate) -> None:
        environment = _Environment()
        with budget_for({}):  # what is constant is computed here
            code = environment.compile_counted(source.text)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, Any], *, now: datetime) -> str:
        """The text for `variables`; `now` is what `strftime_now` shows.

        Raises:
            TemplateRefusal: the template called `raise_exception`.
            Exception: any other, Python's included, is the template's fault; `failing_line` says where.
        """
        names = {**variables, "strftime_now": now.strftime, _BUDGET: Budget(LOOP_STEPS_MAX)}
        output = Budget(OUTPUT_CHARS_MAX)
        parts = []
        with budget_for(variables):
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


def _concatenated(items: Iterable[Any]) -> str:
    parts = list(items)
    spend_size(text_size(parts))
    return "".join(map(str, parts))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concatenated)  # of macros, calls and blocks that are set

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_finalize
        )
        self.globals["raise_exception"] = _raise_exception
        own = {"tojson": _tojson, "concatenated": _concatenated, "sliced": _sliced, "sum": _sum}
        for name, function in {**self.filters, **own}.items():
            self.filters[name] = _measured(name, function)
        self.filters["counted"] = _counted
        del self.globals["lipsum"]  # as much random text as one asks for

    def compile_counted(self, source: str) -> CodeType:
        """Compile with loops counted, and with what the sandbox does not see turned into filters."""
        tree = _Rewriter().visit(self.parse(source, filename=_SOURCE_NAME))
        return self.compile(tree, filename=_SOURCE_NAME)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spend_size(operator_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                args = tuple(map(_as_list, args))
            spend_size(method_size(owner, name, (*args, *kwargs.values())))
        elif isinstance(owner, list | dict):
            spend_size(shallow_size(owner))
        return super().call(__context, __obj, *args, **kwargs)


class _Rewriter(NodeTransformer):
    """Turns loops' inputs, `~` and slices into filters: Jinja compiles them to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter("sliced", node.node, *(bound or nodes.Const(None) for bound in bounds))


def _filter(name: str, value: Any, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with what it will make counted first."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or the environment

    @functools.wraps(function)  # keeps Jinja's marks on the function
    def checked(*args: Any, **kwargs: Any) -> Any:
        first, (value, *more) = args[:skipped], args[skipped:]
        if name in _NUMBERED:
            check_numbers(f"the filter {name}", (*more, *kwargs.values()))
        if name == "join":
            value = _as_list(value)
        spend_size(filter_size(name, value, (*more, *kwargs.values())))
        return function(*first, value, *more, **kwargs)

    return checked


def _as_list(items: Any) -> Any:
    """Generators as lists, to be measured; anything else as it is."""
    return list(items) if isinstance(items, Iterator) else items


def _finalize(value: Any) -> Any:
    """What an expression puts out; counted where that makes a string of it."""
    if not isinstance(value, str):
        spend_size(text_size(value))
    return value


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return value[start:stop:step]


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Jinja's filter, of numbers only: lists would be copied over and over."""
    if not isinstance(start, int | float):
        raise SecurityError("a sum of what are no numbers")
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    return sum(items, start)


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
