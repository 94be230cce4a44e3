"""Owns the words that describe an architecture: what its layers compute, and which tensors that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

RopeStyle = Literal["pairs", "halves"]
Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["before", "after", "both"]
# Names of sizes that a tensor's dimensions must have; see `ModelConfig.size`.
SizeName = Literal["hidden", "ffn", "q", "kv", "head", "vocab"]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A tensor that a model must have; `dims` in GGUF order, the length of a row first."""

    role: str
    dims: tuple[SizeName, ...]

    @property
    def is_vector(self) -> bool:
        """A norm or a bias: plain float32 in the store, not packed for matrix kernels."""
        return len(self.dims) == 1

    @property
    def file_name(self) -> str:
        """Its name in a GGUF file, behind the prefix of its layer."""
        if self.role.endswith("_bias"):
            return f"{self.role.removesuffix('_bias')}.bias"
        return f"{self.role}.weight"


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """How an architecture mixes layers that see the last tokens only with layers that see all.

    Attributes:
        pattern: whether a layer slides, repeated over all layers; a file may bring its own.
        default_tokens: the window where the file gives none; None: then every layer sees all tokens.
        rope_base: of the sliding layers, whose positions are not scaled; None: they turn as the others do.
        global_rope: whether the layers that see all tokens rotate in a model that has sliding ones.
    """

    pattern: tuple[bool, ...]
    default_tokens: int | None = None
    rope_base: float | None = None
    global_rope: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models. Every layer is attention, then a gated MLP, both added to the residual stream.

    Attributes:
        rope_style: which channels rotate together: neighbours (`pairs`), or i and i + half (`halves`).
        norms: RMS norms of each block: of what it reads (`before`), of what it adds (`after`), or `both`.
        qkv_bias: a vector is added to Q, K and V.
        qk_norm: each head of Q and K is normalised before it rotates.
        activation: of the MLP's gate.
        scales_embedding: embedding rows are multiplied by sqrt(hidden size).
        attention_softcap, logit_softcap: s becomes cap * tanh(s / cap), for scores and for logits; the value
            where the file gives none, and None for an architecture without.
        sliding: which layers see a window only; None: none do.
        wide_query_layers: numbers of layers of those models, told by nothing else in the file, whose scores
            are divided by sqrt(hidden / heads) and not by sqrt(head_dim).
    """

    rope_style: RopeStyle
    norms: NormPlacement = "before"
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    scales_embedding: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding: SlidingWindow | None = None
    wide_query_layers: frozenset[int] = frozenset()

    @property
    def norm_before(self) -> bool:
        """Whether a block reads the residual stream through a norm."""
        return self.norms != "after"

    @property
    def norm_after(self) -> bool:
        """Whether what a block adds passes a norm."""
        return self.norms != "before"

    @property
    def layer_tensors(self) -> tuple[TensorRule, ...]:
        """The tensors of each layer, in order of use; in a file `blk.N.FILE_NAME`."""
        return (*self._attention_tensors(), *self._mlp_tensors())

    def _attention_tensors(self) -> Iterator[TensorRule]:
        # Q, K and V next to each other: for one token they are multiplied as one matrix.
        if self.norm_before:
            yield TensorRule("attn_norm", ("hidden",))
        yield TensorRule("attn_q", ("hidden", "q"))
        yield TensorRule("attn_k", ("hidden", "kv"))
        yield TensorRule("attn_v", ("hidden", "kv"))
        if self.qkv_bias:
            yield TensorRule("attn_q_bias", ("q",))
            yield TensorRule("attn_k_bias", ("kv",))
            yield TensorRule("attn_v_bias", ("kv",))
        if self.qk_norm:
            yield TensorRule("attn_q_norm", ("head",))
            yield TensorRule("attn_k_norm", ("head",))
        yield TensorRule("attn_output", ("q", "hidden"))
        if self.norm_after:
            yield TensorRule("post_attention_norm", ("hidden",))

    def _mlp_tensors(self) -> Iterator[TensorRule]:
        if self.norm_before:
            yield TensorRule("ffn_norm", ("hidden",))
        yield TensorRule("ffn_gate", ("hidden", "ffn"))
        yield TensorRule("ffn_up", ("hidden", "ffn"))
        yield TensorRule("ffn_down", ("ffn", "hidden"))
        if self.norm_after:
            yield TensorRule("post_ffw_norm", ("hidden",))


HEAD_TENSORS = (TensorRule("token_embd", ("hidden", "vocab")), TensorRule("output_norm", ("hidden",)))
OUTPUT_TENSOR = TensorRule("output", ("hidden", "vocab"))  # missing where the embedding serves (tied)
