"""The report's pictures, as PNG. Names come from whoever may append to the log: they are drawn, never interpreted."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Line", "bars", "histogram", "lines"]

#: Told apart by people who see colours otherwise, too (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f")

_LONGEST_NAME = 38

#: Below it there is Latin, without marks that stand on other characters.
_FIRST_FOREIGN: Final = "\u0250"

#: Seconds, and what a span that is not longer than 200 of them is called.
_UNITS: Final = ((1.0, "s"), (60.0, "min"), (3600.0, "h"), (86_400.0, "d"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One holder's time with one lease, in ms of log time."""

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
    """Who held what when: a line for each lease, a colour for each owner."""
    leases = list(dict.fromkeys(bar.lease for bar in found))
    owners = list(dict.fromkeys(bar.owner for bar in found))
    begin, end = min(bar.start for bar in found), max(bar.end for bar in found)
    scale, unit = _unit(end - begin)
    figure, axes = _figure(1.2 + 0.26 * len(leases))
    for owner_number, owner in enumerate(owners):
        mine = [bar for bar in found if bar.owner == owner]
        axes.barh(
            [leases.index(bar.lease) for bar in mine],
            [max((bar.end - bar.start) / scale, (end - begin) / scale / 2000) for bar in mine],
            left=[(bar.start - begin) / scale for bar in mine],
            height=0.7,
            color=_COLOURS[owner_number % len(_COLOURS)],
            edgecolor="white",
            linewidth=0.4,
            label=_label(owner) if owner_number < len(_COLOURS) else None,
        )
    axes.set_yticks(range(len(leases)))
    axes.set_yticklabels([_plain(lease) for lease in leases], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(f"log time since the first claim, {unit}")
    _legend(axes, len(owners))
    return _png(figure)


def histogram(groups: Sequence[tuple[str, Sequence[float]]], xlabel: str) -> str:
    """How often what took how long; values in ms."""
    top = max(max(values) for _, values in groups)
    scale, unit = _unit(top)
    figure, axes = _figure(3.2)
    axes.hist(
        [[value / scale for value in values] for _, values in groups],
        bins=40,
        stacked=True,
        color=_COLOURS[: len(groups)],
        label=[name for name, _ in groups],
    )
    axes.set_xlabel(f"{xlabel}, {unit}")
    axes.set_ylabel("how often")
    _legend(axes, len(groups))
    return _png(figure)


def lines(found: Sequence[Line], ylabel: str) -> str:
    """Values over log time."""
    begin = min(line.points[0][0] for line in found)
    end = max(line.points[-1][0] for line in found)
    scale, unit = _unit(end - begin)
    figure, axes = _figure(3.4)
    for number, line in enumerate(found):
        axes.step(
            [(time - begin) / scale for time, _ in line.points],
            [value for _, value in line.points],
            where="post",
            color=_COLOURS[number % len(_COLOURS)],
            label=_label(line.name),
            linewidth=1.4,
        )
    axes.set_xlabel(f"log time, {unit}")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    _legend(axes, len(found))
    return _png(figure)


def _unit(span_ms: float) -> tuple[float, str]:
    """ms in a unit in which the span is easy to read, and its name."""
    for seconds, name in _UNITS:
        if span_ms <= 200_000 * seconds or name == "d":
            return max(1.0, seconds * 1000), name
    raise AssertionError("the last unit fits everything")


def _figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Axes, entries: int) -> None:
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
    if entries > len(_COLOURS):
        legend.set_title(f"{len(_COLOURS)} of {entries} owners")
        legend.get_title().set_fontsize("small")


def _plain(name: str) -> str:
    """Characters that the font has and that run from left to right; others are escaped, so that nothing is hidden."""
    plain = "".join(c if c.isprintable() and c < _FIRST_FOREIGN else c.encode("unicode_escape").decode() for c in name)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 3]}..."


def _label(name: str) -> str:
    """In a legend, where a name that begins with an underscore would be left out."""
    return _plain(name) if not name.startswith("_") else f" {_plain(name)}"


def _png(figure: Any) -> str:
    """As the address of an image that is in the page itself."""
    from matplotlib import rc_context

    with io.BytesIO() as file, rc_context({"savefig.facecolor": "white"}):
        figure.savefig(file, format="png")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
