"""Owns the bench `engine`: tokens a second of long prompt, short question and decode, beside llama.cpp."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final

import numpy as np

from mzd.benchmarks.engine_cases import (
    Case,
    Contestant,
    Logits,
    Tokens,
    case_row,
    common_prefix,
    engine_cases,
    greedy,
    logits_distance,
    random_tokens,
    timed,
)
from mzd.benchmarks.environment import drop_page_cache
from mzd.benchmarks.llama_peer import LlamaPeer, PeerOptions, import_binding
from mzd.benchmarks.llama_probe import working_options
from mzd.benchmarks.models import BenchModel
from mzd.benchmarks.resident_model import ResidentModel
from mzd.benchmarks.results import BenchResult, worst
from mzd.benchmarks.statistics import Series, interleave, ratio, rounds
from mzd.daemon.assembly import activations_of
from mzd.daemon.config import Config
from mzd.device.matmul import INT8_TYPES, Activations
from mzd.device.opencl import OpenClDevice
from mzd.device.self_test import self_test
from mzd.errors import MzdError
from mzd.formats.weight_store import StoreIndex
from mzd.model.tokenizer import Tokenizer
from mzd.model.weight_store import WeightStore

Report = Callable[[str], None]
ChooseCases = Callable[[bool, int], Sequence[Case]]

CHECK_TEXT: Final = "The capital of France is Paris. The capital of Italy is"
CHECK_TOKENS: Final = 16
SUMMARY_CASES: Final = {"ratio_prompt512": "prompt", "ratio_short8": "short", "ratio_decode": "decode"}

FLOAT_DISTANCE_MAX: Final = 0.01
"""Of our logits from llama.cpp's, see `logits_distance`. Seen: 0.0014; it rounds activations to F16."""

QUANTISED_DISTANCE_MAX: Final = 0.15
"""Seen: 0.02 with Q8_0 and 0.055 with Q4_1, where llama.cpp rounds activations to 8 bits. One layer with the
weights of its neighbour gives 0.29 and more."""


async def run_engine(
    models: Sequence[BenchModel], *, quick: bool, report: Report, choose_cases: ChooseCases = engine_cases
) -> BenchResult:
    """Check, then measure, each model.

    Args:
        choose_cases: of a model, from `quick` and its longest context.

    Raises:
        MzdError: `device_lost`, a kernel computes wrongly; `internal`, two runs gave different tokens, or
            llama.cpp other logits: so there is no speed to speak of.
    """
    cold = drop_page_cache()
    device = OpenClDevice.open(Config().device or None)
    synthetic = any(model.synthetic for model in models)
    result = BenchResult("engine", device.name, device.driver, quick, synthetic, cold)
    summaries: dict[str, Mapping[str, float]] = {}
    try:
        for model in models:
            with WeightStore.open(model.store_path) as store:
                bench = _ModelBench(device, store, model, result, report)
                bench.look_for_peer()
                await bench.check()
                cases = choose_cases(quick, store.index.config.context_length)
                summaries[model.name] = await bench.measure(cases, rounds(quick))
    finally:
        device.close()
    _conclude(result, summaries)
    return result


def _conclude(result: BenchResult, summaries: Mapping[str, Mapping[str, float]]) -> None:
    """Each model's ratios, and the worst of all."""
    compared = {name: summary for name, summary in summaries.items() if summary}
    if compared:
        result.summary |= worst(list(compared.values()))
        result.summary["models"] = compared


