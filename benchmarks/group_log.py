"""The log of a coordinated group at work, with checkpoints or without: written once, then replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.replay import Entry
from rationalizer import (
    AnswerBarrier,
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    JoinGroup,
    Record,
    Upgrade,
    World,
    encode,
)
from rationalizer.levels import CHECKPOINTS_LEVEL, GROUPS_LEVEL
from rationalizer.wire.wellformed import COMMIT, LET_GO, REACHED, START

__all__ = ["GroupLog"]

GROUP, TOPIC = "delays-by-carrier", "flights"
MEMBERS, PARTITIONS = 20, 60
SESSION_MS = 30_000
KEEP = 16


class GroupLog:
    """`begin`: until the group is balanced; `work`: all members commit, or answer, for three partitions each."""

    def __init__(self, records: int, *, checkpoints: bool) -> None:
        self.begin: list[Entry] = []
        self.work: list[Entry] = []
        self._world = World(0, 1)
        self._entries = self.begin
        self._now = 1_700_000_000_000
        self._rng = random.Random(75)
        self._done = [self._rng.randrange(1_000_000, 50_000_000) for _ in range(PARTITIONS)]
        self._start(checkpoints)
        everything = [CommitEntry(TOPIC, n, action=COMMIT if checkpoints else LET_GO) for n in range(PARTITIONS)]
        if checkpoints:
            self._answer(self._begin(0), everything, 0)
        else:
            self._commit(everything, 0)
        self._entries = self.work
        while len(self.work) < records:
            barrier = self._begin(KEEP) if checkpoints else 0
            for number in range(MEMBERS):
                if checkpoints:
                    self._answer(barrier, self._progress(number), number)
                else:
                    self._commit(self._progress(number), number)

    def _append(self, record: Record) -> int:
        offset, value = self._world.next_offset, encode(record)
        self._now += self._rng.randrange(20)
        outcome = self._world.apply(offset, self._now, value)
        if not outcome.accepted or outcome.code != "OK":
            raise AssertionError(f"the log was not accepted: {outcome.code} {record}")
        self._entries.append((offset, self._now, value))
        return offset

    def _start(self, checkpoints: bool) -> None:
        self._append(Upgrade("u", "operator", GROUP, CHECKPOINTS_LEVEL if checkpoints else GROUPS_LEVEL))
        self._append(ConfigureGroup("u", "operator", GROUP))
        if checkpoints:
            self._append(BeginCheckpoint(*self._ids(0), 0, SESSION_MS, KEEP, False))
        for number in range(MEMBERS):
            self._append(JoinGroup(*self._ids(number), "", 0, SESSION_MS, "sticky", False, "", ((TOPIC, PARTITIONS),)))
            if number == 0:
                self._commit([CommitEntry(TOPIC, n, action=START, through=x) for n, x in enumerate(self._done)], 0)

    @staticmethod
    def _ids(number: int) -> tuple[str, str, str]:
        return f"{number:02d}-5f0e9a3c1b7d42e8", f"delays-worker-{number:02d}", GROUP

    def _member(self, number: int) -> tuple[str, int]:
        """The id of a member, and the group's generation."""
        group = self._world.group(GROUP)
        assert group is not None
        return group.clients[self._ids(number)[1]].member_id, group.generation

    def _progress(self, number: int) -> list[CommitEntry]:
        """The member's partitions have moved on."""
        group = self._world.group(GROUP)
        assert group is not None
        slot = group.clients[self._ids(number)[1]].slot
        found = []
        for partition, _ in group.pieces[TOPIC].owned_by(slot):
            self._done[partition] += self._rng.randrange(1, 2000)
            found.append(CommitEntry(TOPIC, partition, through=self._done[partition]))
        return found

    def _commit(self, entries: Sequence[CommitEntry], number: int) -> None:
        self._append(CommitOffsets(*self._ids(number), *self._member(number), False, tuple(entries)))

    def _begin(self, keep: int) -> int:
        group = self._world.group(GROUP)
        assert group is not None
        assert group.checkpoints is not None
        return self._append(BeginCheckpoint(*self._ids(0), group.checkpoints.newest, SESSION_MS, keep, False))

    def _answer(self, barrier: int, entries: Sequence[CommitEntry], number: int) -> None:
        ids = *self._ids(number), *self._member(number)
        self._append(AnswerBarrier(*ids, barrier, REACHED, tuple(entries)))
