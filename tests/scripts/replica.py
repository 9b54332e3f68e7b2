"""The commands of scripts about one CP: records of a few members, and the state that a replica concludes.

    log a1=a/1 b1=b/1 [cp=3/8]             a new CP (0 of 1); a1 is instance 1 of client a. Its clock stands at 1000 ms
    a1 claims flights:0 [hi=1000]          a record, in the words of `records.py`
    value [1, 32, "1", "a", "g"]           any other value; `value none` is a record without one
    lease flights:0                        how the lease stands
    world                                  log time, next offset, level, pauses, and all leases

A record may have at=, too: +500 moves the broker's clock on first, 900 sets it, none is a record without a stamp. It
prints its offset, sender, code, and the epoch of the lease that it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from msgpack import packb

from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    Lease,
    Outcome,
    Record,
    ReleasingPartition,
    World,
    encode,
)
from rationalizer.leases.transitions import TRANSITIONS, Sender, Transition
from tests.scripts.records import lease_name, lease_words, options_of, record_of

__all__ = ["CellMet", "Replica"]

#: A cell of the table of transitions: its row, and how the lease stands.
Cell = tuple[Transition, str]
#: And how a record in it ended.
CellMet = tuple[Transition, str, str]
Key = tuple[str, str, int]

ROWS = {(row.record, row.sender, row.nil_epoch): row for row in TRANSITIONS}
#: The codes in the table's cells; all others are of pauses, progress and values.
LEASE_CODES = {code for row in TRANSITIONS for code in (row.free, row.fresh, row.unknown, row.stale)}


class Replica:
    """One CP as a script writes it; also what was met on the way: `cells`, and `ends`, (record type, code)."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, str]] = {}  # a1 → (instance, client)
        self.cells: set[CellMet] = set()
        self.ends: set[tuple[str, str]] = set()
        #: What each log holds: (CP, CPs, its records).
        self.logs: list[tuple[int, int, list[tuple[int, int, bytes | None]]]] = []
        self._begin("0/1")

    def _begin(self, cp: str) -> None:
        partition, partitions = map(int, cp.split("/"))
        self.world = World(partition, partitions)
        self.now = 1000
        self.last_holders: dict[Key, tuple[str | None, str | None]] = {}
        self.logs.append((partition, partitions, []))

    def play(self, line: str) -> Iterator[str]:
        """One command: what it prints."""
        who, *rest = line.split()
        words, options = options_of(rest)
        match who:
            case "log":
                self._begin(options.pop("cp", "0/1"))
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
        stamp = self._stamp(options.pop("at", "+0"))
        if who == "value":
            text = " ".join(words)
            yield self._apply("-", stamp, None if text == "none" else packb(json.loads(text)))
            return
        record = record_of(self.names[who], words, options, self.now, self._epoch)
        if options:
            raise ValueError(f"{', '.join(options)} means nothing here")
        yield self._judge(who, stamp, record)

    def _stamp(self, at: str) -> int:
        if at == "none":
            return -1
        self.now = self.now + int(at) if at[0] in "+-" else int(at)
        return self.now

    def _epoch(self, key: Key) -> int:
        lease = self.world.lease(*key)
        return 0 if lease is None else lease.epoch

    # -- judging ---------------------------------------------------------------------------------------

    def _judge(self, who: str, stamp: int, record: Record) -> str:
        cell = self._cell(record, max(stamp, self.world.log_time))
        line = self._apply(who, stamp, encode(record))
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
        self.ends |= {(outcome.type or "any", outcome.code), *(("batch entry", code) for code in outcome.entries or ())}
        became = "accepted" if outcome.accepted else "rejected"
        if self.world.required_level is not None:
            became = "not applied:"
        line = f"@{offset} {who} {became} {outcome.code}"
        if outcome.epoch is not None:
            line += f" epoch={outcome.epoch}"
        return line if outcome.entries is None else f"{line}: {' '.join(outcome.entries)}"

    def _cell(self, record: Record, log_time: int) -> Cell | None:
        """Where the table of transitions has this record; None where it names no lease that was ever held."""
        if not isinstance(record, Heartbeat | ClaimingPartition | ReleasingPartition | ClaimingMessages | CommitRanges):
            return None
        key = (record.group_id, record.topic, record.partition)
        lease, epoch = self.world.lease(*key), getattr(record, "epoch", None)
        if lease is None:
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
            yield f"{lease.group_id} {lease_words(lease, world.log_time, self._holder(lease))}"

    def _lease(self, key: Key) -> str:
        lease = self.world.lease(*key)
        if lease is None:
            return f"{key[1]}:{key[2]} never claimed"
        return lease_words(lease, self.world.log_time, self._holder(lease))

    def _holder(self, lease: Lease) -> str:
        return next((name for name, ids in self.names.items() if ids == (lease.instance_id, lease.client_id)), "")
