import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError, MzdError
from mzd.model import pre_tokenizer
from mzd.model.byte_pairs import byte_alphabet
from mzd.model.tokenizer import Tokenizer

IM_START, IM_END, END_OF_TEXT = 1, 2, 0


def tiny_metadata(**changes):
    """Metadata of a vocabulary of single bytes, one merge and four special tokens; None removes a key."""
    characters = list(byte_alphabet())
    tokens = [*characters, "ab", "<s>", "</s>", "<note>", "<0xFF>"]
    types = [1] * 257 + [3, 3, 4, 6]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (keys | changes).items() if v is not None}


def test_smollm2_tokens_equal_the_golden_ones(smollm2, smollm2_golden):
    for case in smollm2_golden["tokenize"]:
        assert smollm2.encode(case["text"], parse_special=True) == case["tokens"], case["text"]


def test_smollm2_plain_tokens_equal_llama_cpp(smollm2, smollm2_golden):
    for case in smollm2_golden["tokenize"]:
        expected = case.get("llama_cpp_plain", case["tokens"])
        assert smollm2.encode(case["text"], parse_special=False) == expected, case["text"]


def test_smollm2_text_equals_the_golden_one(smollm2, smollm2_golden):
    for case in smollm2_golden["tokenize"]:
        assert smollm2.decode(case["tokens"], show_control=True) == case["decoded"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "exaone4", "gemma2"])
def test_small_models_equal_the_golden_tokens(small_models, name):
    tokenizer = Tokenizer.from_metadata(small_models[name]["metadata"])
    for case in small_models[name]["tokenize"]:
        assert tokenizer.encode(case["text"], parse_special=True) == case["tokens"], case["text"]


def test_each_numeric_character_stands_alone(smollm2):
    # transformers builds from GGUF without this split: " ½" would become [3351, 138].
    assert smollm2.encode(" ½", parse_special=False) == [216, 16738]


def test_case_132_text_from_users_holds_no_control_token(smollm2):
    names = "".join(smollm2.special_ids)
    ids = smollm2.encode(names, parse_special=False)
    assert not any(map(smollm2.is_control, ids))
    assert smollm2.decode(ids) == names


def test_the_longest_special_token_wins():
    tokens = [*byte_alphabet(), "ab", "<s>", "<s>>", "<note>", "<0xFF>"]
    tokenizer = Tokenizer.from_metadata(tiny_metadata(tokens=tokens))
    assert tokenizer.encode("<s>><s>", parse_special=True) == [258, 257]


