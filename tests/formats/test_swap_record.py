"""The swap journal: round trips, and what is left of it when it is torn or damaged anywhere."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.swap_record import (
    RECORD_BYTES,
    FreedRecord,
    StoredRecord,
    decode_journal,
    encode_header,
    encode_record,
    live_records,
    place_seed,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
stored_records = st.builds(
    StoredRecord,
    layer=u32,
    chunk=u32,
    generation=u64,
    num_tokens=u32,
    tokens_hash=st.binary(min_size=16, max_size=16),
    model_id=st.binary(min_size=32, max_size=32).map(bytes.hex),
    codec_name=st.text("abcxyz0189-_", min_size=1, max_size=16),
    codec_version=st.integers(0, 2**16 - 1),
    offset_bytes=u64,
    slot_bytes=u32,
    payload_bytes=u32,
    payload_crc=u32,
)
freed_records = st.builds(FreedRecord, layer=u32, chunk=u32, generation=u64)
records = st.one_of(stored_records, freed_records)

EXAMPLE = StoredRecord(3, 7, 1, 200, b"h" * 16, "ab" * 32, "int8", 1, 8192, 4096, 4000, 0xDEADBEEF)


def encode_journal(entries, context="chat"):
    return encode_header(context=context) + b"".join(
        encode_record(entry, context=context) for entry in entries
    )


@given(st.lists(records, max_size=5))
def test_round_trip(entries):
    data = encode_journal(entries)
    assert len(data) == RECORD_BYTES * (1 + len(entries))
    journal = decode_journal(data, context="chat")
    assert journal.records == tuple(entries)
    assert (journal.valid_bytes, journal.num_damaged) == (len(data), 0)


@given(st.lists(records, min_size=1, max_size=3))
def test_torn_at_every_byte_it_keeps_every_whole_record(entries):
    data = encode_journal(entries)
    for length in range(len(data)):
        journal = decode_journal(data[:length], context="chat")
        whole = max(0, length // RECORD_BYTES - 1)
        assert journal.records == tuple(entries[:whole])
        assert journal.valid_bytes == length // RECORD_BYTES * RECORD_BYTES
        assert journal.num_damaged == 0


@given(st.lists(records, min_size=1, max_size=3), st.binary(max_size=RECORD_BYTES * 2))
def test_garbage_behind_the_last_record_is_ignored(entries, garbage):
    data = encode_journal(entries)
    journal = decode_journal(data + garbage, context="chat")
    assert journal.records == tuple(entries)
    assert (journal.valid_bytes, journal.num_damaged) == (len(data), 0)


def test_a_flipped_bit_loses_its_record_and_no_other():
    entries = [EXAMPLE, FreedRecord(1, 2, 3), EXAMPLE]
    data = encode_journal(entries)
    for place in range(RECORD_BYTES, len(data) - RECORD_BYTES):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        journal = decode_journal(bytes(damaged), context="chat")
        lost = place // RECORD_BYTES - 1
        assert journal.records == tuple(entry for i, entry in enumerate(entries) if i != lost)
        assert (journal.valid_bytes, journal.num_damaged) == (len(data), 1)


def test_a_damaged_header_is_refused_wherever_it_is_damaged():
    header = encode_header(context="chat")
    for place in range(RECORD_BYTES):
        damaged = bytearray(header)
        damaged[place] ^= 0x10
        with pytest.raises(FormatError) as error:
            decode_journal(bytes(damaged), context="chat")
        assert error.value.code == "corrupt_chunk"


def test_another_version_is_refused_by_number():
    header = bytearray(encode_header(context="chat"))
    header[8] = 9
    with pytest.raises(FormatError, match="version 9, this program reads 1"):
        decode_journal(bytes(header), context="chat")


def test_the_journal_of_another_context_is_refused():
    with pytest.raises(FormatError, match="not of context other"):
        decode_journal(encode_journal([EXAMPLE]), context="other")


def test_a_record_of_another_context_does_not_count():
    data = encode_header(context="chat") + encode_record(EXAMPLE, context="other")
    assert decode_journal(data, context="chat").records == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec_name": ""},
        {"codec_name": "a" * 17},
        {"tokens_hash": b"short"},
        {"model_id": "ab"},
        {"layer": -1},
        {"payload_bytes": 2**32},
        {"codec_version": 2**16},
    ],
)
def test_what_does_not_fit_is_refused(wrong):
    fields = {name: getattr(EXAMPLE, name) for name in EXAMPLE.__slots__} | wrong
    with pytest.raises(ValueError, match=r"does not fit|wrong size"):
        encode_record(StoredRecord(**fields), context="chat")


places = st.tuples(st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.tuples(places, st.booleans()), max_size=12))
def test_replay_keeps_the_last_word_on_every_chunk(changes):
    entries, model = [], {}
    for generation, ((layer, chunk), is_stored) in enumerate(changes, start=1):
        if is_stored:
            entry = StoredRecord(layer, chunk, generation, 1, b"h" * 16, "ab" * 32, "none", 1, 0, 4096, 1, 0)
            model[layer, chunk] = entry
        else:
            entry = FreedRecord(layer, chunk, generation)
            model.pop((layer, chunk), None)
        entries.append(entry)
    assert live_records(entries) == model
    assert live_records(reversed(entries)) == model


def test_every_part_of_the_place_changes_the_seed():
    place = {
        "context": "a",
        "layer": 1,
        "chunk": 2,
        "codec_name": "int8",
        "codec_version": 1,
        "model_id": "00",
    }
    others = {
        "context": "b",
        "layer": 2,
        "chunk": 1,
        "codec_name": "none",
        "codec_version": 2,
        "model_id": "01",
    }
    seeds = [place_seed(**place)] + [place_seed(**(place | {name: others[name]})) for name in place]
    assert all(a != b for a, b in itertools.combinations(seeds, 2))


def test_numbers_that_run_together_are_different_places():
    common = {"context": "a", "codec_name": "int8", "codec_version": 1, "model_id": "00"}
    assert place_seed(layer=1, chunk=11, **common) != place_seed(layer=11, chunk=1, **common)
