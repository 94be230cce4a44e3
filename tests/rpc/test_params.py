"""Parameters: every method, every kind of wrong value, the parameter named."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import MzdError
from mzd.messages.requests import ChatMessage, EvictParams, GenerateParams, NoParams, PinParams, TrimLevel
from mzd.rpc.params import CANCEL, EVICT, GENERATE, PIN, SCHEMAS, STATUS, TRACE, TRIM


def refusal(schema, params):
    """data.parameter of the refusal, which must be in the message too."""
    with pytest.raises(MzdError) as caught:
        schema.parse(params)
    assert caught.value.code == "invalid_params"
    assert caught.value.data["parameter"] in caught.value.message
    return caught.value.data["parameter"]


def test_defaults_are_those_of_the_specification():
    assert GENERATE.parse({"prompt": "x"}) == GenerateParams(
        prompt="x",
        max_tokens=256,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        stream=False,
        logprobs=0,
    )


def test_nil_counts_as_not_given():
    params = {
        "prompt": "x",
        "tokens": None,
        "messages": None,
        "max_tokens": None,
        "context": None,
        "seed": None,
    }
    assert GENERATE.parse(params) == GenerateParams(prompt="x")
    assert refusal(GENERATE, {"prompt": None}) == "prompt"


def test_a_whole_request():
    given = {
        "context": "a.b-c_D",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "max_tokens": 0, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": (1 << 64) - 1,
        "stop": ["a", "b"], "stream": True, "logprobs": 5, "request": "mine",
    }  # fmt: skip
    parsed = GENERATE.parse(given)
    assert parsed.messages == (ChatMessage("system", "s"), ChatMessage("user", "u"))
    assert parsed.stop == ("a", "b")
    assert (parsed.temperature, type(parsed.temperature)) == (0.0, float)
    assert parsed.seed == (1 << 64) - 1


def test_case_141_content_may_be_a_list_of_text_parts():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = GENERATE.parse({"messages": [{"role": "user", "content": content}]})
    assert parsed.messages == (ChatMessage("user", "ab"),)


def test_stop_may_be_one_string():
    assert GENERATE.parse({"prompt": "x", "stop": "end"}).stop == ("end",)


OUT_OF_RANGE = [
    ("max_tokens", -1), ("max_tokens", 1 << 31), ("max_tokens", True), ("max_tokens", 5.0),
    ("max_tokens", "5"),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", True),
    ("temperature", "hot"), ("top_k", -1), ("top_k", 1.5), ("top_p", -0.1), ("top_p", 1.1), ("min_p", 2),
    ("seed", -1), ("seed", 1 << 64), ("seed", 1.0), ("seed", False), ("stream", 1), ("stream", "true"),
    ("logprobs", -1), ("logprobs", 101), ("logprobs", True), ("stop", 5), ("stop", ""), ("stop", b"x"),
    ("stop", ["x"] * 17), ("context", ""), ("context", "."), ("context", ".."), ("context", "a/b"),
    ("context", "a" * 65), ("context", "ä"), ("context", "a\n"), ("context", 5), ("context", "a\x00"),
    ("request", ""), ("request", "x" * 129), ("request", 5), ("request", "1:7"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_wrong_values_are_named(name, value):
    assert refusal(GENERATE, {"prompt": "x", name: value}) == name


INSIDE = [
    ({"tokens": [1, True]}, "tokens[1]"),
    ({"tokens": [1, -1]}, "tokens[1]"),
    ({"tokens": [1 << 31]}, "tokens[0]"),
    ({"tokens": [1.0]}, "tokens[0]"),
    ({"tokens": "123"}, "tokens"),
    ({"prompt": b"bytes"}, "prompt"),
    ({"prompt": "not utf-8: \udcff"}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
    ({"messages": [{"content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "", "name": "x"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
    ({"prompt": "x", "stop": ["a", 5]}, "stop[1]"),
    ({"prompt": "x", "tokens": [1]}, "tokens"),
    ({"prompt": "x", "messages": [{"role": "user", "content": ""}]}, "messages"),
    ({}, "prompt"),
    ({"prompt": "x", "promtp": 1}, "promtp"),
    ({"prompt": "x", "promtp": None}, "promtp"),
]


@pytest.mark.parametrize(("params", "named"), INSIDE)
def test_the_very_place_is_named(params, named):
    assert refusal(GENERATE, params) == named


def test_evict_takes_one_of_bytes_and_fraction():
    assert EVICT.parse({"bytes": 0}) == EvictParams(bytes=0)
    assert EVICT.parse({"fraction": 1, "dry_run": True, "context": "c"}) == EvictParams(
        fraction=1.0, context="c", dry_run=True
    )
    assert refusal(EVICT, {}) == "bytes"
    assert refusal(EVICT, {"bytes": 1, "fraction": 0.5}) == "fraction"
    for name, value in (
        ("bytes", -1),
        ("bytes", 1.0),
        ("bytes", 1 << 63),
        ("fraction", 1.01),
        ("fraction", -0.1),
    ):
        assert refusal(EVICT, {name: value}) == name


@pytest.mark.parametrize(
    ("level", "meant"),
    [
        ("TRIM_MEMORY_COMPLETE", TrimLevel.COMPLETE),
        ("complete", TrimLevel.COMPLETE), (80, TrimLevel.COMPLETE),
        ("RUNNING_LOW", TrimLevel.RUNNING_LOW), ("low", TrimLevel.RUNNING_LOW), (10, TrimLevel.RUNNING_LOW),
        ("critical", TrimLevel.RUNNING_CRITICAL),
        ("Background", TrimLevel.BACKGROUND), (59, TrimLevel.BACKGROUND),
        ("moderate", TrimLevel.MODERATE), (1000, TrimLevel.COMPLETE), (5, TrimLevel.RUNNING_MODERATE),
    ],
)  # fmt: skip
def test_trim_knows_androids_levels(level, meant):
    assert TRIM.parse({"level": level}).level is meant


@pytest.mark.parametrize("level", [None, 4, -1, 1001, 10.0, True, "", "much", b"complete", []])
def test_trim_refuses_other_levels(level):
    assert refusal(TRIM, {"level": level}) == "level"


def test_pin_takes_a_context_or_the_model():
    assert PIN.parse({"context": "c", "pinned": True}) == PinParams(pinned=True, context="c")
    assert PIN.parse({"model": True, "pinned": False}) == PinParams(pinned=False, model=True)
    assert PIN.parse({"model": "smollm2", "pinned": True}).model == "smollm2"
    assert refusal(PIN, {"context": "c"}) == "pinned"
    assert refusal(PIN, {"pinned": True}) == "context"
    assert refusal(PIN, {"pinned": True, "context": "c", "model": True}) == "model"
    for model in (False, "", 5):
        assert refusal(PIN, {"pinned": True, "model": model}) == "model"


def test_methods_without_parameters_take_none():
    assert STATUS.parse({}) == NoParams()
    assert refusal(STATUS, {"verbose": True}) == "verbose"


def test_required_ones_are_named_when_missing():
    missing = {"trim": "level", "drop": "context", "tokenize": "text", "detokenize": "tokens"}
    for method, parameter in missing.items():
        assert refusal(SCHEMAS[method], {}) == parameter
    assert refusal(CANCEL, {}) == "request"


def test_the_daemons_own_names_can_be_cancelled_and_traced():
    assert CANCEL.parse({"request": "1:7"}).request == "1:7"
    assert TRACE.parse({"request": "1:7"}).request == "1:7"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.binary(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(SCHEMAS)), st.data())
def test_anything_is_parsed_or_refused(method, data):
    schema = SCHEMAS[method]
    names = st.sampled_from([*schema.fields, "other"]) | st.text()
    params = data.draw(st.dictionaries(names, json_like, max_size=4))
    refusals: list[MzdError] = []
    try:
        schema.parse(params)
    except MzdError as error:
        refusals.append(error)
    for error in refusals:
        assert error.code == "invalid_params"
        assert error.data["parameter"].encode()[:128] in error.message.encode()
