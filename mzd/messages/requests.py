"""Owns what clients ask for, once it has been checked: one dataclass a method, defaults included."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `role`: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """Produce tokens. Exactly one of `prompt`, `messages`, `tokens` is not None.

    Attributes:
        context: the context to continue; None makes a new one.
        prompt: raw text that continues the context.
        messages: the whole conversation, rendered by the model's template.
        tokens: token ids that continue the context; below 2^31, not checked against the vocabulary.
        max_tokens: tokens to produce at most; 0 only brings the context up to date.
        top_k: 0 for no limit.
        seed: unsigned 64-bit; None for one of the daemon's choice.
        stop: strings that end the text; never empty ones.
        logprobs: how many of the likeliest tokens to name at each step; 0 for none.
    """

    context: str | None = None
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int = 0
    request: str | None = None


@dataclass(frozen=True, slots=True)
class EvictParams:
    """Give memory back. Exactly one of `bytes` and `fraction` is not None.

    `fraction`: 0 to 1, of the whole model memory (`full_bytes` in `status`).
    """

    bytes: int | None = None
    fraction: float | None = None
    context: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class RestoreParams:
    """Bring a context back; None for the one used last."""

    context: str | None = None


class TrimLevel(IntEnum):
    """Android's ComponentCallbacks2 levels, by the numbers that onTrimMemory gets."""

    RUNNING_MODERATE = 5
    RUNNING_LOW = 10
    RUNNING_CRITICAL = 15
    UI_HIDDEN = 20
    BACKGROUND = 40
    MODERATE = 60
    COMPLETE = 80


@dataclass(frozen=True, slots=True)
class TrimParams:
    """Give back what Android's level stands for."""

    level: TrimLevel


@dataclass(frozen=True, slots=True)
class CancelParams:
    """End one running request, by its name."""

    request: str


@dataclass(frozen=True, slots=True)
class DropParams:
    """Forget one context for good."""

    context: str


@dataclass(frozen=True, slots=True)
class PinParams:
    """Keep something resident, or no longer. Exactly one of `context` and `model` is not None.

    `model` is the loaded model's name, or True for whichever is loaded.
    """

    pinned: bool
    context: str | None = None
    model: str | bool | None = None


@dataclass(frozen=True, slots=True)
class TokenizeParams:
    """Text to token ids."""

    text: str


@dataclass(frozen=True, slots=True)
class DetokenizeParams:
    """Token ids to text; ids below 2^31, not checked against the vocabulary."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceParams:
    """The events of one request; None for the last restore."""

    request: str | None = None


@dataclass(frozen=True, slots=True)
class NoParams:
    """What `status`, `contexts` and `metrics` take: nothing."""
