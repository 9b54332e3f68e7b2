"""The base class of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.race.contestants import Contestant
from benchmarks.race.grounds import Grounds

__all__ = ["Aim", "Event", "Samples"]

#: Metric → samples of one round.
Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Aim:
    """Target of a median: at most (or at least) factor × another contestant's, or a fixed number of units."""

    metric: str
    contestant: str
    #: Another contestant's name; "": a fixed bound.
    beside: str
    bound: float
    at_least: bool = False

    def met(self, ours: float, theirs: float) -> bool:
        """Whether it is reached."""
        value = ours / theirs if self.beside else ours
        return value >= self.bound if self.at_least else value <= self.bound

    def text(self) -> str:
        """For the table."""
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bound:g}" + (f" × {self.beside}" if self.beside else "")


class Event:
    """One kind of race."""

    #: As in --only.
    name: ClassVar[str]
    #: One line for people.
    title: ClassVar[str]
    #: By metric: its unit.
    units: ClassVar[Mapping[str, str]]

    def __init__(
        self, contestants: Sequence[Contestant], aims: Sequence[Aim], conditions: Mapping[str, object]
    ) -> None:
        """The contestants, the targets, and a description of the conditions."""
        self.contestants = contestants
        self.aims = aims
        self.conditions = conditions

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """Measure once, on the broker of this contestant."""
        raise NotImplementedError
