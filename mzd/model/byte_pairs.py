"""Owns byte-level BPE: words of GPT-2's byte alphabet, and the merges that lead to their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers.models import BPE

from mzd.errors import FormatError
from mzd.model.vocabulary import BytePairs, TokenType, Vocabulary


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: those that print stand for themselves, others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET: Final = byte_alphabet()


class BytePairEncoder:
    """Text without special tokens to ids. It releases the GIL for most of its time.

    Attributes:
        add_space_prefix: never, to bytes.

    Raises:
        FormatError: a merge has or makes a token that the vocabulary lacks.
    """

    add_space_prefix: Final = False

    def __init__(self, vocabulary: Vocabulary, pairs: BytePairs) -> None:
        self._pre = pairs.pre
        self._bpe = _build(vocabulary, pairs)

    def encode(self, text: str, *, continues: bool = False) -> Iterator[int]:
        """The ids of `text`. A byte with no token, and no merge that leads to one, gives none.

        Args:
            continues: text precedes; to bytes that makes no difference.

        Raises:
            MzdError: `invalid_params`: a run that is too long (see `PreTokenizer`).
        """
        for segment in self._pre.segments(text):
            # The batch call holds no GIL and computes no offsets; `encode` does both.
            (encoding,) = self._bpe.encode_batch_fast([segment], add_special_tokens=False)
            yield from encoding.ids


def bytes_of(token: str, kind: TokenType) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for."""
    if kind is TokenType.UNUSED:
        return b""
    if kind is TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes.fromhex(token[3:5])
    if kind is TokenType.NORMAL and all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode("utf-8", "surrogateescape")


def _build(vocabulary: Vocabulary, pairs: BytePairs) -> Any:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    _check_merges(pairs.merges, ids)
    model = BPE(ids, list(pairs.merges), ignore_merges=pairs.pre.ignore_merges)
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = pairs.pre.build()
    return bpe


def _check_merges(merges: Sequence[tuple[str, str]], ids: Mapping[str, int]) -> None:
    """Raise FormatError for a merge of what is no token: the library may panic, which no handler expects."""
    for left, right in merges:
        if left in ids and right in ids and left + right in ids:
            continue
        missing = next(token for token in (left, right, left + right) if token not in ids)
        raise FormatError(
            f"tokenizer.ggml.merges joins {left!a:.40} and {right!a:.40}, "
            f"but there is no token {missing!a:.60}",
            key="tokenizer.ggml.merges",
        )
