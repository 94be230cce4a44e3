"""Owns what sets layers of one model apart: how far each sees, and how it rotates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mzd.formats.architectures import RopeStyle, SlidingWindow
from mzd.formats.metadata_keys import MetadataKeys, shown

ROPE_BASE_DEFAULT = 10_000.0  # what converters leave out


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: channel pair i turns by position * base^(-2i/dimensions) / freq_factors[i].

    Attributes:
        dimensions: channels of a head that rotate; even, at most head_dim.
        freq_factors: dimensions / 2 divisors (llama3 and linear scaling), or None for all ones.

    Raises:
        ValueError: values that no model has.
    """

    style: RopeStyle
    base: float
    dimensions: int
    freq_factors: tuple[float, ...] | None

    def __post_init__(self) -> None:
        check(self.style in ("pairs", "halves"), f"RoPE style {self.style!r}")
        check(math.isfinite(self.base) and self.base > 0, f"RoPE base {self.base}")
        check(self.dimensions > 0 and self.dimensions % 2 == 0, f"{self.dimensions} RoPE dimensions")
        if self.freq_factors is not None:
            check(len(self.freq_factors) == self.dimensions // 2, f"{len(self.freq_factors)} RoPE factors")
            check(
                all(math.isfinite(f) and f > 0 for f in self.freq_factors),
                "RoPE factors that are not above zero",
            )


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer, as far as layers of a model differ.

    Attributes:
        window: position i sees position j where 0 <= i - j < window; None: every j <= i.
        rope: which of the model's `ropes` turns Q and K; None: they do not turn.

    Raises:
        ValueError: values that no model has.
    """

    window: int | None
    rope: int | None

    def __post_init__(self) -> None:
        check(self.window is None or self.window > 0, f"a window of {self.window} tokens")
        check(self.rope is None or self.rope >= 0, f"RoPE number {self.rope}")


def read_layers(
    keys: MetadataKeys,
    *,
    num_layers: int,
    head_dim: int,
    freq_factors: NDArray[np.float32] | None,
) -> tuple[tuple[RopeConfig, ...], tuple[LayerConfig, ...]]:
    """The model's rotations, and each of its layers.

    Args:
        freq_factors: contents of `rope_freqs.weight`, (rope dimensions / 2,), or None if the file has none.

    Raises:
        FormatError: `unsupported_architecture` for a scaling or a pattern that is not computed,
            `invalid_model` for one that makes no sense.
        ValueError: RoPE values that no model has.
    """
    rope = _rope(keys, head_dim, freq_factors)
    sliding = keys.description.sliding
    window = None if sliding is None else _window(keys, sliding)
    if sliding is None or window is None:
        return (rope,), (LayerConfig(None, 0),) * num_layers
    near = _sliding_rope(keys, sliding, rope)
    far = rope if sliding.global_rope else None
    slides = _pattern(keys, sliding, num_layers)
    used = [near if slid else far for slid in slides]
    ropes = tuple(dict.fromkeys(one for one in used if one is not None))
    return ropes, tuple(
        LayerConfig(window if slid else None, None if one is None else ropes.index(one))
        for slid, one in zip(slides, used, strict=True)
    )


def check(holds: bool, what: str) -> None:
    """Raise ValueError if a model has `what` no model has."""
    if not holds:
        raise ValueError(f"no model has {what}")


def _rope(keys: MetadataKeys, head_dim: int, freq_factors: NDArray[np.float32] | None) -> RopeConfig:
    dimensions = keys.count("rope.dimension_count", head_dim)
    scale = _linear_scale(keys)
    factors = None if freq_factors is None else tuple(float(factor) * scale for factor in freq_factors)
    if factors is None and scale != 1.0:
        factors = (scale,) * (dimensions // 2)  # position / scale is the same as all frequencies / scale
    base = keys.number("rope.freq_base", ROPE_BASE_DEFAULT)
    return RopeConfig(keys.description.rope_style, base, dimensions, factors)


def _linear_scale(keys: MetadataKeys) -> float:
    """By how much positions are divided; other ways of stretching the context are refused."""
    kind = keys.get("rope.scaling.type") or "linear"
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise keys.unsupported(f"RoPE scaling of type {shown(kind)} is not supported")
    scale = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return scale or 1.0  # converters write 0 for none


def _sliding_rope(keys: MetadataKeys, sliding: SlidingWindow, rope: RopeConfig) -> RopeConfig:
    """The rotation of sliding layers; one with a base of its own is not scaled."""
    if sliding.rope_base is None:
        return rope
    base = keys.number("rope.freq_base_swa", sliding.rope_base)
    return RopeConfig(rope.style, base, rope.dimensions, None)


def _window(keys: MetadataKeys, sliding: SlidingWindow) -> int | None:
    """Tokens that sliding layers see, or None if the model has no such layers."""
    key = "attention.sliding_window"
    if keys.get(key) in (None, 0):
        return sliding.default_tokens
    return keys.count(key)


def _pattern(keys: MetadataKeys, sliding: SlidingWindow, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer slides: the file's own answer, else the architecture's."""
    key = "attention.sliding_window_pattern"
    given = keys.get(key)
    if given is None:
        return tuple(sliding.pattern[layer % len(sliding.pattern)] for layer in range(num_layers))
    if type(given) is int and given > 0:  # the last of every so many layers is global
        return tuple(layer % given < given - 1 for layer in range(num_layers))
    if isinstance(given, tuple) and len(given) == num_layers and set(map(type, given)) == {bool}:
        return tuple(bool(slid) for slid in given)
    raise keys.invalid(f"{keys.architecture}.{key} is {shown(given)}, no pattern of {num_layers} layers")
