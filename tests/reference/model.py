"""Owns the NumPy reference of every architecture, and the way from a GGUF file to units in memory.

The reference computes from dequantised weights, one sequence at a time, with the whole context at hand and no
cache: nothing of the engine's structure is repeated here, so an error has to be made twice to go unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mzd.formats.gguf import GgufFile, TensorInfo, parse_gguf
from mzd.formats.layer_config import RopeConfig
from mzd.formats.model_config import ModelConfig, head_tensor_name, layer_tensor_name, model_config
from mzd.formats.quantization import dequantize
from mzd.formats.weight_layout import repack
from mzd.formats.weight_store import (
    FORMAT_VERSION,
    SourceFile,
    StoreIndex,
    UnitPlan,
    plan_head,
    plan_layer,
)

Tensor = NDArray[np.floating]


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file in memory: `data` is all of it, uint8."""

    gguf: GgufFile
    data: NDArray[np.uint8]
    config: ModelConfig

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of one tensor."""
        info = self.gguf.tensors[name]
        return self.data[info.offset_bytes : info.offset_bytes + info.size_bytes]

    def values(self, name: str) -> NDArray[np.float32]:
        """One tensor's values, (rows, cols); a vector is one row."""
        info = self.gguf.tensors[name]
        return dequantize(info.type, self.raw(name), info.rows * info.cols).reshape(info.rows, info.cols)


def read_model(path: Path) -> ModelFile:
    """Read a GGUF file whole."""
    data = np.fromfile(path, np.uint8)
    gguf = parse_gguf(lambda offset, size: data[offset : offset + size].tobytes(), data.size, name=path.name)
    factors = None
    info = gguf.tensors.get("rope_freqs.weight")
    if info is not None:
        raw = data[info.offset_bytes : info.offset_bytes + info.size_bytes]
        factors = dequantize(info.type, raw, info.cols)
    return ModelFile(gguf, data, model_config(gguf, factors))


