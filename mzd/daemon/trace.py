"""Owns the picture of a restore as Chrome trace events.

Source: the Trace Event Format of Chromium: complete events ("ph": "X"), times in microseconds, and
metadata events ("ph": "M") that name the lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mzd.actors.allocator import Allocator
from mzd.actors.gpu_prefill import GpuPrefill
from mzd.errors import MzdError
from mzd.memory.restore_trace import RestoreTrace, Span

LANES: Final = ("allocate", "read", "decompress", "ready", "prefill")
PROCESS: Final = 1
REQUESTS_KEPT: Final = 64


class TraceBook:
    """Which restore belongs to which request, and what both actors noted of it."""

    def __init__(self, allocator: Allocator, gpu: GpuPrefill) -> None:
        self._allocator = allocator
        self._gpu = gpu
        self._restore_ids: dict[str, int] = {}

    def note(self, request: str, restore_id: int) -> None:
        """A request's restore; the oldest requests are forgotten."""
        self._restore_ids[request] = restore_id
        while len(self._restore_ids) > REQUESTS_KEPT:
            del self._restore_ids[next(iter(self._restore_ids))]

    def events(self, request: str | None) -> list[dict[str, Any]]:
        """The events of a request's restore, or of the last one.

        Raises:
            MzdError: `not_found`: nothing was restored yet, or the request is not known any more.
        """
        trace = self._find(request)
        prefill = [span for restore_id, span in self._gpu.spans if restore_id == trace.restore_id]
        return chrome_events([*trace.spans, *prefill])

    def _find(self, request: str | None) -> RestoreTrace:
        traces = self._allocator.traces
        if request is None and traces:
            return traces[-1]
        wanted = self._restore_ids.get(request) if request is not None else None
        for trace in traces:
            if trace.restore_id == wanted:
                return trace
        raise MzdError("not_found", "no restore is on record for that", request=request)


def chrome_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Lay spans out in lanes: work that ran side by side in one lane gets a row each."""
    rows: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    ends: dict[tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        row = 0
        while ends.get((span.lane, row), 0) > span.start_ns:
            row += 1
        ends[span.lane, row] = span.end_ns
        lane = rows.setdefault((span.lane, row), 10 * LANES.index(span.lane) + row)
        events.append(_event(span, lane))
    names = [_name(f"{lane} {row + 1}" if row else lane, tid) for (lane, row), tid in rows.items()]
    return sorted(names, key=lambda event: int(event["tid"])) + events


def _event(span: Span, lane: int) -> dict[str, Any]:
    name = "head" if span.layer is None else f"layer {span.layer}"
    return {
        "ph": "X",
        "name": name,
        "cat": span.lane,
        "pid": PROCESS,
        "tid": lane,
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {"bytes": span.size_bytes},
    }


def _name(lane: str, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": tid, "args": {"name": lane}}
