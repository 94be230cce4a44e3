"""Owns the commands that fetch and convert models; they need no daemon."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mzd.cli.output import Exit, Output, console, note


def pull(arguments: Namespace, output: Output) -> int:
    """`mzd pull NAME`: fetch a model and make its weight store."""
    from mzd.model.pull import pull as pull_model

    with _progress_bar(f"pull {arguments.name}") as progress:
        path = pull_model(arguments.name, progress)
    output.result({"name": arguments.name, "path": str(path)}, lambda shown: note(f"ready: {shown['path']}"))
    return Exit.DONE


def import_model(arguments: Namespace, output: Output) -> int:
    """`mzd import FILE`: make the weight store of a GGUF file."""
    from mzd.model.importer import import_gguf
    from mzd.model.library import store_path

    name = arguments.name or arguments.file.stem
    path = store_path(name)
    with _progress_bar(f"import {name}") as progress:
        index = import_gguf(arguments.file, path, progress=progress)
    result = {"name": name, "path": str(path), "model_id": index.model_id}
    output.result(result, lambda shown: note(f"ready: {shown['path']}"))
    return Exit.DONE


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; what it yields takes (done_bytes, total_bytes). Silent where stderr is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    terminal = console(stderr=True)
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
