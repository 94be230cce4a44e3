"""Owns the commands that fetch and convert models; they need no daemon."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mzd.cli.output import Exit, Output, console, note
from mzd.cli.pull_list import known_models, show_known_models
from mzd.cli.sizes import format_bytes

if TYPE_CHECKING:
    from mzd.model.library import InstalledModel, ModelLibrary

Report = Callable[[str, int, int], None]


def pull(arguments: Namespace, output: Output) -> int:
    """`mzd pull NAME`: fetch a model and make its weight store; `--list` shows the names."""
    if arguments.list:
        output.result(known_models(_library()), show_known_models)
        return Exit.DONE
    from mzd.model.pull import pull as pull_model

    with _progress_bar() as report:
        pulled = pull_model(arguments.name, _library(), progress=report)
    _show(pulled.model, output)
    return Exit.DONE


def import_model(arguments: Namespace, output: Output) -> int:
    """`mzd import FILE`: make the weight store of a GGUF file."""
    with _progress_bar() as report:
        model = _library().import_file(
            arguments.file, arguments.name, progress=lambda done, total: report("import", done, total)
        )
    _show(model, output)
    return Exit.DONE


def _library() -> ModelLibrary:
    from mzd.model.library import ModelLibrary, models_directory

    return ModelLibrary(models_directory(os.environ))


def _show(model: InstalledModel, output: Output) -> None:
    result = {
        "name": model.name,
        "directory": str(model.directory),
        "store": str(model.store_path),
        **_figures(model),
    }
    output.result(result, _show_model)


def _figures(model: InstalledModel) -> dict[str, Any]:
    """`memory`: `MemoryNeed.fields` of a model that is ready; `servable`, `problem`: as `_problem`."""
    from mzd.formats.memory_need import memory_need
    from mzd.model.weight_store import WeightStore
    from mzd.policy.units import CHUNK_TOKENS

    with WeightStore.open(model.store_path) as store:
        index = store.index
    need = memory_need(index.config, index.layers, index.head, chunk_tokens=CHUNK_TOKENS)
    servable, problem = _problem(index.tokenizer)
    return {"memory": need.fields(), "servable": servable, "problem": problem}


def _problem(metadata: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether the daemon takes a model with this tokenizer metadata, and what is wrong with it."""
    from mzd.errors import MzdError
    from mzd.model.chat_template import ChatTemplate
    from mzd.model.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except MzdError as error:
        return False, error.message
    try:
        ChatTemplate.from_metadata(metadata, tokenizer)
    except MzdError as error:
        return True, f"chats are not possible: {error.message}"
    return True, None


def _show_model(shown: Mapping[str, Any]) -> None:
    memory = shown["memory"]
    print(
        f"memory: weights {format_bytes(memory['weights_bytes'])}, "
        f"embedding and output matrix {format_bytes(memory['head_bytes'])}, "
        f"KV {format_bytes(memory['kv_bytes_per_1k_tokens'])} per 1k tokens"
    )
    totals = (
        f"{format_bytes(total['total_bytes'])} at {total['context_tokens']} tokens"
        for total in memory["totals"]
    )
    print(f"in all: {', '.join(totals)}; the program itself comes on top")
    if shown["problem"]:
        note(f"warning: {shown['problem']}")
    if shown["servable"]:
        note(f"ready: mzd serve --model {shown['name']}")
    else:
        note("imported, but it cannot be served")


@contextmanager
def _progress_bar() -> Iterator[Report]:
    """Bars on stderr, one a phase: what this yields takes (phase, done_bytes, total_bytes).

    Silent where stderr is no terminal.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    title = TextColumn("{task.description}", markup=False)
    terminal = console(stderr=True)
    columns = (title, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            bars.update(tasks[phase], completed=done, total=total)

        yield report
