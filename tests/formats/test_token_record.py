"""The token log's encoding: round trips, torn tails, damage."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.token_record import HEADER_BYTES, decode_log, encode_header, encode_record, header_crc

MODEL = "5a" * 32
changes = st.lists(
    st.tuples(st.floats(0, 1), st.lists(st.integers(0, 2**32 - 1), max_size=4)), min_size=1, max_size=5
)


def build_log(steps):
    """Encode steps `(where, ids)`; returns the file, and the (offset, tokens) after each step."""
    data = encode_header(context="chat", model_id=MODEL)
    crc, tokens, states = header_crc(data), [], [(HEADER_BYTES, [])]
    for where, ids in steps:
        position = int(where * len(tokens))
        record, crc = encode_record(position, np.array(ids, dtype=np.uint32), previous_crc=crc)
        data += record
        tokens = tokens[:position] + ids
        states.append((len(data), tokens))
    return data, states


@given(changes)
def test_round_trip_of_append_and_forget(steps):
    data, states = build_log(steps)
    content = decode_log(data, context="chat")
    assert content.model_id == MODEL
    assert content.tokens.tolist() == states[-1][1]
    assert content.tokens.dtype == np.uint32
    assert content.valid_bytes == len(data)


@given(changes)
def test_torn_at_every_byte_it_is_what_it_was_before_the_torn_record(steps):
    data, states = build_log(steps)
    for length in range(HEADER_BYTES, len(data)):
        content = decode_log(data[:length], context="chat")
        offset, tokens = max(state for state in states if state[0] <= length)
        assert (content.valid_bytes, content.tokens.tolist()) == (offset, tokens)


@given(changes, st.data())
def test_a_flipped_bit_ends_the_log_before_its_record(steps, data):
    log, states = build_log(steps)
    place = data.draw(st.integers(HEADER_BYTES, len(log) - 1))
    damaged = bytearray(log)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    content = decode_log(bytes(damaged), context="chat")
    offset, tokens = max(state for state in states if state[0] <= place)
    assert (content.valid_bytes, content.tokens.tolist()) == (offset, tokens)


def test_records_cannot_be_left_out_or_exchanged():
    log, states = build_log([(1, [1, 2]), (1, [3, 4]), (1, [5, 6])])
    first, second, third = (log[a[0] : b[0]] for a, b in pairwise(states))
    header = log[:HEADER_BYTES]
    assert decode_log(header + first + third, context="chat").tokens.tolist() == [1, 2]
    assert decode_log(header + second + first + third, context="chat").tokens.tolist() == []


def test_a_count_that_promises_more_than_the_file_holds_allocates_nothing():
    log = encode_header(context="chat", model_id=MODEL) + bytes(4) + b"\xff" * 8
    assert decode_log(log, context="chat").tokens.tolist() == []


@pytest.mark.parametrize("length", range(HEADER_BYTES))
def test_a_short_header_is_refused(length):
    with pytest.raises(FormatError, match="has no header") as error:
        decode_log(encode_header(context="chat", model_id=MODEL)[:length], context="chat")
    assert error.value.code == "corrupt_chunk"


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_a_damaged_header_is_refused(place):
    header = bytearray(encode_header(context="chat", model_id=MODEL))
    header[place] ^= 4
    with pytest.raises(FormatError):
        decode_log(bytes(header), context="chat")


def test_the_log_of_another_context_is_refused():
    with pytest.raises(FormatError, match="not of context other"):
        decode_log(encode_header(context="chat", model_id=MODEL), context="other")
