"""Owns one answer from prompt to last token: what is reused, computed, sampled and sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import trio
from numpy.typing import NDArray

from mzd.daemon.conversations import Conversation
from mzd.errors import MzdError
from mzd.messages.compute import RunStep, StepDone, StepTicket
from mzd.messages.reply import Reply
from mzd.messages.restore_path import AbandonRestore, FinishUse, RestoreContext, RestoreReplies
from mzd.model.text_stream import StopStrings, TextStream
from mzd.model.tokenizer import Tokenizer
from mzd.policy.sampling import Sampler
from mzd.policy.units import CHUNK_TOKENS

Notify = Callable[[str, dict[str, Any]], Awaitable[None]]


KEEP_TOKENS = 16
"""Tokens said between two writes of the token log: what a SIGKILL in the middle of an answer may cost."""


@dataclass(slots=True)
class Usage:
    """Tokens of one request; `prompt = reused + computed` (spec: before the first new one)."""

    reused: int = 0
    computed: int = 0
    recomputed: int = 0
    completion: int = 0

    def as_map(self) -> dict[str, int]:
        """The RPC's `usage`."""
        return {
            "prompt_tokens": self.reused + self.computed,
            "reused_tokens": self.reused,
            "computed_tokens": self.computed,
            "recomputed_tokens": self.recomputed,
            "completion_tokens": self.completion,
        }


@dataclass(slots=True)
class Timings:
    """Monotonic seconds of the moments of one request."""

    received_s: float
    started_s: float = 0.0
    restored_s: float = 0.0
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0

    def as_map(self) -> dict[str, float]:
        """The RPC's `timings`. Restore and prefill overlap: both lie inside the time to the first token.

        Where no token was asked for, the first one would have come when the prefill ended.
        """
        first_token_s = self.first_token_s or self.prefilled_s
        return {
            "ttft_s": first_token_s - self.received_s,
            "queue_s": self.started_s - self.received_s,
            "restore_s": max(0.0, self.restored_s - self.started_s),
            "prefill_s": self.prefilled_s - self.started_s,
            "decode_s": self.ended_s - first_token_s,
        }


class ComputeClient:
    """The generation's side of the messages to the allocator and to gpu_prefill."""

    def __init__(
        self,
        allocator: trio.MemorySendChannel[Any],
        steps: trio.MemorySendChannel[RunStep],
        ubatch_tokens: int,
    ) -> None:
        self._allocator = allocator
        self._steps = steps
        self.ubatch_tokens = ubatch_tokens
        self._next_id = 0

    async def restore(
        self, context: str, *, keep_tokens: int, capacity_tokens: int, announce: bool
    ) -> tuple[int, RestoreReplies]:
        """Ask for a context; its readiness events go to gpu_prefill when `announce` is set."""
        self._next_id += 1
        replies = RestoreReplies(Reply(), Reply())
        await self._allocator.send(
            RestoreContext(self._next_id, context, keep_tokens, capacity_tokens, announce, replies)
        )
        return self._next_id, replies

    async def abandon(self, restore_id: int) -> None:
        """Dispatch no further unit of this restore."""
        await self._allocator.send(AbandonRestore(restore_id))

    async def finish(self, context: str, tokens: NDArray[np.uint32]) -> None:
        """End the protection of the context's units."""
        await self._allocator.send(FinishUse(context, tokens))

    async def step(
        self,
        restore_id: int,
        tokens: Sequence[int],
        position: int,
        *,
        logits: Literal["none", "last"],
        trace: bool = False,
    ) -> StepDone:
        """Run one step and wait for it.

        Cancelled: the step is abandoned and has ended when this returns, so its units may move.
        """
        reply: Reply[StepDone] = Reply()
        ticket = StepTicket()
        ids = np.asarray(tokens, dtype=np.int32)
        await self._steps.send(RunStep(restore_id, ids, position, logits, ticket, reply, trace))
        try:
            return await reply.get()
        except trio.Cancelled:
            ticket.abandoned = True
            with trio.CancelScope(shield=True):
                await self.abandon(restore_id)
                await _settled(reply)
            raise


async def _settled(reply: Reply[StepDone]) -> None:
    try:
        await reply.get()
    except MzdError:
        return  # the step ended as it should: nobody wants its result