# Planes 4 to 15 and a few letters of plane 0 need bytes for which SmolLM2 has no token.
@given(st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs"])))
def test_decoding_gives_back_what_was_encoded(text):
    tokenizer = Tokenizer.from_metadata(TINY)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(st.text(max_size=60))
def test_special_tokens_and_the_text_between_make_up_the_text(text):
    tokenizer = Tokenizer.from_metadata(TINY)
    mixed = text[:30] + "<s>" + text[30:] + "</s><note>"
    parts = [tokenizer.token_text(p) if isinstance(p, int) else p for p in tokenizer.split_special(mixed)]
    assert "".join(parts) == mixed
    assert "" not in parts


TINY = tiny_metadata()


def test_control_tokens_are_hidden_unless_asked_for(smollm2):
    ids = [IM_START, 4093, 198, 26843, IM_END]
    assert smollm2.decode(ids) == "user\nHi"
    assert smollm2.decode(ids, show_control=True) == "<|im_start|>user\nHi<|im_end|>"
    assert smollm2.token_bytes(IM_END) == b""


def test_every_kind_of_token_has_its_bytes():
    tokenizer = Tokenizer.from_metadata(TINY)
    assert tokenizer.decode_bytes([256, 259, 260]) == b"ab<note>\xff"
    unused = Tokenizer.from_metadata(tiny_metadata(token_type=[1] * 257 + [3, 3, 5, 6]))
    assert unused.token_bytes(259, show_control=True) == b""


@pytest.mark.parametrize("token_id", [-1, 261, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(MzdError, match="not in the vocabulary of 261") as caught:
        Tokenizer.from_metadata(TINY).decode([97, token_id])
    assert (caught.value.code, caught.value.data["parameter"]) == ("invalid_params", "tokens")


def test_end_tokens_are_those_named_and_those_well_known(smollm2, small_models):
    assert smollm2.end_tokens == {IM_END, END_OF_TEXT}
    assert Tokenizer.from_metadata(small_models["llama"]["metadata"]).end_tokens == {1, 4}
    assert Tokenizer.from_metadata(small_models["exaone4"]["metadata"]).end_tokens == {6}
    assert Tokenizer.from_metadata(tiny_metadata(eos_token_id=3, eot_token_id=5)).end_tokens == {3, 5, 258}


def test_case_129_a_raw_prompt_begins_with_one_bos(caplog):
    tokenizer = Tokenizer.from_metadata(TINY)
    assert tokenizer.encode_prompt("ab") == [257, 256]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode_prompt("<s>ab") == [257, 256]
    assert "begins with the BOS token already" in caplog.text


def test_case_130_no_bos_is_invented():
    assert Tokenizer.from_metadata(tiny_metadata(bos_token_id=None)).encode_prompt("ab") == [256]
    assert Tokenizer.from_metadata(tiny_metadata(add_bos_token=False)).encode_prompt("ab") == [256]
    assert Tokenizer.from_metadata(tiny_metadata(add_bos_token=None)).encode_prompt("ab") == [256]
    llama = tiny_metadata(add_bos_token=None, pre="llama-bpe")
    assert Tokenizer.from_metadata(llama).encode_prompt("ab") == [257, 256]


def test_llama_bpe_takes_a_whole_word_without_merges():
    tokens = [*byte_alphabet(), "xyz", "<s>", "</s>", "<note>", "<0xFF>"]
    with_word = {"tokens": tokens, "merges": []}
    assert Tokenizer.from_metadata(tiny_metadata(pre="llama-bpe", **with_word)).encode(
        "xyz", parse_special=False
    ) == [256]
    assert 256 not in Tokenizer.from_metadata(tiny_metadata(**with_word)).encode("xyz", parse_special=False)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"merges": None}, "merges", r"has no tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, "merges", "is no pair"),
        ({"merges": ["a c"]}, "merges", "no token 'ac'"),
        ({"merges": ["ab " + "c" * 1000]}, "merges", "no token 'ccc"),
        ({"merges": [7]}, "merges", "no array of str"),
        ({"tokens": None}, "tokens", r"has no tokenizer\.ggml\.tokens"),
        ({"model": None}, "model", r"has no tokenizer\.ggml\.model"),
        ({"model": "bert"}, "model", "'bert'"),
        ({"pre": "tekken"}, "pre", "'tekken'"),
        ({"token_type": [1]}, "token_type", "1 entries for 261 tokens"),
        ({"token_type": [9] * 261}, "token_type", "9 is not a valid"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "is no int"),
        ({"eos_token_id": True}, "eos_token_id", "is no int"),
    ],
)
def test_wrong_metadata_is_refused_by_key(changes, key, reason):
    with pytest.raises(FormatError, match=reason) as caught:
        Tokenizer.from_metadata(tiny_metadata(**changes))
    assert caught.value.code == "invalid_model"
    assert caught.value.data["key"] == f"tokenizer.ggml.{key}"


@pytest.mark.parametrize(
    "role", ["bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask", "fim_pre"]
)
@pytest.mark.parametrize("token_id", [261, 2**32 - 1, -1])
def test_a_role_for_a_token_that_is_not_there_is_refused(role, token_id):
    """Roles that mean nothing here too: such a file was put together from two."""
    with pytest.raises(FormatError, match=f"is {token_id}; there are 261 tokens") as caught:
        Tokenizer.from_metadata(tiny_metadata(**{f"{role}_token_id": token_id}))
    assert caught.value.data["key"] == f"tokenizer.ggml.{role}_token_id"
    Tokenizer.from_metadata(tiny_metadata(**{f"{role}_token_id": 260}))


def test_a_file_without_pre_is_read_as_llama_cpp_does(caplog):
    assert Tokenizer.from_metadata(tiny_metadata(pre=None)).encode("ab", parse_special=False) == [256]
    assert "has no tokenizer.ggml.pre" in caplog.text


def test_long_prose_is_encoded_in_segments_to_the_same_tokens(smollm2, monkeypatch):
    text = "Words, more words;\n\n\tand 1234 numbers. " * 300
    monkeypatch.setattr(pre_tokenizer, "SEGMENT_CHARS", len(text))
    whole = smollm2.encode(text, parse_special=False)
    monkeypatch.setattr(pre_tokenizer, "SEGMENT_CHARS", 50)
    assert smollm2.encode(text, parse_special=False) == whole


@pytest.mark.parametrize("character", ["A", " ", "\n", "😀"])
def test_case_133_ten_million_of_one_character_are_refused_by_size(smollm2, character):
    with pytest.raises(MzdError, match="no word boundary") as caught:
        smollm2.encode(character * 10_000_000, parse_special=True)
    assert caught.value.code == "invalid_params"


def test_a_lone_surrogate_is_refused(smollm2):
    with pytest.raises(MzdError, match="no valid Unicode at character 3") as caught:
        smollm2.encode("abc\udcff", parse_special=False)
    assert (caught.value.code, caught.value.data["parameter"]) == ("invalid_params", "text")
