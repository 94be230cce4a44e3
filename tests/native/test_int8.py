"""The int8 format: its promises, and that every implementation gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mzd.native import int8_numpy

GROUP = 32
ALL_BITS = np.arange(65536, dtype=np.uint16)
FINITE_BITS = ALL_BITS[(ALL_BITS & 0x7C00) != 0x7C00]


def every_variant():
    """(encode, decode) of every implementation here, on arrays; the NumPy reference first."""
    yield "numpy", int8_numpy
    native = pytest.importorskip("mzd._native")
    for name in native.int8_variants():
        yield name, native


def addresses(*parts):
    return np.array([part.ctypes.data for part in parts], np.uint64)


def encode(backend, variant, chunk):
    payload = np.empty(backend.int8_payload_bytes(chunk.size), np.uint8)
    status = np.full(1, 255, np.uint8)
    backend.int8_encode_batch(addresses(chunk), addresses(payload), chunk.size, status, variant)
    return payload if status[0] == backend.INT8_OK else None


def decode(backend, variant, payload, num_elements):
    chunk = np.empty(num_elements, np.uint16)
    backend.int8_decode_batch(addresses(payload), addresses(chunk), num_elements, variant)
    return chunk


def round_trip(backend, variant, chunk):
    return decode(backend, variant, encode(backend, variant, chunk), chunk.size)


def limited(bits, limit):
    """Halves of any sign whose magnitudes, as bits, lie below limit: a group of one order of magnitude."""
    halves = np.frombuffer(bits, np.uint16)
    return (halves & 0x7FFF) % np.uint16(limit) | (halves & 0x8000)


def finite_chunks(max_groups=6):
    """Chunks whose groups differ in size as much as FP16 allows, and reach the subnormals often."""
    limits = st.one_of(st.integers(1, 0x7C00), st.integers(1, 0x0200))
    group = st.builds(limited, st.binary(min_size=2 * GROUP, max_size=2 * GROUP), limits)
    return st.lists(group, min_size=1, max_size=max_groups).map(np.concatenate)


@pytest.fixture(params=list(every_variant()), ids=lambda pair: pair[0])
def variant(request):
    return request.param


def group_scales(chunk):
    """(num_groups, 1) float64: the exact scale of each group, one subnormal step at least."""
    magnitudes = np.abs(chunk.view(np.float16).astype(np.float64)).reshape(-1, GROUP)
    return np.maximum(magnitudes.max(axis=1, keepdims=True) / 128, 2.0**-24)


def as_groups(chunk):
    return chunk.view(np.float16).astype(np.float64).reshape(-1, GROUP)


@given(chunk=finite_chunks())
@example(chunk=np.full(GROUP, 0x8000, np.uint16))
@example(chunk=np.resize(np.array([0x7BFF, 0xFBFF], np.uint16), GROUP))
@example(chunk=np.resize(np.array([0x0041, 0x8041, 0x0040], np.uint16), GROUP))
@settings(deadline=None, max_examples=300)
def test_a_second_round_trip_changes_no_bit_of_chunk_or_payload(chunk):
    for name, backend in every_variant():
        payload = encode(backend, name, chunk)
        once = decode(backend, name, payload, chunk.size)
        np.testing.assert_array_equal(encode(backend, name, once), payload, err_msg=name)
        np.testing.assert_array_equal(round_trip(backend, name, once), once, err_msg=name)


@given(chunk=finite_chunks())
@settings(deadline=None, max_examples=300)
def test_every_variant_writes_the_same_payload(chunk):
    expected = encode(int8_numpy, "numpy", chunk)
    for name, backend in every_variant():
        np.testing.assert_array_equal(encode(backend, name, chunk), expected, err_msg=name)


@given(chunk=finite_chunks())
@settings(deadline=None, max_examples=200)
def test_error_is_half_a_step_and_a_whole_one_only_opposite_the_largest(chunk):
    before, after = as_groups(chunk), as_groups(round_trip(int8_numpy, "numpy", chunk))
    steps = np.abs(after - before) / group_scales(chunk)
    rounding = np.maximum(np.abs(before) * 2.0**-10, 2.0**-24) / group_scales(chunk)
    is_positive = before.max(axis=1, keepdims=True) >= -before.min(
        axis=1, keepdims=True
    )  # the largest, ties too
    is_opposite = np.where(is_positive, before < 0, before > 0)
    is_clipped = is_opposite & (np.abs(before) > 127.5 * group_scales(chunk) * (1 - 2.0**-20))
    assert (steps <= np.where(is_clipped, 1.0, 0.5) + rounding).all()


def test_every_pattern_as_the_largest_of_its_group_comes_back_itself(variant):
    name, backend = variant
    fractions = np.linspace(-0.97, 0.97, GROUP - 1, dtype=np.float32)
    peaks = FINITE_BITS.view(np.float16).astype(np.float32)[:, None]
    chunk = np.concatenate([peaks, peaks * fractions], axis=1).astype(np.float16).view(np.uint16).ravel()
    once = round_trip(backend, name, chunk)
    values = once.view(np.float16).reshape(-1, GROUP)[:, 0]
    np.testing.assert_array_equal(values, FINITE_BITS.view(np.float16))
    np.testing.assert_array_equal(round_trip(backend, name, once), once)
    np.testing.assert_array_equal(encode(backend, name, chunk), encode(int8_numpy, "numpy", chunk))


@pytest.mark.parametrize("seed", range(4))
def test_all_finite_patterns_in_any_company(variant, seed):
    name, backend = variant
    bits = np.random.default_rng(seed).permutation(FINITE_BITS)
    chunk = bits if seed % 2 else np.sort(bits & 0x7FFF) | (bits & 0x8000)  # neighbours of like magnitude
    once = round_trip(backend, name, chunk)
    np.testing.assert_array_equal(once, round_trip(int8_numpy, "numpy", chunk))
    np.testing.assert_array_equal(round_trip(backend, name, once), once)


def test_every_code_under_every_peak_decodes_to_the_same_bits(variant):
    name, backend = variant
    codes = np.arange(256, dtype=np.uint8)
    peaks = np.repeat(FINITE_BITS[::7], 256 // GROUP)
    payload = np.concatenate([peaks.view(np.uint8), np.resize(codes, peaks.size * GROUP)])
    chunk = decode(backend, name, payload, peaks.size * GROUP)
    np.testing.assert_array_equal(chunk, decode(int8_numpy, "numpy", payload, chunk.size))


def test_groups_below_two_to_the_minus_17_are_exact_and_zeros_positive(variant):
    name, backend = variant
    steps = np.random.default_rng(1).integers(-127, 128, 64 * GROUP).astype(np.float32)
    chunk = (steps * np.float32(2**-24)).astype(np.float16).view(np.uint16)
    chunk[chunk == 0] = 0x8000
    expected = np.where(chunk == 0x8000, np.uint16(0), chunk)
    np.testing.assert_array_equal(round_trip(backend, name, chunk), expected)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF])
def test_a_chunk_that_is_not_finite_is_refused_alone(variant, bits):
    name, backend = variant
    chunks = np.full((3, 4 * GROUP), 0x3C00, np.uint16)
    for position in (0, 17, 31, 32, 127):
        broken = chunks.copy()
        broken[1, position] = bits
        payloads = np.empty((3, backend.int8_payload_bytes(4 * GROUP)), np.uint8)
        status = np.full(3, 255, np.uint8)
        backend.int8_encode_batch(addresses(*broken), addresses(*payloads), 4 * GROUP, status, name)
        assert status.tolist() == [0, backend.INT8_NOT_FINITE, 0]
        np.testing.assert_array_equal(decode(backend, name, payloads[2], 4 * GROUP), chunks[2])


def test_scales_shifted_by_one_group_are_noticed():
    """The tests above tell a codec whose scales belong to the neighbour's codes."""
    values = np.random.default_rng(2).normal(size=(8, GROUP)) * 2.0 ** np.arange(8)[:, None]
    chunk = values.astype(np.float16).view(np.uint16).ravel()
    payload = encode(int8_numpy, "numpy", chunk)
    shifted = payload.copy()
    shifted[:16] = np.roll(payload[:16].view(np.uint16), 1).view(np.uint8)
    once = decode(int8_numpy, "numpy", shifted, chunk.size)
    assert (np.abs(as_groups(once) - as_groups(chunk)) > group_scales(chunk)).any()


