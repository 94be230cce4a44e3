"""One answer, with allocator and device played by the test: what is asked of them, what the client gets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from mzd.daemon.conversations import Conversation
from mzd.daemon.generation import KEEP_TOKENS, ComputeClient, Generation, Timings
from mzd.errors import MzdError
from mzd.messages.compute import RunStep, StepDone
from mzd.messages.restore_path import AbandonRestore, FinishUse, RestoreContext, RestoreOutcome
from mzd.model.text_stream import StopStrings
from mzd.policy.sampling import Sampler, SamplingParams

VOCAB = 32
END = 31
UBATCH = 4
CHUNK = 256


class Letters:
    """A tokenizer whose token i is the i-th letter; `END` ends."""

    end_tokens = frozenset({END})

    def token_bytes(self, token, *, show_control=False):
        return b"" if token == END else bytes([97 + token % 26])


class Machine:
    """Allocator and device: a step's logits prefer `next_token(last token)`; `failures` come first."""

    def __init__(self, next_token=lambda token: (token + 1) % 26, step_s=1.0):
        self.next_token = next_token
        self.step_s = step_s
        self.failures = []
        self.restores, self.steps, self.finished, self.abandoned = [], [], [], []
        self.to_allocator, self.inbox = trio.open_memory_channel(64)
        self.to_gpu, self.gpu = trio.open_memory_channel(1)

    async def run(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.allocate)
            nursery.start_soon(self.compute)

    async def allocate(self):
        async for message in self.inbox:
            match message:
                case RestoreContext():
                    self.restores.append(message)
                    message.replies.planned.set(100)
                    if not self.failures:
                        outcome = RestoreOutcome(message.restore_id, 100, 1.0)
                        message.replies.outcome.set(outcome)
                case FinishUse():
                    self.finished.append(message)
                case AbandonRestore():
                    self.abandoned.append(message.restore_id)

    async def compute(self):
        async for step in self.gpu:
            self.steps.append(step)
            await self.serve(step)

    async def serve(self, step: RunStep):
        await trio.testing.wait_all_tasks_blocked()  # its restore was asked for first, and is known by now
        if self.failures:
            error = self.failures.pop(0)
            self.restores[-1].replies.outcome.fail(error)
            step.reply.fail(error)
            return
        await trio.sleep(self.step_s)
        if step.ticket.abandoned:
            step.reply.fail(MzdError("cancelled", "abandoned"))
            return
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, self.next_token(int(step.tokens[-1]))] = 5.0
        step.reply.set(StepDone(logits if step.logits != "none" else logits[:0], 0, 1))


def generation_of(machine, conversation=None, **changes):
    """A greedy generation on the machine; what it notifies is in `.notify.told` if streamed."""
    told, said, logged = [], [], []

    async def kept():
        logged.append(list(fields["conversation"].tokens))

    async def notify(method, params):
        told.append((method, params))

    fields = {
        "compute": ComputeClient(machine.to_allocator, machine.to_gpu, UBATCH),
        "tokenizer": Letters(),
        "conversation": conversation or Conversation("c"),
        "sampler": Sampler(SamplingParams(temperature=0)),
        "context_length": 1000,
        "max_tokens": 5,
        "num_logprobs": 0,
        "stops": StopStrings(()),
        "notify": notify,
        "said": said.append,
        "keep": kept,
        "timings": Timings(received_s=trio.current_time(), started_s=trio.current_time()),
    }
    generation = Generation(**(fields | changes))
    return SimpleNamespace(of=generation, told=told, said=said, logged=logged)


@asynccontextmanager
async def running(machine):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(machine.run)
        yield machine
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_a_new_context_is_prefilled_in_ubatches_and_decoded(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine)
        await it.of.run(list(range(10)))
    assert it.of.answer.tokens == [10, 11, 12, 13, 14]
    assert it.of.answer.text == "klmno"
    assert it.of.answer.finish_reason == "length"
    assert [(len(s.tokens), s.position, s.logits) for s in machine.steps] == [
        (4, 0, "none"),
        (4, 4, "none"),
        (2, 8, "last"),
        *((1, position, "last") for position in range(10, 14)),
    ]
    assert (machine.restores[0].keep_tokens, machine.restores[0].capacity_tokens) == (0, CHUNK)
    assert it.of.usage.as_map() == {
        "prompt_tokens": 10,
        "reused_tokens": 0,
        "computed_tokens": 10,
        "recomputed_tokens": 0,
        "completion_tokens": 5,
    }


