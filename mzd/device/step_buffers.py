"""Owns the scratch memory of a step: what lies where, and the host's views of what it writes and reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.device.attention import AttentionShape, AttentionTarget, partials_bytes
from mzd.device.matmul import rounded_bytes
from mzd.device.opencl import OpenClDevice
from mzd.formats.layer_config import LayerConfig
from mzd.formats.model_config import ModelConfig
from mzd.policy.units import CHUNK_TOKENS

_ALIGNMENT_BYTES = 128
"""Two cache lines: buffers that different cores write never share one, nor an adjacent pair."""

_STEP_NUMBERS = 5
"""Of `AttentionPlan.step`."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: `tokens` new tokens, ending a context of `context_tokens`, `logit_rows` of output."""

    tokens: int
    context_tokens: int
    logit_rows: int

    @property
    def chunks(self) -> int:
        """Chunks of one layer."""
        return -(-self.context_tokens // CHUNK_TOKENS)


def place(kept: Mapping[str, int], phases: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], int]:
    """Lay out buffers of the given sizes in bytes.

    `kept` live through the whole step; the buffers of one phase are dead in every other phase, so the
    phases lie over each other.

    Returns:
        (offset of each buffer, multiples of 128; total size), in bytes.
    """
    offsets, end = _place_row(kept, begin=0)
    ends = [end]
    for phase in phases:
        phase_offsets, phase_end = _place_row(phase, begin=end)
        offsets |= phase_offsets
        ends.append(phase_end)
    return offsets, max(ends)


def _place_row(sizes: Mapping[str, int], *, begin: int) -> tuple[dict[str, int], int]:
    """Place buffers one after the other; return offsets and the end, both aligned."""
    offsets = {}
    for name, size_bytes in sizes.items():
        offsets[name] = begin
        begin += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, begin


class StepBuffers:
    """One scratch allocation, cut up for `config` and `limits`.

    Attributes (the host's views, written only while no step runs):
        step: (attention shapes, 5) int32: `AttentionPlan.step` for each.
        tokens: (tokens,) int32.
        angles: for each of the model's rotations (tokens, 2, rotating pairs) float32.
        chunk_tables: (layers, chunks) uint64 addresses.
        x: (tokens, hidden) float32, the residual stream.
        logits: (logit rows, vocab) float32.
    """

    def __init__(self, device: OpenClDevice, config: ModelConfig, limits: StepLimits) -> None:
        kept = _kept_sizes(config, limits)
        if device.kernel_class == "gpu":
            kept["rounded"] = rounded_bytes(limits.tokens, max(config.size("q"), config.ffn_size))
        phases = (_attention_sizes(device, config, limits), _mlp_sizes(config, limits))
        self._offsets, size_bytes = place(kept, phases)
        self._scratch = device.allocate_scratch(size_bytes)
        self._table_bytes = limits.chunks * 8
        self.step: NDArray[np.int32] = self._view(
            "step", np.int32, (len(attention_shapes(config)), _STEP_NUMBERS)
        )
        self.tokens: NDArray[np.int32] = self._view("tokens", np.int32, (limits.tokens,))
        self.angles: tuple[NDArray[np.float32], ...] = tuple(
            self._view(f"angles{i}", np.float32, (limits.tokens, 2, rope.dimensions // 2))
            for i, rope in enumerate(config.ropes)
        )
        self.chunk_tables: NDArray[np.uint64] = self._view(
            "chunk_tables", np.uint64, (config.num_layers, limits.chunks)
        )
        self.x: NDArray[np.float32] = self._view("x", np.float32, (limits.tokens, config.hidden_size))
        self.logits: NDArray[np.float32] = self._view(
            "logits", np.float32, (limits.logit_rows, config.vocab_size)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole allocation."""
        return self._scratch.size_bytes

    def address(self, name: str) -> int:
        """Address of a buffer."""
        return self._scratch.address + self._offsets[name]

    @property
    def rounded_address(self) -> int | None:
        """Where products keep rounded tokens; None where they need no memory for that."""
        return self.address("rounded") if "rounded" in self._offsets else None

    def upload_step(self, num_tokens: int, *, with_x: bool) -> None:
        """Give the device what the host wrote for a step: its numbers, tokens, angles, and x if so."""
        begin = 0  # the first angles lie right behind the numbers and tokens: one copy for all three
        for i, angles in enumerate(self.angles):
            end = self._offsets[f"angles{i}"] + num_tokens * angles.strides[0]
            self._scratch.upload(begin, end - begin)
            begin = self._offsets.get(f"angles{i + 1}", end)
        if with_x:
            self._scratch.upload(self._offsets["x"], num_tokens * self.x.strides[0])

    def upload_chunk_table(self, layer: int) -> None:
        """Give the device one layer's row of `chunk_tables`."""
        self._scratch.upload(self._offsets["chunk_tables"] + layer * self._table_bytes, self._table_bytes)

    def download_logits(self, num_rows: int) -> None:
        """Give the host the first rows of `logits`, once what is enqueued has run."""
        self._scratch.download(self._offsets["logits"], num_rows * self.logits.strides[0])

    def step_address(self, shape_number: int) -> int:
        """Address of the numbers for one attention shape."""
        return self.address("step") + shape_number * self.step.strides[0]

    def angles_address(self, rope: int | None) -> int:
        """Address of one rotation's angles; where a layer does not rotate, of anything."""
        return self.address("step" if rope is None else f"angles{rope}")

    def chunk_table_address(self, layer: int) -> int:
        """Address of one layer's row of `chunk_tables`."""
        return self.address("chunk_tables") + layer * self._table_bytes

    def free(self) -> None:
        """Give the memory back; no step may be running."""
        self._scratch.free()

    def _view(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
        return self._scratch.view(dtype, shape, offset_bytes=self._offsets[name])


def attention_shape(config: ModelConfig, layer: LayerConfig) -> AttentionShape:
    """What attention needs to know of a layer."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        window=layer.window,
    )


def attention_shapes(config: ModelConfig) -> tuple[AttentionShape, ...]:
    """The shapes of a model's layers, each once."""
    return tuple(dict.fromkeys(attention_shape(config, layer) for layer in config.layers))


def _kept_sizes(config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    """What the host writes for each step comes first."""
    step = {"step": len(attention_shapes(config)) * _STEP_NUMBERS * 4, "tokens": limits.tokens * 4}
    angles = {f"angles{i}": limits.tokens * rope.dimensions * 4 for i, rope in enumerate(config.ropes)}
    others = {
        "chunk_tables": config.num_layers * limits.chunks * 8,
        "x": limits.tokens * config.hidden_size * 4,
        "normed": limits.tokens * config.hidden_size * 4,
        "logits": limits.logit_rows * config.vocab_size * 4,
    }
    return step | angles | others


def _attention_sizes(device: OpenClDevice, config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    q_bytes = limits.tokens * config.size("q") * 4
    qkv_bytes = limits.tokens * (config.size("q") + 2 * config.size("kv")) * 4
    partials = partials_bytes(
        attention_shapes(config)[0],
        AttentionTarget.of(device),
        tokens_max=limits.tokens,
        context_tokens_max=limits.context_tokens,
    )
    # Where no step leaves partial results kernels get their address all the same: it has to be in the buffer.
    return {"qkv": qkv_bytes, "attended": q_bytes, "partials": max(partials, _ALIGNMENT_BYTES)}


def _mlp_sizes(config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    return {"gate_up": limits.tokens * 2 * config.ffn_size * 4}
