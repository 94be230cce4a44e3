import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError, MzdError
from mzd.model import pre_tokenizer
from mzd.model.pre_tokenizer import PRE_TOKENIZERS, pre_tokenizer_named

# White space of every kind, marks that only some tables call white space, and what contractions,
# numbers, letters and punctuation are made of.
AWKWARD = (
    " \t\n\r\x0b\x1c\x85\xa0\u2003\u3000\u200b\ufeff'strevmldSTRaZé字かв١½²Ⅷ5。.,!-$<|>=_😀\u0301\u200d\x00"
)
awkward_text = st.text(st.sampled_from(AWKWARD), max_size=40)


def words_of(splitter, text):
    return [word for word, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_segments_have_the_words_of_the_whole_text(name):
    pre = PRE_TOKENIZERS[name]
    splitter = pre.build()

    @given(awkward_text | st.text(max_size=40))
    def check(text):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pre_tokenizer, "SEGMENT_CHARS", 1)
            segments = list(pre.segments(text))
        assert "".join(segments) == text
        assert [word for s in segments for word in words_of(splitter, s)] == words_of(splitter, text)

    check()


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize("text", ["two words", "a line\nanother", "長い文。\n次の文。\n"])
def test_ordinary_text_can_be_cut(name, text, monkeypatch):
    monkeypatch.setattr(pre_tokenizer, "SEGMENT_CHARS", 1)
    assert len(list(PRE_TOKENIZERS[name].segments(text))) > 1


def test_a_run_without_a_boundary_is_refused_by_size():
    pre = pre_tokenizer_named("smollm")
    longest = "A" * pre_tokenizer.RUN_CHARS_MAX
    assert list(pre.segments(longest)) == [longest]
    with pytest.raises(MzdError, match="no word boundary") as caught:
        list(pre.segments("some words " + longest + "A" * pre_tokenizer.SEGMENT_CHARS))
    assert caught.value.code == "invalid_params"


def test_an_unknown_name_is_refused_with_its_value():
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.pre is 'tekken'") as caught:
        pre_tokenizer_named("tekken")
    assert caught.value.data == {"key": "tokenizer.ggml.pre", "value": "tekken"}
