"""Owns which architectures the engine computes, by the name in the GGUF file; others are refused."""

from __future__ import annotations

from collections.abc import Mapping

from mzd.formats.architectures.description import (
    HEAD_TENSORS,
    OUTPUT_TENSOR,
    Activation,
    Architecture,
    NormPlacement,
    RopeStyle,
    SizeName,
    SlidingWindow,
    TensorRule,
)
from mzd.formats.architectures.exaone4 import EXAONE4
from mzd.formats.architectures.gemma2 import GEMMA2
from mzd.formats.architectures.gemma3 import GEMMA3
from mzd.formats.architectures.llama import LLAMA
from mzd.formats.architectures.qwen2 import QWEN2
from mzd.formats.architectures.qwen3 import QWEN3

__all__ = [
    "ARCHITECTURES",
    "HEAD_TENSORS",
    "OUTPUT_TENSOR",
    "Activation",
    "Architecture",
    "NormPlacement",
    "RopeStyle",
    "SizeName",
    "SlidingWindow",
    "TensorRule",
]

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "exaone4": EXAONE4,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
}
