"""What was done with messages, and what the log said of their leases, as the checks keep account of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.living import Living

__all__ = ["NOBODY", "Ledger", "Seen"]


@dataclass(slots=True)
class Seen:
    """A lease as it was after the last record about it."""

    epoch: int
    stable: int
    ranges: tuple[tuple[int, int], ...]
    #: What was done when the epoch began.
    granted_stable: int = -1
    granted_ranges: tuple[tuple[int, int], ...] = ()

    def was_done(self, offset: int) -> bool:
        """Whether the log called it done when the epoch began."""
        return offset <= self.granted_stable or any(first <= offset <= last for first, last in self.granted_ranges)


@dataclass(slots=True)
class Ledger:
    """What was done with the messages of one partition."""

    #: offset → who handled it last, when it was through, and the epoch under which it was handed out (-1: unknown).
    handled: dict[int, tuple[Living, float, int]] = field(default_factory=dict)
    #: Handled or begun (at most once), or passed over by an admin, ever.
    ever: set[int] = field(default_factory=set)
    #: Passed over by an admin before anybody had handled it. A sink that is ahead of it by now leaves it out for good,
    #: also when the admin goes back behind it: to have it written, users rewind the sink, too (docs/sinks.md).
    passed_over: set[int] = field(default_factory=set)
    #: At most once: offset → who was handed it.
    begun: dict[int, Living] = field(default_factory=dict)


class _Nobody:
    name = "an admin"
    is_iterating = defers = False


#: Who handled what nobody had to, when, and under which epoch.
NOBODY: tuple[Living, float, int] = (_Nobody(), 0.0, -1)  # type: ignore[assignment]
