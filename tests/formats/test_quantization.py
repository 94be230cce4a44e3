"""The reference meaning of quantised weights, against the gguf package."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.quantization import dequantize

TYPES = sorted(SUPPORTED_TYPES)
PACKED_BY_GGUF = [type for type in TYPES if type.block_weights < 256]


def test_type_sizes_are_those_of_the_gguf_package():
    for type in GgmlType:
        expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(type))]
        assert (type.block_weights, type.block_bytes) == expected, type.name
        assert gguf.GGMLQuantizationType(int(type)).name == type.name


@given(st.sampled_from(TYPES), st.integers(1, 9), st.data())
def test_any_bytes_mean_what_the_gguf_package_says(type, num_blocks, data):
    size = num_blocks * type.block_bytes
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    with np.errstate(all="ignore"):  # infinite scales and signalling NaN, which any bytes may hold
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(type)))
    found = dequantize(type, raw, num_blocks * type.block_weights)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected.reshape(-1), equal_nan=True)


@given(st.sampled_from(PACKED_BY_GGUF), st.integers(0, 2**32 - 1))
def test_quantised_weights_come_back(type, seed):
    weights = np.random.default_rng(seed).standard_normal(128).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(type))).view(np.uint8)
    step = {GgmlType.F32: 0, GgmlType.F16: 2**-9, GgmlType.BF16: 2**-6, GgmlType.Q8_0: 0.05}.get(type, 0.8)
    assert np.abs(dequantize(type, raw, 128) - weights).max() <= step


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("missing", [-1, 1])
def test_wrong_sizes_are_refused_with_both_numbers(type, missing):
    raw = np.zeros(type.block_bytes * 2 - missing, np.uint8)
    with pytest.raises(FormatError) as caught:
        dequantize(type, raw, type.block_weights * 2)
    assert caught.value.data == {"expected": type.block_bytes * 2, "found": raw.size}


def test_part_of_a_block_is_refused():
    with pytest.raises(FormatError, match="whole blocks"):
        dequantize(GgmlType.Q8_0, np.zeros(34, np.uint8), 33)


def test_types_without_a_meaning_here_are_refused_by_name():
    with pytest.raises(FormatError, match="Q2_K") as caught:
        dequantize(GgmlType.Q2_K, np.zeros(84, np.uint8), 256)
    assert caught.value.code == "unsupported_type"
