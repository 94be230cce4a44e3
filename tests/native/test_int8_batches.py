"""Batches of the int8 codec: what is refused, and memory that falls while encoding."""

from __future__ import annotations

import numpy as np
import pytest

CHUNK = 8192  # elements: four pages


@pytest.fixture
def chunks(backend, memory):
    """Three chunks of four pages each, and room for their payloads."""
    source, target = memory(3 * 2 * CHUNK), memory(3 * backend.int8_payload_bytes(CHUNK))
    values = np.random.default_rng(4).normal(size=3 * CHUNK).astype(np.float16)
    source.bytes[:] = values.view(np.uint8)
    return source, target


def addresses(memory, step, count=3):
    return memory.address + step * np.arange(count, dtype=np.uint64)


def encode_release(backend, chunks, *, release_bytes=2 * CHUNK):
    source, target = chunks
    status = np.full(3, 255, np.uint8)
    backend.int8_encode_release_batch(
        addresses(source, 2 * CHUNK),
        addresses(target, backend.int8_payload_bytes(CHUNK)),
        CHUNK,
        release_bytes,
        status,
    )
    return status.tolist()


def test_encode_release_gives_every_source_back_and_keeps_the_payload(backend, chunks):
    source, target = chunks
    before = source.bytes.copy()
    assert encode_release(backend, chunks) == [backend.INT8_OK] * 3
    assert backend.resident_bytes(source.address, 3 * 2 * CHUNK) == 0
    restored = np.empty(3 * CHUNK, np.float16)
    backend.int8_decode_batch(
        addresses(target, backend.int8_payload_bytes(CHUNK)),
        restored.ctypes.data + 2 * CHUNK * np.arange(3, dtype=np.uint64),
        CHUNK,
    )
    np.testing.assert_allclose(restored, before.view(np.float16), atol=0.02)


def test_a_chunk_that_is_not_finite_keeps_its_pages(backend, chunks):
    source, _ = chunks
    source.bytes.view(np.float16)[CHUNK + 5] = np.inf
    before = source.bytes[2 * CHUNK : 4 * CHUNK].copy()
    assert encode_release(backend, chunks) == [0, backend.INT8_NOT_FINITE, 0]
    np.testing.assert_array_equal(source.bytes[2 * CHUNK : 4 * CHUNK], before)
    assert backend.resident_bytes(source.address, 3 * 2 * CHUNK) == 2 * CHUNK


def test_pages_covered_in_part_stay(backend, chunks):
    source, _ = chunks
    page = backend.PAGE_BYTES
    last_page = source.bytes[-page:].copy()
    assert encode_release(backend, chunks, release_bytes=2 * CHUNK - 1) == [0, 0, 0]
    np.testing.assert_array_equal(source.bytes[-page:], last_page)
    assert backend.resident_bytes(source.address, 3 * 2 * CHUNK) == 3 * page


def test_an_empty_batch_does_nothing(backend):
    empty = np.empty(0, np.uint64)
    backend.int8_encode_batch(empty, empty, CHUNK, np.empty(0, np.uint8))
    backend.int8_decode_batch(empty, empty, CHUNK)


def one(value, dtype=np.uint64):
    return np.array([value], dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_elements": 0}, "positive multiple of 32"),
        ({"num_elements": 33}, "positive multiple of 32"),
        ({"num_elements": -32}, "not in 0"),
        ({"num_elements": 2**62}, "32|not in"),
        ({"src": one(0)}, "src is a null address"),
        ({"dst": one(4097)}, "dst: address 4097 is not a multiple of 2"),
        ({"src": one(2**64 - 2)}, "wrap around"),
        ({"dst": one(8192 + 62)}, "overlap"),
        ({"src": np.array([8192, 16384], np.uint64)}, "src has 2 items and (status|dst) has 1"),
        ({"status": np.zeros(2, np.uint8)}, "src has 1 items and status has 2"),
        ({"src": one(8192, np.int64)}, "src must be a one-dimensional array of uint64"),
        ({"src": one(8192, ">u8")}, "src must be a one-dimensional array of uint64"),
        ({"src": one([8192])}, "src must be a one-dimensional array of uint64"),
        ({"status": np.zeros(1, np.int8)}, "status must be a one-dimensional array of uint8"),
        ({"variant": "sse9"}, "no int8 variant 'sse9'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(backend, arguments, message):
    good = {"src": one(8192), "dst": one(4096), "num_elements": 32, "status": np.zeros(1, np.uint8)}
    with pytest.raises(ValueError, match=message):
        backend.int8_encode_batch(**(good | arguments))


def test_release_must_not_reach_into_the_payload(backend):
    with pytest.raises(ValueError, match="overlap"):
        backend.int8_encode_release_batch(one(4096), one(8192), 32, 8192, np.zeros(1, np.uint8))


def test_a_list_is_no_array(backend):
    with pytest.raises(TypeError):
        backend.int8_decode_batch([4096], [8192], 32)
