"""Owns the pre-tokenizers: how text falls into words before byte pairs are merged (`tokenizer.ggml.pre`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

from mzd.errors import FormatError, MzdError

SEGMENT_CHARS: Final = 1 << 15
"""Text is encoded in segments of about this size: the encoder holds some 65 bytes for each character."""

RUN_CHARS_MAX: Final = 1 << 18
"""Characters in a row without a place to cut. No prose has as many; to encode them takes 17 MB."""

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# No word of GPT-2's pattern goes on from another character into white space.
_GPT2_CUT = re.compile(r"(?<=\S)(?=[ \t\n\r])")
# Llama 3's words take line ends after punctuation, but then end, as white space does at its last line end.
_LLAMA3_CUT = re.compile(r"(?<=\S)(?=[ \t])|(?<=\n)(?=\S)")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to split text into words, as llama.cpp names and does it.

    Attributes:
        patterns: Oniguruma; applied in order, each inside the words of the one before. A match is a word, and
            so is what lies between two matches.
        cut: matches, with no width, only where a word ends whatever is around it, so that
            both sides alone have the same words.
        ignore_merges: a word that is a token needs no merges.
        adds_bos: what holds where the file has no `add_bos_token`.
    """

    patterns: tuple[str, ...]
    cut: re.Pattern[str] = _GPT2_CUT
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> Any:
        """The `tokenizers` object: the splits, then bytes mapped to GPT-2's printable alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    def segments(self, text: str) -> Iterator[str]:
        """`text` in order, in segments that are encoded alone to the same tokens.

        Raises:
            MzdError: `invalid_params`: more than `RUN_CHARS_MAX` characters have no place to cut.
        """
        start = 0
        while start < len(text):
            end = self._segment_end(text, start)
            yield text[start:end]
            start = end

    def _segment_end(self, text: str, start: int) -> int:
        wanted, limit = start + SEGMENT_CHARS, start + RUN_CHARS_MAX
        if wanted >= len(text):
            return len(text)
        found = self.cut.search(text, wanted, limit)
        if found is None and len(text) > limit:
            raise MzdError(
                "invalid_params",
                f"the text has no word boundary in {RUN_CHARS_MAX} characters from character {start} on",
                parameter="text",
                offset_chars=start,
                run_chars_max=RUN_CHARS_MAX,
            )
        return len(text) if found is None else found.start()


_LLAMA_BPE = PreTokenizer((_LLAMA3 % "1,3",), _LLAMA3_CUT, ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Final = {
    "smollm": PreTokenizer((_DIGIT, _GPT2)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "exaone4": PreTokenizer((_GPT2,)),
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "qwen2": PreTokenizer((_LLAMA3 % "1",), _LLAMA3_CUT),
    # What llama.cpp does with files from before the key existed.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names.

    Raises:
        FormatError: the name is unknown. To guess would give wrong tokens without a word.
    """
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise FormatError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported (supported: {known})",
            key="tokenizer.ggml.pre",
            value=name,
        )
    return PRE_TOKENIZERS[name]
