"""Joining checksums, against the extension that sums whole buffers."""

from hypothesis import given
from hypothesis import strategies as st

from mzd import _native
from mzd.formats.crc32c import concatenated


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_is_the_checksum_of_the_whole(first, second):
    joined = concatenated(_native.crc32c_buffer(first), _native.crc32c_buffer(second), len(second))
    assert joined == _native.crc32c_buffer(first + second)


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_any_number_of_pieces_joins(pieces):
    crc = 0
    for piece in pieces:
        crc = concatenated(crc, _native.crc32c_buffer(piece), len(piece))
    assert crc == _native.crc32c_buffer(b"".join(pieces))


def test_large_pieces_join():
    zeros = bytes(70_000_000)
    assert concatenated(_native.crc32c_buffer(b"x"), _native.crc32c_buffer(zeros), len(zeros)) == (
        _native.crc32c_buffer(zeros, _native.crc32c_buffer(b"x"))
    )