@dataclass(slots=True)
class _ModelBench:
    """One model's part of the bench."""

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
        self.peer_options = working_options(self.model.gguf_path, threads=peer_threads(self.device))
        if not self.peer_options.extra_buffers:
            self._note(
                "llama.cpp dies of its AMX kernels on this machine: it runs without extra buffer types"
            )

    async def check(self) -> None:
        """Kernels must be right; two engines, each with units that it read itself, must say the same; and it
        must be what llama.cpp says.
        """
        prompt = np.asarray(
            Tokenizer.from_metadata(self.store.index.tokenizer).encode(CHECK_TEXT, parse_special=False),
            np.int32,
        )
        for activations in model_modes(self.store.index):
            self_test(self.device, self.store.index, activations=activations)
            runs = []
            for _ in range(2):
                with self._resident(activations, len(prompt) + CHECK_TOKENS) as engine:
                    runs.append(await greedy(engine, prompt, CHECK_TOKENS))
            if runs[0] != runs[1]:
                raise MzdError("internal", f"two runs gave different tokens: {runs[0]} and {runs[1]}")
            await self._compare_with_peer(activations, prompt, runs[0])

    async def _compare_with_peer(self, activations: Activations, prompt: Tokens, tokens: list[int]) -> None:
        """Logits of the first step must be near; how long the greedy tokens agree is told."""
        with self._peer(len(prompt) + CHECK_TOKENS) as peer:
            if peer is None:
                return
            with self._resident(activations, len(prompt)) as engine:
                ours = await first_logits(engine, prompt)
            distance = logits_distance(ours, await first_logits(peer, prompt))
            theirs = await greedy(peer, prompt, CHECK_TOKENS)
        if not distance <= distance_max(self.store.index):  # not-a-number too
            raise MzdError("internal", f"{self.model.name}: logits differ from llama.cpp's by {distance:.2g}")
        self._note(
            f"{activations}: logits differ from llama.cpp's by {distance:.2g} of their spread; the first "
            f"{common_prefix(tokens, theirs)} of {CHECK_TOKENS} greedy tokens are the same"
        )

    async def measure(self, cases: Sequence[Case], num_rounds: int) -> Mapping[str, float]:
        """All cases, those over the same context together; the summary."""
        context_tokens = max(case.end_tokens for case in cases)
        modes = model_modes(self.store.index)
        filled = 0
        with ExitStack() as stack:
            systems: list[Contestant] = [
                stack.enter_context(self._resident(activations, context_tokens)) for activations in modes
            ]
            peer = stack.enter_context(self._peer(context_tokens))
            if peer is not None:
                systems.append(peer)
            for num_tokens, group in groupby(cases, key=lambda case: case.context_tokens):
                await self._fill(systems, num_tokens, filled)
                filled = num_tokens
                for case in group:
                    await self._measure_case(systems, case, num_rounds)
        return self._summary(cases)

    async def _fill(self, systems: Sequence[Contestant], num_tokens: int, start: int) -> None:
        """Extend every system's context from `start` to `num_tokens`."""
        tokens = random_tokens(num_tokens, self.store.index.config.vocab_size)
        for system in systems:
            start_s = time.perf_counter()
            await system.fill(tokens, start)
            if num_tokens:
                seconds = time.perf_counter() - start_s
                self.report(f"{system.name}: filled up to {num_tokens} tokens in {seconds:.1f} s")

    async def _measure_case(self, systems: Sequence[Contestant], case: Case, num_rounds: int) -> None:
        tokens = random_tokens(case.step_tokens, self.store.index.config.vocab_size)
        contestants = {system.name: partial(timed, system, case, tokens) for system in systems}
        for name, series in (await interleave(contestants, num_rounds)).items():
            self.measured[case, name] = series
            row = case_row(self.model.name, case, name, series)
            self.result.rows.append(row)
            self.report(f"{case.kind} at {case.context_tokens}: {name} {row['tokens_per_s']:.1f} tokens/s")

    def _summary(self, cases: Sequence[Case]) -> Mapping[str, float]:
        """The worst case of each kind, for the activations that users get."""
        ours, theirs = system_name(users_mode(self.store.index, self.device)), LlamaPeer.name
        found: dict[str, float] = {}
        for key, kind in SUMMARY_CASES.items():
            ratios = [
                ratio(self.measured[case, theirs], self.measured[case, ours])
                for case in cases
                if case.kind == kind and (case, theirs) in self.measured
            ]
            if ratios:
                found[key] = min(ratios)
        return found

    def _note(self, text: str) -> None:
        text = f"{self.model.name}: {text}"
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
            threads=peer_threads(self.device),
            options=self.peer_options,
        )
        try:
            yield peer
        finally:
            peer.close()


def peer_threads(device: OpenClDevice) -> int:
    """As many as a CPU device has; beside another device all cores that this process may use."""
    return device.compute_units if device.kernel_class == "cpu" else len(os.sched_getaffinity(0))


def model_modes(index: StoreIndex) -> tuple[Activations, ...]:
    """Kinds of activations between which the model's matrices differ: to floats all are exact."""
    return ("f32", "int8") if _is_quantised(index) else ("f32",)


def users_mode(index: StoreIndex, device: OpenClDevice) -> Activations:
    """What users get of them on a device without asking."""
    return activations_of(Config(), device) if _is_quantised(index) else "f32"


def distance_max(index: StoreIndex) -> float:
    """How far our logits may be from llama.cpp's."""
    return QUANTISED_DISTANCE_MAX if _is_quantised(index) else FLOAT_DISTANCE_MAX


def _is_quantised(index: StoreIndex) -> bool:
    return any(spec.type in INT8_TYPES for unit in (*index.layers, index.head) for spec in unit.tensors)


def system_name(activations: str) -> str:
    """What rows call the engine with these activations."""
    return f"mzd {activations}"


async def first_logits(system: Contestant, prompt: Tokens) -> Logits:
    """(vocab,) float32 behind `prompt`, newly allocated."""
    await system.answer(prompt, 0)
    return system.logits().copy()
