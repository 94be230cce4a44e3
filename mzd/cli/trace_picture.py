"""Owns the picture of a restore: a lane for each kind of work, a bar for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mzd.errors import MzdError

Bar = tuple[float, float]  # start and duration, milliseconds


def draw_trace(events: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of the complete events ("ph": "X") among Chrome trace events.

    Raises:
        MzdError: `not_found` where matplotlib is not installed, or there is nothing to draw.
    """
    lanes = lanes_of(events)
    if not lanes:
        raise MzdError("not_found", "the trace holds nothing to draw; restore something first")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MzdError("not_found", "a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(12, 1 + 0.6 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for row, bars in enumerate(lanes.values()):
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=f"C{row}", edgecolors="white", linewidth=0.5)
    axes.set_yticks(range(len(lanes)), labels=list(lanes))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.savefig(path, format="png", dpi=150)


def lanes_of(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Bar]]:
    """Bars by lane, lanes in order of appearance, times from the first event on.

    A lane is named by a `thread_name` event where there is one, else by its `tid`.
    """
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    complete = [event for event in events if event.get("ph") == "X"]
    start_us = min((event["ts"] for event in complete), default=0)
    lanes: dict[str, list[Bar]] = {}
    for event in complete:
        bar = ((event["ts"] - start_us) / 1000, event["dur"] / 1000)
        lanes.setdefault(str(names.get(event["tid"], event["tid"])), []).append(bar)
    return lanes
