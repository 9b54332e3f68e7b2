"""Members of a coordinated group that are records only: one thread plays all of them beside a real member.

They join, report starts, release what is revoked, and send heartbeats, as the engine's members do: so a real member
beside them reads the log of a fleet, and this machine runs one member, not a thousand.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from kafka_marshal.adapters.kafka import KafkaCluster
from rationalizer import (
    CommitEntry,
    CommitOffsets,
    Group,
    GroupHeartbeat,
    JoinGroup,
    Record,
    World,
    encode,
    route_group,
)
from rationalizer.groups.pieces import NEVER
from rationalizer.wire.wellformed import LET_GO, START

__all__ = ["Phantoms", "is_even"]

#: Pieces start this long after a join, as the engine's do.
OPENS_MS = 50.0
#: How often each phantom checks what it has to report, all in one go.
SWEEP_MS = 15.0
#: A beat comes after this share of a third of the session.
BEATS_AFTER = (0.8, 1.0)


def is_even(group: Group | None, topics: Mapping[str, int], members: int) -> bool:
    """Whether this number of members are in the group, and every partition is with its target and has a start."""
    if group is None or len(group.members) != members:
        return False
    for name, count in topics.items():
        pieces = group.pieces.get(name)
        if pieces is None or len(pieces.owners) < count or pieces.owners != pieces.targets or pieces.any_revoked():
            return False
        if len(group.progress.get(name, ())) < count:
            return False
    return True


class Phantoms:
    """`count` members of a group, which join evenly at random within `over_s`; topics: name → partitions."""

    def __init__(
        self,
        bootstrap: str,
        coordination: str,
        cps: int,
        group: str,
        topics: dict[str, int],
        count: int,
        *,
        over_s: float,
        session_ms: int,
        strategy: str = "sticky",
        seed: int = 50,
    ) -> None:
        self.group_id, self.topics, self.count = group, topics, count
        self.home = route_group(group, cps)
        self.world = World(self.home, cps)
        #: Processor time of this thread for applying the log (s), and for a record at most.
        self.rules_s = self.slowest_s = 0.0
        self.records = 0
        self._session_ms, self._strategy = session_ms, strategy
        self._rng = random.Random(seed)
        self._cluster = KafkaCluster(bootstrap, {})
        self._tail = self._cluster.tail(coordination, {self.home: 0})
        self._appender = self._cluster.appender(coordination, delivery_timeout_ms=30_000)
        #: (when, number): the next beat of each member, or its join.
        self._due: list[tuple[float, int]] = []
        self._begin = time.monotonic()
        self._over_s = over_s
        #: What was reported and is not shown yet: key → when it may be reported again.
        self._reported: dict[tuple[str, int], float] = {}
        self._opens: dict[int, float] = {}
        self._numbers: dict[int, int] = {}
        self._swept = 0.0

    def now_ms(self) -> float:
        """Since the start."""
        return (time.monotonic() - self._begin) * 1000

    def start(self) -> None:
        """Time begins."""
        self._begin = time.monotonic()
        self._due = [(self._rng.random() * self._over_s * 1000, number) for number in range(self.count)]
        heapify(self._due)

    def turn(self) -> None:
        """Read, and do what is due (*blocking*, for some milliseconds)."""
        for entries in self._tail.read(0.005).records.values():
            for offset, timestamp_ms, value in entries:
                began = time.thread_time()
                self.world.apply(offset, timestamp_ms, value)
                took = time.thread_time() - began
                self.rules_s += took
                self.slowest_s = max(self.slowest_s, took)
                self.records += 1
        now = self.now_ms()
        while self._due and self._due[0][0] <= now:
            _, number = heappop(self._due)
            again = now + self._session_ms / 3 * self._rng.uniform(*BEATS_AFTER)
            heappush(self._due, (again, number))
            self._beat(number)
        if now >= self._swept + SWEEP_MS:
            self._swept = now
            self._sweep(now)
        self._appender.poll(0)

    def is_even(self, members: int) -> bool:
        """See :func:`is_even`."""
        return is_even(self.world.group(self.group_id), self.topics, members)

    def close(self) -> None:
        """Free what was opened."""
        self._tail.close()
        self._appender.close(5)
        self._cluster.close()

    def _append(self, record: Record) -> None:
        self._appender.append(self.home, encode(record))

    def _ids(self, number: int) -> tuple[str, str, str]:
        return f"m-{number:04}/1/0.1.0/5f0e9a3c1b7d42e8", f"m-{number:04}", self.group_id

    def _beat(self, number: int) -> None:
        group = self.world.group(self.group_id)
        ids = self._ids(number)
        member = None if group is None else group.clients.get(ids[1])
        if group is None or member is None:
            seen = self.world.next_offset
            topics = tuple(sorted(self.topics.items()))
            self._append(JoinGroup(*ids, "", seen, self._session_ms, self._strategy, False, "", topics))
        else:
            self._append(GroupHeartbeat(*ids, member.member_id, group.generation))

    def _sweep(self, now: float) -> None:
        """Report starts and releases of all phantoms, one record each."""
        group = self.world.group(self.group_id)
        if group is None:
            return
        if len(self._opens) < len(group.members):
            for slot, member in group.members.items():
                if slot not in self._opens:
                    self._opens[slot] = now + OPENS_MS
                    if member.client_id.startswith("m-"):
                        self._numbers[slot] = int(member.client_id[2:])
        entries: dict[int, list[CommitEntry]] = defaultdict(list)
        for name, pieces in group.pieces.items():
            kept = group.progress.get(name, {})
            for partition, (owner, revoked) in enumerate(zip(pieces.owners, pieces.revoked, strict=True)):
                if revoked == NEVER and partition in kept:
                    continue
                key = (name, partition)
                if owner not in self._numbers or self._reported.get(key, -1.0) > now:
                    continue
                if revoked != NEVER:
                    entries[owner].append(CommitEntry(*key, action=LET_GO))
                elif now >= self._opens[owner]:
                    entries[owner].append(CommitEntry(*key, action=START, through=-1))
                else:
                    continue
                self._reported[key] = now + 200.0
        for slot, found in entries.items():
            ids = self._ids(self._numbers[slot])
            for first in range(0, len(found), 1000):
                some = tuple(found[first : first + 1000])
                member_id = group.members[slot].member_id
                self._append(CommitOffsets(*ids, member_id, group.generation, False, some))
