"""Owns SentencePiece's BPE: neighbours join while a token has their text, the best score first.

Spaces are written as U+2581. Unlike byte-level BPE there are no words, and no list of merges whose order
would decide between two places: the score of the joined token does, then the place further left. A list of
merges cannot say that (of one token, "--" + "-" and "-" + "--" would differ in rank), hence an own
implementation. Characters without a token become one token for each of their UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

from mzd.errors import FormatError, MzdError
from mzd.model.vocabulary import SentencePieces, TokenType, Vocabulary, any_of

SPACE: Final = "\u2581"

TEXT_CHARS_MAX: Final = 1 << 20
"""Characters of one text: more than fit 128 k tokens of prose. To encode as many takes a second."""

RUN_CHARS_MAX: Final = 1 << 16
"""Characters in a row that may all join. To encode them takes half a second."""

CACHED_CHARS_MAX: Final = 32
CACHED_RUNS_MAX: Final = 1 << 15
"""Runs to remember, which are words mostly: a few MB."""

_MERGEABLE: Final = frozenset({TokenType.NORMAL, TokenType.USER_DEFINED})


class SentencePieceEncoder:
    """Text to ids. Immutable but for a cache, so threads may share it; it holds the GIL.

    User-defined tokens (runs of line ends, HTML tags) stand as a whole wherever text has them: to
    SentencePiece they are text, whoever wrote it, and no new text begins behind them (to llama.cpp one does).

    Attributes:
        add_space_prefix: a text begins with a space that nobody wrote.

    Raises:
        FormatError: a byte has no token.
    """

    def __init__(self, vocabulary: Vocabulary, pieces: SentencePieces) -> None:
        kinds = vocabulary.types
        self.add_space_prefix = pieces.add_space_prefix
        self._byte_ids = _byte_ids(vocabulary)
        self._ids = {t: i for i, t in enumerate(vocabulary.tokens) if kinds[i] in _MERGEABLE}
        self._scores = {token: pieces.scores[token_id] for token, token_id in self._ids.items()}
        # No token joins two characters that are neighbours in none: there a run ends, whatever is around it.
        self._joined = {a + b for token in self._scores for a, b in pairwise(token)}
        self._user_defined = _user_defined_ids(vocabulary)
        self._find_user_defined = any_of(self._user_defined)
        self._encode_cached = lru_cache(CACHED_RUNS_MAX)(self._encode_run)

    def encode(self, text: str, *, continues: bool = False) -> Iterator[int]:
        """The ids of `text`, which holds no control token.

        Args:
            continues: text precedes; else a space is put in front where the model expects one.

        Raises:
            MzdError: `invalid_params`: more than `TEXT_CHARS_MAX` characters, or `RUN_CHARS_MAX` in which no
                run ends.
        """
        if not text:
            return
        if len(text) > TEXT_CHARS_MAX:
            raise _too_long("more than", TEXT_CHARS_MAX, 0)
        prefix = SPACE if self.add_space_prefix and not continues else ""
        escaped, end = prefix + text.replace(" ", SPACE), 0
        for match in self._find_user_defined.finditer(escaped):
            yield from self._encode_text(escaped[end : match.start()])
            yield self._user_defined[match.group()]
            end = match.end()
        yield from self._encode_text(escaped[end:])

    def _encode_text(self, text: str) -> Iterator[int]:
        for run in self._runs(text):
            yield from self._encode_cached(run) if len(run) <= CACHED_CHARS_MAX else self._encode_run(run)

    def _runs(self, text: str) -> Iterator[str]:
        """`text` cut where no token can join what is left and right."""
        start = 0
        for place in range(1, len(text)):
            if text[place - 1 : place + 1] not in self._joined:
                yield text[start:place]
                start = place
            elif place - start == RUN_CHARS_MAX:
                raise _too_long("no word boundary in", RUN_CHARS_MAX, start)
        if text:
            yield text[start:]

    def _encode_run(self, run: str) -> tuple[int, ...]:
        ids: list[int] = []
        for symbol in merge(run, self._scores):
            token_id = self._ids.get(symbol)
            ids.extend(
                [token_id] if token_id is not None else map(self._byte_ids.__getitem__, symbol.encode())
            )
        return tuple(ids)


def merge(text: str, scores: Mapping[str, float]) -> list[str]:
    """Split `text` into symbols: start from characters, join the pair with the best score until none is left.

    Takes O(n log n) for n characters; symbols are as short as the tokens of `scores`.
    """
    symbols = list(text)
    before, after = list(range(-1, len(text) - 1)), list(range(1, len(text) + 1))
    proposals: list[tuple[float, int, str]] = []

    def propose(left: int) -> None:
        if left >= 0 and after[left] < len(symbols):
            joined = symbols[left] + symbols[after[left]]
            if joined in scores:
                heappush(proposals, (-scores[joined], left, joined))

    for left in range(len(text) - 1):
        propose(left)
    while proposals:
        _, left, joined = heappop(proposals)
        right = after[left]
        # Either may have joined another in the meantime; an empty symbol has become part of one before it.
        if not symbols[left] or right == len(symbols) or symbols[left] + symbols[right] != joined:
            continue
        symbols[left], symbols[right] = joined, ""
        after[left] = after[right]
        if after[left] < len(symbols):
            before[after[left]] = left
        propose(before[left])
        propose(left)
    return [symbol for symbol in symbols if symbol]


def bytes_of(token: str, kind: TokenType) -> bytes:
    """The bytes that a token of a SentencePiece vocabulary stands for."""
    if kind is TokenType.UNUSED:
        return b""
    if kind is TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes.fromhex(token[3:5])
    text = token.replace(SPACE, " ") if kind in _MERGEABLE else token
    return text.encode("utf-8", "surrogateescape")


def _byte_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """The id of each byte's token."""
    ids = {
        bytes_of(token, kind): token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind is TokenType.BYTE
    }
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if missing:
        raise FormatError(
            f"tokenizer.ggml.tokens has no token for the byte {missing[0]:#04x}", key="tokenizer.ggml.tokens"
        )
    return tuple(ids[bytes([byte])] for byte in range(256))


def _user_defined_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of user-defined tokens by their text, which files write with spaces."""
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    kind = TokenType.USER_DEFINED
    return {token.replace(" ", SPACE): i for i, (token, k) in enumerate(pairs) if k is kind and token}


def _too_long(what: str, chars_max: int, start: int) -> MzdError:
    return MzdError(
        "invalid_params",
        f"the text has {what} {chars_max} characters from character {start} on",
        parameter="text",
        offset_chars=start,
        chars_max=chars_max,
    )
