from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mzd.errors import MzdError
from mzd.model.text_stream import STOP_CHARS_MAX, STOPS_MAX, StopStrings, TextStream


class Pieces:
    """A tokenizer whose token n is the nth of the given pieces."""

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, token_id, *, show_control=False):
        return self.pieces[token_id]


def cut(whole, places):
    bounds = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[start:end] for start, end in pairwise(bounds)]


# Bytes near the borders of UTF-8: continuation, too short and overlong leads, surrogates, beyond U+10FFFF.
near_utf8 = st.lists(
    st.sampled_from([b"\x80", b"\xbf", b"\xc0", b"\xc2", b"\xe0", b"\xe2\x82", b"\xed\xa0", b"\xef\xbb\xbf"])
    | st.sampled_from([b"\xf0\x9f\x98", b"\xf0\x80", b"\xf4\x90", b"\xf5", b"\xff", b"a", "€😀é".encode()]),
).map(b"".join)
places = st.lists(st.integers(0, 100), max_size=8)


@given(near_utf8 | st.binary(), places)
@example(b"\xe2\x82(", [1, 2])
@example(b"\xf0\x9f\x98", [1])
def test_case_135_any_split_gives_the_text_of_all_bytes(data, places):
    pieces = cut(data, places)
    stream = TextStream(Pieces(pieces))
    texts = [stream.push(token) for token in range(len(pieces))]
    assert "".join(texts) + stream.finish() == data.decode("utf-8", "replace")


@given(st.text(), places)
def test_every_piece_is_whole_characters(text, places):
    pieces = cut(text.encode("utf-8", "surrogatepass"), places)
    stream = TextStream(Pieces(pieces))
    for token in range(len(pieces)):
        stream.push(token).encode()  # no half of anything


def test_maximal_subparts_are_replaced_one_by_one():
    # Unicode 15, table 3-11: bytes of truncated sequences.
    data = bytes.fromhex("E1 80 E2 F0 91 92 F1 BF 41")
    stream = TextStream(Pieces([data[i : i + 1] for i in range(len(data))]))
    assert "".join(map(stream.push, range(len(data)))) == "����A"


def test_an_unfinished_character_is_replaced_at_the_end():
    stream = TextStream(Pieces([b"ok\xf0\x9f"]))
    assert (stream.push(0), stream.finish(), stream.finish()) == ("ok", "�", "")


def test_tokens_of_a_model_stream_whole_emoji(smollm2):
    stream = TextStream(smollm2)
    ids = smollm2.encode("Hi😀!", parse_special=False)
    texts = [stream.push(token) for token in ids]
    assert "".join(texts) == "Hi😀!"
    assert "�" not in "".join(texts)
    assert texts.count("") == 2  # the emoji is three tokens here and comes with the last


def test_control_tokens_are_no_text_unless_asked_for(smollm2):
    assert TextStream(smollm2).push(2) == ""
    assert TextStream(smollm2, show_control=True).push(2) == "<|im_end|>"


def feed(stops, pieces):
    """All text that came out, and whether it was stopped."""
    search, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = search.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + search.finish(), False


def first_complete(stops, text):
    """Reference: read character by character; the first moment at which the text ends with a stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


few = st.text("ab ", max_size=20)
stop_lists = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4)


@given(stop_lists, few, places)
@example(["abcd", "bc"], "abcd", [])
@example(["aab"], "aaab", [1, 2, 3])
def test_the_result_does_not_depend_on_the_split(stops, text, places):
    assert feed(stops, cut(text, places)) == first_complete(stops, text)


@given(stop_lists, few)
def test_just_what_may_become_a_stop_is_held_back(stops, text):
    search, shown = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        emitted, stopped = search.push(text[end - 1])
        shown += emitted
        if stopped:
            break
        tails = (text[start:end] for start in range(end + 1))
        held = next(tail for tail in tails if not tail or any(stop.startswith(tail) for stop in stops))
        assert shown + held == text[:end]


def test_case_136_a_stop_across_tokens_is_found_and_not_leaked():
    search = StopStrings(["beta gamma"])
    assert search.push("alpha be") == ("alpha ", False)
    assert search.push("ta ga") == ("", False)
    assert search.push("mma delta") == ("", True)
    assert search.push("more") == ("", True)
    assert search.finish() == ""


def test_a_stop_that_does_not_come_is_given_back():
    search = StopStrings(["beta gamma"])
    assert search.push("beta ") == ("", False)
    assert search.push("blocker") == ("beta blocker", False)
    assert search.push("!be") == ("!", False)
    assert search.finish() == "be"


def test_without_stops_text_passes():
    assert StopStrings([]).push("text") == ("text", False)


@pytest.mark.parametrize("stops", [[""], ["a" * (STOP_CHARS_MAX + 1)], ["a"] * (STOPS_MAX + 1)])
def test_stops_out_of_bounds_are_refused(stops):
    with pytest.raises(MzdError) as caught:
        StopStrings(stops)
    assert (caught.value.code, caught.value.data["parameter"]) == ("invalid_params", "stop")
