"""Owns the vocabulary of models without a source: bytes, one merge, and names for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mzd.model.byte_pairs import byte_alphabet
from mzd.model.vocabulary import TokenType

_PREFIX = "tokenizer.ggml."


def vocabulary_metadata(vocab_size: int) -> Mapping[str, str | int | Sequence[str] | Sequence[int]]:
    """The `tokenizer.ggml.*` keys of a byte-level BPE that any text goes through, whatever its ids mean.

    Args:
        vocab_size: above 257 for that; a smaller one lacks some bytes.
    """
    alphabet = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    merge = alphabet[ord(" ")], "t"
    named = [*alphabet, "".join(merge)]
    fillers = [f"[{i}]" for i in range(len(named), vocab_size)]
    tokens = [*named, *fillers][:vocab_size]
    types = [TokenType.NORMAL] * (len(tokens) - 1) + [TokenType.CONTROL]
    return {
        _PREFIX + "model": "gpt2",
        _PREFIX + "pre": "qwen2",
        _PREFIX + "tokens": tokens,
        _PREFIX + "token_type": [int(kind) for kind in types],
        _PREFIX + "merges": [" ".join(merge)] if vocab_size > len(named) else [],
        _PREFIX + "eos_token_id": vocab_size - 1,
    }
