"""Owns the OpenCL C sources: finds one by name and puts its includes in place."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def kernel_source(name: str) -> str:
    """Return the source of ``NAME.cl`` with every ``#include "X.cl"`` replaced by that file's text.

    Drivers look for includes in directories that they choose; a wheel may even be a zip file. So the
    text that reaches the driver is complete, which also makes it the whole key of the driver's cache.

    Raises:
        FileNotFoundError: there is no such source.
    """
    return _expand(name, included=set())


def _expand(name: str, *, included: set[str]) -> str:
    """Expand includes depth first; a file that was already included adds nothing."""
    if name in included:
        return ""
    included.add(name)
    text = files(__package__).joinpath(f"{name}.cl").read_text(encoding="utf-8")
    return "".join(_expand_line(line, included=included) for line in text.splitlines(keepends=True))


def _expand_line(line: str, *, included: set[str]) -> str:
    """Replace one include line by the file that it names; return any other line as it is."""
    if not line.startswith('#include "'):
        return line
    return _expand(line.split('"')[1].removesuffix(".cl"), included=included)
