"""Owns which kernels the bench `kernels` measures: types, shapes of models, numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from mzd.benchmarks.attention_work import attention_group
from mzd.benchmarks.elementwise_work import embedding_group, gate_group, norm_group, rope_group
from mzd.benchmarks.kernel_work import KernelGroup
from mzd.benchmarks.matmul_work import matmul_group
from mzd.benchmarks.synthetic import GEOMETRIES, Geometry
from mzd.device.attention import AttentionShape
from mzd.device.trial_memory import TrialMemory
from mzd.formats.architectures import ARCHITECTURES
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import RopeConfig

MakeGroup = Callable[[TrialMemory], KernelGroup]

KERNEL_MODELS: Final = ("smollm2-135m", "qwen3-0.6b", "exaone-4.0-1.2b")
"""Whose shapes are measured."""

MATMUL_TYPES: Final = (
    GgmlType.F16,
    GgmlType.Q8_0,
    GgmlType.Q4_0,
    GgmlType.Q4_1,
    GgmlType.Q4_K,
    GgmlType.Q5_K,
    GgmlType.Q6_K,
)
EMBEDDING_TYPE: Final = GgmlType.Q8_0


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Attributes:
        matrices: of each layer; `output` is measured for one token only, as it is used.
        tokens: new tokens, of products and small kernels.
        attention_tokens: queries.
        contexts: tokens of context.
    """

    matrices: tuple[str, ...]
    tokens: tuple[int, ...]
    attention_tokens: tuple[int, ...]
    contexts: tuple[int, ...]


FULL: Final = Extent(
    ("attn_output", "ffn_up", "ffn_down", "output"), (1, 8, 512), (1, 8), (2048, 8192, 32_768)
)
QUICK: Final = Extent(("ffn_up",), (1, 8, 512), (1, 8), (2048, 8192))


def kernel_groups(models: Sequence[str], extent: Extent) -> Iterator[MakeGroup]:
    """Everything to measure, each made when its turn comes; a shape that two models have comes once."""
    geometries = [GEOMETRIES[name] for name in models]
    for type in MATMUL_TYPES:
        yield from _matmuls(geometries, extent, type)
    for geometry in geometries:
        yield from _attentions(geometry, extent)
        for num_tokens in extent.tokens:
            yield from _small_kernels(geometry, num_tokens)


def _matmuls(geometries: Sequence[Geometry], extent: Extent, type: GgmlType) -> Iterator[MakeGroup]:
    shapes = dict.fromkeys(
        (*matrix_shape(geometry, matrix), num_tokens)
        for geometry in geometries
        for matrix in extent.matrices
        for num_tokens in ((1,) if matrix == "output" else extent.tokens)
    )
    for rows, cols, num_tokens in shapes:
        if cols % type.block_weights == 0:
            yield partial(_matmul, type, rows, cols, num_tokens)


def _matmul(type: GgmlType, rows: int, cols: int, num_tokens: int, memory: TrialMemory) -> KernelGroup:
    return matmul_group(memory, type, rows, cols, num_tokens)


def matrix_shape(geometry: Geometry, matrix: str) -> tuple[int, int]:
    """Rows and columns of a matrix of the model."""
    q_size = geometry.num_heads * geometry.head_dim
    shapes = {
        "attn_output": (geometry.hidden_size, q_size),
        "ffn_up": (geometry.ffn_size, geometry.hidden_size),
        "ffn_down": (geometry.hidden_size, geometry.ffn_size),
        "output": (geometry.vocab_size, geometry.hidden_size),
    }
    return shapes[matrix]


def _attention_shape(geometry: Geometry) -> AttentionShape:
    return AttentionShape(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)


def _attentions(geometry: Geometry, extent: Extent) -> Iterator[MakeGroup]:
    for context_tokens in extent.contexts:
        for num_tokens in extent.attention_tokens:
            yield partial(
                attention_group,
                shape=_attention_shape(geometry),
                num_tokens=num_tokens,
                context_tokens=context_tokens,
            )


def _small_kernels(geometry: Geometry, num_tokens: int) -> Iterator[MakeGroup]:
    architecture = ARCHITECTURES[geometry.architecture]
    rope = RopeConfig(architecture.rope_style, 1e6, geometry.head_dim, None)
    hidden_size = geometry.hidden_size
    yield partial(norm_group, num_tokens=num_tokens, hidden_size=hidden_size)
    yield partial(
        rope_group,
        num_tokens=num_tokens,
        shape=_attention_shape(geometry),
        rope=rope,
        qk_norm=architecture.qk_norm,
    )
    yield partial(
        gate_group, num_tokens=num_tokens, ffn_size=geometry.ffn_size, activation=architecture.activation
    )
    yield partial(embedding_group, num_tokens=num_tokens, hidden_size=hidden_size, type=EMBEDDING_TYPE)
