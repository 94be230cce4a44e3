"""Owns chats as prompts: the model file's template, and that only the template makes control tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

from mzd.errors import MzdError
from mzd.model.template_sandbox import (
    SandboxedTemplate,
    TemplateRefusal,
    failing_line,
    spread_template,
)
from mzd.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Parts = list[int | str]

_KEY: Final = "tokenizer.chat_template"
_ROLE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PROBE: Final = "mzd probes"
_PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)


class ChatTemplate:
    """The template of a model file.

    Args:
        source: Jinja, in the dialect of transformers.
        bos_token: what `bos_token` stands for in it; empty if the model has none.
        eos_token: the same for `eos_token`.

    Raises:
        MzdError: `invalid_template`: the source is no Jinja; `data["line"]` and `data["column"]` say where.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self._source = source
        self._constants = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._spread = spread_template(source)
        try:
            self._template = SandboxedTemplate(self._spread)
        except Exception as error:  # RecursionError and OverflowError too: the source decides what goes wrong
            raise self._invalid(error) from error
        self._wants_parts = self._probe_content()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a GGUF file.

        Raises:
            MzdError: `no_chat_template`, `invalid_template`.
        """
        source = metadata.get(_KEY)
        if not isinstance(source, str) or not source:
            raise MzdError(
                "no_chat_template", f"the model file has no {_KEY}; give `prompt` or `tokens`", key=_KEY
            )
        bos_token, eos_token = map(tokenizer.token_text, (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source, bos_token=bos_token, eos_token=eos_token)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, to read: control tokens that users wrote look like the template's.

        Args:
            messages: maps with `role` and `content`, both strings.
            add_generation_prompt: end with the beginning of the assistant's answer.

        Raises:
            MzdError: `invalid_params`: a message is malformed, or the template refuses the conversation;
                `invalid_template`: the template fails, `data["line"]` and `data["column"]` say where.
        """
        check_messages(messages)
        return self._render(messages, datetime.now(), add_generation_prompt)

    def encode_chat(
        self, tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation; with the BOS once if the model expects it.

        Words are those of the whole text: template and content may share one. Control tokens come from the
        template alone: it renders disguised content, in which nothing looks like a special token. A template
        that looks for "</think>" in the content does not find it then. Where the disguise thus changes the
        text, the undisguised text is used, provided that no control token in it can come from the content.

        Raises:
            MzdError: as `render`, and `invalid_params` for text that cannot be encoded.
        """
        check_messages(messages)
        parts = self._parts(tokenizer, messages, add_generation_prompt)
        return tokenizer.with_bos(_encode_parts(tokenizer, parts))

    def _parts(self, tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool) -> Parts:
        """The template's special tokens as ids and the text between them."""
        now = datetime.now()  # one for both texts
        contents = [message["content"] for message in messages]
        disguise = Disguise(tokenizer.special_ids, (self._source, *contents))
        disguised = [{**message, "content": disguise.put_on(message["content"])} for message in messages]
        plain_text = self._render(messages, now, add_generation_prompt)
        text = self._render(disguised, now, add_generation_prompt)
        parts: Parts = [
            part if isinstance(part, int) else disguise.take_off(part)
            for part in tokenizer.split_special(text)
        ]
        if disguise.take_off(text) == plain_text:
            return parts
        return _safer(tokenizer, contents, parts, list(tokenizer.split_special(plain_text)))

    def _render(self, messages: Sequence[Message], now: datetime, add_generation_prompt: bool) -> str:
        if self._wants_parts:
            messages = [_in_parts(message) for message in messages]
        return self._run(messages, now, add_generation_prompt)

    def _run(self, messages: Sequence[Message], now: datetime, add_generation_prompt: bool) -> str:
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(self._constants | variables, now=now)
        except TemplateRefusal as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise MzdError("invalid_params", message, parameter="messages") from error
        except Exception as error:  # a template may provoke any of Python's errors
            raise self._invalid(error) from error

    def _invalid(self, error: Exception) -> MzdError:
        spread_line = failing_line(error)
        line, column = (None, None) if spread_line is None else self._spread.place(spread_line)
        place = "" if line is None else f", line {line}, column {column}"
        reason = str(error) or type(error).__name__
        message = f"the model's chat template{place}: {reason}"
        return MzdError("invalid_template", message, line=line, column=column)

    def _probe_content(self) -> bool:
        """Whether the template shows content only as a list of parts. One that shows none fails when used."""
        probe = {"role": "user", "content": _PROBE}
        failure: MzdError | None = None
        for message in (probe, _in_parts(probe)):
            try:
                if _PROBE in self._run([message], datetime.now(), True):
                    return message is not probe
            except MzdError as error:
                failure = error
        log.warning("the chat template cannot show a message: %s", failure or "its text does not appear")
        return False


class Disguise:
    """Private characters in place of those with which special tokens begin and end.

    Disguised text holds no special token and can begin or end none that reaches into what is around it. Every
    character stands for one, and white space for itself, so lengths and trimming stay.

    Args:
        special_tokens: what must not appear.
        texts: everything the disguise may get mixed with; its characters are none of theirs.

    Raises:
        MzdError: `invalid_params`: the texts use up nearly all private characters.
    """

    def __init__(self, special_tokens: Iterable[str], texts: Iterable[str]) -> None:
        edges = sorted({char for token in special_tokens for char in (token[0], token[-1])})
        taken = set().union(*texts)
        free = islice((chr(code) for code in _PRIVATE_USE if chr(code) not in taken), len(edges))
        pairs = list(zip(edges, free, strict=False))
        if len(pairs) < len(edges):
            raise MzdError("invalid_params", "the text uses all private characters", parameter="messages")
        self._on = str.maketrans(dict(pairs))
        self._off = str.maketrans({private: edge for edge, private in pairs})

    def put_on(self, text: str) -> str:
        """`text` without a special token."""
        return text.translate(self._on)

    def take_off(self, text: str) -> str:
        """`text` as it was."""
        return text.translate(self._off)


def check_messages(messages: Any) -> None:
    """Require a list of maps, each with the strings `role` and `content` and nothing else.

    Raises:
        MzdError: `invalid_params`; `data["parameter"]` names the place, such as `messages[2].role`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise _bad("messages", "is a list of at least one message")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _bad(place, "is a map with role and content")
        for key in message.keys() - {"role", "content"}:
            raise _bad(f"{place}.{key}", "is not known")
        if not isinstance(message.get("content"), str):
            raise _bad(f"{place}.content", "is a string")
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise _bad(f"{place}.role", "is a name such as user")


def _bad(parameter: str, rule: str) -> MzdError:
    return MzdError("invalid_params", f"{parameter} {rule}", parameter=parameter)


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _safer(tokenizer: Tokenizer, contents: Iterable[str], disguised: Parts, plain: Parts) -> Parts:
    """`plain` if no control token in it can come from the content, else `disguised`."""

    def control(parts: Iterable[int | str]) -> list[int]:
        return [part for part in parts if isinstance(part, int) and tokenizer.is_control(part)]

    forged = any(control(tokenizer.split_special(content)) for content in contents)
    return disguised if forged or control(plain) != control(disguised) else plain


def _encode_parts(tokenizer: Tokenizer, parts: Parts) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids.extend([part] if isinstance(part, int) else tokenizer.encode(part, parse_special=False))
    return ids
