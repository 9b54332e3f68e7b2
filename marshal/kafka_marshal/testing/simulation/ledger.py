"""The books of the checks: what was done with messages, and what the log holds of their leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafka_marshal.testing.simulation.counting import Counted
from kafka_marshal.testing.simulation.living import Host, Living
from kafka_marshal.testing.simulation.ordering import Ordering
from kafka_marshal.testing.simulation.outputs import Outputs
from kafka_marshal.testing.simulation.parking import Parking
from kafka_marshal.types import Key
from rationalizer import Outcome, Record, World

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario, Terms
    from kafka_marshal.testing.simulation.scheduler import Scheduler


@dataclass(slots=True)
class Seen:
    """A lease after the last record about it."""

    epoch: int
    stable: int
    ranges: tuple[tuple[int, int], ...]
    #: Progress when the epoch began.
    granted_stable: int = -1
    granted_ranges: tuple[tuple[int, int], ...] = ()
    #: What is open, whatever the position says; and what was when the epoch began, or has been since.
    open: frozenset[int] = frozenset()
    granted_open: frozenset[int] = frozenset()

    def done_since(self, before: Seen) -> Iterator[int]:
        """What the log has called done since then, and not open."""
        spans = [(before.stable + 1, self.stable), *(span for span in self.ranges if span not in before.ranges)]
        spans += [(offset, offset) for offset in before.open - self.open]
        return (offset for first, last in spans for offset in range(first, last + 1) if offset not in self.open)

    def was_done(self, offset: int) -> bool:
        """Whether the log called it done when the epoch began."""
        if offset in self.granted_open:
            return False
        return offset <= self.granted_stable or any(first <= offset <= last for first, last in self.granted_ranges)


@dataclass(slots=True)
class Ledger:
    """What was done with the messages of one partition."""

    #: offset → last process that handled it, when it finished, and the epoch of its delivery (-1: unknown).
    handled: dict[int, tuple[Living, float, int]] = field(default_factory=dict)
    #: Ever handled, begun (at most once), or skipped by an admin.
    ever: set[int] = field(default_factory=set)
    #: Skipped by an admin before it was handled. A sink that is ahead of it omits it for good, even if the admin moves
    #: back behind it: to have it written, users rewind the sink, too (docs/sinks.md).
    passed_over: set[int] = field(default_factory=set)
    #: At most once: offset → the process that received it.
    begun: dict[int, Living] = field(default_factory=dict)


class _NotNeeded:
    name = "an admin"
    host = Host("an admin")


#: Stands in for the handler of messages that need none.
NOT_NEEDED: tuple[Living, float, int] = (_NotNeeded(), 0.0, -1)  # type: ignore[assignment]


@dataclass(slots=True)
class Accounts:
    """What was done with all partitions' messages."""

    #: In which order.
    ordering: Ordering
    #: What readers of committed records see.
    outputs: Outputs
    #: What members of a group that takes checkpoints counted.
    counted: Counted
    #: What is set aside.
    parking: Parking
    _ledgers: dict[Key, Ledger] = field(default_factory=dict)
    seen: dict[Key, Seen] = field(default_factory=dict)
    #: Where an admin has set the position.
    moved: set[Key] = field(default_factory=set)
    #: What the fenced sink has.
    written: dict[Key, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> Accounts:
        """Those of a story that begins."""
        made = cls(Ordering(scenario, fail), Outputs(fail), Counted(scenario, scheduler, fail), Parking(scenario, fail))
        made.ordering.killing = made.parking.killing
        return made

    def published(self, key: Key, offset: int, message_key: bytes | None) -> None:
        """A message was written to a partition."""
        self.ordering.published(key, offset, message_key)
        self.counted.published(key, offset, message_key)

    def ledger(self, key: Key) -> Ledger:
        """What was done with a partition's messages."""
        found = self._ledgers.get(key)
        if found is None:
            found = self._ledgers[key] = Ledger()
        return found

    def repositioned(self, key: Key, position: int, worlds: Mapping[int, World]) -> None:
        """An admin has set the position."""
        for offset in self.parking.repositioned(key, position - 1, worlds):
            self.ledger(key).handled.setdefault(offset, NOT_NEEDED)
            self.ledger(key).ever.add(offset)
        self.moved.add(key)
        self.outputs.repositioned(key, position)

    def released_of(
        self, terms: Terms, holders: Holders, worlds: Mapping[int, World]
    ) -> Callable[[Living, Key, Callable[[int], bool]], object]:
        """What to call when a member has released a partition: everything that it sent has arrived."""

        def released(sender: Living, key: Key, concerns: Callable[[int], bool]) -> None:
            if terms.is_heard and (sender.name, key) not in holders.lost:
                self.parking.released(sender, key, concerns, worlds)

        return released

    def settled(self, outcome: Outcome, record: Record, sender: Living) -> None:
        """A record was accepted: what operators settle by it needs no handler, and what is set aside none any more."""
        discarded, aside = set(self.parking.discarded), set(self.parking.aside)
        self.parking.record(outcome, record, sender)
        for key, offset in self.parking.discarded - discarded:
            self.ledger(key).handled.setdefault(offset, NOT_NEEDED)
        for key, offset in self.parking.aside - aside:
            self.ledger(key).ever.add(offset)

    def no_messages(self, key: Key, offsets: Iterable[int]) -> None:
        """These offsets have no message; they are done with their neighbours (P6)."""
        for offset in offsets:
            self.ledger(key).handled[offset] = NOT_NEEDED
            self.ledger(key).ever.add(offset)


@dataclass(slots=True)
class Granted:
    """At most once: what the log granted, and what was begun of it."""

    #: (instance, partition, first, last offset, when)
    all: list[tuple[str, Key, int, int, float]] = field(default_factory=list)
    #: The same by process and partition: (first, last offset).
    spans: dict[tuple[str, Key], list[tuple[int, int]]] = field(default_factory=dict)
    #: How often a process began a message.
    begun: dict[tuple[str, Key, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class Holders:
    """Present and former holders of leases."""

    #: (process, partition) → virtual time at which it learned that its lease was lost.
    lost: dict[tuple[str, Key], float] = field(default_factory=dict)
    #: (process, partition, epoch) → when its last accepted heartbeat was sent.
    beaten: dict[tuple[Living, Key, int], float] = field(default_factory=dict)
    #: (partition, epoch, key hash; 0: not known) → the process that worked under it.
    tokens: dict[tuple[Key, int, int], Living] = field(default_factory=dict)
    #: The epoch under which a process received the message that it handles now.
    epochs: dict[tuple[Living, Key], int] = field(default_factory=dict)

    def check_token(self, process: Living, key: Key, epoch: int, hashed: int, fail: Callable[[str, str], None]) -> None:
        """A fencing token belongs, for these keys, to one process for ever (C9, G5)."""
        other = self.tokens.setdefault((key, epoch, hashed), process)
        if other is not process:
            who = f"{other.name} and {process.name}"
            fail("two owners", f"{key[0]} [{key[1]}]: {who} work under one token, {epoch}")
