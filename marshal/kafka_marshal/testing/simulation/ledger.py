"""What was done with messages, and what the log said of their leases, as the checks keep account of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kafka_marshal.testing.simulation.living import Host, Living
from kafka_marshal.testing.simulation.ordering import Ordering
from kafka_marshal.types import Key

__all__ = ["NOBODY", "Accounts", "Granted", "Holders", "Ledger", "Seen"]


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
    host = Host("an admin")


#: Who handled what nobody had to, when, and under which epoch.
NOBODY: tuple[Living, float, int] = (_Nobody(), 0.0, -1)  # type: ignore[assignment]


@dataclass(slots=True)
class Accounts:
    """What was done with all partitions' messages."""

    #: In which order.
    ordering: Ordering
    _ledgers: dict[Key, Ledger] = field(default_factory=dict)
    seen: dict[Key, Seen] = field(default_factory=dict)
    #: Where an admin has set the position.
    moved: set[Key] = field(default_factory=set)
    #: What the fenced sink has.
    written: dict[Key, set[int]] = field(default_factory=dict)

    def ledger(self, key: Key) -> Ledger:
        """What was done with a partition's messages."""
        found = self._ledgers.get(key)
        if found is None:
            found = self._ledgers[key] = Ledger()
        return found

    def no_messages(self, key: Key, offsets: Iterable[int]) -> None:
        """Nobody is given these; they are done with what lies around them (P6)."""
        for offset in offsets:
            self.ledger(key).handled[offset] = NOBODY
            self.ledger(key).ever.add(offset)


@dataclass(slots=True)
class Granted:
    """At most once: what the log granted, and what became of it."""

    #: (instance, partition, first, last offset, when)
    all: list[tuple[str, Key, int, int, float]] = field(default_factory=list)
    #: The same by process and partition: (first, last offset).
    spans: dict[tuple[str, Key], list[tuple[int, int]]] = field(default_factory=dict)
    #: How often a process began a message.
    begun: dict[tuple[str, Key, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class Holders:
    """What is known of those who hold, or held, a lease."""

    #: (process, partition) → virtual time at which it knew that its lease was lost.
    lost: dict[tuple[str, Key], float] = field(default_factory=dict)
    #: (process, partition, epoch) → when its last accepted beat was sent.
    beaten: dict[tuple[Living, Key, int], float] = field(default_factory=dict)
    #: (partition, epoch) → who worked under it.
    tokens: dict[tuple[Key, int], Living] = field(default_factory=dict)
    #: The epoch under which a process got the message that it handles now.
    epochs: dict[tuple[Living, Key], int] = field(default_factory=dict)
