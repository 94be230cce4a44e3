"""Owns the vocabulary of a model file: tokens, their types, and which of them begin or end a text."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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


TURN_NAMES: Final = frozenset(
    {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"}
)
"""Structure that some SentencePiece files call user-defined, which is text that users may write."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_NORMAL: Final = TokenType.NORMAL
_TYPES_BY_NUMBER: Final = {int(kind): kind for kind in TokenType}
"""Vocabularies have up to a quarter of a million tokens, and an enum takes its time to be asked."""

CONTROL_TYPES: Final = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
"""Tokens that are no text: hidden from readers, and never made from what a user wrote."""

SPECIAL_TYPES: Final = CONTROL_TYPES | {TokenType.USER_DEFINED}
"""Tokens that stand as a whole in text whose author may write them; no byte pairs lead to them."""


@dataclass(frozen=True, slots=True)
class BytePairs:
    """Byte-level BPE (`gpt2`): ordinary tokens are in GPT-2's byte alphabet.

    Attributes:
        merges: pairs of tokens, the most urgent first.
        pre: how text falls into words.
    """

    merges: tuple[tuple[str, str], ...]
    pre: PreTokenizer


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """SentencePiece's BPE (`llama`): ordinary tokens are text with U+2581 for spaces.

    Attributes:
        scores: of each token by id; of two that could be joined the higher one is.
        add_space_prefix: text begins with a space that nobody wrote.
    """

    scores: tuple[float, ...]
    add_space_prefix: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer is made of.

    Attributes:
        tokens: text of each token by id.
        types: type of each token by id.
        model: how text becomes tokens.
        bos_id: the token before every text; None if the file names none.
        eos_id: the file's end token; None if it names none.
        add_bos: texts begin with `bos_id`.
        end_tokens: ids that end an answer.
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    model: BytePairs | SentencePieces
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    end_tokens: frozenset[int]

    def special_ids(self) -> dict[str, int]:
        """Ids, by their text, of tokens that only the author of a text's structure may write.

        Control tokens, and user-defined ones of byte-level BPE. Those of SentencePiece are text.
        """
        special = SPECIAL_TYPES if isinstance(self.model, BytePairs) else CONTROL_TYPES
        return {self.tokens[i]: i for i in self.ids_of(special) if self.tokens[i]}

    def ids_of(self, kinds: frozenset[TokenType]) -> list[int]:
        """Ids of the tokens of `kinds`, which are not ordinary ones."""
        return [i for i, kind in enumerate(self.types) if kind is not _NORMAL and kind in kinds]


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Finds each of `names`, the longest where several begin."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Check and collect the `tokenizer.ggml.*` keys of a GGUF file.

    Raises:
        FormatError: a key is missing or wrong, or names what is not supported; `data["key"]` says which.
    """
    model, adds_bos = _read_model(metadata)
    tokens = tuple(_array(metadata, "tokens", str))
    types = _read_types(metadata, len(tokens))
    if isinstance(model, SentencePieces):
        _require_length(len(model.scores), "scores", len(tokens))
        types = tuple(map(_true_type, tokens, types))
    _check_token_ids(metadata, len(tokens))
    bos_id = _token_id(metadata, "bos_token_id", len(tokens))
    add_bos = _scalar(metadata, "add_bos_token", bool)
    _warn_of_end_token(metadata)
    return Vocabulary(
        tokens=tokens,
        types=types,
        model=model,
        bos_id=bos_id,
        eos_id=_token_id(metadata, "eos_token_id", len(tokens)),
        add_bos=bos_id is not None and (adds_bos if add_bos is None else add_bos),
        end_tokens=_read_end_tokens(metadata, tokens, types),
    )


def _read_model(metadata: Mapping[str, Any]) -> tuple[BytePairs | SentencePieces, bool]:
    """The way to tokens, and whether it puts a BOS in front where the file does not say."""
    name = _scalar(metadata, "model", str)
    if name is None:
        raise FormatError("the model file has no tokenizer.ggml.model", key=_PREFIX + "model")
    if name == "gpt2":
        pre = pre_tokenizer_named(_pre_name(metadata))
        merges = tuple(_split_merge(merge) for merge in _array(metadata, "merges", str))
        return BytePairs(merges, pre), pre.adds_bos
    if name == "llama":
        space = _scalar(metadata, "add_space_prefix", bool)
        return SentencePieces(_read_scores(metadata), True if space is None else space), True
    raise FormatError(
        f"tokenizer.ggml.model is {name!r}, not byte-level BPE ('gpt2') or SentencePiece ('llama')",
        key=_PREFIX + "model",
        value=name,
    )


def _read_scores(metadata: Mapping[str, Any]) -> tuple[float, ...]:
    scores = tuple(_array(metadata, "scores", float))
    if not all(map(math.isfinite, scores)):
        raise FormatError("tokenizer.ggml.scores holds what is no number", key=_PREFIX + "scores")
    return scores


def _true_type(token: str, kind: TokenType) -> TokenType:
    """The type of a SentencePiece token: structure is control, whatever the file says."""
    named = token in END_NAMES or token in TURN_NAMES
    return TokenType.CONTROL if named and kind is not TokenType.UNUSED else kind


def _warn_of_end_token(metadata: Mapping[str, Any]) -> None:
    if _scalar(metadata, "add_eos_token", bool):
        log.warning("the model file wants an end token behind every text: prompts are continued and get none")


def _pre_name(metadata: Mapping[str, Any]) -> str:
    name = _scalar(metadata, "pre", str)
    if name is None:
        log.warning(
            "the model file has no tokenizer.ggml.pre: words may be split in ways it was not trained on"
        )
    return "default" if name is None else name


def _read_types(metadata: Mapping[str, Any], num_tokens: int) -> tuple[TokenType, ...]:
    values = _array(metadata, "token_type", int)
    _require_length(len(values), "token_type", num_tokens)
    try:
        return tuple(map(_TYPES_BY_NUMBER.__getitem__, values))
    except KeyError as error:
        raise FormatError(
            f"tokenizer.ggml.token_type: {error} is not a valid type", key=_PREFIX + "token_type"
        ) from error


def _require_length(length: int, name: str, num_tokens: int) -> None:
    if length != num_tokens:
        raise FormatError(f"{_PREFIX}{name} has {length} entries for {num_tokens} tokens", key=_PREFIX + name)


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


def _check_token_ids(metadata: Mapping[str, Any], num_tokens: int) -> None:
    """Every token that the file gives a role is there, whether or not the role means something here."""
    for key in metadata:
        if key.startswith(_PREFIX) and key.endswith("_token_id"):
            _token_id(metadata, key.removeprefix(_PREFIX), num_tokens)


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = _scalar(metadata, name, int)
    if value is not None and not 0 <= value < num_tokens:
        raise FormatError(f"{_PREFIX}{name} is {value}; there are {num_tokens} tokens", key=_PREFIX + name)
    return value


def _scalar(metadata: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = metadata.get(_PREFIX + name)
    if value is not None and type(value) is not kind:  # to Python a bool is an int
        raise FormatError(f"{_PREFIX}{name} is no {kind.__name__}", key=_PREFIX + name)
    return value


def _array(metadata: Mapping[str, Any], name: str, kind: type[T]) -> Sequence[T]:
    values = metadata.get(_PREFIX + name)
    if values is None:
        raise FormatError(f"the model file has no {_PREFIX}{name}", key=_PREFIX + name)
    if not isinstance(values, list | tuple) or not all(issubclass(k, kind) for k in set(map(type, values))):
        raise FormatError(f"{_PREFIX}{name} is no array of {kind.__name__}", key=_PREFIX + name)
    return values
