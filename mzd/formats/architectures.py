"""Owns which models the engine computes: their tensors, their RoPE, what they must not ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mzd.formats.ggml_types import GgmlType
from mzd.formats.gguf import MetaValue

VECTOR_TYPES = frozenset({GgmlType.F32, GgmlType.F16})  # norms; stored as F32, which holds both exactly

RopeStyle = Literal["pairs", "halves"]
# Names of sizes that a tensor's dimensions must have; see `ModelConfig.size`.
SizeName = Literal["hidden", "ffn", "q", "kv", "vocab"]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A tensor that a model must have; `dims` in GGUF order, the length of a row first."""

    role: str
    dims: tuple[SizeName, ...]

    @property
    def is_vector(self) -> bool:
        """A norm or a bias: plain float32 in the store, not packed for matrix kernels."""
        return len(self.dims) == 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models, as far as its tensors and its rotary embedding go.

    Attributes:
        rope_style: which channels rotate together: neighbours (`pairs`), or i and i + half (`halves`).
        layer_tensors: of each layer, in order of use; in the file `blk.N.ROLE.weight`.
    """

    rope_style: RopeStyle
    layer_tensors: tuple[TensorRule, ...]


_ATTENTION = (
    TensorRule("attn_norm", ("hidden",)),
    TensorRule("attn_q", ("hidden", "q")),
    TensorRule("attn_k", ("hidden", "kv")),
    TensorRule("attn_v", ("hidden", "kv")),
    TensorRule("attn_output", ("q", "hidden")),
)
_GATED_MLP = (
    TensorRule("ffn_norm", ("hidden",)),
    TensorRule("ffn_gate", ("hidden", "ffn")),
    TensorRule("ffn_up", ("hidden", "ffn")),
    TensorRule("ffn_down", ("ffn", "hidden")),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("pairs", _ATTENTION + _GATED_MLP),
}

HEAD_TENSORS = (TensorRule("token_embd", ("hidden", "vocab")), TensorRule("output_norm", ("hidden",)))
OUTPUT_TENSOR = TensorRule("output", ("hidden", "vocab"))  # missing where the embedding serves (tied)

# Metadata that changes what is computed, with the values that change nothing. Any other value is refused
# by name: a wrong answer is worse than none.
NEUTRAL_METADATA: Mapping[str, tuple[MetaValue, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
