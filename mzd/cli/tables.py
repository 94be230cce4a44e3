"""Owns how the daemon's state looks on a terminal. Imported only when it is shown: rich takes its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mzd.cli.sizes import format_bytes

# Each kind of memory: key in `status`, what it is, how to free it.
_MEMORY_ROWS = (
    ("weights_bytes", "weights", "mzd evict"),
    ("head_bytes", "embedding and output matrix", "mzd evict"),
    ("kv_bytes", "KV of contexts", "mzd evict, mzd drop"),
    ("compressed_bytes", "KV, compressed", "mzd evict 100%, mzd drop"),
    ("staging_bytes", "read and write buffers", "goes with the daemon"),
    ("scratch_bytes", "scratch", "goes with the daemon"),
    ("baseline_bytes", "the program itself", "goes with the daemon"),
)
_STORAGE_ROWS = (
    ("store_bytes", "weight store", "remove the model's directory"),
    ("swap_bytes", "KV of contexts", "mzd drop"),
)


def status_view(status: Mapping[str, Any]) -> RenderableType:
    """One screen: who, what RAM and flash hold, how to free each, pressure, contexts."""
    sections: list[RenderableType] = [_heading(status), _memory_table(status["memory"], status["storage"])]
    if status["pressure"] is not None:
        sections.append(_pressure_line(status["pressure"]))
    if status["contexts"]:
        sections.append(contexts_table(status["contexts"]))
    return Group(*sections)


def _heading(status: Mapping[str, Any]) -> Text:
    model, device = status["model"], status["device"]
    lines = (
        f"mzd {status['version']}: {status['state']} (ready {status['ready_s']:.1f} s after its start)",
        f"model {model['name']} ({model['architecture']}, {model['num_layers']} layers, "
        f"{model['context_length']} tokens)",
        f"device {device['name']} ({device['driver']})",
        f"memory: {device['memory_backend']}; {device['kernels']}",
        *(f"refused {other['device']} ({other['memory']}): {other['reason']}" for other in device["refused"]),
    )
    return Text("\n".join(lines))


def _memory_table(memory: Mapping[str, Any], storage: Mapping[str, Any]) -> Table:
    table = _table(("", "left"), ("", "left"), ("size", "right"), ("to free it", "left"))
    _add_rows(table, "RAM", memory, _MEMORY_ROWS)
    evictable = f"{format_bytes(memory['evictable_bytes'])} can be evicted"
    table.add_row("", "all of it", format_bytes(memory["total_bytes"]), evictable, end_section=True)
    _add_rows(table, "flash", storage, _STORAGE_ROWS)
    table.add_row("", "written since the start", format_bytes(storage["written_bytes"]), "")
    return table


def _add_rows(
    table: Table, place: str, sizes: Mapping[str, Any], rows: Iterable[tuple[str, str, str]]
) -> None:
    for key, what, how in rows:
        table.add_row(place, what, _size(sizes.get(key)), how)
        place = ""


def _pressure_line(pressure: Mapping[str, Any]) -> Text:
    available, floor = pressure["available_bytes"], pressure["floor_bytes"]
    decision = pressure["last_decision"]
    return Text(
        f"pressure {pressure['level']} (from {pressure['source']}): {_size(available)} available, "
        f"floor {_size(floor)}" + (f"; last decision: {decision['reason']}" if decision else "")
    )


def _size(size_bytes: float | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)


def contexts_table(contexts: Sequence[Mapping[str, Any]]) -> Table:
    """A line a context."""
    table = _table(
        ("context", "left"), ("tokens", "right"), ("in RAM", "right"), ("compressed", "right"),
        ("on flash", "right"), ("last used", "right"), ("", "left"),
    )  # fmt: skip
    for context in contexts:
        sizes = (format_bytes(context[f"{kind}_bytes"]) for kind in ("resident", "compressed", "stored"))
        flags = " ".join(
            ("pinned",) * bool(context["pinned"]) + (context["state"],) * (context["state"] != "ok")
        )
        used = _ago(context["last_used_s"])
        table.add_row(context["context"], str(context["tokens"]), *sizes, used, flags)
    return table


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title, justify in columns:
        table.add_column(title, justify="right" if justify == "right" else "left")
    return table


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Measurements, a line each; the columns are the keys of the first."""
    keys = list(rows[0]) if rows else []
    table = _table(*((key, "left" if isinstance(rows[0][key], str) else "right") for key in keys))
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in keys))
    return table


def _cell(value: Any) -> str:
    """A measurement; nothing where none was taken."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
