"""Owns text to token ids and back, as the model file's own tokenizer does it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import tokenizers
from tokenizers.models import BPE

from mzd.errors import FormatError, MzdError
from mzd.model.vocabulary import CONTROL_TYPES, TokenType, Vocabulary, read_vocabulary

log = logging.getLogger(__name__)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: those that print stand for themselves, others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET: Final = byte_alphabet()


class Tokenizer:
    """Byte-level BPE. Immutable, so threads may share it; `encode` releases the GIL for most of its time.

    Attributes:
        vocab_size: number of tokens; ids are below it.
        bos_id: the token that begins a text, if the file names one.
        eos_id: the file's own end token, if it names one.
        add_bos: the model expects `bos_id` in front of every text.
        end_tokens: ids that end an answer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.end_tokens = vocabulary.end_tokens
        self.special_ids: Mapping[str, int] = vocabulary.special_ids()
        self._control = frozenset(i for i, kind in enumerate(vocabulary.types) if kind in CONTROL_TYPES)
        self._bytes = tuple(map(_bytes_of, vocabulary.tokens, vocabulary.types))
        self._special = _any_of(self.special_ids)
        self._pre = vocabulary.pre
        self._bpe = _build_bpe(vocabulary)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build it from the `tokenizer.ggml.*` keys of a GGUF file.

        Raises:
            FormatError: a key is missing or wrong, or names what is not supported; `data["key"]` says which.
        """
        return cls(read_vocabulary(metadata))

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """The ids of `text`, no BOS added.

        A byte that has no token, and no merge that leads to one, gives no id, as in other engines.

        Args:
            text: any length; memory stays bounded.
            parse_special: "<|im_end|>" and its like in `text` become their tokens. If not, they are ordinary
                text, user-defined ones too: to a model they are structure, which users must not forge.

        Raises:
            MzdError: `invalid_params`: a lone surrogate, or a run that is too long (see `PreTokenizer`).
        """
        _require_encodable(text)
        ids: list[int] = []
        for part in self.split_special(text) if parse_special else (text,):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encode_words(part))
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
        return b"" if hidden else self._bytes[token_id]

    def decode_bytes(self, ids: Iterable[int], *, show_control: bool = False) -> bytes:
        """The bytes of all of `ids`. Raises as `token_bytes`."""
        return b"".join(self.token_bytes(token_id, show_control=show_control) for token_id in ids)

    def decode(self, ids: Iterable[int], *, show_control: bool = False) -> str:
        """The text of `ids`, invalid bytes replaced by U+FFFD. Raises as `token_bytes`."""
        return self.decode_bytes(ids, show_control=show_control).decode("utf-8", "replace")

    def token_text(self, token_id: int | None) -> str:
        """The name of a token, as templates use it; empty for None."""
        return "" if token_id is None else self.decode([token_id], show_control=True)

    def _encode_words(self, text: str) -> Iterator[int]:
        for segment in self._pre.segments(text):
            # The batch call holds no GIL and computes no offsets; `encode` does both.
            (encoding,) = self._bpe.encode_batch_fast([segment], add_special_tokens=False)
            yield from encoding.ids


def _build_bpe(vocabulary: Vocabulary) -> Any:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        model = BPE(ids, list(vocabulary.merges), ignore_merges=vocabulary.pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception, with the token that a merge lacks
        raise FormatError(f"tokenizer.ggml.merges: {error}", key="tokenizer.ggml.merges") from error
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = vocabulary.pre.build()
    return bpe


def _bytes_of(token: str, kind: TokenType) -> bytes:
    if kind is TokenType.UNUSED:
        return b""
    if kind is TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes.fromhex(token[3:5])
    if kind is TokenType.NORMAL and all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode("utf-8", "surrogateescape")


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


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
