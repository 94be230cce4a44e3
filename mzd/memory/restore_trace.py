"""Owns the record of a restore: which lane worked on which layer, when, on how many bytes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one lane: allocate, read, decompress, ready or prefill. `layer` None is the head unit."""

    lane: str
    layer: int | None
    start_ns: int
    end_ns: int
    size_bytes: int


@dataclass(slots=True)
class RestoreTrace:
    """All spans of one restore, in the order in which they ended. Monotonic nanoseconds."""

    restore_id: int
    spans: list[Span] = field(default_factory=list)

    def add(self, lane: str, layer: int | None, start_ns: int, end_ns: int, size_bytes: int) -> None:
        """Note one span."""
        self.spans.append(Span(lane, layer, start_ns, end_ns, size_bytes))

    def lane_seconds(self, lane: str) -> float:
        """Seconds of work in a lane, side-by-side work counted once for each thread."""
        return sum(span.end_ns - span.start_ns for span in self.spans if span.lane == lane) / 1e9
