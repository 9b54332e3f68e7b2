"""The commands of scripts about one CP: records of a few members, and the state that a replica concludes.

    log a1=a/1 b1=b/1 [cp=3/8] [level=2]   a new CP (0 of 1); a1 is instance 1 of client a. Its clock stands at 1000 ms.
                                           With a level, an Upgrade is the first record
    a1 claims flights:0 [hi=1000]          a record, in the words of `records.py`
    value [1, 32, "1", "a", "g"]           any other value; `value none` is a record without one
    many 1000 joins flights:4              as many clients, m0 …, say the same
    lease flights:0                        how the lease stands
    group [g2], members, pieces            how the coordinated group stands: all of it, or without the other half
    checkpoints [g2]                       its checkpoints, and the open barrier
    counts                                 how many partitions each member owns, and should (->)
    ids                                    the members' ids
    world                                  log time, next offset, level, pauses, and all leases
    outcome                                the line of the last record as `kafka-marshal replay` has it (D2)
    object                                 the group as `--state` has it (D3)
    row                                    the group in the canonical state (S1)

A record may have at=, too: +500 moves the broker's clock on first, 900 sets it, none is a record without a stamp. It
prints its offset, sender, code, and the epoch of the lease, or the generation of the group, that it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from msgpack import packb, unpackb

from rationalizer import (
    AnswerBarrier,
    BeginCheckpoint,
    ClaimingShare,
    Heartbeat,
    HeartbeatBatch,
    KeepCheckpoint,
    Lease,
    Outcome,
    Record,
    Rollback,
    SettlingMessages,
    Upgrade,
    World,
    encode,
)
from rationalizer.dump import DumpHeader, DumpRecord, Replay, header_line, record_line, state
from rationalizer.groups.group import Group, Member
from rationalizer.wire.records import LeaseRecord
from tests.scripts.group_cells import (
    CheckpointCellMet,
    GroupCellMet,
    Seen,
    SettleCellMet,
    cell_of,
    checkpoint_cell_of,
    codes_of,
    ending_of,
    moves_of,
    settle_cell_of,
)
from tests.scripts.group_records import Groups, checkpoint_words, counts_of, group_words
from tests.scripts.records import lease_name, lease_words, options_of, record_of
from tests.scripts.sharing_records import CODES, ShareCell, Sharing, share_cell_of
from tests.tables.leases import TRANSITIONS, Sender, Transition

#: A cell of the table of transitions: its row, and how the lease stands.
Cell = tuple[Transition, str]
#: And how a record in it ended.
CellMet = tuple[Transition, str, str]
Key = tuple[str, str, int]

ROWS = {(row.record, row.sender, row.nil_epoch): row for row in TRANSITIONS}
FEW_ENTRIES = 12
#: The codes in the table's cells; all others are of pauses, progress and values.
LEASE_CODES = {code for row in TRANSITIONS for code in (row.free, row.fresh, row.unknown, row.stale)}


class Replica:
    """One CP as a script writes it; also what was met on the way.

    `cells`, `group_cells`, `checkpoint_cells`, `settle_cells`, `share_cells`: of the tables of transitions; `moves`: of
    states of a group; `ends`: (record type, code).
    """

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, str]] = {}  # a1 → (instance, client)
        self.cells: set[CellMet] = set()
        self.group_cells: set[GroupCellMet] = set()
        self.checkpoint_cells: set[CheckpointCellMet] = set()
        self.settle_cells: set[SettleCellMet] = set()
        self.share_cells: set[ShareCell] = set()
        self.moves: set[tuple[str, str]] = set()
        self.ends: set[tuple[str, str]] = set()
        #: What each log holds: (CP, CPs, its records).
        self.logs: list[tuple[int, int, list[tuple[int, int, bytes | None]]]] = []
        self._begin("0/1", 1)

    def _begin(self, cp: str, level: int) -> None:
        partition, partitions = map(int, cp.split("/"))
        self.world = World(partition, partitions)
        self.now = 1000
        self.last_holders: dict[Key, tuple[str | None, str | None]] = {}
        #: The id of each member that ever joined: (group, sender) →.
        self.member_ids: dict[tuple[str, tuple[str, str]], str] = {}
        self.groups = Groups(
            *(self._member_id, self._generation, lambda: self.world.next_offset, self._named),
            *(self._newest, self._barrier),
        )
        self.sharing = Sharing(self._own_epoch, lambda: self.world.next_offset, self._member_id, self._generation)
        self.logs.append((partition, partitions, []))
        if level > 1:
            self._apply("", self.now, encode(Upgrade("admin", "admin", "g", level)))

    def play(self, line: str) -> Iterator[str]:
        """One command: what it prints."""
        who, *rest = line.split()
        words, options = options_of(rest)
        match who:
            case "log":
                self._begin(options.pop("cp", "0/1"), int(options.pop("level", "1")))
                for name, ids in options.items():
                    client, instance = ids.split("/")
                    self.names[name] = (instance, client)
                return
            case "world":
                yield from self._world()
                return
            case "lease":
                yield self._lease((options.pop("group", "g"), *lease_name(words[0])))
                return
            case "checkpoints" | "group" | "members" | "pieces" | "counts" | "ids" | "object" | "row" | "outcome":
                yield from self._look(who, words[0] if words else "g")
                return
        stamp = self._stamp(options.pop("at", "+0"))
        if who == "value":
            text = " ".join(words)
            yield self._apply("-", stamp, None if text == "none" else packb(json.loads(text)))
            return
        if who == "many":
            yield self._many(int(words[0]), words[1:], options, stamp)
            return
        yield self._judge(who, stamp, self._record(self.names[who], words, options))

    def _record(self, sender: tuple[str, str], words: list[str], options: dict[str, str]) -> Record:
        record = record_of(
            *(sender, words, options, self.now, lambda key: self._own_epoch(key, sender)), self.groups, self.sharing
        )
        if options:
            raise ValueError(f"{', '.join(options)} means nothing here")
        return record

    def _many(self, count: int, words: list[str], options: dict[str, str], stamp: int) -> str:
        lines = [
            self._apply(f"m{number}", stamp, encode(self._record(("1", f"m{number}"), words, dict(options))))
            for number in range(count)
        ]
        return f"{lines[0]} … {lines[-1]}"

    def _stamp(self, at: str) -> int:
        if at == "none":
            return -1
        self.now = self.now + int(at) if at[0] in "+-" else int(at)
        return self.now

    def _member_id(self, group: str, sender: tuple[str, str]) -> str:
        return self.member_ids.get((group, sender), "")

    def _generation(self, group_id: str) -> int:
        group = self.world.group(group_id)
        return 0 if group is None else group.generation

    def _newest(self, group_id: str) -> int:
        group = self.world.group(group_id)
        return 0 if group is None or group.checkpoints is None else group.checkpoints.newest

    def _barrier(self, group_id: str) -> int:
        group = self.world.group(group_id)
        barrier = None if group is None or group.checkpoints is None else group.checkpoints.barrier
        return 0 if barrier is None else barrier.id

    def _named(self, group: str, name: str) -> str:
        return self._member_id(group, self.names[name]) if name in self.names else name

    def _epoch(self, key: Key) -> int:
        lease = self.world.lease(*key)
        return 0 if lease is None else lease.epoch

    def _own_epoch(self, key: Key, sender: tuple[str, str]) -> int:
        lease = self.world.lease(*key)
        for share in () if lease is None or lease.shares is None else lease.shares:
            if share.is_of(*sender):
                return share.epoch
        return self._epoch(key)

    # -- judging ---------------------------------------------------------------------------------------

    def _judge(self, who: str, stamp: int, record: Record) -> str:
        log_time, world = max(stamp, self.world.log_time), self.world
        cell, of_group = self._cell(record, log_time), cell_of(world, record, log_time)
        of_checkpoints = checkpoint_cell_of(world, record, log_time)
        of_shares, of_settling = share_cell_of(world, record, log_time), settle_cell_of(world, record, log_time)
        earlier = Seen.of(world, record.group_id, world.log_time)
        before = Seen.of(world, record.group_id, log_time)
        line = self._apply(who, stamp, encode(record))
        if world.required_level is not None:
            return line
        after, offset = Seen.of(world, record.group_id, log_time), world.next_offset - 1
        ending = ending_of(record, before, after, self.outcome, offset)
        self.moves |= {*moves_of(earlier.state, before, after)}
        if of_group is not None and ending.code in codes_of(of_group):
            self.group_cells.add((*of_group, ending))
        if of_checkpoints is not None and ending.code in codes_of(of_checkpoints):
            self.checkpoint_cells.add((*of_checkpoints, ending))
        if of_settling is not None and ending.code in codes_of(of_settling):
            self.settle_cells.add((*of_settling, ending))
        if of_shares is not None and self.outcome.code in CODES[of_shares[0].record, of_shares[0].nil_epoch]:
            self.share_cells.add((*of_shares, self.outcome.code))
        if cell is not None and self.outcome.code in LEASE_CODES:
            self.cells.add((*cell, self.outcome.code))
        return line

    def _apply(self, who: str, stamp: int, value: bytes | None) -> str:
        offset = self.world.next_offset
        self.outcome: Outcome = self.world.apply(offset, stamp, value)
        self.logs[-1][2].append((offset, stamp, value))
        for lease in self.world.leases():
            if lease.held:
                self.last_holders[lease.group_id, lease.topic, lease.partition] = (lease.instance_id, lease.client_id)
        outcome = self.outcome
        if outcome.member is not None and (record := outcome.record) is not None:
            self.member_ids[record.group_id, (record.instance_id, record.client_id)] = outcome.member
        entry = "batch entry" if outcome.is_a(HeartbeatBatch) else f"entry of {outcome.type}"
        self.ends |= {(outcome.type or "any", outcome.code), *((entry, code) for code in outcome.entries or ())}
        became = "accepted" if outcome.accepted else "rejected"
        if self.world.required_level is not None:
            became = "not applied:"
        line = f"@{offset} {who} {became} {outcome.code}"
        if outcome.epoch is not None:
            line += f" epoch={outcome.epoch}"
        if outcome.of_group:
            line += " no group" if outcome.generation is None else f" generation={outcome.generation}"
        if outcome.is_a(BeginCheckpoint, AnswerBarrier, Rollback, KeepCheckpoint):
            line += "" if outcome.checkpoint is None else f" checkpoint={outcome.checkpoint}"
            line += "" if outcome.barrier is None else f" barrier={outcome.barrier}"
        line += "" if outcome.share is None else f" share={outcome.share}"
        line += "" if outcome.taken is None else f" took {outcome.taken[0]}-{outcome.taken[1]}"
        return f"{line}: {_codes(outcome.entries)}" if outcome.entries else line

    def _cell(self, record: Record, log_time: int) -> Cell | None:
        """Where the table of transitions has this record; None where it names no lease that was ever held."""
        if not isinstance(record, LeaseRecord) or isinstance(record, ClaimingShare | SettlingMessages):
            return None
        key = (record.group_id, record.topic, record.partition)
        lease, epoch = self.world.lease(*key), getattr(record, "epoch", None)
        if lease is None or lease.shares is not None or key not in self.last_holders:
            return None
        instance, client = self.last_holders[key]
        sender = Sender.HOLDER
        if record.client_id != client:
            sender = Sender.OTHER_CLIENT
        elif record.instance_id != instance:
            sender = Sender.OTHER_INSTANCE
        elif epoch is not None and epoch != lease.epoch:
            sender = Sender.OLDER_EPOCH
        row = ROWS[type(record).__name__, sender, isinstance(record, Heartbeat) and epoch is None]
        return row, lease.freshness(log_time)

    # -- looking ---------------------------------------------------------------------------------------

    def _world(self) -> Iterator[str]:
        world = self.world
        yield f"log time {world.log_time}, next offset {world.next_offset}, level {world.level}"
        if world.required_level is not None:
            yield f"stands before an Upgrade to level {world.required_level}"
        for pause in world.pauses():
            yield f"{pause.group_id} paused by {pause.client_id} until {pause.expires}"
        for lease in world.leases():
            yield f"{lease.group_id} {self._lease((lease.group_id, lease.topic, lease.partition))}"
        for group in world.groups():
            yield from group_words(group, world.log_time, self._name)

    def _look(self, what: str, group_id: str) -> Iterator[str]:
        group = self.world.group(group_id)
        if what == "outcome":
            partition, partitions, log = self.logs[-1]
            lines = [header_line(DumpHeader("__marshal", partitions))]
            lines += [record_line(DumpRecord(partition, *entry)) for entry in log]
            yield json.dumps([*Replay(line.encode() for line in lines).outcomes()][-1])
        elif group is None:
            yield f"{group_id}: no such group"
        elif what == "checkpoints":
            yield from checkpoint_words(group, self._name)
        elif what in ("group", "members", "pieces"):
            head, *lines = group_words(group, self.world.log_time, self._name)
            count = len(group.members)
            yield from [head, *({"group": lines, "members": lines[:count], "pieces": lines[count:]}[what])]
        elif what == "counts":
            yield counts_of(group, self._name)
        elif what == "ids":
            yield from (f"{self._name(member)} {member.member_id}" for member in group.members.values())
        else:
            yield from self._whole(what, group)

    def _whole(self, what: str, group: Group) -> Iterator[str]:
        """All of a group as others are given it: its object (D3), or its row (S1), a member and a partition a line."""
        if what == "row":
            rows = unpackb(self.world.snapshot())[7]
            head = next(row for row in rows if row[0] == group.group_id)
            lists = [*head[5], *head[6]]
            yield json.dumps([*head[:5], *head[7:]])
        else:
            objects: Any = state([self.world])["groups"]
            head = next(each for each in objects if each["group"] == group.group_id)
            lists = [*head.pop("members"), *head.pop("partitions")]
            yield json.dumps(head)
        yield from (f"  {json.dumps(each)}" for each in lists)

    def _lease(self, key: Key) -> str:
        lease = self.world.lease(*key)
        if lease is None:
            return f"{key[1]}:{key[2]} never claimed"
        return lease_words(lease, self.world.log_time, self._holder(lease), self._name_of)

    def _name_of(self, instance: str, client: str) -> str:
        return next((name for name, ids in self.names.items() if ids == (instance, client)), client)

    def _name(self, member: Member) -> str:
        ids = (member.instance_id, member.client_id)
        return next((name for name, known in self.names.items() if known == ids), member.client_id)

    def _holder(self, lease: Lease) -> str:
        return next((name for name, ids in self.names.items() if ids == (lease.instance_id, lease.client_id)), "")


def _codes(entries: tuple[str, ...]) -> str:
    """OK OK NOT_ASSIGNED; where there are many, 900 × OK, NOT_ASSIGNED."""
    if len(entries) <= FEW_ENTRIES:
        return " ".join(entries)
    runs = [(code, len(list(same))) for code, same in groupby(entries)]
    return ", ".join(code if count == 1 else f"{count} × {code}" for code, count in runs)
