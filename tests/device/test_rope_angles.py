"""Angles of RoPE for single tokens, which are computed some positions ahead."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mzd.device.rope import RopeAngles
from mzd.formats.layer_config import RopeConfig


@given(st.lists(st.integers(0, 5).map(lambda block: 50 * block) | st.integers(0, 300), max_size=12))
def test_single_tokens_in_any_order(positions):
    angles = RopeAngles(RopeConfig("pairs", 1e4, 16, None))
    for position in positions:
        single, first_of_two = np.zeros((1, 2, 8), np.float32), np.zeros((2, 2, 8), np.float32)
        angles.write(single, position)
        angles.write(first_of_two, position)
        assert np.allclose(single[0], first_of_two[0], atol=1e-7)
