"""Owns the contexts as conversations: names, token ids, how many of them have KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from mzd.errors import MzdError


@dataclass(slots=True)
class Conversation:
    """One context. The first `computed` of `tokens` have KV, resident or not.

    `once_computed` of them had it at some time: what lies between was lost, and is computed again.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    once_computed: int = 0
    last_used_s: float = 0.0

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """How many leading ids of `tokens` are this context's own."""
        known = np.asarray(self.tokens[: len(tokens)], dtype=np.int64)
        differs = np.nonzero(known != np.asarray(tokens[: len(known)], dtype=np.int64))[0]
        return int(differs[0]) if len(differs) else len(known)

    def continue_with(self, tokens: Sequence[int], computed: int) -> None:
        """Become `tokens`, of which the first `computed` have KV; what followed here is forgotten."""
        self.once_computed = min(self.once_computed, self.common_prefix(tokens))
        self.tokens = list(tokens)
        self.computed = computed

    def advance_to(self, computed: int) -> None:
        """The KV of the first `computed` tokens stands."""
        self.computed = computed
        self.once_computed = max(self.once_computed, computed)

    def computed_ids(self) -> NDArray[np.uint32]:
        """(computed,) uint32: the ids whose KV stands."""
        return np.asarray(self.tokens[: self.computed], dtype=np.uint32)


def since_wall_time(written_s: float) -> float:
    """A time of the wall clock as one of trio's, whose zero is anywhere; what lies ahead is now."""
    age_s = max(0.0, time.time() - written_s)
    return trio.current_time() - age_s


class Conversations:
    """The daemon's contexts by name; an unknown name is a new one, up to a limit.

    Args:
        check_name: raises MzdError for a name that a new context may not have.
    """

    def __init__(self, limit: int, check_name: Callable[[str], None]) -> None:
        self._limit = limit
        self._check_name = check_name
        self._by_name: dict[str, Conversation] = {}
        self._created = 0

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, name: str | None) -> Conversation:
        """The context of that name, made if there is none; no name makes one with a new name.

        Raises:
            MzdError: `context_limit`, and what `check_name` refuses with.
        """
        name = name or self._new_name()
        if name not in self._by_name:
            self._check_name(name)
            if len(self._by_name) >= self._limit:
                raise MzdError(
                    "context_limit",
                    f"there are {self._limit} contexts already; drop one first",
                    limit=self._limit,
                )
            self._by_name[name] = Conversation(name)
        return self._by_name[name]

    def adopt(self, conversation: Conversation) -> None:
        """Take in a context of an earlier run, whatever the limit is now."""
        self._by_name[conversation.name] = conversation

    def find(self, name: str) -> Conversation:
        """The context of that name.

        Raises:
            MzdError: `unknown_context`.
        """
        if name not in self._by_name:
            raise MzdError("unknown_context", f"there is no context {name!r}", context=name)
        return self._by_name[name]

    def last_used(self) -> Conversation | None:
        """The context that was used last, if there is any."""
        return max(self._by_name.values(), key=lambda c: c.last_used_s, default=None)

    def forget(self, name: str) -> None:
        """Take the context off the list."""
        self._by_name.pop(name, None)

    def _new_name(self) -> str:
        while True:
            self._created += 1
            name = f"context-{self._created}"
            if name not in self._by_name and self._is_free(name):
                return name

    def _is_free(self, name: str) -> bool:
        try:
            self._check_name(name)
        except MzdError:
            return False
        return True
