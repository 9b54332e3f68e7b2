"""Promises that depend on a story's faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario

__all__ = ["Terms"]

#: If these are the only faults, everything that a member sends reaches the log.
HEARD = frozenset({"crash", "term", "grow", "markers", "slow handler"})


@dataclass(frozen=True, slots=True)
class Terms:
    """The promises that hold in a story."""

    are_clocks_trusted: bool
    #: The only faults are requests to end.
    is_orderly: bool
    #: Everything that a living member sends reaches the log.
    is_heard: bool

    @classmethod
    def of(cls, scenario: Scenario) -> Terms:
        """Those of this one."""
        kinds = {fault.kind for fault in scenario.faults}
        return cls(scenario.clocks_are_trusted, kinds <= {"term"}, kinds <= HEARD)
