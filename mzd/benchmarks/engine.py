"""Owns the bench `engine`: tokens a second of long prompt, short question and decode, beside llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.environment import drop_page_cache
from mzd.benchmarks.llama_peer import LlamaPeer, PeerOptions, import_binding
from mzd.benchmarks.llama_probe import working_options
from mzd.benchmarks.models import BenchModel
from mzd.benchmarks.resident_model import ResidentModel
from mzd.benchmarks.results import BenchResult, Row
from mzd.benchmarks.statistics import Series, interleave, ratio, rounds
from mzd.daemon.config import Config
from mzd.device.matmul import Activations
from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError
from mzd.model.tokenizer import Tokenizer
from mzd.model.weight_store import WeightStore

Report = Callable[[str], None]
Tokens = NDArray[np.int32]

CHECK_TEXT: Final = "The capital of France is Paris. The capital of Italy is"
CHECK_TOKENS: Final = 16
TOKENS_SEED: Final = 20260
SUMMARY_CASES: Final = {"ratio_prompt512": "prompt", "ratio_short8": "short", "ratio_decode": "decode"}


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: `steps` steps of `step_tokens` tokens each, over a context of `context_tokens`."""

    kind: str
    context_tokens: int
    step_tokens: int
    steps: int = 1

    @property
    def end_tokens(self) -> int:
        """Tokens of the context after it."""
        return self.context_tokens + self.step_tokens * self.steps


class Contestant(Protocol):
    """One system; both methods compute on all of its threads before they return."""

    @property
    def name(self) -> str:
        """In rows."""

    async def fill(self, tokens: Tokens) -> None:
        """Make `tokens` the context."""

    async def answer(self, tokens: Tokens, position: int) -> int:
        """Compute `tokens` at `position` of the context; the greedy next id."""


def engine_cases(quick: bool, context_length: int) -> tuple[Case, ...]:
    """The cases that fit into the model, shortest context first. Quick: not 8k, which is slow to fill."""
    steps = 16 if quick else 64
    cases = [
        Case("prompt", 0, 512),
        Case("decode", 512, 1, steps),
        Case("short", 2048, 8),
        Case("decode", 2048, 1, steps),
    ]
    if not quick:
        cases.append(Case("short", 8160, 8))
    return tuple(case for case in cases if case.end_tokens <= context_length)


async def run_engine(model: BenchModel, cases: Sequence[Case], *, quick: bool, report: Report) -> BenchResult:
    """Check, then measure.

    Raises:
        MzdError: `internal`; two runs gave different tokens, so there is no speed to speak of.
    """
    cold = drop_page_cache()
    device = OpenClDevice.open(Config().device or None)
    result = BenchResult("engine", device.name, device.driver, quick, model.synthetic, cold)
    try:
        with WeightStore.open(model.store_path) as store:
            bench = _EngineBench(device, store, model, result, report)
            bench.look_for_peer()
            await bench.check()
            await bench.measure(cases, rounds(quick))
    finally:
        device.close()
    return result


