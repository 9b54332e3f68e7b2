"""The books of the checks: what was done with messages, and what the log holds of their leases.

They have the order in which messages of one key, or of one partition, are handled (``consumer.run``), and outputs of
transactions, as a reader of committed records sees them: of each input once, and in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.testing.simulation.counting import CountLedger
from kafka_marshal.testing.simulation.holdings import name_of
from kafka_marshal.testing.simulation.living import Host, Living
from kafka_marshal.testing.simulation.parking import Parking
from kafka_marshal.testing.simulation.redoing import Redoing
from kafka_marshal.types import Key
from rationalizer import Outcome, Record, SettleOffsets, SettlingMessages, World

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario, Terms
    from kafka_marshal.testing.simulation.scheduler import Scheduler


#: The topic that workers produce to; each record names its input.
OUTPUTS = "outputs"
OUTPUT_PARTITIONS = 3


def output_partition(key: Key) -> int:
    """Where the outputs of an input partition go: its order can be seen there."""
    return crc32(f"{key[0]}/{key[1]}".encode()) % OUTPUT_PARTITIONS


class Outputs:
    """The checks of one story. Without transactions nothing is ever written."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        self.broker: MemoryBroker | None = None
        self._read: dict[int, int] = {}
        #: Input partition → the offset of its last output.
        self._last: dict[Key, int] = {}
        #: Input partition → positions that an admin has set: each lets the order begin there once.
        self._moved: dict[Key, list[int]] = {}
        #: The last of these, and the inputs of all outputs since.
        self._from: dict[Key, int] = {}
        self._since: dict[Key, set[int]] = {}
        #: Number of outputs.
        self.count: int = 0

    def repositioned(self, key: Key, position: int) -> None:
        """An admin has set where the group continues."""
        self._moved.setdefault(key, []).append(position)
        self._from[key] = position
        self._since[key] = set()

    def committed(self, key: Key) -> None:
        """Transactions of this partition have ended: check what can be read now."""
        log = self.broker.log(*key) if self.broker is not None and key[0] == OUTPUTS else None
        if log is None:
            return
        end = log.stable_end
        for message in log.messages[log.index(self._read.get(key[1], 0)) : log.index(end)]:
            topic, partition, offset = (message.value() or b"").decode().split("/")
            self._check((topic, int(partition)), int(offset))
        self._read[key[1]] = end

    def _check(self, key: Key, offset: int) -> None:
        self.count += 1
        last, moved = self._last.get(key), self._moved.get(key, [])
        if offset != self._first_at(key, 0 if last is None else last + 1):
            begins = next((at for at in reversed(moved) if self._first_at(key, at) == offset), None)
            if begins is None:
                follows = "is the first" if last is None else f"follows that of {last}"
                self._fail("outputs", f"the output of {key[0]} [{key[1]}] offset {offset} {follows}")
                return
            moved.remove(begins)
        self._last[key] = offset
        self._since.setdefault(key, set()).add(offset)

    def _first_at(self, key: Key, position: int) -> int | None:
        """The offset of the first message at or after a position."""
        log = self.broker.log(*key) if self.broker is not None else None
        if log is None or (index := log.index(position)) >= len(log.offsets):
            return None
        return log.offsets[index]

    def check_complete(self, keys: Iterable[Key]) -> None:
        """At the end: every message since the last position that was set has its output."""
        for key in keys:
            log = self.broker.log(*key) if self.broker is not None else None
            due = [] if log is None else log.offsets[log.index(self._from.get(key, 0)) :]
            missing = [offset for offset in due if offset not in self._since.get(key, ())]
            if missing:
                self._fail("outputs", f"{key[0]} [{key[1]}] offset {missing[0]} is done, and has no output")


