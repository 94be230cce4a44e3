"""Owns `mzd run` and `mzd chat`: one answer, or a conversation."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from mzd.cli.generation import generate, sampling_params
from mzd.cli.output import Exit, Output, note
from mzd.cli.transcript import Transcript
from mzd.errors import MzdError
from mzd.rpc.blocking_client import BlockingClient


def run(arguments: Namespace, output: Output) -> int:
    """`mzd run PROMPT`: one answer, streamed; with `--json` the whole result at once.

    In a named context the conversation goes on: the turns so far are sent along, and computed once only.
    """
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    params = sampling_params(arguments)
    with BlockingClient(arguments.socket) as client:
        if arguments.raw:
            result = generate(client, {**params, "prompt": text}, stream=not output.as_json)
        else:
            result = _take_turn(client, arguments, params, text, output)
    output.result(result, lambda _: None)  # a person has read it already
    return Exit.DONE


def _take_turn(
    client: BlockingClient, arguments: Namespace, params: Mapping[str, Any], text: str, output: Output
) -> Mapping[str, Any]:
    transcript = Transcript(arguments.socket, arguments.context) if arguments.context else None
    said = transcript.messages() if transcript is not None else []
    goes_on = bool(said)
    if not goes_on:
        said = _system(arguments)
    said.append({"role": "user", "content": text})
    try:
        result = generate(client, {**params, "messages": said}, stream=not output.as_json)
    except MzdError as error:
        if error.code == "cancelled" and transcript is not None:
            # What was said until Ctrl-C was said: the next turn goes on from there.
            transcript.keep([*said, {"role": "assistant", "content": str(error.data.get("text", ""))}])
        raise
    if transcript is not None:
        if goes_on and not _was_known(result["usage"]):
            note(_lost(transcript, arguments.context, result["usage"]["prompt_tokens"]))
        transcript.keep([*said, {"role": "assistant", "content": result["text"]}])
    return result


def _was_known(usage: Mapping[str, Any]) -> bool:
    """Whether the daemon still had tokens of the conversation, be it without their KV."""
    return bool(usage["reused_tokens"] or usage["recomputed_tokens"])


def _lost(transcript: Transcript, context: str, num_tokens: int) -> str:
    return (
        f"mzd: the daemon knew nothing of context {context} any more: it has computed all {num_tokens} "
        f"tokens from the turns kept in {transcript.path}; to begin anew: mzd drop {context}"
    )


def _system(arguments: Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def chat(arguments: Namespace, output: Output) -> int:
    """`mzd chat`: read a line, answer it, until the end of input. With `--json` a line of JSON per answer."""
    conversation = _Conversation(sampling_params(arguments), _system(arguments))
    with BlockingClient(arguments.socket) as client:
        for line in _lines():
            conversation.say(client, line, output)
    return Exit.DONE


def _lines() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


class _Conversation:
    """The turns so far. They all go to the daemon each time: it reuses what its context knows already."""

    def __init__(self, params: Mapping[str, Any], messages: list[dict[str, str]]) -> None:
        self._params = dict(params)
        self._messages = messages

    def say(self, client: BlockingClient, line: str, output: Output) -> None:
        """One turn. What was said of a cancelled answer counts; a refused turn is forgotten."""
        question = {"role": "user", "content": line}
        params = {**self._params, "messages": [*self._messages, question]}
        try:
            result = generate(client, params, stream=not output.as_json)
        except MzdError as error:
            self._take_refusal(question, error, output)
            return
        output.result(result, lambda _: None)
        self._params["context"] = result["context"]
        self._messages += [question, {"role": "assistant", "content": result["text"]}]

    def _take_refusal(self, question: dict[str, str], error: MzdError, output: Output) -> None:
        if error.code == "no_daemon":
            raise error
        if error.code == "cancelled" and not output.as_json:
            self._messages += [question, {"role": "assistant", "content": str(error.data.get("text", ""))}]
            note("(cancelled)")
        else:
            output.error(error)
