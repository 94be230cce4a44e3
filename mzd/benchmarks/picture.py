"""Owns how a result looks as a picture: bars of one quantity, grouped by case, a colour a system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mzd.errors import MzdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI: Final = 144
_GROUPS_SIDE_BY_SIDE: Final = 12
"""More than that have their names slanted."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Which columns of a bench's rows are drawn.

    Attributes:
        groups: columns that name a place on the x axis.
        colour: the column that is told apart by colour.
        value: the height of the bars.
        spread: the length of the error bars, or None where the rows have none for `value`.
        unit: what `value` is measured in.
        logarithmic: whether tens lie as far apart as hundreds.
    """

    groups: tuple[str, ...]
    colour: str
    value: str
    spread: str | None
    unit: str
    logarithmic: bool = False


PLOTS: Final[Mapping[str, Plot]] = {
    "breakdown": Plot(("model", "stage"), "system", "time_s", "time_spread_s", "seconds"),
    "engine": Plot(("model", "case", "context_tokens"), "system", "tokens_per_s", None, "tokens a second"),
    "evict": Plot(("model", "remaining"), "copies", "all_bytes_s_per_gb", None, "seconds a GB"),
    "kernels": Plot(
        ("kernel",), "tokens", "over_read", None, "times a plain read (the worst shape)", logarithmic=True
    ),
    "order": Plot(("model",), "order", "ttft_s", "ttft_spread_s", "seconds to the first token"),
    "overlap": Plot(("model",), "system", "ttft_s", "ttft_spread_s", "seconds to the first token"),
    "swap": Plot(("model", "remaining"), "restore", "time_s", "time_spread_s", "seconds"),
}


def draw_benchmark(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result into a PNG file.

    Raises:
        MzdError: `not_found`; matplotlib is not installed, or the bench has no picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MzdError("not_found", "pictures need matplotlib: pip install matplotlib") from error
    if result["bench"] not in PLOTS:
        raise MzdError("not_found", f"the bench {result['bench']} has no picture")
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    draw_bars(axes, result["rows"], PLOTS[result["bench"]])
    axes.set_title(f"mzd bench {result['bench']}  ({result['commit']}, {result['date']})")
    figure.supxlabel(f"{result['machine']}; {result['device']}; {_kind(result)}", fontsize=6)
    figure.savefig(path, format="png", dpi=_DPI)


def _kind(result: Mapping[str, Any]) -> str:
    words = ["quick" if result["quick"] else "full"]
    words += ["synthetic"] * bool(result["synthetic"])
    words.append("page cache dropped" if result["cold"] else "page cache not dropped")
    return ", ".join(words)


def draw_bars(axes: Axes, rows: Sequence[Mapping[str, Any]], plot: Plot) -> None:
    """Draw one bar a row: colours side by side within a group. Rows without the value are left out."""
    rows = [row for row in rows if row[plot.value] is not None]
    groups = list(dict.fromkeys(group_name(row, plot.groups) for row in rows))
    colours = list(dict.fromkeys(str(row[plot.colour]) for row in rows))
    width = 0.8 / len(colours)
    for shift, colour in enumerate(colours):
        mine = [row for row in rows if str(row[plot.colour]) == colour]
        places = [groups.index(group_name(row, plot.groups)) + (shift + 0.5) * width - 0.4 for row in mine]
        errors = None if plot.spread is None else [row[plot.spread] / 2 for row in mine]
        axes.bar(places, [row[plot.value] for row in mine], width, yerr=errors, capsize=2, label=colour)
    turned = 60 if len(groups) > _GROUPS_SIDE_BY_SIDE else 0
    axes.set_xticks(range(len(groups)), groups, fontsize=8, rotation=turned)
    axes.set_yscale("log" if plot.logarithmic else "linear")
    axes.set_ylabel(plot.unit)
    axes.legend(title=plot.colour)


def group_name(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The words below a group; shares as whole percents, so that near levels of two systems meet."""
    shown = (
        f"{row[column]:.0%}" if isinstance(row[column], float) else str(row[column]) for column in columns
    )
    return "\n".join(shown)
