"""The report's charts, as PNG. Names in the log are untrusted: they are drawn, never interpreted."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that colour-blind people can distinguish, too (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f")

_LONGEST_NAME = 38

_DAY_MS = 86_400_000

#: The end of the year 9999, the last of calendars.
_LAST_DAY_MS = 253_402_300_799_999

#: Characters in the legend for owners that share a colour.
_LONGEST_LINE: Final = 40

#: Characters below are Latin, without combining marks.
_FIRST_FOREIGN: Final = "\u0250"

#: (seconds, unit): the unit of a span of at most 2,000 ms, or else of at most 200 units.
_UNITS: Final = ((0.001, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86_400.0, "d"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One holder's tenure of one lease, in ms of log time."""

    lease: str
    owner: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Line:
    """Values over time: (ms of log time, value), ascending."""

    name: str
    points: Sequence[tuple[int, float]]


def bars(found: Sequence[Bar]) -> str:
    """Chart of tenures: a row for each lease, a colour for each owner."""
    leases = list(dict.fromkeys(bar.lease for bar in found))
    owners = list(dict.fromkeys(bar.owner for bar in found))
    begin, end = min(bar.start for bar in found), max(bar.end for bar in found)
    figure, axes = _figure(1.2 + 0.26 * len(leases))
    clock = _Clock(axes, begin, end)
    for colour_number in range(min(len(_COLOURS), len(owners))):
        same = owners[colour_number :: len(_COLOURS)]
        mine = [bar for bar in found if bar.owner in same]
        axes.barh(
            [leases.index(bar.lease) for bar in mine],
            [clock.width(max(bar.end - bar.start, (end - begin) / 2000)) for bar in mine],
            left=[clock.place(bar.start) for bar in mine],
            height=0.7,
            color=_COLOURS[colour_number],
            edgecolor="white",
            linewidth=0.4,
            label=_labels(same),
        )
    axes.set_yticks(range(len(leases)))
    axes.set_yticklabels([_plain(lease) for lease in leases], parse_math=False)
    axes.invert_yaxis()
    clock.name_axis()
    _legend(axes, len(owners))
    return _png(figure)


def histogram(groups: Sequence[tuple[str, Sequence[float]]], xlabel: str) -> str:
    """Histograms of durations in ms. Each group has its own scale: they differ a thousandfold."""
    from matplotlib.ticker import MaxNLocator

    figure, rows = _figure(0.6 + 2.1 * len(groups), len(groups))
    for axes, (name, values), colour in zip(rows, groups, _COLOURS, strict=False):
        scale, unit = _unit(max(values))
        axes.hist([value / scale for value in values], bins=40, color=colour)
        axes.set_title(f"{name} ({len(values):,})", loc="left", fontsize="medium", parse_math=False)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{xlabel}, {unit}")
        axes.set_ylabel("how often")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    return _png(figure)


def lines(found: Sequence[Line], ylabel: str) -> str:
    """Values over log time."""
    begin = min(line.points[0][0] for line in found)
    end = max(line.points[-1][0] for line in found)
    figure, axes = _figure(3.4)
    clock = _Clock(axes, begin, end)
    for number, line in enumerate(found):
        axes.step(
            [clock.place(time) for time, _ in line.points],
            [value for _, value in line.points],
            where="post",
            color=_COLOURS[number % len(_COLOURS)],
            label=_label(line.name),
            linewidth=1.4,
        )
    clock.name_axis()
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    _legend(axes, len(found))
    return _png(figure)


class _Clock:
    """The time axis: UTC, or plain durations beyond the calendar."""

    def __init__(self, axes: Axes, begin: int, end: int) -> None:
        self._axes = axes
        self._begin = begin
        self._is_calendar = 0 <= begin < end <= _LAST_DAY_MS
        self._scale, self._unit = _unit(end - begin)

    def place(self, time_ms: int) -> float:
        """Where a time lies."""
        return time_ms / _DAY_MS if self._is_calendar else (time_ms - self._begin) / self._scale

    def width(self, span_ms: float) -> float:
        """How long a span is."""
        return span_ms / (_DAY_MS if self._is_calendar else self._scale)

    def name_axis(self) -> None:
        """Write the axis label."""
        if not self._is_calendar:
            self._axes.set_xlabel(f"since the first, {self._unit}")
            return
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(tz="UTC")  # type: ignore[no-untyped-call]
        self._axes.xaxis.set_major_locator(locator)
        formatter = ConciseDateFormatter(locator, tz="UTC")  # type: ignore[no-untyped-call]
        formatter.formats[4:] = formatter.zero_formats[4:] = ["%H:%M:%S", "%H:%M:%S.%f"]
        self._axes.xaxis.set_major_formatter(formatter)
        self._axes.set_xlabel("clock time, UTC")


def _unit(span_ms: float) -> tuple[float, str]:
    """Length in ms and name of a unit that suits the span."""
    for seconds, name in _UNITS:
        if span_ms <= (2_000 if name == "ms" else 200_000 * seconds) or name == "d":
            return max(1.0, seconds * 1000), name
    raise AssertionError("the last unit fits everything")


def _figure(height: float, rows: int = 0) -> tuple[Figure, Any]:
    """A figure and its axes; a list of axes if `rows` is given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, height), dpi=110, layout="constrained")
    made = figure.subplots(max(1, rows), squeeze=False)
    for axes in made[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, list(made[:, 0]) if rows else made[0, 0]


def _legend(axes: Axes, entries: int) -> None:
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
    if entries > len(_COLOURS):
        legend.set_title(f"{entries} names, {len(_COLOURS)} colours:\nthose in one line share one")
        legend.get_title().set_fontsize("small")


def _labels(names: Sequence[str]) -> str:
    """Names that share a colour, as far as there is room."""
    named = [_label(names[0])]
    for name in names[1:]:
        if len(", ".join([*named, _label(name)])) > _LONGEST_LINE:
            break
        named.append(_label(name))
    more = f" and {len(names) - len(named)} more" if len(names) > len(named) else ""
    return ", ".join(named) + more


def _plain(name: str) -> str:
    """Escape characters that the font lacks or that don't run from left to right, so that nothing is hidden."""
    plain = "".join(c if c.isprintable() and c < _FIRST_FOREIGN else c.encode("unicode_escape").decode() for c in name)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 3]}..."


def _label(name: str) -> str:
    """A label for a legend, which would omit a name that begins with an underscore."""
    return _plain(name) if not name.startswith("_") else f" {_plain(name)}"


def _png(figure: Any) -> str:
    """The figure as a data URL."""
    from matplotlib import rc_context

    with io.BytesIO() as file, rc_context({"savefig.facecolor": "white"}):
        figure.savefig(file, format="png")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