def test_bytes_around_chunk_and_payload_stay(variant):
    name, backend = variant
    num_elements, margin = 5 * GROUP, 64
    payload_bytes = backend.int8_payload_bytes(num_elements)
    chunk = np.random.default_rng(3).normal(size=num_elements).astype(np.float16)
    for shift in (0, 2, 6, 34):  # even addresses of every alignment
        target = np.full(payload_bytes + 2 * margin, 0xA5, np.uint8)
        back = np.full(2 * num_elements + 2 * margin, 0xA5, np.uint8)
        at_target, at_back = target.ctypes.data + shift, back.ctypes.data + shift
        status = np.empty(1, np.uint8)
        backend.int8_encode_batch(
            addresses(chunk), np.array([at_target], np.uint64), num_elements, status, name
        )
        backend.int8_decode_batch(
            np.array([at_target], np.uint64), np.array([at_back], np.uint64), num_elements, name
        )
        for buffer, size in ((target, payload_bytes), (back, 2 * num_elements)):
            assert (buffer[:shift] == 0xA5).all()
            assert (buffer[shift + size :] == 0xA5).all()


def test_golden_payload(variant):
    """The bits of version 1: a change here is a new version."""
    name, backend = variant
    values = np.array([1.0, -2.0, 0.5, 0.0, 0.007812, -0.0078, 1.9961, 2.0] + [0.25] * 24, np.float16)
    payload = encode(backend, name, values.view(np.uint16))
    expected_codes = [-64, 127, -32, 0, 0, 0, -128, -128] + [-16] * 24
    assert payload[:2].view(np.uint16)[0] == 0xC000  # -2: of the tie the positive one is the largest
    assert payload[2:].view(np.int8).tolist() == expected_codes


def test_payload_is_17_bytes_for_32_elements(backend):
    assert backend.int8_payload_bytes(98304) == 98304 * 17 // 16
    assert 1 - backend.int8_payload_bytes(98304) / (2 * 98304) == 0.46875
