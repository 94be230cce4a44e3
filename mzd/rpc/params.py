"""Owns the parameters of every method: a table of names, checks and what excludes what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from mzd.errors import MzdError
from mzd.messages import requests
from mzd.rpc import checks
from mzd.rpc.checks import Check, MismatchError

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ParamsSchema(Generic[P]):
    """What one method takes. Defaults are those of the dataclass it becomes.

    Attributes:
        becomes: the dataclass that `parse` returns.
        fields: every parameter and its check.
        required: parameters that must be there.
        one_of: parameters of which exactly one must be there; () for no such group.
        names_request: `request` is the client's name for this very request.
    """

    becomes: type[P]
    fields: Mapping[str, Check]
    required: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    names_request: bool = False

    def parse(self, params: Mapping[str, Any]) -> P:
        """Check `params`; nil counts as not given.

        Raises:
            MzdError: `invalid_params`; `data.parameter` is the first wrong one.
        """
        given = {name: value for name, value in params.items() if value is not None}
        self._check_names(params, given)
        return self.becomes(**{name: self._check(name, value) for name, value in given.items()})

    def _check_names(self, params: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        for name in params:
            if name not in self.fields:
                raise invalid_params(name, "is unknown")
        for name in self.required:
            if name not in given:
                raise invalid_params(name, "is missing")
        self._check_one_of([name for name in self.one_of if name in given])

    def _check_one_of(self, chosen: list[str]) -> None:
        choices = ", ".join(self.one_of)
        if self.one_of and not chosen:
            raise invalid_params(self.one_of[0], f"is missing: give one of {choices}")
        if len(chosen) > 1:
            raise invalid_params(chosen[1], f"is given beside {chosen[0]}: give one of {choices}")

    def _check(self, name: str, value: Any) -> Any:
        try:
            return self.fields[name](value)
        except MismatchError as mismatch:
            raise invalid_params(name + mismatch.place, f"must be {mismatch.expected}") from None


def invalid_params(parameter: str, problem: str) -> MzdError:
    """The error for one parameter; its name may be a client's, so it is made printable and short."""
    name = parameter[:128].encode("utf-8", "backslashreplace").decode()
    return MzdError("invalid_params", f"{name} {problem}", parameter=name)


_BYTES_MAX: Final = (1 << 63) - 1
_NOTHING: Final[ParamsSchema[requests.NoParams]] = ParamsSchema(requests.NoParams, {})

GENERATE: Final = ParamsSchema(
    requests.GenerateParams,
    {
        "context": checks.context_name,
        "prompt": checks.text,
        "messages": checks.messages,
        "tokens": checks.tokens,
        "max_tokens": checks.integer(0, checks.TOKEN_MAX),
        "temperature": checks.number(0, 100),
        "top_k": checks.integer(0, checks.TOKEN_MAX),
        "top_p": checks.number(0, 1),
        "min_p": checks.number(0, 1),
        "seed": checks.integer(0, (1 << 64) - 1),
        "stop": checks.stop_strings,
        "stream": checks.boolean,
        "logprobs": checks.integer(0, 100),
        "request": checks.new_request_name,
    },
    one_of=("prompt", "messages", "tokens"),
    names_request=True,
)
EVICT: Final = ParamsSchema(
    requests.EvictParams,
    {
        "bytes": checks.integer(0, _BYTES_MAX),
        "fraction": checks.number(0, 1),
        "context": checks.context_name,
        "dry_run": checks.boolean,
    },
    one_of=("bytes", "fraction"),
)
RESTORE: Final = ParamsSchema(requests.RestoreParams, {"context": checks.context_name})
TRIM: Final = ParamsSchema(requests.TrimParams, {"level": checks.trim_level}, required=("level",))
CANCEL: Final = ParamsSchema(requests.CancelParams, {"request": checks.request_name}, required=("request",))
STATUS: Final = _NOTHING
CONTEXTS: Final = _NOTHING
DROP: Final = ParamsSchema(requests.DropParams, {"context": checks.context_name}, required=("context",))
PIN: Final = ParamsSchema(
    requests.PinParams,
    {"context": checks.context_name, "model": checks.model, "pinned": checks.boolean},
    required=("pinned",),
    one_of=("context", "model"),
)
TOKENIZE: Final = ParamsSchema(requests.TokenizeParams, {"text": checks.text}, required=("text",))
DETOKENIZE: Final = ParamsSchema(requests.DetokenizeParams, {"tokens": checks.tokens}, required=("tokens",))
METRICS: Final = _NOTHING
TRACE: Final = ParamsSchema(requests.TraceParams, {"request": checks.request_name})

# Every method but `cancel`, which the server answers itself.
SCHEMAS: Final[Mapping[str, ParamsSchema[Any]]] = {
    "generate": GENERATE,
    "evict": EVICT,
    "restore": RESTORE,
    "trim": TRIM,
    "status": STATUS,
    "contexts": CONTEXTS,
    "drop": DROP,
    "pin": PIN,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "metrics": METRICS,
    "trace": TRACE,
}
