"""Conversations: what of a prompt is known already, and which names there are."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.daemon.conversations import Conversation, Conversations, since_wall_time
from mzd.errors import MzdError

IDS = st.lists(st.integers(0, 3), max_size=12)


def allow_all(name):
    """Every name is free."""


@given(known=IDS, prompt=IDS)
def test_the_common_prefix_is_the_longest_one(known, prompt):
    length = Conversation("c", list(known)).common_prefix(prompt)
    assert known[:length] == prompt[:length]
    assert length in (len(known), len(prompt)) or known[length] != prompt[length]


@given(known=IDS, prompt=IDS, data=st.data())
def test_what_was_computed_once_counts_as_far_as_the_tokens_are_the_same(known, prompt, data):
    conversation = Conversation("c", list(known))
    conversation.advance_to(data.draw(st.integers(0, len(known))))
    common, once = conversation.common_prefix(prompt), conversation.once_computed
    conversation.continue_with(prompt, 0)
    assert conversation.tokens == prompt
    assert conversation.once_computed == min(once, common)


def test_kv_that_was_lost_was_computed_once():
    conversation = Conversation("c", [1, 2, 3, 4])
    conversation.advance_to(4)
    conversation.computed = 1
    conversation.advance_to(2)
    assert (conversation.computed, conversation.once_computed) == (2, 4)
    assert conversation.computed_ids().tolist() == [1, 2]
    assert conversation.computed_ids().dtype == "uint32"


def test_an_unknown_name_is_a_new_context_and_a_known_one_is_it():
    conversations = Conversations(4, allow_all)
    assert conversations.open("c") is conversations.open("c") is conversations.find("c")
    assert len(conversations) == 1
    with pytest.raises(MzdError) as raised:
        conversations.find("d")
    assert raised.value.code == "unknown_context"


def test_without_a_name_each_is_a_new_one_beside_those_that_clients_named():
    conversations = Conversations(9, allow_all)
    conversations.open("context-1")
    names = {conversations.open(None).name for _ in range(3)}
    assert len(names) == 3
    assert len(conversations) == 4


def test_a_new_name_is_never_one_that_may_not_be_had():
    def refuse(name):
        if name == "context-1":
            raise MzdError("model_changed", "planted")

    conversations = Conversations(9, refuse)
    assert conversations.open(None).name == "context-2"
    with pytest.raises(MzdError, match="planted"):
        conversations.open("context-1")
    assert len(conversations) == 1


def test_the_limit_is_for_new_ones_only():
    conversations = Conversations(1, allow_all)
    conversations.adopt(Conversation("a"))
    conversations.adopt(Conversation("b"))  # from an earlier run with a higher limit
    conversations.open("a")
    with pytest.raises(MzdError) as raised:
        conversations.open("c")
    assert (raised.value.code, raised.value.data["limit"]) == ("context_limit", 1)
    conversations.forget("a")
    conversations.forget("b")
    conversations.open("c")


def test_the_last_used():
    conversations = Conversations(4, allow_all)
    assert conversations.last_used() is None
    for name, used_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        conversations.open(name).last_used_s = used_s
    assert conversations.last_used().name == "b"
    conversations.forget("b")
    assert conversations.last_used().name == "c"


async def test_a_time_of_the_wall_clock_becomes_an_age(monkeypatch, mock_clock):
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    assert since_wall_time(4900.0) == mock_clock.current_time() - 100.0
    assert since_wall_time(9000.0) == mock_clock.current_time()  # the clock was set back: used just now
