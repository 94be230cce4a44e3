"""Owns the daemon's RPC methods: checked parameters in, results of the contract out."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from mzd.daemon.conversations import Conversation, Conversations
from mzd.daemon.generation import ComputeClient, Generation, Timings
from mzd.daemon.status import StatusReporter
from mzd.daemon.trace import TraceBook
from mzd.daemon.turnstile import Turnstile
from mzd.errors import MzdError
from mzd.memory.context_archive import ContextArchive
from mzd.messages import requests
from mzd.messages.evict_path import DropContext, Evict, EvictOutcome
from mzd.messages.reply import Reply
from mzd.messages.restore_path import RestoreOutcome
from mzd.model.chat_template import ChatTemplate
from mzd.model.text_stream import StopStrings
from mzd.model.tokenizer import Tokenizer
from mzd.policy.eviction_planner import fraction_to_bytes
from mzd.policy.sampling import Sampler, SamplingParams
from mzd.rpc.call import Call, Method
from mzd.rpc.params import SCHEMAS

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Service:
    """What clients can ask for. One generation runs at a time; everything else runs beside it."""

    compute: ComputeClient
    allocator: trio.MemorySendChannel[Any]
    tokenizer: Tokenizer
    template: ChatTemplate | MzdError
    conversations: Conversations
    archive: ContextArchive
    turnstile: Turnstile
    status_reporter: StatusReporter
    context_length: int
    traces: TraceBook

    def methods(self) -> dict[str, Method[Any]]:
        """The table that the RPC server dispatches by."""
        handlers: dict[str, Callable[[Any, Call], Awaitable[Any]]] = {
            "generate": self.generate,
            "evict": self.evict,
            "restore": self.restore,
            "status": self.status,
            "contexts": self.contexts,
            "drop": self.drop,
            "tokenize": self.tokenize,
            "detokenize": self.detokenize,
            "trace": self.trace,
        }
        return {name: Method(SCHEMAS[name], handler) for name, handler in handlers.items()}

    async def generate(self, params: requests.GenerateParams, call: Call) -> dict[str, Any]:
        """Answer a prompt; see the contract's `generate`."""
        sampler = Sampler(_sampling(params))
        timings = Timings(received_s=call.received_s)
        async with self.turnstile.turn():
            timings.started_s = trio.current_time()
            conversation = self.conversations.open(params.context)
            conversation.last_used_s = timings.started_s
            try:
                prompt = self._prompt_ids(params, conversation)
                self._check_fits(prompt)
                generation = self._generation(params, call, conversation, sampler, timings)
                await generation.run(prompt)
                self.traces.note(call.request, generation.first_restore_id)
            finally:
                await self._keep(conversation)
        return _result(generation, with_logprobs=params.logprobs > 0)

    def _generation(
        self,
        params: requests.GenerateParams,
        call: Call,
        conversation: Conversation,
        sampler: Sampler,
        timings: Timings,
    ) -> Generation:
        def said(text: str) -> None:
            call.partial_text = text

        return Generation(
            compute=self.compute,
            tokenizer=self.tokenizer,
            conversation=conversation,
            sampler=sampler,
            context_length=self.context_length,
            max_tokens=params.max_tokens,
            num_logprobs=params.logprobs,
            stops=StopStrings(params.stop),
            notify=call.notify if params.stream else None,
            said=said,
            keep=partial(self._log_tokens, conversation),
            timings=timings,
        )

    async def _keep(self, conversation: Conversation) -> None:
        """Log the token ids, or forget a context that a refused request has just made."""
        conversation.last_used_s = trio.current_time()
        if not conversation.tokens:
            self.conversations.forget(conversation.name)
            return
        with trio.CancelScope(shield=True):
            await self._log_tokens(conversation)

    async def _log_tokens(self, conversation: Conversation) -> None:
        """Bring the log up to date. An answer is never lost for it: the next time adds what is missing."""
        try:
            await self.archive.keep_tokens(conversation.name, conversation.tokens)
        except MzdError as error:
            log.warning("the token log of %s is behind: %s", conversation.name, error)

    def _prompt_ids(self, params: requests.GenerateParams, conversation: Conversation) -> list[int]:
        if params.messages is not None:
            if isinstance(self.template, MzdError):
                raise MzdError(self.template.code, self.template.message, **self.template.data)
            messages = [{"role": m.role, "content": m.content} for m in params.messages]
            return self.template.encode_chat(self.tokenizer, messages)
        if params.tokens is not None:
            self._check_ids(params.tokens)
            return conversation.tokens + list(params.tokens)
        assert params.prompt is not None
        if conversation.tokens:
            return conversation.tokens + self.tokenizer.encode(
                params.prompt, parse_special=True, continues=True
            )
        return self.tokenizer.encode_prompt(params.prompt)

    def _check_ids(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            if token >= self.tokenizer.vocab_size:
                raise MzdError(
                    "invalid_params",
                    f"token {token} is not in the vocabulary of {self.tokenizer.vocab_size}",
                    parameter="tokens",
                )

    def _check_fits(self, prompt: list[int]) -> None:
        if not prompt:
            raise MzdError("invalid_params", "the prompt has no token", parameter="prompt")
        if len(prompt) >= self.context_length:
            raise MzdError(
                "context_full",
                f"the prompt has {len(prompt)} tokens; with the answer, {self.context_length} fit",
                prompt_tokens=len(prompt),
                context_length=self.context_length,
            )

    async def evict(self, params: requests.EvictParams, call: Call) -> dict[str, Any]:
        """Give memory back; see the contract's `evict`."""
        if params.context is not None:
            self.conversations.find(params.context)
        goal = params.bytes if params.bytes is not None else self._fraction_bytes(params.fraction or 0.0)
        reply: Reply[EvictOutcome] = Reply()
        await self.allocator.send(
            Evict(goal, f"request {call.request}", params.dry_run, params.context, reply)
        )
        outcome = await reply.get()
        return {
            "requested_bytes": outcome.requested_bytes,
            "freed_bytes": outcome.freed_bytes,
            "resident_bytes": outcome.resident_bytes,
            "exhausted": outcome.exhausted,
            "warnings": list(outcome.warnings),
            "steps": list(outcome.steps),
        }

    def _fraction_bytes(self, fraction: float) -> int:
        return fraction_to_bytes(fraction, self.status_reporter.full_bytes())

    async def restore(self, params: requests.RestoreParams, call: Call) -> dict[str, Any]:
        """Bring a context and the weights back ahead of a request."""
        async with self.turnstile.turn():
            conversation = (
                self.conversations.find(params.context)
                if params.context is not None
                else self.conversations.last_used()
            )
            outcome = await self._bring_back(conversation or Conversation(""))
        return {
            "restored_bytes": outcome.restored_bytes,
            "resident_bytes": self.status_reporter.resident_bytes(),
        }

    async def _bring_back(self, conversation: Conversation) -> RestoreOutcome:
        """Restore a context; what a damaged chunk held is computed when it is asked for."""
        while True:
            try:
                return await self._restore(conversation)
            except MzdError as error:
                keep_tokens = int(error.data.get("keep_tokens", conversation.computed))
                if error.code != "corrupt_chunk" or keep_tokens >= conversation.computed:
                    raise
                conversation.computed = keep_tokens

    async def _restore(self, conversation: Conversation) -> RestoreOutcome:
        computed = conversation.computed
        restore_id, replies = await self.compute.restore(
            conversation.name, keep_tokens=computed, capacity_tokens=computed, announce=False
        )
        try:
            return await replies.outcome.get()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self.compute.abandon(restore_id)
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self.compute.finish(conversation.name, conversation.computed_ids())

    async def status(self, params: requests.NoParams, call: Call) -> dict[str, Any]:
        """One screen of everything; wakes nothing."""
        return self.status_reporter.status()

    async def contexts(self, params: requests.NoParams, call: Call) -> dict[str, Any]:
        """The list of contexts; wakes nothing."""
        return {"contexts": self.status_reporter.contexts()}

    async def drop(self, params: requests.DropParams, call: Call) -> dict[str, Any]:
        """Forget a context for good, in RAM and on flash. Waits for a generation that runs."""
        if params.context not in self.archive.unusable:
            self.conversations.find(params.context)
        async with self.turnstile.turn():
            reply: Reply[bool] = Reply()
            await self.allocator.send(DropContext(params.context, reply))
            await reply.get()
            await self.archive.forget(params.context)
            self.conversations.forget(params.context)
        return {"dropped": params.context}

    async def trace(self, params: requests.TraceParams, call: Call) -> dict[str, Any]:
        """The lanes of a restore, as Chrome trace events."""
        return {"events": self.traces.events(params.request)}

    async def tokenize(self, params: requests.TokenizeParams, call: Call) -> dict[str, Any]:
        """Text to ids, control tokens parsed."""
        return {"tokens": self.tokenizer.encode(params.text, parse_special=True)}

    async def detokenize(self, params: requests.DetokenizeParams, call: Call) -> dict[str, Any]:
        """Ids to text."""
        self._check_ids(params.tokens)
        return {"text": self.tokenizer.decode(list(params.tokens))}


def _sampling(params: requests.GenerateParams) -> SamplingParams:
    seed = params.seed if params.seed is not None else secrets.randbits(64)
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
    )


def _result(generation: Generation, *, with_logprobs: bool) -> dict[str, Any]:
    answer = generation.answer
    result: dict[str, Any] = {
        "context": generation.conversation.name,
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "usage": generation.usage.as_map(),
        "timings": generation.timings.as_map(),
    }
    if with_logprobs:
        result["logprobs"] = answer.logprobs
    return result