class Ordering:
    """Checks the order of a story's handlers, if it has one and no user's worker takes part."""

    def __init__(self, scenario: Scenario, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        judged = all(client.worker != "yours" for client in scenario.clients)
        self._order = scenario.order if judged else None
        #: The lane of each message, and the last message of each lane so far.
        self._lanes: dict[tuple[Key, int], Hashable] = {}
        self._last: dict[tuple[Key, Hashable], int] = {}
        #: Each message's predecessor in its lane.
        self._before: dict[tuple[Key, int], int] = {}
        #: Begun at least once.
        self._begun: set[tuple[Key, int]] = set()
        #: (process, partition, lane) → offset that a handler of that process has.
        self._running: dict[tuple[Living, Key, Hashable], int] = {}
        #: The messages that begin at once, in one list.
        self.together: set[tuple[Key, int]] = set()
        #: The message that kills: set aside, it lets its key continue before the log shows that (U2).
        self.killing: tuple[Key, int] | None = None
        #: Lanes with a hanging handler.
        self.hung: set[tuple[Key, Hashable]] = set()

    def published(self, key: Key, offset: int, message_key: bytes | None) -> None:
        """A message was written to a partition."""
        if self._order is None:
            return
        keyed = self._order == "key" and message_key is not None
        lane: Hashable = message_key if keyed else "all" if self._order == "partition" else offset
        self._lanes[key, offset] = lane
        if (key, lane) in self._last:
            self._before[key, offset] = self._last[key, lane]
        self._last[key, lane] = offset

    def begins(self, process: Living, key: Key, offset: int, handled: Collection[int]) -> None:
        """A handler begins with a message; handled: what any process has handled, or an admin skipped."""
        lane = self._lanes.get((key, offset))
        if lane is None:
            return
        other = self._running.get((process, key, lane))
        if other is not None and process.host.in_lanes and (key, other) not in self.together:
            what = f"{process.name} begins {name_of(key)} offset {offset}, and has {other} with a handler still"
            self._fail("order", f"{what} (order={self._order!r})")
        self._running[process, key, lane] = offset
        if (key, offset) in self._begun:
            return
        self._begun.add((key, offset))
        before = self._before.get((key, offset))
        if before is not None and before not in handled and (key, before) not in {*self.together, self.killing}:
            what = f"{process.name} begins {name_of(key)} offset {offset}, and no process has handled {before}"
            self._fail("order", f"{what}, which comes before it (order={self._order!r})")

    def ended(self, process: Living, key: Key, offset: int) -> None:
        """A handler has returned or failed."""
        lane = self._lanes.get((key, offset))
        if self._running.get((process, key, lane)) == offset:
            del self._running[process, key, lane]

    def comes_again(self, key: Key, offset: int) -> None:
        """It was in a list, and not handled, since one before it has failed, or the whole list."""
        self._begun.discard((key, offset))

    def hangs(self, key: Key, offset: int) -> None:
        """A handler hangs with this message."""
        self.hung.add((key, self._lanes.get((key, offset))))

    def waits(self, key: Key, offset: int) -> bool:
        """Whether this message hangs or waits for one that does."""
        return (key, self._lanes.get((key, offset))) in self.hung


@dataclass(slots=True)
class LeaseSeen:
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

    def done_since(self, before: LeaseSeen) -> Iterator[int]:
        """What the log has called done since then, and not open."""
        spans = [(before.stable + 1, self.stable), *(span for span in self.ranges if span not in before.ranges)]
        spans += [(offset, offset) for offset in before.open - self.open]
        return (offset for first, last in spans for offset in range(first, last + 1) if offset not in self.open)

    def calls_done(self, first: int, last: int) -> bool:
        """Whether these are done for every key, or in holes."""
        return last <= self.stable or any(low <= first and last <= high for low, high in self.ranges)

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
    counted: CountLedger
    #: What is set aside.
    parking: Parking
    #: What is opened again.
    redoing: Redoing
    _ledgers: dict[Key, Ledger] = field(default_factory=dict)
    seen: dict[Key, LeaseSeen] = field(default_factory=dict)
    #: Where an admin has set the position.
    moved: set[Key] = field(default_factory=set)
    #: What the fenced sink has.
    written: dict[Key, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> Accounts:
        """Those of a story that begins."""
        made = cls(
            Ordering(scenario, fail),
            Outputs(fail),
            CountLedger(scenario, scheduler, fail),
            Parking(scenario, scheduler, fail),
            Redoing(scenario, scheduler, fail),
        )
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
        self.redoing.repositioned(key, position, worlds)

    def released_of(
        self, terms: Terms, holders: Holders, worlds: Mapping[int, World]
    ) -> Callable[[Living, Key, Callable[[int], bool]], object]:
        """What to call when a member has released a partition: everything that it sent has arrived."""

        def released(sender: Living, key: Key, concerns: Callable[[int], bool]) -> None:
            if terms.is_heard and (sender.name, key) not in holders.lost:
                self.parking.released(sender, key, concerns, worlds)

        return released

    def settled(self, outcome: Outcome, record: Record, sender: Living, at: int) -> None:
        """The record at this offset was judged: what operators settle needs no handler, nor what is set aside by now.

        What they open of what is done needs one again.
        """
        discarded, aside = set(self.parking.discarded), set(self.parking.aside)
        self.parking.record(outcome, record, sender)
        for key, offset in self.parking.discarded - discarded:
            self.ledger(key).handled.setdefault(offset, NOT_NEEDED)
        for key, offset in self.parking.aside - aside:
            self.ledger(key).ever.add(offset)
        if self.redoing.is_on and isinstance(record, SettlingMessages | SettleOffsets):
            seen = self.seen.get((record.topic, record.partition)) or LeaseSeen(-1, -1, ())
            opened, given_up = self.redoing.record(outcome, record, sender, at, seen.open, seen.calls_done)
            for key, offset in opened:
                self.ledger(key).handled.pop(offset, None)
            for key, offset in given_up:
                self.ledger(key).handled.setdefault(offset, NOT_NEEDED)
            self.parking.discarded.difference_update(opened)

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