def pack_units(model: ModelFile) -> tuple[StoreIndex, list[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Lay a model out as a weight store would: (index, each layer's unit, the head unit), units as bytes."""
    layers, extents = [], []
    for layer in range(model.config.num_layers):
        names = {rule.role: layer_tensor_name(layer, rule) for rule in model.config.layer_rules}
        plan = plan_layer(model.config, lambda rule: model.gguf.tensors[names[rule.role]].type, 0)  # noqa: B023
        layers.append(_pack_unit(model, plan, names))
        extents.append(plan.with_checksum(0))
    names = {rule.role: head_tensor_name(rule) for rule in model.config.head_rules}
    plan = plan_head(model.config, lambda rule: model.gguf.tensors[names[rule.role]].type, 0)
    head = _pack_unit(model, plan, names)
    source = SourceFile(model.gguf.name, model.data.size, "0" * 64)
    index = StoreIndex(
        FORMAT_VERSION, "0" * 64, model.config, tuple(extents), plan.with_checksum(0), source, {}
    )
    return index, layers, head


def _pack_unit(model: ModelFile, plan: UnitPlan, names: Mapping[str, str]) -> NDArray[np.uint8]:
    unit = np.zeros(plan.size_bytes, np.uint8)
    for spec in plan.tensors:
        info, raw = model.gguf.tensors[names[spec.role]], model.raw(names[spec.role])
        packed = _vector_bytes(info, raw) if spec.rows == 1 else repack(spec.type, raw, spec.rows, spec.cols)
        unit[spec.offset_bytes : spec.offset_bytes + spec.size_bytes] = packed
    return unit


def _vector_bytes(info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return dequantize(info.type, raw, info.cols).astype(np.float32).view(np.uint8)


class ReferenceModel:
    """Forward pass in `dtype`, with K and V rounded to float16 as chunks hold them if `half_kv`."""

    def __init__(self, model: ModelFile, *, dtype: DTypeLike = np.float64, half_kv: bool = True) -> None:
        self._model = model
        self._dtype = np.dtype(dtype)
        self._half_kv = half_kv
        self._weights: dict[str, Tensor] = {}

    def logits(self, tokens: NDArray[np.int32] | list[int]) -> Tensor:
        """Logits after each token of one sequence, (tokens, vocab)."""
        config = self._model.config
        x = self._weight("token_embd.weight")[np.asarray(tokens)] * config.embedding_scale
        for layer in range(config.num_layers):
            block = f"blk.{layer}"
            added = self._attention(layer, self._norm_if_there(x, f"{block}.attn_norm"))
            x = x + self._norm_if_there(added, f"{block}.post_attention_norm")
            added = self._mlp(layer, self._norm_if_there(x, f"{block}.ffn_norm"))
            x = x + self._norm_if_there(added, f"{block}.post_ffw_norm")
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        """Logits of what the last layer gives, (tokens, hidden)."""
        output = "token_embd" if self._model.config.tied_output else "output"
        scores = self._norm(x, "output_norm") @ self._weight(f"{output}.weight").T
        return soft_cap(scores, self._model.config.logit_softcap)

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        config = self._model.config
        q, k, v = (
            self._project(layer, role, x).reshape(len(x), -1, config.head_dim).transpose(1, 0, 2)
            for role in ("attn_q", "attn_k", "attn_v")
        )
        q, k = (self._norm_if_there(y, f"blk.{layer}.attn_{name}_norm") for name, y in (("q", q), ("k", k)))
        q, k = self._rotate(layer, q), self._rounded(self._rotate(layer, k))
        out = attend(
            q,
            k,
            self._rounded(v),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=config.layers[layer].window,
        )
        return self._project(layer, "attn_output", out.transpose(1, 0, 2).reshape(len(x), -1))

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = self._project(layer, "ffn_gate", x), self._project(layer, "ffn_up", x)
        act = {"silu": silu, "gelu_tanh": gelu_tanh}[self._model.config.description.activation]
        return self._project(layer, "ffn_down", act(gate) * up)

    def _rotate(self, layer: int, heads: Tensor) -> Tensor:
        """Rotate (heads, tokens, head_dim) by the tokens' positions 0, 1, ..."""
        config = self._model.config
        number = config.layers[layer].rope
        if number is None:
            return heads
        rope = config.ropes[number]
        return rotate(heads, np.arange(heads.shape[1]), rope.style, rope_frequencies(rope))

    def _rounded(self, kv: Tensor) -> Tensor:
        return kv.astype(np.float16).astype(self._dtype) if self._half_kv else kv

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weight(f"{name}.weight")[0], self._model.config.rms_eps)

    def _norm_if_there(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if f"{name}.weight" in self._model.gguf.tensors else x

    def _project(self, layer: int, role: str, x: Tensor) -> Tensor:
        y = x @ self._weight(f"blk.{layer}.{role}.weight").T
        bias = f"blk.{layer}.{role}.bias"
        return y + self._weight(bias)[0] if bias in self._model.gguf.tensors else y

    def _weight(self, name: str) -> Tensor:
        if name not in self._weights:
            self._weights[name] = self._model.values(name).astype(self._dtype)
        return self._weights[name]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of x over their root mean square, times `weight`."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    """The GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x."""
    return x if cap is None else cap * np.tanh(x / cap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention; the queries are the last tokens of the context.

    Args:
        q: (heads, queries, head_dim).
        k, v: (K/V heads, context, head_dim).
        scale: of the scores; None: 1 / sqrt(head_dim).
        softcap: of the scaled scores; None: none.
        window: position i sees position j only where i - j < window; None: every j <= i.

    Returns:
        (heads, queries, head_dim).
    """
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    queries, context = q.shape[1], k.shape[1]
    scores = q @ k.transpose(0, 2, 1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distances = np.arange(context - queries, context)[:, None] - np.arange(context)
    hidden = (distances < 0) | (distances >= (context if window is None else window))
    scores = np.where(hidden, -np.inf, soft_cap(scores, softcap))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def rope_frequencies(rope: RopeConfig) -> NDArray[np.float64]:
    """Radians by which each pair of channels turns from one position to the next."""
    factors = np.ones(rope.dimensions // 2) if rope.freq_factors is None else np.array(rope.freq_factors)
    return 1.0 / (rope.base ** (np.arange(0, rope.dimensions, 2) / rope.dimensions)) / factors


def rotate(
    heads: Tensor, positions: NDArray[np.int64], style: str, frequencies: NDArray[np.float64]
) -> Tensor:
    """Rotate (heads, tokens, head_dim); channels past twice the frequencies stay."""
    turn = np.exp(1j * positions[:, None] * frequencies)
    pairs = len(frequencies)
    rotated = heads.astype(np.float64)
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if style == "pairs"
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    z = (rotated[..., first] + 1j * rotated[..., second]) * turn
    rotated[..., first], rotated[..., second] = z.real, z.imag
    return rotated.astype(heads.dtype)
