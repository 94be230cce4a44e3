"""Case 126: rotation at positions 10, 8k and 32k against float64 and the definition of Llama 3's scaling.

The definition is that of the model's makers (`rope_scaling` of its configuration); nothing of how this
project reads or applies the factors of a file is used for what is expected.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mzd.device.rope import RopeAngles
from mzd.formats.layer_config import RopeConfig
from tests.formats.gguf_files import F32, U32, Gguf, Tensor, aligned, tiny_llama
from tests.reference.loaded_model import LoadedModel
from tests.reference.model import ReferenceModel, attend, read_model, rotate

POSITIONS = (10, 8192, 32768)
BASE = 500_000.0
FACTOR, LOW, HIGH, TRAINED_TOKENS = 32.0, 1.0, 4.0, 8192  # of Llama 3.2
DIMENSIONS = (16, 64)


def plain_frequencies(dimensions):
    """Radians a position, by pair of channels."""
    return np.array([BASE ** (-2 * i / dimensions) for i in range(dimensions // 2)])


def llama3_frequencies(dimensions):
    """Waves longer than the trained context are stretched, short ones stay, between them it blends."""
    stretched = []
    for frequency in plain_frequencies(dimensions):
        wave = 2 * math.pi / frequency
        blend = min(max((TRAINED_TOKENS / wave - LOW) / (HIGH - LOW), 0.0), 1.0)
        stretched.append((1 - blend) * frequency / FACTOR + blend * frequency)
    return np.array(stretched)


def file_factors(dimensions):
    """`rope_freqs.weight` as converters write it, (dimensions / 2,) float32."""
    return (plain_frequencies(dimensions) / llama3_frequencies(dimensions)).astype(np.float32)


def write_model(path, *, with_factors):
    """A llama of one layer with random weights, whose attention depends on where tokens are."""
    file = tiny_llama(hidden=16, ffn=32, heads=1)  # one head of 16 channels: 32k tokens take seconds
    file = file.with_metadata(llama__context_length=(U32, 2**17), llama__rope__freq_base=(F32, BASE))
    factors = (Tensor("rope_freqs.weight", (DIMENSIONS[0] // 2,)),) if with_factors else ()
    file = Gguf(file.metadata, (*file.tensors, *factors))
    rng = np.random.default_rng(126)
    header = file.header()
    data = header.ljust(aligned(len(header), 32), b"\0")
    for tensor in file.tensors:
        values = tensor_values(tensor, rng).tobytes()
        data += values.ljust(aligned(len(values), 32), b"\0")
    path.write_bytes(data)
    return path


def tensor_values(tensor, rng):
    if tensor.name == "rope_freqs.weight":
        return file_factors(DIMENSIONS[0])
    if len(tensor.dims) == 1:
        return rng.uniform(0.8, 1.2, tensor.dims).astype(np.float32)
    peaked = 2.0 if tensor.name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight") else 1.0
    return (rng.standard_normal(tensor.dims[::-1]) * peaked / math.sqrt(tensor.dims[0])).astype(np.float16)


class LastToken(ReferenceModel):
    """The reference for the last token of a long text: one layer, so the others give K and V only."""

    frequencies: np.ndarray

    def _attention(self, layer, x):
        config = self._model.config
        q, k, v = (
            self._project(layer, role, part).reshape(len(part), -1, config.head_dim).transpose(1, 0, 2)
            for role, part in (("attn_q", x[-1:]), ("attn_k", x), ("attn_v", x))
        )
        at = np.arange(len(x))
        q = rotate(q, at[-1:], "pairs", self.frequencies)
        k = self._rounded(rotate(k, at, "pairs", self.frequencies))
        return self._project(layer, "attn_output", attend(q, k, self._rounded(v)).reshape(1, -1))


def expected_logits(path, tokens, frequencies):
    reference = LastToken(read_model(path))
    reference.frequencies = frequencies
    return reference.logits(tokens)[-1]


@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "llama3"])
def test_case_126_angles_at_every_position(dimensions, scaled):
    factors = tuple(float(factor) for factor in file_factors(dimensions)) if scaled else None
    frequencies = llama3_frequencies(dimensions) if scaled else plain_frequencies(dimensions)
    angles = RopeAngles(RopeConfig("pairs", BASE, dimensions, factors))
    for position in POSITIONS:
        out = np.empty((2, 2, dimensions // 2), np.float32)
        angles.write(out, position - 1)  # not only the first of a step
        turned = position * frequencies
        assert np.abs(out[1] - [np.cos(turned), np.sin(turned)]).max() < 1e-5


def test_the_factors_are_those_of_the_definition():
    """Pairs that stay, pairs that are stretched by 32, and one between."""
    factors = file_factors(64)
    assert factors[0] == 1.0
    assert factors[-1] == 32.0
    assert ((factors > 1.0) & (factors < 32.0)).sum() >= 1


@pytest.mark.parametrize("with_factors", [False, True], ids=["plain", "llama3"])
async def test_case_126_logits_at_every_position(device, tmp_path, with_factors):
    path = write_model(tmp_path / "a.gguf", with_factors=with_factors)
    frequencies = (llama3_frequencies if with_factors else plain_frequencies)(DIMENSIONS[0])
    other = (plain_frequencies if with_factors else llama3_frequencies)(DIMENSIONS[0])
    tokens = np.random.default_rng(8).integers(0, 8, POSITIONS[-1] + 1)
    model = LoadedModel(device, path, context_tokens=POSITIONS[-1] + 256)
    try:
        done = 0
        for position in POSITIONS:
            logits = await prefill_from(model, tokens, done, position + 1)
            done = position + 1
            expected = expected_logits(path, tokens[:done], frequencies)
            assert np.abs(logits - expected).max() < 2e-3
            wrong = expected_logits(path, tokens[:done], other)
            assert np.abs(logits - wrong).max() > 0.01 or position < 100
    finally:
        model.close()


async def prefill_from(model, tokens, begin, end):
    """Run tokens[begin:end] in steps of 512; the last token's logits."""
    for start in range(begin, end, 512):
        logits = await model.step(tokens[start : min(start + 512, end)], start)
    return logits[0]
