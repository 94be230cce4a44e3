"""CRC-32C: known values, every implementation against the definition, continued at any point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.native import crc32c_numpy


def defined_crc(data: bytes, seed: int = 0) -> int:
    """RFC 3720 B.4, bit by bit."""
    register = seed ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def every_variant():
    native = pytest.importorskip("mzd._native")
    yield from ((name, native) for name in native.crc32c_variants())
    yield "numpy", crc32c_numpy


@pytest.fixture(params=list(every_variant()), ids=lambda pair: pair[0])
def variant(request):
    return request.param


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_values(variant, data, expected):
    name, backend = variant
    assert backend.crc32c_buffer(data, variant=name) == expected


@given(data=st.binary(max_size=300), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_short_data_agrees_with_the_definition(data, seed):
    expected = defined_crc(data, seed)
    for name, backend in every_variant():
        assert backend.crc32c_buffer(data, seed, name) == expected, name


@given(
    size=st.integers(0, 40_000), start=st.integers(0, 15), cut=st.floats(0, 1), seed=st.integers(0, 2**32 - 1)
)
@settings(deadline=None, max_examples=60)
def test_variants_agree_on_any_size_and_alignment_and_continue_anywhere(size, start, cut, seed):
    data = np.random.default_rng(size).integers(0, 256, size + 16, dtype=np.uint8)[start : start + size]
    middle = int(size * cut)
    results = set()
    for name, backend in every_variant():
        head = backend.crc32c_buffer(data[:middle], seed, name)
        results.add(backend.crc32c_buffer(data[middle:], head, name))
        results.add(backend.crc32c(data.ctypes.data, size, seed, name) if size else results.copy().pop())
    assert len(results) == 1


@pytest.mark.parametrize("size", [4095, 4096, 6143, 6144, 12_288, 4 * 1024 * 1024 + 3, 9_000_001])
def test_sizes_at_the_seams_of_stripes_and_lanes(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert len({backend.crc32c_buffer(data, 7, name) for name, backend in every_variant()}) == 1


def test_a_flipped_bit_changes_it(variant):
    name, backend = variant
    data = bytearray(20_000)
    plain = backend.crc32c_buffer(data, variant=name)
    data[12_345] ^= 0x10
    assert backend.crc32c_buffer(data, variant=name) != plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "null address"),
        ((-1, 8), "not in 0"),
        ((4096, -1), "not in 0"),
        ((2**64 - 4, 8), "wrap around"),
        ((2**64, 8), "not in 0"),
        ((4096, 0, 2**32), "not in 0"),
        ((4096, 0, 0, "magic"), "no crc32c variant 'magic'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(backend, arguments, message):
    with pytest.raises(ValueError, match=message):
        backend.crc32c(*arguments)


def test_no_bytes_need_no_address(backend):
    assert backend.crc32c(0, 0, 5) == 5
