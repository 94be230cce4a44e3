"""Owns the shapes of models that are not here yet: enough of each to say how much memory it will need."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mzd.formats.architectures import TensorRule
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import LayerConfig
from mzd.formats.memory_need import MemoryNeed, memory_need
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import UnitPlan, plan_head, plan_layer

_PREFERRED_ROLES = frozenset({"attn_v", "ffn_down"})


@dataclass(frozen=True, slots=True)
class TypeMix:
    """Which types a file's matrices have, as llama.cpp's quantiser mixes them.

    Attributes:
        name: as files are called.
        matrices: of most matrices.
        head: of the embedding and the output matrix.
        preferred: of V and of the MLP's way down in about half of the layers; None: as of the others.
    """

    name: str
    matrices: GgmlType
    head: GgmlType
    preferred: GgmlType | None = None

    def layer_type(self, rule: TensorRule, layer: int, num_layers: int) -> GgmlType:
        """The type of a matrix in a layer."""
        if self.preferred is None or rule.role not in _PREFERRED_ROLES:
            return self.matrices
        return self.preferred if _is_preferred(layer, num_layers) else self.matrices


Q8_0 = TypeMix("Q8_0", GgmlType.Q8_0, GgmlType.Q8_0)
Q4_1 = TypeMix("Q4_1", GgmlType.Q4_1, GgmlType.Q8_0)  # Q6_K for the head needs rows of 256
Q4_K_M = TypeMix("Q4_K_M", GgmlType.Q4_K, GgmlType.Q6_K, preferred=GgmlType.Q6_K)


@dataclass(frozen=True, slots=True)
class DeclaredShape:
    """What a model's file will say of itself, as far as memory depends on it; names as in `ModelConfig`."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    types: TypeMix
    tied_output: bool = True

    def memory_need(self, *, chunk_tokens: int) -> MemoryNeed:
        """What `mzd import` will say that the model needs."""
        config = self._config()
        layers, head = self.plan()
        return memory_need(config, layers, head, chunk_tokens=chunk_tokens)

    def plan(self) -> tuple[tuple[UnitPlan, ...], UnitPlan]:
        """The layers and the head unit, as the weight store will hold them."""
        config = self._config()
        layers = tuple(self._plan_layer(config, layer) for layer in range(self.num_layers))
        return layers, plan_head(config, lambda rule: self.types.head, 0)

    def _plan_layer(self, config: ModelConfig, layer: int) -> UnitPlan:
        return plan_layer(config, lambda rule: self.types.layer_type(rule, layer, self.num_layers), 0)

    def _config(self) -> ModelConfig:
        """With values that change nothing in place of those that memory does not depend on."""
        return ModelConfig(
            architecture=self.architecture,
            name="",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            rms_eps=1e-6,
            ropes=(),
            layers=(LayerConfig(window=None, rope=None),) * self.num_layers,
            attention_scale=1.0 / math.sqrt(self.head_dim),
            attention_softcap=None,
            logit_softcap=None,
            embedding_scale=1.0,
            tied_output=self.tied_output,
        )


def _is_preferred(layer: int, num_layers: int) -> bool:
    """Whether a `_M` mix gives more bits here: the first and last eighth, and each third layer between."""
    first = num_layers // 8
    return layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2