@dataclass(slots=True)
class Answer:
    """What one generation has said so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Generation:
    """One request that has its turn. `run` may be called once.

    Cancelled: at the end of the layer or token in hand; the context keeps what was computed.
    """

    compute: ComputeClient
    tokenizer: Tokenizer
    conversation: Conversation
    sampler: Sampler
    context_length: int
    max_tokens: int
    num_logprobs: int
    stops: StopStrings
    notify: Notify | None
    said: Callable[[str], None]
    keep: Callable[[], Awaitable[None]]
    timings: Timings
    usage: Usage = field(default_factory=Usage)
    answer: Answer = field(default_factory=Answer)
    first_restore_id: int = -1
    _restore_id: int = -1
    _capacity: int = 0

    async def run(self, prompt: list[int]) -> None:
        """Compute what is not known of `prompt`, then decode up to `max_tokens`.

        Raises:
            MzdError: the codes of restoring: `insufficient_memory`, `weights_unavailable`, `model_changed`.
        """
        before = self.conversation.tokens
        known = self.conversation.common_prefix(prompt)
        reused = min(known, self.conversation.computed, len(prompt) - 1)
        self.conversation.continue_with(prompt, reused)
        try:
            await self.keep()
            logits = await self._prefill_with_retry(prompt, reused)
            self.timings.prefilled_s = trio.current_time()
            await self._decode(logits)
        except BaseException:
            if self.conversation.computed <= reused:
                self.conversation.tokens = before  # nothing of the prompt was taken: it may be sent again
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self.compute.finish(self.conversation.name, self.conversation.computed_ids())
        self.timings.ended_s = trio.current_time()

    async def _prefill_with_retry(self, prompt: list[int], reused: int) -> NDArray[np.float32]:
        """Prefill; where a chunk turns out to be damaged, compute its range again from the token ids."""
        while True:
            try:
                return await self._prefill(prompt, reused)
            except MzdError as error:
                if error.code != "corrupt_chunk" or "keep_tokens" not in error.data:
                    raise
                if int(error.data["keep_tokens"]) >= reused:
                    raise
                reused = int(error.data["keep_tokens"])
                self.conversation.computed = reused

    async def _prefill(self, prompt: list[int], reused: int) -> NDArray[np.float32]:
        self.usage.reused, self.usage.computed = reused, len(prompt) - reused
        self.usage.recomputed = max(0, min(self.conversation.once_computed, len(prompt) - 1) - reused)
        self._restore_id, restored = await self._reserve(reused, len(prompt) + 1)
        self.first_restore_id = self._restore_id
        failure: MzdError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_restore, restored)
            try:
                logits = await self._run_ubatches(prompt, reused)
            except MzdError as error:  # out of the nursery as itself, not in a group
                failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return logits

    async def _reserve(self, keep: int, capacity: int) -> tuple[int, RestoreReplies]:
        """Ask for room up to the end of a chunk: a restore a token took longer than the token itself."""
        self._capacity = min(-(-capacity // CHUNK_TOKENS) * CHUNK_TOKENS, self.context_length)
        return await self.compute.restore(
            self.conversation.name, keep_tokens=keep, capacity_tokens=self._capacity, announce=True
        )

    async def _watch_restore(self, restore: RestoreReplies) -> None:
        """Tell the client how far its memory is back, beside the prefill that uses it."""
        try:
            total = await restore.planned.get()
            if total:
                await self._tell("restoring", 0, total)
            await restore.outcome.get()
        except MzdError:
            return  # the step over these units fails with the same error and tells
        self.timings.restored_s = trio.current_time()
        if total:
            await self._tell("restoring", total, total)

    async def _run_ubatches(self, prompt: list[int], reused: int) -> NDArray[np.float32]:
        total = len(prompt) - reused
        for start in range(reused, len(prompt), self.compute.ubatch_tokens):
            part = prompt[start : start + self.compute.ubatch_tokens]
            last = start + len(part) == len(prompt)
            done = await self.compute.step(
                self._restore_id, part, start, logits="last" if last else "none", trace=start == reused
            )
            self.conversation.advance_to(start + len(part))
            if not last:
                await self._tell("prefill", self.conversation.computed - reused, total)
        row: NDArray[np.float32] = done.logits[0]
        return row

    async def _tell(self, phase: str, done: int, total: int) -> None:
        if self.notify is not None:
            await self.notify("progress", {"phase": phase, "done": done, "total": total})

    async def _decode(self, logits: NDArray[np.float32]) -> None:
        stream = TextStream(self.tokenizer)
        for count in range(self.max_tokens):
            token = self.sampler.sample(logits)
            self._note(token, logits)
            if count == 0:
                self.timings.first_token_s = trio.current_time()
            if token in self.tokenizer.end_tokens:
                self.answer.finish_reason = "stop"
                break
            stopped = await self._say(stream.push(token), token)
            if stopped:
                self.answer.finish_reason = "stop"
                return
            if count + 1 == self.max_tokens or len(self.conversation.tokens) >= self.context_length:
                break
            if (count + 1) % KEEP_TOKENS == 0:
                await self.keep()
            logits = await self._next_logits(token)
        await self._say_rest(stream)

    def _note(self, token: int, logits: NDArray[np.float32]) -> None:
        self.answer.tokens.append(token)
        self.conversation.tokens.append(token)
        self.usage.completion += 1
        if self.num_logprobs:
            self.answer.logprobs.append(self._logprobs_of(token, logits))

    def _logprobs_of(self, token: int, logits: NDArray[np.float32]) -> dict[str, Any]:
        chosen = self.sampler.logprob(logits, token)
        top = self.sampler.top_logprobs(logits, self.num_logprobs)
        return {
            "token": token,
            "logprob": chosen,
            "top": [{"token": other, "logprob": value} for other, value in top],
        }

    async def _say(self, text: str, token: int) -> bool:
        """Send what may be sent; True when a stop string ended the answer."""
        emitted, stopped = self.stops.push(text)
        await self._send(emitted, token)
        return stopped

    async def _say_rest(self, stream: TextStream) -> None:
        emitted, stopped = self.stops.push(stream.finish())
        rest = emitted if stopped else emitted + self.stops.finish()
        if stopped:
            self.answer.finish_reason = "stop"
        if rest:
            await self._send(rest, None)  # what a stop string held back, or half a character: no token's own

    async def _send(self, text: str, token: int | None) -> None:
        self.answer.text += text
        self.said(self.answer.text)
        if self.notify is not None:
            await self.notify("token", {"text": text, "token": token})

    async def _next_logits(self, token: int) -> NDArray[np.float32]:
        position = len(self.conversation.tokens) - 1
        if position >= self._capacity:
            self._restore_id, _ = await self._reserve(position, position + 1)
        done = await self.compute.step(self._restore_id, [token], position, logits="last")
        self.conversation.advance_to(position + 1)
        row: NDArray[np.float32] = done.logits[0]
        return row