async def test_the_last_token_said_is_computed_only_when_it_is_needed(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine)
        await it.of.run([1, 2, 3])
    assert it.of.conversation.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert it.of.conversation.computed == 7
    assert machine.finished[-1].tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [([1, 2, 3, 4, 5], 3), ([1, 2, 9], 2), ([1, 2, 3], 2), ([1, 2], 1), ([9, 9], 0)],
)
async def test_what_the_context_shares_is_reused_and_one_token_is_always_computed(
    autojump_clock, prompt, reused
):
    """The context has KV of [1, 2, 3] and one more token without."""
    conversation = Conversation("c", [1, 2, 3, 4], computed=3, once_computed=3)
    async with running(Machine()) as machine:
        it = generation_of(machine, conversation, max_tokens=0)
        await it.of.run(prompt)
    assert (it.of.usage.reused, it.of.usage.computed) == (reused, len(prompt) - reused)
    assert machine.restores[0].keep_tokens == reused
    assert conversation.tokens == prompt
    assert conversation.computed == len(prompt)


async def test_a_damaged_chunk_is_computed_again_from_the_ids(autojump_clock):
    conversation = Conversation("c", list(range(20)), computed=20, once_computed=20)
    async with running(Machine()) as machine:
        machine.failures = [
            MzdError("corrupt_chunk", "planted", keep_tokens=12),
            MzdError("corrupt_chunk", "again", keep_tokens=4),
        ]
        it = generation_of(machine, conversation, max_tokens=1)
        await it.of.run([*range(20), 20, 21])
    assert [restore.keep_tokens for restore in machine.restores] == [20, 12, 4]
    usage = it.of.usage
    assert (usage.reused, usage.computed, usage.recomputed) == (4, 18, 16)
    assert it.of.answer.tokens == [22]


@pytest.mark.parametrize("data", [{}, {"keep_tokens": 20}])
async def test_damage_that_leaves_no_less_than_before_is_an_error_and_no_loop(autojump_clock, data):
    conversation = Conversation("c", list(range(20)), computed=20, once_computed=20)
    async with running(Machine()) as machine:
        machine.failures = [MzdError("corrupt_chunk", "planted", **data)]
        it = generation_of(machine, conversation)
        with pytest.raises(MzdError, match="planted"):
            await it.of.run([*range(20), 20, 21])
    assert len(machine.restores) == 1


async def test_a_request_that_fails_before_anything_was_computed_may_be_sent_again(autojump_clock):
    conversation = Conversation("c", [1, 2, 3], computed=3, once_computed=3)
    async with running(Machine()) as machine:
        machine.failures = [MzdError("insufficient_memory", "planted")]
        with pytest.raises(MzdError, match="planted"):
            await generation_of(machine, conversation).of.run([1, 2, 3, 4])
        assert conversation.tokens == [1, 2, 3]
        await generation_of(machine, conversation, max_tokens=1).of.run([1, 2, 3, 4])
    assert conversation.tokens == [1, 2, 3, 4, 5]
    assert [finish.tokens.tolist() for finish in machine.finished] == [[1, 2, 3], [1, 2, 3, 4]]


async def test_an_end_token_ends_and_is_not_said(autojump_clock):
    async with running(Machine(next_token=lambda token: END if token == 3 else token + 1)) as machine:
        it = generation_of(machine)
        await it.of.run([1])
    assert it.of.answer.tokens == [2, 3, END]
    assert (it.of.answer.text, it.of.answer.finish_reason) == ("cd", "stop")


async def test_a_stop_string_ends_and_nothing_of_it_is_said(autojump_clock):
    """Case 136: its beginning is held back until it is clear that it is none."""
    async with running(Machine()) as machine:
        it = generation_of(machine, stops=StopStrings(("ef", "cx")), max_tokens=9)
        await it.of.run([1])
    assert (it.of.answer.text, it.of.answer.finish_reason) == ("cd", "stop")
    assert it.of.answer.tokens == [2, 3, 4, 5]
    told = "".join(params["text"] for method, params in it.told if method == "token")
    assert told == "cd"


