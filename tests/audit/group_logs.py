"""Logs of coordinated groups for the audit's tests: written by hand with a few members, or by the oracle's author."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rationalizer import (
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    Outcome,
    Record,
    Upgrade,
    World,
    encode,
)
from tests.audit.logs import WholeLog
from tests.rationalizer.group_author import GroupAuthor
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.strategies import Entry, by_seed

SESSION = 1000


@dataclass
class GroupLog:
    """One CP at level 2, and what a replica makes of it."""

    entries: list[Entry] = field(default_factory=list)
    world: World = field(default_factory=lambda: World(0, 1))
    ids: dict[str, str] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.add(Upgrade("1", "admin", "g", 2))

    def add(self, record: Record, after: int = 10) -> Outcome:
        """The record, so many ms later."""
        self.now += after
        entry: Entry = (self.world.next_offset, self.now, encode(record))
        self.entries.append(entry)
        return self.world.apply(*entry)

    def join(
        self, client: str, instance: str = "1", topics: Sequence[tuple[str, int]] = (("t", 1),), **more: Any
    ) -> Outcome:
        """A newcomer, or a restart."""
        share = more.pop("share", False)
        seen = self.world.next_offset
        fields = ("", seen, SESSION, more.pop("strategy", "sticky"), share, "", tuple(topics))
        outcome = self.add(JoinGroup(instance, client, "g", *fields), **more)
        assert outcome.member is not None, outcome
        self.ids[client] = outcome.member
        return outcome

    @property
    def generation(self) -> int:
        group = self.world.group("g")
        return 0 if group is None else group.generation

    def beat(self, client: str, instance: str = "1", **more: Any) -> Outcome:
        return self.add(GroupHeartbeat(instance, client, "g", self.ids[client], self.generation), **more)

    def leave(self, client: str, instance: str = "1", **more: Any) -> Outcome:
        return self.add(LeaveGroup(instance, client, "g", self.ids[client], self.generation), **more)

    def commit(self, client: str, *entries: CommitEntry, instance: str = "1", **more: Any) -> Outcome:
        generation = more.pop("generation", self.generation)
        member_id = more.pop("member_id", self.ids.get(client, ""))
        return self.add(CommitOffsets(instance, client, "g", member_id, generation, False, entries), **more)

    def share(self, *topics: str) -> Outcome:
        return self.add(ConfigureGroup("1", "admin", "g", (("accept_range_fetch", topics),)))

    @property
    def whole(self) -> WholeLog:
        return WholeLog(1, {0: self.entries})


def random_group_log(seed: int, length: int, partitions: int = 1) -> WholeLog:
    """`length` records in each CP after its upgrade, plausible and near every edge; claims are among them."""
    found = {}
    for cp in range(partitions):
        world = OracleWorld(cp, partitions)
        log: list[Entry] = [(0, 0, encode(Upgrade("1", "admin", "g", 2)))]
        world.apply(*log[0])
        author = GroupAuthor(by_seed(seed * 1000 + cp), world)
        for _ in range(length):
            entry = author.entry()
            world.apply(*entry)
            log.append(entry)
        found[cp] = log
    return WholeLog(partitions, found)
