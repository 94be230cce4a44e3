"""Owns the demo: the main job on the real model, from nothing to a second answer, with its figures.

    python -m mzd.demo --output build/demo.json [-- OPTIONS OF mzd serve]

Pulls and imports the model, serves it, asks over a context of about 2,000 tokens, gives all memory back and
asks again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from mzd.errors import MzdError
from mzd.memory.device_memory import read_device_memory
from mzd.memory.process_memory import read_process_memory
from mzd.model.library import ModelLibrary, models_directory
from mzd.rpc.blocking_client import BlockingClient

MODEL = "smollm2-135m"
CONTEXT = "demo"
DOCUMENT = Path(__file__).with_name("demo_text.txt")
FIRST_QUESTION = "What is this document? Answer in one sentence."
SECOND_QUESTION = "What does it say about trademarks?"
ANSWER_TOKENS = 48
READY_TIMEOUT_S = 600.0
SAY_EVERY_S = 10.0

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon: its process and a connection to it."""

    process: subprocess.Popen[str]
    client: BlockingClient

    def resident_bytes(self) -> int:
        """The daemon's resident set, from the kernel, and its memory on a device that has its own."""
        host = read_process_memory(Path(f"/proc/{self.process.pid}"))
        device = read_device_memory(self.process.pid)
        return host.rss_bytes + (device.size_bytes if device else 0)

    def ask(self, messages: Messages, max_tokens: int) -> dict[str, Any]:
        """A greedy answer to a whole conversation."""
        answer: dict[str, Any] = self.client.call(
            "generate",
            {"context": CONTEXT, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0},
        )
        return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every step did what it should."""
    parser = argparse.ArgumentParser(prog="python -m mzd.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"), help="where the figures go")
    parser.add_argument("serve", nargs="*", metavar="OPTION", help="for mzd serve, after --")
    given = parser.parse_args(arguments)
    output: Path = given.output
    try:
        figures = run_demo(given.serve)
    except MzdError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(figures, indent=2) + "\n")
    _show(figures)
    print(f"figures: {output}")
    return 0


def run_demo(serve_options: Sequence[str] = ()) -> dict[str, Any]:
    """The whole job; returns the figures.

    Raises:
        MzdError: a step failed; or the resident set did not fall as far as the daemon said.
    """
    if ModelLibrary(models_directory(os.environ)).get(MODEL) is None:
        _say("pull and import")
        _mzd("pull", MODEL)
    with tempfile.TemporaryDirectory(prefix="mzd-demo-") as directory:
        _say("serve (the first start compiles the kernels, for about a minute)")
        with _serving(Path(directory), serve_options) as daemon:
            figures = _main_job(daemon)
    fallen = figures["resident_before_bytes"] - figures["resident_after_bytes"]
    if fallen < 0.95 * figures["evicted_bytes"]:
        raise MzdError("internal", f"evicted {figures['evicted_bytes']} bytes, but only {fallen} are free")
    return figures


def _main_job(daemon: Daemon) -> dict[str, Any]:
    opening: Messages = [{"role": "user", "content": f"{DOCUMENT.read_text()}\n\n{FIRST_QUESTION}"}]
    _say("read a document and answer a first question")
    first = daemon.ask(opening, ANSWER_TOKENS)
    known = [*opening, {"role": "assistant", "content": first["text"]}]
    question = [*known, {"role": "user", "content": SECOND_QUESTION}]
    daemon.ask(known, 0)  # what the template puts between two turns is computed now
    _say("ask a second question, all in memory")
    in_memory = daemon.ask(question, ANSWER_TOKENS)
    daemon.ask(known, 0)  # forget the second question, so that it is new again
    _say("give all memory back")
    before_bytes = daemon.resident_bytes()
    evicted = daemon.client.call("evict", {"fraction": 1.0})
    after_bytes = daemon.resident_bytes()
    _say("ask the second question again")
    again = daemon.ask(question, ANSWER_TOKENS)
    status = daemon.client.call("status", {})
    return {
        "model": status["model"]["name"],
        "device": status["device"]["name"],
        "codec": "int8",
        "document_answer": first["text"],
        "answer_in_memory": in_memory["text"],
        "answer_evicted": again["text"],
        "tokens_equal": in_memory["tokens"] == again["tokens"],
        "tokens_agreement": _agreement(in_memory["tokens"], again["tokens"]),
        "prompt_tokens": again["usage"]["prompt_tokens"],
        "reused_tokens": again["usage"]["reused_tokens"],
        "computed_tokens": again["usage"]["computed_tokens"],
        "computed_tokens_in_memory": in_memory["usage"]["computed_tokens"],
        "recomputed_tokens": again["usage"]["recomputed_tokens"],
        "evicted_bytes": evicted["freed_bytes"],
        "resident_before_bytes": before_bytes,
        "resident_after_bytes": after_bytes,
        "ttft_first_s": first["timings"]["ttft_s"],
        "ttft_in_memory_s": in_memory["timings"]["ttft_s"],
        "ttft_evicted_s": again["timings"]["ttft_s"],
        "restore_s": again["timings"]["restore_s"],
        "ready_s": status["ready_s"],
    }


def _agreement(expected: list[int], found: list[int]) -> float:
    """Share of `expected` before the first difference."""
    same = 0
    for one, other in zip(expected, found, strict=False):
        if one != other:
            break
        same += 1
    return same / len(expected) if expected else 1.0


@contextmanager
def _serving(directory: Path, options: Sequence[str]) -> Iterator[Daemon]:
    """A daemon with a state of its own, ended in order."""
    socket = directory / "mzd.sock"
    command = [sys.executable, "-m", "mzd.cli.main", "serve"]
    command += ["--model", MODEL, "--socket", str(socket), "--state", str(_state_directory(directory))]
    command += options
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        _wait_ready(process)
        with BlockingClient(str(socket)) as client:
            yield Daemon(process, client)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _state_directory(directory: Path) -> Path:
    """On the disk of the working directory: /tmp may be memory, where eviction to flash frees nothing."""
    state = Path("build") / "demo-state" / directory.name
    state.mkdir(mode=0o700, parents=True)
    return state


def _wait_ready(process: subprocess.Popen[str], *, say_every_s: float = SAY_EVERY_S) -> None:
    """Pass on what the daemon logs until it is ready; where it is silent, say how long it has taken."""
    lines: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(process.stderr, lines), daemon=True).start()
    began_s = time.monotonic()
    said: list[str] = []
    while (waited_s := time.monotonic() - began_s) < READY_TIMEOUT_S:
        try:
            line = lines.get(timeout=say_every_s)
        except Empty:
            _say(f"  not ready yet, after {waited_s + say_every_s:.0f} s")
            continue
        if line is None:
            break
        if line == "ready":
            return
        said.append(line)
        _say(f"  {line}")
    raise MzdError("internal", f"the daemon did not start: {' '.join(said[-3:])}")


def _read_lines(stream: TextIO, lines: SimpleQueue[str | None]) -> None:
    """All lines of a stream, then None. To its end: a daemon whose pipe is full would stop."""
    with stream:
        for line in stream:
            lines.put(line.strip())
    lines.put(None)


def _mzd(*arguments: str) -> None:
    """Run a command of mzd in a process of its own, as a user would."""
    result = subprocess.run([sys.executable, "-m", "mzd.cli.main", *arguments], check=False)
    if result.returncode:
        raise MzdError("internal", f"mzd {' '.join(arguments)} ended with {result.returncode}")


def _say(step: str) -> None:
    print(f"demo: {step}", flush=True)


def _show(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['model']} on {figures['device']}", show_header=True)
    table.add_column("")
    table.add_column("in memory", justify="right")
    table.add_column("all evicted", justify="right")
    table.add_row("first token", _seconds(figures["ttft_in_memory_s"]), _seconds(figures["ttft_evicted_s"]))
    table.add_row(
        "daemon's resident set before asking",
        _mb(figures["resident_before_bytes"]),
        _mb(figures["resident_after_bytes"]),
    )
    table.add_row(
        "prompt tokens computed", str(figures["computed_tokens_in_memory"]), str(figures["computed_tokens"])
    )
    table.add_row("prompt tokens known already", "", str(figures["reused_tokens"]))
    console = Console()
    console.print(table)
    console.print(f"given back: {_mb(figures['evicted_bytes'])}")
    console.print(_agreement_said(figures))
    console.print(f"answer: {figures['answer_evicted']!r}", markup=False)


def _agreement_said(figures: dict[str, Any]) -> str:
    if figures["tokens_equal"]:
        return "same tokens: all of the answer"
    return (
        f"same tokens: the first {figures['tokens_agreement']:.0%} of the answer; KV in the codec "
        f"{figures['codec']} is not exact (`mzd serve --codec none` is)"
    )


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _mb(value: int) -> str:
    return f"{value / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