async def test_what_was_held_back_is_said_at_the_end(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine, stops=StopStrings(("cde-",)), max_tokens=3)
        await it.of.run([1])
    assert it.of.answer.text == "cde"
    assert "".join(params["text"] for method, params in it.told if method == "token") == "cde"
    assert it.said[-1] == "cde"


async def test_the_end_of_the_context_is_a_length(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine, context_length=8, max_tokens=50)
        await it.of.run([0, 1, 2, 3, 4])
    assert it.of.answer.tokens == [5, 6, 7]
    assert it.of.answer.finish_reason == "length"
    assert all(restore.capacity_tokens <= 8 for restore in machine.restores)
    assert max(step.position for step in machine.steps) < 8


async def test_progress_comes_before_the_tokens(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine)
        await it.of.run(list(range(10)))
    kinds = [params.get("phase", method) for method, params in it.told]
    assert kinds.index("restoring") < kinds.index("prefill") < kinds.index("token")
    assert [p["done"] for m, p in it.told if p.get("phase") == "prefill"] == [4, 8]
    assert [p["token"] for m, p in it.told if m == "token"] == it.of.answer.tokens


async def test_logprobs_name_the_chosen_token_and_the_likeliest(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine, num_logprobs=2, max_tokens=2)
        await it.of.run([1])
    assert [step["token"] for step in it.of.answer.logprobs] == [2, 3]
    for step in it.of.answer.logprobs:
        assert step["top"][0] == {"token": step["token"], "logprob": step["logprob"]}
        assert len(step["top"]) == 2
        assert step["logprob"] < 0


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_times_add_up(autojump_clock, max_tokens):
    async with running(Machine(step_s=1.0)) as machine:
        it = generation_of(machine, max_tokens=max_tokens)
        await it.of.run(list(range(8)))
    times = it.of.timings.as_map()
    assert times["queue_s"] == 0
    assert times["prefill_s"] == pytest.approx(2.0)
    assert times["ttft_s"] == pytest.approx(2.0)
    assert times["decode_s"] == pytest.approx(max(0, max_tokens - 1))


@pytest.mark.parametrize("cancel_s", [0.5, 1.5, 2.5, 4.5])
async def test_cancelled_it_keeps_what_was_computed(autojump_clock, cancel_s):
    """In the first ubatch, the second, the first token, and a later one."""
    async with running(Machine(step_s=1.0)) as machine:
        it = generation_of(machine)
        with trio.move_on_after(cancel_s) as scope:
            await it.of.run([0, 1, 2, 3, 4, 5])
        assert scope.cancelled_caught
        assert machine.steps[-1].ticket.abandoned
        assert machine.steps[-1].reply.is_settled
        await trio.testing.wait_all_tasks_blocked()
    done = {0.5: 0, 1.5: 4, 2.5: 6, 4.5: 8}[cancel_s]
    assert it.of.conversation.computed == done
    assert machine.finished[-1].tokens.tolist() == list(range(done))
    assert it.of.conversation.tokens[:done] == list(range(done))


async def test_room_for_more_tokens_is_asked_for_where_it_ends(autojump_clock):
    """A step never runs past the capacity that its restore was given, and every chunk is asked for once."""
    async with running(Machine(step_s=0.0)) as machine:
        it = generation_of(machine, context_length=700, max_tokens=600)
        await it.of.run(list(range(10)))
    capacity = {restore.restore_id: restore.capacity_tokens for restore in machine.restores}
    assert list(capacity.values()) == [CHUNK, 2 * CHUNK, 700]
    for step in machine.steps:
        assert step.position + len(step.tokens) <= capacity[step.restore_id]


async def test_the_prompt_is_logged_before_it_is_computed_and_the_answer_as_it_grows(autojump_clock):
    async with running(Machine()) as machine:
        it = generation_of(machine, max_tokens=2 * KEEP_TOKENS + 1)
        await it.of.run([0, 1, 2])
    assert it.logged[0] == [0, 1, 2]
    assert [len(tokens) for tokens in it.logged[1:]] == [3 + KEEP_TOKENS, 3 + 2 * KEEP_TOKENS]
