"""Kernel sources reach the driver complete: every include in place, once."""

import pytest

from mzd.kernels import kernel_source

NAMES = ["attention", "elementwise", "embedding", "norm", "rope", "matmul"]
NAMES += ["attention_gpu", "elementwise_gpu", "norm_gpu", "rope_gpu"]


@pytest.mark.parametrize("name", NAMES)
def test_no_include_is_left(name):
    source = kernel_source(name)
    assert "#include" not in source
    assert source.count("static inline float sum8(") == 1


def test_unknown_source():
    with pytest.raises(FileNotFoundError):
        kernel_source("no_such")
