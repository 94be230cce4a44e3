"""Tokenizer metadata of real and small model files, with what they must answer.

`smollm2_tokenizer.json.xz` holds every `tokenizer.*` key of SmolLM2-135M-Instruct.Q4_1.gguf,
`small_tokenizers.json.xz` those of four small fixture models with their expected tokens and chats,
`sentencepiece.json.xz` a Llama-2-like vocabulary that the sentencepiece package (0.2.3; BPE, byte fallback,
dummy prefix) learned from Python's language reference, with the tokens that it gives.
"""

import json
import lzma
from pathlib import Path

import pytest

from mzd.model.chat_template import ChatTemplate
from mzd.model.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"


def _load(name):
    data = (FIXTURES / name).read_bytes()
    return json.loads(lzma.decompress(data) if name.endswith(".xz") else data)


@pytest.fixture(scope="session")
def smollm2_metadata():
    return _load("smollm2_tokenizer.json.xz")


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata):
    return Tokenizer.from_metadata(smollm2_metadata)


@pytest.fixture(scope="session")
def smollm2_template(smollm2_metadata, smollm2):
    return ChatTemplate.from_metadata(smollm2_metadata, smollm2)


@pytest.fixture(scope="session")
def smollm2_golden():
    return _load("smollm2.json")


@pytest.fixture(scope="session")
def small_models():
    """By architecture: `metadata`, `tokenize`, `chat`."""
    return {model["name"]: model for model in _load("small_tokenizers.json.xz")}


@pytest.fixture(scope="session")
def sentencepiece_golden():
    """`metadata`, `tokenize`; ids as SentencePiece gives them, for text without control tokens."""
    return _load("sentencepiece.json.xz")