@dataclass(slots=True)
class _EngineBench:
    """One run of the bench."""

    device: OpenClDevice
    store: WeightStore
    model: BenchModel
    result: BenchResult
    report: Report
    peer_options: PeerOptions | None = None
    measured: dict[tuple[Case, str], Series] = field(default_factory=dict)

    def look_for_peer(self) -> None:
        """Find out whether llama.cpp is there and how it runs here, and say so."""
        if import_binding() is None or self.model.gguf_path is None:
            self._note("llama_cpp or the GGUF file is missing: rows and ratios of llama.cpp are absent")
            return
        self.peer_options = working_options(self.model.gguf_path, threads=self.device.compute_units)
        if not self.peer_options.extra_buffers:
            self._note(
                "llama.cpp dies of its AMX kernels on this machine: it runs without extra buffer types"
            )

    async def check(self) -> None:
        """Two engines, each with units that it read itself, must say the same; llama.cpp is asked too."""
        prompt = np.asarray(
            Tokenizer.from_metadata(self.store.index.tokenizer).encode(CHECK_TEXT, parse_special=False),
            np.int32,
        )
        for activations in _modes():
            runs = []
            for _ in range(2):
                with self._resident(activations, len(prompt) + CHECK_TOKENS) as engine:
                    runs.append(await greedy(engine, prompt, CHECK_TOKENS))
            if runs[0] != runs[1]:
                raise MzdError("internal", f"two runs gave different tokens: {runs[0]} and {runs[1]}")
            await self._compare_with_peer(activations, prompt, runs[0])

    async def _compare_with_peer(self, activations: Activations, prompt: Tokens, tokens: list[int]) -> None:
        with self._peer(len(prompt) + CHECK_TOKENS) as peer:
            if peer is not None:
                theirs = await greedy(peer, prompt, CHECK_TOKENS)
                same = common_prefix(tokens, theirs)
                self._note(
                    f"{activations}: the first {same} of {CHECK_TOKENS} greedy tokens are llama.cpp's too"
                )

    async def measure(self, cases: Sequence[Case], num_rounds: int) -> None:
        """All cases, those over the same context together."""
        context_tokens = max(case.end_tokens for case in cases)
        with ExitStack() as stack:
            systems: list[Contestant] = [
                stack.enter_context(self._resident(activations, context_tokens)) for activations in _modes()
            ]
            peer = stack.enter_context(self._peer(context_tokens))
            if peer is not None:
                systems.append(peer)
            for num_tokens, group in groupby(cases, key=lambda case: case.context_tokens):
                await self._fill(systems, num_tokens)
                for case in group:
                    await self._measure_case(systems, case, num_rounds)
        self._conclude(cases)

    async def _fill(self, systems: Sequence[Contestant], num_tokens: int) -> None:
        tokens = random_tokens(num_tokens, self.store.index.config.vocab_size)
        for system in systems:
            start_s = time.perf_counter()
            await system.fill(tokens)
            if num_tokens:
                self.report(
                    f"{system.name}: filled {num_tokens} tokens in {time.perf_counter() - start_s:.1f} s"
                )

    async def _measure_case(self, systems: Sequence[Contestant], case: Case, num_rounds: int) -> None:
        tokens = random_tokens(case.step_tokens, self.store.index.config.vocab_size)
        contestants = {system.name: partial(timed, system, case, tokens) for system in systems}
        for name, series in (await interleave(contestants, num_rounds)).items():
            self.measured[case, name] = series
            row = case_row(case, name, series)
            self.result.rows.append(row)
            self.report(f"{case.kind} at {case.context_tokens}: {name} {row['tokens_per_s']:.1f} tokens/s")

    def _conclude(self, cases: Sequence[Case]) -> None:
        """The worst case of each kind, for the activations that users get."""
        ours, theirs = system_name(Config().activations), LlamaPeer.name
        for key, kind in SUMMARY_CASES.items():
            ratios = [
                ratio(self.measured[case, theirs], self.measured[case, ours])
                for case in cases
                if case.kind == kind and (case, theirs) in self.measured
            ]
            if ratios:
                self.result.summary[key] = min(ratios)

    def _note(self, text: str) -> None:
        self.result.notes.append(text)
        self.report(text)

    @contextmanager
    def _resident(self, activations: Activations, context_tokens: int) -> Iterator[ResidentModel]:
        model = ResidentModel(
            self.device,
            self.store,
            context_tokens=context_tokens,
            activations=activations,
            name=system_name(activations),
        )
        try:
            yield model
        finally:
            model.close()

    @contextmanager
    def _peer(self, context_tokens: int) -> Iterator[LlamaPeer | None]:
        binding = import_binding()
        if binding is None or self.model.gguf_path is None or self.peer_options is None:
            yield None
            return
        peer = LlamaPeer(
            binding,
            self.model.gguf_path,
            context_tokens=context_tokens,
            threads=self.device.compute_units,
            options=self.peer_options,
        )
        try:
            yield peer
        finally:
            peer.close()


def _modes() -> tuple[Activations, ...]:
    return ("f32", "int8")


def system_name(activations: str) -> str:
    """What rows call the engine with these activations."""
    return f"mzd {activations}"


def random_tokens(num_tokens: int, vocab_size: int) -> Tokens:
    """(num_tokens,) int32 ids by a seed: speed does not depend on which."""
    return np.random.default_rng(TOKENS_SEED).integers(0, vocab_size, num_tokens, dtype=np.int32)


async def greedy(system: Contestant, prompt: Tokens, num_tokens: int) -> list[int]:
    """The likeliest continuation of `prompt`."""
    tokens = [await system.answer(prompt, 0)]
    while len(tokens) < num_tokens:
        tokens.append(await system.answer(np.array(tokens[-1:], np.int32), len(prompt) + len(tokens) - 1))
    return tokens


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))


async def timed(system: Contestant, case: Case, tokens: Tokens) -> float:
    """Seconds of one run of a case; a step after the first takes the token that the one before it chose."""
    start_s = time.perf_counter()
    part = tokens
    for step in range(case.steps):
        chosen = await system.answer(part, case.context_tokens + step * case.step_tokens)
        if case.step_tokens == 1:
            part = np.array([chosen], np.int32)
    return time.perf_counter() - start_s


def case_row(case: Case, name: str, series: Series) -> Row:
    """One line of the table."""
    return {
        "case": case.kind,
        "context_tokens": case.context_tokens,
        "new_tokens": case.step_tokens * case.steps,
        "system": name,
        **series.fields("time"),
        "tokens_per_s": case.step_tokens * case.steps / series.median,
        "rounds": len(series.values),
    }
