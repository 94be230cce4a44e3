"""Owns what the self-test holds kernels against: the same functions in NumPy, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.device.attention import AttentionShape
from mzd.device.rope import RopeAngles
from mzd.formats.architectures import Activation
from mzd.formats.layer_config import RopeConfig

_ROUNDED_TOGETHER = 32
"""Activations that share a scale."""


def activate(z: NDArray[Any], activation: Activation) -> NDArray[np.float64]:
    """The gate's activation, element by element."""
    z = z.astype(np.float64)
    if activation == "silu":
        silu: NDArray[np.float64] = z / (1.0 + np.exp(-z))
        return silu
    gelu: NDArray[np.float64] = 0.5 * z * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3)))
    return gelu


def normalise(x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[np.float64]:
    """RMS norm of the last axis."""
    mean_square = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = x / np.sqrt(mean_square + eps) * weight
    return normalised


def round_to_int8(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What products of integers see of x, (tokens, cols): 8 bits in blocks of 32, a scale for each."""
    blocks = x.reshape(len(x), -1, _ROUNDED_TOGETHER)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = (np.float32(127.0) / largest).astype(np.float64)
    rounded: NDArray[np.float64] = np.rint(blocks * inverse) * (largest.astype(np.float64) / 127.0)
    return rounded.reshape(x.shape)


def rotate(x: NDArray[Any], rope: RopeConfig | None) -> NDArray[np.float64]:
    """Rotate (tokens, heads, head_dim) from position 0 on; None does not rotate."""
    y = x.astype(np.float64)
    if rope is None:
        return y
    pairs = rope.dimensions // 2
    angles = np.zeros((len(x), 2, pairs), np.float32)
    RopeAngles(rope).write(angles, 0)
    turn = (angles[:, 0] + 1j * angles[:, 1])[:, None]
    stride, second = (2, 1) if rope.style == "pairs" else (1, pairs)
    a = slice(0, stride * pairs, stride)
    b = slice(second, second + stride * pairs, stride)
    z = (y[..., a] + 1j * y[..., b]) * turn
    y[..., a], y[..., b] = z.real, z.imag
    return y


def attend(shape: AttentionShape, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.float64]:
    """Causal attention of a context's last tokens.

    Args:
        q: (queries, heads, head_dim).
        k, v: (tokens, K/V heads, head_dim), the queries' own tokens last.

    Returns:
        (queries, heads, head_dim).
    """
    keys, values = (np.repeat(x.astype(np.float64), shape.group, axis=1) for x in (k, v))
    scores = np.matmul(_by_head(q.astype(np.float64)), _by_head(keys).transpose(0, 2, 1)) * shape.score_scale
    if shape.softcap is not None:
        scores = shape.softcap * np.tanh(scores / shape.softcap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    seen = (distance >= 0) & (distance < (len(k) if shape.window is None else shape.window))
    weights = np.where(seen, np.exp(scores - scores.max(axis=2, keepdims=True)), 0.0)
    weights /= weights.sum(axis=2, keepdims=True)
    return _by_head(np.matmul(weights, _by_head(values)))


def _by_head(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Swap tokens and heads."""
    return x.transpose(1, 0, 2)
