"""What can be promised, which depends on what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario

__all__ = ["Terms"]

#: Where these are the only faults, whatever a member says is heard.
HEARD = frozenset({"crash", "term", "grow", "markers", "slow handler"})


@dataclass(frozen=True, slots=True)
class Terms:
    """What can be promised in a story."""

    are_clocks_trusted: bool
    #: Nothing goes wrong but that processes are asked to end.
    is_orderly: bool
    #: Whatever a member says is heard, as long as it lives.
    is_heard: bool

    @classmethod
    def of(cls, scenario: Scenario) -> Terms:
        """Those of this one."""
        kinds = {fault.kind for fault in scenario.faults}
        return cls(scenario.clocks_are_trusted, kinds <= {"term"}, kinds <= HEARD)
