"""The 6-bit scales of K types: every bit has one place."""

import numpy as np
from gguf.quants import Q4_K
from hypothesis import given
from hypothesis import strategies as st

from mzd.formats.k_quants import pack_scales, unpack_scales

packed_scales = st.binary(min_size=12, max_size=12).map(lambda data: np.frombuffer(data, np.uint8))


@given(packed_scales)
def test_scales_are_those_of_the_gguf_package(packed):
    scales, minima = Q4_K.get_scale_min(packed.reshape(1, 12))
    assert np.array_equal(unpack_scales(packed), np.stack([scales[0], minima[0]], axis=1))


@given(packed_scales)
def test_packing_undoes_unpacking(packed):
    unpacked = unpack_scales(packed.reshape(1, 12))
    assert unpacked.max() < 64
    assert np.array_equal(pack_scales(unpacked), packed.reshape(1, 12))
