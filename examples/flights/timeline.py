"""The picture: who owned which partition when, and how many rows a second were done meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flights.ownership import History
from rationalizer.history import End, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Mark", "color_of", "draw"]

#: Okabe and Ito's colours, which people with any kind of colour vision can tell apart; the text that stands on each.
#: A label in every bar says the same, so that colour is never needed.
_COLORS: Final = (
    ("#0072B2", "white"),
    ("#E69F00", "black"),
    ("#009E73", "white"),
    ("#CC79A7", "black"),
    ("#56B4E9", "black"),
    ("#F0E442", "black"),
    ("#D55E00", "white"),
    ("#999999", "black"),
)
_INK: Final = "#222222"
_FAINT: Final = "#8a8a8a"

#: A bar narrower than this share of the picture has no room for a name.
_ROOM_FOR_NAME: Final = 0.07
_ROOM_FOR_NUMBER: Final = 0.022

#: Width of the lower panel's bars.
_BIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to the workers, as a vertical line."""

    at_ms: int
    text: str
    #: A line of this colour; drawn dashed if it is a death.
    death: bool


def color_of(client_id: str, clients: Sequence[str]) -> tuple[str, str]:
    """(colour, colour of text on it) of one of the clients."""
    return _COLORS[clients.index(client_id) % len(_COLORS)]


def draw(
    history: History,
    clients: Sequence[str],
    marks: Sequence[Mark],
    title: str,
    subtitle: str,
    path: Path,
    closing_ms: int,
) -> None:
    """Draw the history into a PNG file, but for tenures that began when all was done. Raises OSError."""
    # Imported here: it takes a second, and only this step needs it.
    from matplotlib.figure import Figure

    tenures = [tenure for tenure in history.all_tenures() if tenure.since < closing_ms]
    start = min((tenure.since for tenure in tenures), default=0)
    end = max([start + 1_000] + [tenure.until or tenure.last_beat for tenure in tenures])
    figure = Figure(figsize=(11, 6.6), dpi=110, facecolor="white", layout=None)
    grid = figure.add_gridspec(
        2, 1, height_ratios=(4, 1.15), hspace=0.09, left=0.085, right=0.985, top=0.845, bottom=0.075
    )
    upper = figure.add_subplot(grid[0])
    lower = figure.add_subplot(grid[1], sharex=upper)
    figure.text(0.012, 0.962, title, fontsize=15, fontweight="bold", color=_INK, va="center")
    figure.text(0.012, 0.918, subtitle, fontsize=10, color="#555555", va="center")
    for axes in (upper, lower):
        axes.set_xlim(-0.01 * (end - start) / 1000, (end - start) / 1000 * 1.01)
        _plain(axes)
    _draw_tenures(upper, tenures, clients, start, end)
    _draw_rates(lower, history, clients, start)
    _draw_marks(upper, lower, marks, start)
    figure.savefig(path, metadata={"Software": "kafka-marshal"})


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(length=0, labelsize=9, colors="#444444")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_tenures(axes: Axes, tenures: Sequence[Span], clients: Sequence[str], start: int, end: int) -> None:
    partitions = sorted({tenure.partition for tenure in tenures})
    for tenure in tenures:
        color, ink = color_of(tenure.client_id, clients)
        left = (tenure.since - start) / 1000
        until = ((tenure.until or end) - start) / 1000
        # After the last beat of a replaced worker there is silence: it still had the lease, but did not work.
        alive_until = until if tenure.ended in (End.OPEN, End.RELEASED) else (tenure.last_beat - start) / 1000
        axes.barh(tenure.partition, alive_until - left, left=left, height=0.78, color=color, edgecolor="white", lw=0.8)
        if until > alive_until:
            axes.barh(
                tenure.partition,
                until - alive_until,
                left=alive_until,
                height=0.78,
                facecolor="white",
                edgecolor=color,
                hatch="/////",
                lw=0.8,
            )
        share = (alive_until - left) * 1000 / (end - start)
        label = _short(tenure.client_id) if share < _ROOM_FOR_NAME else tenure.client_id
        if share >= _ROOM_FOR_NUMBER:
            middle = (left + alive_until) / 2
            # The box keeps a mark's line from running through the name.
            box = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
            axes.text(
                middle, tenure.partition, label, ha="center", va="center", fontsize=8.5, color=ink, bbox=box, zorder=5
            )
    axes.set_yticks(partitions, [f"flights {partition}" for partition in partitions])
    axes.set_ylim(max(partitions, default=0) + 0.6, min(partitions, default=0) - 0.6)
    axes.tick_params(labelbottom=False)
    if not tenures:
        axes.text(0.5, 0.5, "The log knows of no lease.", transform=axes.transAxes, ha="center", color=_INK)


def _short(client_id: str) -> str:
    return client_id.rpartition("-")[2][:4]


def _draw_rates(axes: Axes, history: History, clients: Sequence[str], start: int) -> None:
    rates: dict[str, dict[int, float]] = {client: defaultdict(float) for client in clients}
    for at_ms, client_id, rows in history.progress:
        rates[client_id][int((at_ms - start) / 1000 / _BIN_S)] += rows / _BIN_S
    bottoms: dict[int, float] = defaultdict(float)
    for client in clients:
        bins = sorted(rates[client])
        axes.bar(
            [number * _BIN_S for number in bins],
            [rates[client][number] for number in bins],
            width=_BIN_S * 0.94,
            align="edge",
            bottom=[bottoms[number] for number in bins],
            color=color_of(client, clients)[0],
        )
        for number in bins:
            bottoms[number] += rates[client][number]
    axes.set_yticks([])
    peak = max(bottoms.values(), default=0.0)
    axes.set_ylim(0, peak * 1.12 or 1)
    axes.set_xlabel("seconds since the first claim, by the log's own time", fontsize=9, color="#444444", labelpad=3)
    axes.text(
        -0.006,
        0.5,
        "rows done\na second",
        transform=axes.transAxes,
        ha="right",
        va="center",
        fontsize=9,
        color="#444444",
    )
    if peak:
        axes.axhline(peak, color="#cccccc", lw=0.8, ls=":")
        axes.text(
            1.0,
            peak,
            f"{peak:,.0f}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=8.5,
            color=_FAINT,
        )


def _draw_marks(upper: Axes, lower: Axes, marks: Sequence[Mark], start: int) -> None:
    for mark in marks:
        at = (mark.at_ms - start) / 1000
        style = "--" if mark.death else ":"
        for axes in (upper, lower):
            axes.axvline(at, color=_INK, lw=1.3, ls=style, zorder=4)
        upper.annotate(
            mark.text,
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            # A death's text ends at its line, another's begins there: the two are often close.
            xytext=(3 if mark.death else -3, 3),
            textcoords="offset points",
            ha="right" if mark.death else "left",
            va="bottom",
            fontsize=9.5,
            fontweight="bold" if mark.death else "normal",
            color=_INK,
            annotation_clip=False,
        )
