"""Owns finding a column in a template: Jinja tells lines only, and many files have their template in one."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import jinja2
from jinja2.lexer import Lexer

_TAG_BEGINS = frozenset({"block_begin", "variable_begin"})
_TAG_ENDS = frozenset({"block_end", "variable_end"})
_NEWLINE = re.compile(r"\r\n|\r|\n")


class SpreadTemplate:
    """A template with a line break in front of each token inside its tags, where white space means nothing.

    So a line of `text` is a place in the source. What is rendered is the same. A source with something that
    is no token stays as it is, and has one place: that of the culprit.

    Attributes:
        text: what to compile.
    """

    def __init__(self, source: str, lexer: Lexer) -> None:
        self._source = _NEWLINE.sub("\n", source)  # as the lexer does it
        self._lines: list[int] = []  # of `text`, from 1, each on which a token begins
        self._offsets: list[int] = []  # in the source, of the first token on each
        tokens, culprit = _tokens(lexer, self._source)
        if culprit is None:
            self.text = "".join(self._spread(tokens))
        else:
            self.text, self._lines, self._offsets = self._source, [1], [culprit]

    def place(self, line: int) -> tuple[int, int]:
        """(line, column) in the source, from 1, of what begins on that line of `text`, or on one above."""
        token = bisect_right(self._lines, line) - 1
        offset = self._offsets[token] if token >= 0 else 0
        line_start = self._source.rfind("\n", 0, offset) + 1
        return self._source.count("\n", 0, offset) + 1, offset - line_start + 1

    def _spread(self, tokens: Iterable[tuple[str, int, str]]) -> Iterator[str]:
        """The source in pieces, with the breaks."""
        end, line, inside = 0, 1, False
        for kind, start, value in tokens:
            breaks = "\n" if inside and kind != "whitespace" else ""
            piece = self._source[end:start] + breaks
            line += piece.count("\n")
            if self._lines[-1:] != [line]:
                self._lines.append(line)
                self._offsets.append(start)
            yield piece + value
            line += value.count("\n")
            end = start + len(value)
            inside = (inside or kind in _TAG_BEGINS) and kind not in _TAG_ENDS
        yield self._source[end:]


def _tokens(lexer: Lexer, source: str) -> tuple[list[tuple[str, int, str]], int | None]:
    """(kind, offset, text) of every token, white space and data too; and where the lexer gave up, or None."""
    tokens: list[tuple[str, int, str]] = []
    end = 0
    try:
        for _, kind, value in lexer.tokeniter(source, None):
            start = source.find(value, end)  # what is left out between is white space in front of a tag
            tokens.append((kind, start, value))
            end = start + len(value)
    except jinja2.TemplateSyntaxError:  # compiling will say it again
        return tokens, end
    return tokens, None
