"""Owns the vocabulary of a model file: tokens, their types, and which of them begin or end a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

from mzd.errors import FormatError
from mzd.model.pre_tokenizer import PreTokenizer, pre_tokenizer_named

_PREFIX: Final = "tokenizer.ggml."

T = TypeVar("T")

log = logging.getLogger(__name__)

END_NAMES: Final = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "[|endofturn|]",
        "</s>",
    }
)
"""Control tokens that end an answer whether or not the file says so: files often name only one of theirs."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


CONTROL_TYPES: Final = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
"""Tokens that are no text: hidden from readers, and never made from what a user wrote."""

SPECIAL_TYPES: Final = CONTROL_TYPES | {TokenType.USER_DEFINED}
"""Tokens that stand as a whole in text whose author may write them; no merges lead to them."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a byte-level BPE tokenizer is made of.

    Attributes:
        tokens: text of each token by id; ordinary ones in GPT-2's byte alphabet.
        types: type of each token by id.
        merges: pairs of tokens, the most urgent first.
        pre: how text falls into words.
        bos_id: the token before every text; None if the file names none.
        eos_id: the file's end token; None if it names none.
        add_bos: texts begin with `bos_id`.
        end_tokens: ids that end an answer.
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[tuple[str, str], ...]
    pre: PreTokenizer
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    end_tokens: frozenset[int]

    def special_ids(self) -> dict[str, int]:
        """Ids of control and user-defined tokens by their text."""
        return {t: i for i, t in enumerate(self.tokens) if t and self.types[i] in SPECIAL_TYPES}


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Check and collect the `tokenizer.ggml.*` keys of a GGUF file.

    Raises:
        FormatError: a key is missing or wrong, or names what is not supported; `data["key"]` says which.
    """
    _require_byte_level_bpe(metadata)
    pre = pre_tokenizer_named(_pre_name(metadata))
    tokens = tuple(_array(metadata, "tokens", str))
    types = _read_types(metadata, len(tokens))
    bos_id = _token_id(metadata, "bos_token_id", len(tokens))
    add_bos = _scalar(metadata, "add_bos_token", bool)
    return Vocabulary(
        tokens=tokens,
        types=types,
        merges=tuple(_split_merge(merge) for merge in _array(metadata, "merges", str)),
        pre=pre,
        bos_id=bos_id,
        eos_id=_token_id(metadata, "eos_token_id", len(tokens)),
        add_bos=bos_id is not None and (pre.adds_bos if add_bos is None else add_bos),
        end_tokens=_read_end_tokens(metadata, tokens, types),
    )


def _require_byte_level_bpe(metadata: Mapping[str, Any]) -> None:
    model = _scalar(metadata, "model", str)
    if model is None:
        raise FormatError("the model file has no tokenizer.ggml.model", key=_PREFIX + "model")
    if model != "gpt2":
        raise FormatError(
            f"tokenizer.ggml.model is {model!r}; only byte-level BPE ('gpt2') is supported",
            key=_PREFIX + "model",
            value=model,
        )


def _pre_name(metadata: Mapping[str, Any]) -> str:
    name = _scalar(metadata, "pre", str)
    if name is None:
        log.warning(
            "the model file has no tokenizer.ggml.pre: words may be split in ways it was not trained on"
        )
    return "default" if name is None else name


def _read_types(metadata: Mapping[str, Any], num_tokens: int) -> tuple[TokenType, ...]:
    values = _array(metadata, "token_type", int)
    if len(values) != num_tokens:
        raise FormatError(
            f"tokenizer.ggml.token_type has {len(values)} entries for {num_tokens} tokens",
            key=_PREFIX + "token_type",
        )
    try:
        return tuple(TokenType(value) for value in values)
    except ValueError as error:
        raise FormatError(f"tokenizer.ggml.token_type: {error}", key=_PREFIX + "token_type") from error


def _read_end_tokens(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[TokenType]
) -> frozenset[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = {_token_id(metadata, key, len(tokens)) for key in keys}
    well_known = {i for i, t in enumerate(tokens) if t in END_NAMES and types[i] is TokenType.CONTROL}
    return frozenset(i for i in named | well_known if i is not None)


def _split_merge(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise FormatError(f"tokenizer.ggml.merges has {merge!r}, which is no pair", key=_PREFIX + "merges")
    return left, right


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = _scalar(metadata, name, int)
    if value is not None and not 0 <= value < num_tokens:
        raise FormatError(f"{_PREFIX}{name} is {value}; there are {num_tokens} tokens", key=_PREFIX + name)
    return value


def _scalar(metadata: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = metadata.get(_PREFIX + name)
    if value is not None and not isinstance(value, kind):
        raise FormatError(f"{_PREFIX}{name} is no {kind.__name__}", key=_PREFIX + name)
    return value


def _array(metadata: Mapping[str, Any], name: str, kind: type[T]) -> Sequence[T]:
    values = metadata.get(_PREFIX + name)
    if values is None:
        raise FormatError(f"the model file has no {_PREFIX}{name}", key=_PREFIX + name)
    if not isinstance(values, list | tuple) or not all(isinstance(value, kind) for value in values):
        raise FormatError(f"{_PREFIX}{name} is no array of {kind.__name__}", key=_PREFIX + name)
    return values
