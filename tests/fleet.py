"""Members of a coordinated group as raw records: joins, heartbeats, commits, leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rationalizer import (
    AnswerBarrier,
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    Record,
    Upgrade,
    route_group,
)
from rationalizer.groups.machine import member_id_of
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import LET_GO, REACHED, START


class Fleet:
    """A group on a log of ``cps`` CPs. `append`: record and CP → offset. All members have the same strategy."""

    def __init__(
        self, group: str, partitions: int, append: Callable[[Record, int], int], *, strategy: str = "sticky"
    ) -> None:
        self.group = group
        self.home = route_group(group, partitions)
        self.strategy = strategy
        self._append = append
        self._partitions = partitions
        #: client_id → (instance_id, member_id)
        self.members: dict[str, tuple[str, str]] = {}

    def upgrade(self, level: int = 2) -> None:
        """Raise every CP to this level."""
        for cp in range(self._partitions):
            self._append(Upgrade("u", "operator", "g", level), cp)

    def configure(self, **settings: Any) -> None:
        for cp in range(self._partitions):
            self._append(ConfigureGroup("x", "operator", self.group, tuple(settings.items())), cp)

    def join(
        self,
        client: str,
        topics: Mapping[str, int],
        *,
        instance: str = "",
        session: int = 10_000,
        share: bool = False,
        pattern: str = "",
    ) -> int:
        """A new member, or the next instance of one; returns the offset: the generation, if accepted."""
        instance = instance or f"{client}/1/0.1.0/x"
        join = JoinGroup(
            *(instance, client, self.group, "", 2**40),
            *(session, self.strategy, share, pattern, tuple(topics.items())),
        )
        offset = self._append(join, self.home)
        self.members[client] = instance, member_id_of(self.group, self.home, offset)
        return offset

    def ids(self, client: str) -> tuple[str, str, str, str]:
        instance, member_id = self.members[client]
        return instance, client, self.group, member_id

    def beat(self, client: str, generation: int) -> int:
        return self._append(GroupHeartbeat(*self.ids(client), generation), self.home)

    def leave(self, client: str, generation: int) -> int:
        return self._append(LeaveGroup(*self.ids(client), generation), self.home)

    def commit(self, client: str, generation: int, *entries: CommitEntry) -> int:
        return self._append(CommitOffsets(*self.ids(client), generation, False, entries), self.home)

    def begin(self, client: str, after: int, *, keep: int = 3, timeout_ms: int = 60_000, hold: bool = False) -> int:
        """A BeginCheckpoint; returns its offset: the id, if it is accepted."""
        instance = self.members.get(client, (f"{client}/1/0.1.0/x", ""))[0]
        return self._append(BeginCheckpoint(instance, client, self.group, after, timeout_ms, keep, hold), self.home)

    def answer(self, client: str, generation: int, barrier: int, *entries: CommitEntry, answer: int = REACHED) -> int:
        """A member's answer to a barrier."""
        return self._append(AnswerBarrier(*self.ids(client), generation, barrier, answer, entries), self.home)


def cut(topic: str, partition: int, through: int | None = None, lo: int = 0, hi: int = MAX_KEY_HASH) -> CommitEntry:
    """An entry of an answer."""
    return CommitEntry(topic, partition, lo, hi, 0, through)


def started(topic: str, *partitions: int, through: int = -1) -> list[CommitEntry]:
    """Entries that set the start of these partitions."""
    return [CommitEntry(topic, partition, action=START, through=through) for partition in partitions]


def let_go(topic: str, partition: int, through: int | None = None, lo: int = 0, hi: int = MAX_KEY_HASH) -> CommitEntry:
    """An entry that releases a revoked piece."""
    return CommitEntry(topic, partition, lo, hi, LET_GO, through)
