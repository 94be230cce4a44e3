"""Owns text to token ids and back, as the model file's own tokenizer does it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, assert_never

from mzd.errors import MzdError
from mzd.model import byte_pairs, sentence_pieces
from mzd.model.byte_pairs import BytePairEncoder
from mzd.model.sentence_pieces import SentencePieceEncoder
from mzd.model.vocabulary import (
    CONTROL_TYPES,
    BytePairs,
    SentencePieces,
    Vocabulary,
    any_of,
    read_vocabulary,
)

log = logging.getLogger(__name__)


class Tokenizer:
    """Byte-level BPE, or SentencePiece's. Immutable, so threads may share it.

    Attributes:
        vocab_size: number of tokens; ids are below it.
        bos_id: the token that begins a text, if the file names one.
        eos_id: the file's own end token, if it names one.
        add_bos: the model expects `bos_id` in front of every text.
        end_tokens: ids that end an answer.
        special_ids: ids of the tokens that are structure, by their text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.end_tokens = vocabulary.end_tokens
        self.special_ids: Mapping[str, int] = vocabulary.special_ids()
        self._control = frozenset(vocabulary.ids_of(CONTROL_TYPES))
        self._special = any_of(self.special_ids)
        match vocabulary.model:
            case BytePairs() as model:
                self._encoder: BytePairEncoder | SentencePieceEncoder = BytePairEncoder(vocabulary, model)
                self._bytes_of = byte_pairs.bytes_of
            case SentencePieces() as model:
                self._encoder = SentencePieceEncoder(vocabulary, model)
                self._bytes_of = sentence_pieces.bytes_of
            case _:
                assert_never(vocabulary.model)
        self._tokens, self._types = vocabulary.tokens, vocabulary.types

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build it from the `tokenizer.ggml.*` keys of a GGUF file.

        Raises:
            FormatError: a key is missing or wrong, or names what is not supported; `data["key"]` says which.
        """
        return cls(read_vocabulary(metadata))

    def encode(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """The ids of `text`, no BOS added.

        Args:
            text: memory stays bounded; SentencePiece, whose time is the interpreter's, takes 2^20 characters.
            parse_special: "<|im_end|>" and its like in `text` become their tokens. If not, they are ordinary
                text: to a model they are structure, which users must not forge (`special_ids`).
            continues: text of the same author precedes. Else some models expect a space in front, as they do
                behind special tokens.

        Raises:
            MzdError: `invalid_params`: a lone surrogate, or a text or a run in it that is too long.
        """
        _require_encodable(text)
        ids: list[int] = []
        for part in self.split_special(text) if parse_special else (text,):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encoder.encode(part, continues=continues and not ids))
        return ids

    def split_special(self, text: str) -> Iterator[int | str]:
        """The special tokens in `text` as ids and what lies between them as text, in order; none is empty."""
        end = 0
        for match in self._special.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self.special_ids[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a raw prompt that begins a context: special tokens parsed, the BOS in front if expected.

        Raises:
            MzdError: as `encode`.
        """
        ids = self.encode(text, parse_special=True)
        if self.add_bos and ids[:1] == [self.bos_id]:
            log.warning("the prompt begins with the BOS token already; none is added")
        return self.with_bos(ids)

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with the BOS in front if the model expects it there and it is not there yet."""
        if not self.add_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def is_control(self, token_id: int) -> bool:
        """Whether the token is structure rather than text."""
        return token_id in self._control

    def token_bytes(self, token_id: int, *, show_control: bool = False) -> bytes:
        """The bytes that the token stands for, often no whole character; none for a control token.

        Args:
            show_control: give control tokens as their names.

        Raises:
            MzdError: `invalid_params`: the vocabulary has no such id.
        """
        if not 0 <= token_id < self.vocab_size:
            raise MzdError(
                "invalid_params",
                f"token {token_id} is not in the vocabulary of {self.vocab_size}",
                parameter="tokens",
                token=int(token_id),
            )
        hidden = token_id in self._control and not show_control
        return b"" if hidden else self._bytes_of(self._tokens[token_id], self._types[token_id])

    def decode_bytes(self, ids: Iterable[int], *, show_control: bool = False) -> bytes:
        """The bytes of all of `ids`. Raises as `token_bytes`."""
        return b"".join(self.token_bytes(token_id, show_control=show_control) for token_id in ids)

    def decode(self, ids: Iterable[int], *, show_control: bool = False) -> str:
        """The text of `ids`, invalid bytes replaced by U+FFFD. Raises as `token_bytes`.

        A space that `encode` put in front of text, or would have, is taken off.
        """
        pieces = self._without_prefixes(ids, show_control=show_control)
        return b"".join(pieces).decode("utf-8", "replace")

    def token_text(self, token_id: int | None) -> str:
        """The name of a token, as templates use it; empty for None."""
        return "" if token_id is None else self.decode([token_id], show_control=True)

    def _without_prefixes(self, ids: Iterable[int], *, show_control: bool) -> Iterator[bytes]:
        begins = True
        for token_id in ids:
            piece = self.token_bytes(token_id, show_control=show_control)
            yield piece.removeprefix(b" ") if begins and self._encoder.add_space_prefix else piece
            begins = self.is_control(token_id)


def _require_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MzdError(
            "invalid_params",
            f"the text is no valid Unicode at character {error.start}",
            parameter="text",
            offset_chars=error.start,
        ) from error
