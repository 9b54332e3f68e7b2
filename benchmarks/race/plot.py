"""The chart for README: durations, medians with 95th percentiles, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.race.contestants import Side
from benchmarks.race.results import Found, p95

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

OURS, THEIRS = "#0072b2", "#b8b8b8"

#: (event, metric, title) of the panels.
PANELS = (
    ("start", "start", "new process → first record"),
    ("handover", "handover", "close() → first record at another"),
    ("kill", "kill", "kill -9 → first record at another"),
    ("balance", "start", "10 workers start, 900 partitions → stable"),
    ("balance", "leave", "one of 10 leaves → stable"),
    ("balance", "longest gap, leave", "gap of what does not move, one leaves"),
)


def draw(found: Sequence[Found], path: str) -> None:
    """Bars of milliseconds; ours in colour, peers in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_event = {x.event.name: x for x in found}
    panels = [panel for panel in PANELS if panel[0] in by_event and panel[1] in by_event[panel[0]].samples]
    if not panels:
        return
    rows = (len(panels) + 1) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(12, 2.9 * rows), squeeze=False)
    for place, (event, metric, title) in enumerate(panels):
        axes = grid[place // 2][place % 2]
        _panel(axes, by_event[event], metric, title)
    for place in range(len(panels), 2 * rows):
        grid[place // 2][place % 2].set_axis_off()
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Axes, found: Found, metric: str, title: str) -> None:
    samples = found.samples[metric]
    ours = {c.name for c in found.event.contestants if c.side is Side.MARSHAL}
    names = sorted(samples, key=lambda name: -median(samples[name]))
    medians = [max(0.1, median(samples[name])) for name in names]
    tails = [max(0.0, p95(samples[name]) - middle) for name, middle in zip(names, medians, strict=True)]
    colours = [OURS if name in ours else THEIRS for name in names]
    bars = axes.barh(names, medians, xerr=[[0.0] * len(names), tails], color=colours, error_kw={"lw": 0.8})
    axes.bar_label(bars, [f" {value:,.0f} ms" for value in medians], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(1, max(medians) * 12)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
