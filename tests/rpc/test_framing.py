"""Frames: cut right whatever the reads, bounded before anything is built."""

from __future__ import annotations

import contextlib
import math
import struct
import tracemalloc
from itertools import pairwise

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mzd.rpc.framing import FrameReader, ProtocolError, unpack_frame
from mzd.rpc.limits import Limits

MIB = 1 << 20
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=40,
)


def read_all(reader: FrameReader, data: bytes) -> list[bytearray]:
    reader.feed(data)
    frames = []
    while (frame := reader.next_frame()) is not None:
        frames.append(frame)
    return frames


@given(st.lists(values, max_size=5), st.lists(st.integers(0, 2000)))
def test_frames_come_out_whole_whatever_the_reads(objects, cuts):
    stream = b"".join(msgpack.packb(value) for value in objects)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = FrameReader(Limits(frame_depth_max=100))
    frames = [f for a, b in pairwise(places) for f in read_all(reader, stream[a:b])]
    assert [unpack_frame(frame) for frame in frames] == objects
    assert reader.buffered_bytes == 0


@given(values)
def test_a_frame_fed_byte_by_byte_ends_at_its_last_byte(value):
    packed = msgpack.packb(value)
    reader = FrameReader(Limits(frame_depth_max=100))
    for byte in packed[:-1]:
        assert read_all(reader, bytes([byte])) == []
    assert read_all(reader, packed[-1:]) == [packed]


@given(st.binary(max_size=200))
@example(b"\xc1")
@example(b"\x92\xc1")
@example(b"\x81\x90\x01")  # a list as a key
@example(b"\xd6\xff")  # half a timestamp
@example(b"\xd7\xff" + b"\xff" * 8)  # a timestamp with too many nanoseconds
def test_any_bytes_give_frames_or_a_protocol_error(data):
    reader = FrameReader(Limits())
    with contextlib.suppress(ProtocolError):
        for frame in read_all(reader, data):
            unpack_frame(frame)


@pytest.mark.parametrize("first", range(256))
def test_every_first_byte_is_sized_as_msgpack_sizes_it(first):
    stream = bytes([first]) + b"\x00\x01" + bytes(300)  # lengths and counts of 0 or 1 where there are any
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(stream)
    try:
        unpacker.skip()
    except msgpack.FormatError:
        with pytest.raises(ProtocolError):
            read_all(FrameReader(Limits()), stream)
        return
    except msgpack.OutOfData:
        assert read_all(FrameReader(Limits()), stream) == []
        return
    reader = FrameReader(Limits())
    reader.feed(stream)
    frame = reader.next_frame()
    assert frame is not None
    assert len(frame) == unpacker.tell()


ANNOUNCEMENTS = {
    "bin": b"\xc6\xff\xff\xff\xff",
    "str": b"\xdb\xff\xff\xff\xff",
    "ext": b"\xc9\xff\xff\xff\xff\x01",
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "array that fits in bytes, not in values": b"\xdd\x00\x10\x00\x00",
    "nested arrays, each within the limit": (b"\xdd\x00\x03\x00\x00") * 10,
    "map of maps": (b"\xdf\x00\x01\x00\x00\xa1k") * 10,
}


@pytest.mark.parametrize("data", ANNOUNCEMENTS.values(), ids=ANNOUNCEMENTS.keys())
def test_case_144_a_few_bytes_cannot_announce_much(data):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            read_all(FrameReader(Limits()), data)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert caught.value.code == "frame_too_large"


def test_nothing_is_built_before_the_frame_is_whole():
    announcing = b"\xdc\xff\xff" * 3  # three lists of 65535 inside each other, within all limits
    reader = FrameReader(Limits())
    tracemalloc.start()
    try:
        assert read_all(reader, announcing) == []
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_depth_is_bounded():
    limits = Limits(frame_depth_max=4)
    assert read_all(FrameReader(limits), b"\x91" * 4 + b"\x01") == [b"\x91" * 4 + b"\x01"]
    with pytest.raises(ProtocolError) as caught:
        read_all(FrameReader(limits), b"\x91" * 5 + b"\x01")
    assert caught.value.code == "invalid_request"


def test_the_largest_frame_passes_and_one_byte_more_does_not():
    limits = Limits(frame_bytes_max=MIB)
    text = b"\xdb" + struct.pack(">I", MIB - 5) + b"x" * (MIB - 5)
    assert read_all(FrameReader(limits), text) == [text]
    with pytest.raises(ProtocolError) as caught:
        read_all(FrameReader(limits), b"\xdb" + struct.pack(">I", MIB - 4))
    assert caught.value.code == "frame_too_large"


def test_a_long_run_of_scalars_stops_at_the_limit_too():
    limits = Limits(frame_bytes_max=100)
    with pytest.raises(ProtocolError):
        read_all(FrameReader(limits), b"\xdc\x00\x50" + (b"\xcf" + bytes(8)) * 80)


def test_text_that_is_not_utf8_survives_to_be_named():
    value = unpack_frame(b"\xa2\xff\xfe")
    with pytest.raises(UnicodeEncodeError):
        value.encode()


@pytest.mark.parametrize("frame", [b"\x81\x01\x02", b"\x81\xc0\x02", b"\x81\x90\x02"])
def test_keys_must_be_strings(frame):
    with pytest.raises(ProtocolError):
        unpack_frame(frame)


def test_floats_that_are_no_numbers_are_left_to_the_checks():
    assert math.isnan(unpack_frame(msgpack.packb(math.nan)))
