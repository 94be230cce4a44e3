"""Every codec behind the one interface: round trips, sizes, refusals, memory that falls."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from mzd import native
from mzd.codec import Int8Codec, NoneCodec, codec_by_name, codec_names
from mzd.errors import MzdError

CHUNK_BYTES = 256 * 3 * 64 * 2 * 2  # SmolLM2-135M: 3 heads of 64


@pytest.fixture(params=codec_names())
def codec(request):
    return codec_by_name(request.param)


def kv_like(num_chunks, seed=0):
    """(num_chunks, elements) float16: channels of very different size, a zero tail, as KV has."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(num_chunks, CHUNK_BYTES // 512, 256)) * np.exp2(
        random.integers(-9, 5, (1, 384, 1))
    )
    values[-1, :, 200:] = 0
    return values.astype(np.float16).reshape(num_chunks, -1)


def rows(array):
    return [row.ctypes.data for row in array]


def round_trip(codec, chunks):
    payloads = np.empty((len(chunks), codec.payload_bytes(CHUNK_BYTES)), np.uint8)
    back = np.empty_like(chunks)
    assert codec.encode_batch(rows(chunks), rows(payloads), CHUNK_BYTES) == [True] * len(chunks)
    codec.decode_batch(rows(payloads), rows(back), CHUNK_BYTES)
    return payloads, back


def test_a_second_round_trip_changes_no_bit(codec):
    payloads, once = round_trip(codec, kv_like(5))
    payloads_again, twice = round_trip(codec, once)
    np.testing.assert_array_equal(twice.view(np.uint16), once.view(np.uint16))
    np.testing.assert_array_equal(payloads_again, payloads)


def test_exact_means_that_no_bit_changes(codec):
    chunks = kv_like(3)
    _, once = round_trip(codec, chunks)
    assert np.array_equal(once.view(np.uint16), chunks.view(np.uint16)) == codec.exact
    np.testing.assert_allclose(once, chunks, atol=float(np.abs(chunks).max()) / 250)


def test_the_zero_tail_of_an_unfinished_chunk_stays_zero(codec):
    _, once = round_trip(codec, kv_like(2))
    assert not once[-1].reshape(-1, 256)[:, 200:].any()


def test_payload_size_follows_from_the_ratio(codec):
    for chunk_bytes in (CHUNK_BYTES, 512 * 1024, 64):
        assert codec.payload_bytes(chunk_bytes) == chunk_bytes * codec.ratio


@pytest.mark.parametrize("chunk_bytes", [0, -64])
def test_no_codec_takes_chunks_of_no_bytes(codec, chunk_bytes):
    with pytest.raises(ValueError, match="chunk"):
        codec.payload_bytes(chunk_bytes)


@pytest.mark.parametrize("chunk_bytes", [63, 65, 96])
def test_int8_takes_whole_groups_only(chunk_bytes):
    with pytest.raises(ValueError, match="whole number of groups"):
        Int8Codec().payload_bytes(chunk_bytes)


def test_what_int8_cannot_represent_none_keeps():
    chunks = kv_like(3)
    chunks[1, 77] = np.nan
    payloads = np.empty((3, CHUNK_BYTES), np.uint8)
    assert Int8Codec().encode_batch(rows(chunks), rows(payloads), CHUNK_BYTES) == [True, False, True]
    assert NoneCodec().encode_batch(rows(chunks), rows(payloads), CHUNK_BYTES) == [True] * 3
    np.testing.assert_array_equal(payloads, chunks.view(np.uint8).reshape(3, -1))


def test_encode_release_gives_memory_back_chunk_by_chunk(codec):
    area = mmap.mmap(-1, 3 * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chunks = np.frombuffer(area, np.float16).reshape(3, -1)
    chunks[:] = kv_like(3)
    expected, _ = round_trip(codec, chunks)
    payloads = np.empty_like(expected)
    sources = np.array(rows(chunks), np.uint64)
    assert codec.encode_release_batch(sources, rows(payloads), CHUNK_BYTES, CHUNK_BYTES) == [True] * 3
    np.testing.assert_array_equal(payloads, expected)
    assert native.resident_bytes(int(sources[0]), 3 * CHUNK_BYTES) == 0


def test_batches_of_different_lengths_are_refused(codec):
    for call in (codec.encode_batch, codec.decode_batch):
        with pytest.raises(ValueError, match=r"2.* 1"):
            call([4096, 8192], [16384], CHUNK_BYTES)


def test_pages_that_the_kernel_keeps_are_an_error(codec, monkeypatch):
    """Only a shared fault of kernel and caller does this; it must not pass for freed memory."""
    monkeypatch.setattr(native, "release", lambda *_: -22)

    def encode(src, dst, num_elements, release_bytes, status):
        status[:] = native.INT8_NOT_RELEASED

    monkeypatch.setattr(native, "int8_encode_release_batch", encode)
    chunk, payload = kv_like(1), np.empty((1, CHUNK_BYTES), np.uint8)
    with pytest.raises(OSError, match="pages"):
        codec.encode_release_batch(rows(chunk), rows(payload), CHUNK_BYTES, CHUNK_BYTES)


def test_codecs_are_found_by_name_only():
    assert codec_names()[0] == "int8"
    assert [codec_by_name(name).name for name in codec_names()] == list(codec_names())
    with pytest.raises(MzdError, match="lz4") as caught:
        codec_by_name("lz4")
    assert caught.value.code == "invalid_params"
    assert caught.value.data["known"] == list(codec_names())
