"""What must hold of any log, whatever is in it: the promises of C5 … C16 and P2 … P10, in the real world alone.

The oracle only generates the logs here. Both could misread a rule in the same way; these properties are the promises
themselves, so a shared mistake that breaks one is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given

from rationalizer import ClaimingMessages, ClaimingPartition, Heartbeat, HeartbeatBatch, Outcome, World, encode
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.strategies import TEST_TIMEOUT_S, Entry, effort, logs, long_logs

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

Key = tuple[str, str, int]


@dataclass(frozen=True)
class Seen:
    """One lease, copied out of a world at some moment."""

    holder: tuple[str, str] | None
    epoch: int
    interval: int
    last_beat: int
    stable: int
    granted: int
    ranges: tuple[tuple[int, int], ...]
    done_through: tuple[tuple[int, int, int], ...]


def look(world: World) -> dict[Key, Seen]:
    """All leases of a world."""
    return {
        (lease.group_id, lease.topic, lease.partition): Seen(
            (str(lease.client_id), str(lease.instance_id)) if lease.held else None,
            lease.epoch,
            lease.heartbeat_interval_ms,
            lease.last_beat,
            lease.progress.stable,
            lease.progress.granted,
            tuple((first, last) for first, last in lease.progress.ranges),
            tuple((low, high, offset) for low, high, offset in lease.progress.done_through),
        )
        for lease in world.leases()
    }


@dataclass
class Watcher:
    """Applies a log to a real world and checks every promise after each record."""

    world: World
    leases: dict[Key, Seen] = field(default_factory=dict)
    epochs: dict[Key, list[int]] = field(default_factory=dict)
    handed_out: dict[Key, list[tuple[int, int]]] = field(default_factory=dict)
    paused: dict[str, tuple[str, int]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)

    def apply(self, entry: Entry) -> None:
        before, time_before = self.leases, self.world.log_time
        outcome = self.world.apply(*entry)
        self.leases = look(self.world)
        self.codes[outcome.code] += 1
        self.codes.update(outcome.entries or ())
        now = max(time_before, entry[1])
        assert outcome.log_time == self.world.log_time == now  # T1
        assert self.world.next_offset == entry[0] + 1
        paused_by = self.pauses_before(outcome)
        if not outcome.accepted:
            assert self.leases == before  # E3
        for key in before.keys() | self.leases.keys():
            self.check_lease(key, before.get(key), self.leases.get(key), outcome, entry[0])
        self.check_pause(outcome, paused_by)
        self.check_forgotten(before, outcome)
        for seen in self.leases.values():
            check_form(seen)
        self.paused = {pause.group_id: (pause.client_id, pause.expires) for pause in self.world.pauses()}

    def pauses_before(self, outcome: Outcome) -> str | None:
        """The client that had the record's group paused when it arrived, by the record's log time (T2)."""
        if outcome.record is None or outcome.record.group_id not in self.paused:
            return None
        client, expires = self.paused[outcome.record.group_id]
        return client if outcome.log_time < expires else None

    def check_lease(self, key: Key, old: Seen | None, new: Seen | None, outcome: Outcome, offset: int) -> None:
        """C3, C5 to C9, C11, C12: what one record may do to one lease."""
        if new is None:
            return  # see check_forgotten
        if old is None or new.epoch != old.epoch:
            self.check_gain(key, old, new, outcome, offset)
            old = old or Seen(None, -1, new.interval, -1, -1, -1, (), ((0, LARGEST_HASH, -1),))
        elif new.holder != old.holder:
            assert new.holder is None  # C8: within an epoch there is one holder, or none any more
            assert outcome.type == "ReleasingPartition"
        elif new.last_beat != old.last_beat:  # C6
            assert outcome.type in ("Heartbeat", "HeartbeatBatch")
        assert new.last_beat in (old.last_beat, outcome.log_time)
        if outcome.type == "ReleasingPartition":
            assert new.last_beat == old.last_beat
        repositioned = "REPOSITIONED" in (outcome.code, *(outcome.entries or ()))
        if not repositioned:
            self.check_progress(key, old, new, outcome)
        elif new.stable != old.stable or new.granted != old.granted:
            self.handed_out[key] = []  # C11 lets offsets be delivered again, on purpose

    def check_gain(self, key: Key, old: Seen | None, new: Seen, outcome: Outcome, offset: int) -> None:
        """A new epoch: a larger one than ever, by a claim of a free lease or by a takeover of a fresh one."""
        assert outcome.accepted
        assert outcome.record is not None
        assert new.epoch == offset
        assert all(epoch < new.epoch for epoch in self.epochs.setdefault(key, []))  # C9, across C16 too
        self.epochs[key].append(new.epoch)
        assert new.holder == (outcome.record.client_id, outcome.record.instance_id)
        assert new.last_beat == outcome.log_time
        age = outcome.log_time - old.last_beat if old else 0
        if isinstance(outcome.record, ClaimingPartition):
            assert old is None or old.holder is None or age > 2 * old.interval
            assert new.interval == outcome.record.heartbeat_interval_ms
        else:
            assert isinstance(outcome.record, Heartbeat)
            assert outcome.record.epoch is None
            assert old is not None
            assert old.holder is not None
            assert old.holder[0] == new.holder[0]
            assert old.holder[1] != new.holder[1]
            assert age < old.interval == new.interval

    def check_progress(self, key: Key, old: Seen, new: Seen, outcome: Outcome) -> None:
        """P2: never back. C12: granted only by a grant, to no client twice."""
        assert new.stable >= old.stable
        assert new.granted >= old.granted
        for first, last in old.ranges:
            assert last <= new.stable or any(low <= first and last <= high for low, high in new.ranges)
        if new.granted == old.granted:
            return
        assert isinstance(outcome.record, ClaimingMessages)
        assert outcome.accepted
        assert new.granted == outcome.record.proposed_last_offset > old.stable
        for first, last in gaps(old.stable + 1, new.granted, old.ranges):
            mine = self.handed_out.setdefault(key, [])
            assert all(last < low or high < first for low, high in mine)
            mine.append((first, last))

    def check_pause(self, outcome: Outcome, paused_by: str | None) -> None:
        """C10 and C11."""
        codes = (outcome.code, *(outcome.entries or ()))
        if "REPOSITIONED" in codes:
            assert outcome.record is not None
            assert outcome.record.client_id == paused_by
        if outcome.record is None or paused_by in (None, outcome.record.client_id):
            assert "PAUSED" not in codes
            return
        may_pass = outcome.type in ("ReleasingPartition", "CommitRanges", "Tick", "Upgrade")
        assert ("PAUSED" in codes) == (not may_pass and outcome.code != "WRONG_PARTITION")
        client, expires = self.paused[outcome.record.group_id]
        still = self.world.pause(outcome.record.group_id)
        assert still is not None
        assert (still.client_id, still.expires) == (client, expires)

    def check_forgotten(self, before: dict[Key, Seen], outcome: Outcome) -> None:
        """C16: only a ForgetGroup that was accepted removes leases: all of its group, none of them in use."""
        gone = before.keys() - self.leases.keys()
        if outcome.type == "ForgetGroup" and outcome.accepted:
            assert outcome.record is not None
            group = outcome.record.group_id
            assert gone == {key for key in before if key[0] == group}
            assert self.world.pause(group) is None
            for key in gone:
                self.handed_out.pop(key, None)
                age = outcome.log_time - before[key].last_beat
                assert before[key].holder is None or age > 2 * before[key].interval
        else:
            assert not gone


def gaps(first: int, last: int, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """What of first … last is in none of the ranges."""
    for low, high in ranges:
        if first <= min(low - 1, last):
            yield (first, min(low - 1, last))
        first = max(first, high + 1)
    if first <= last:
        yield (first, last)


def check_form(seen: Seen) -> None:
    """P10: one progress has one form."""
    edge = seen.stable + 1
    for first, last in seen.ranges:
        assert edge < first <= last  # neither overlapping nor touching stable or each other
        edge = last + 1
    assert seen.stable >= seen.granted
    assert seen.done_through == ((0, LARGEST_HASH, seen.stable),)


def watch(log: list[Entry], wanted: OracleWorld) -> Counter[str]:
    watcher = Watcher(World(wanted.partition, wanted.partitions))
    for entry in log:
        watcher.apply(entry)
    batches = [outcome for outcome in wanted.outcomes if outcome.entries]
    assert sum(watcher.codes.values()) == len(log) + sum(len(batch.entries or ()) for batch in batches)
    return watcher.codes


@given(written=logs())
@effort(60)
def test_promises(written: tuple[list[Entry], OracleWorld]) -> None:
    watch(*written)


@given(written=long_logs())
@effort(60)
def test_promises_over_long_logs(written: tuple[list[Entry], OracleWorld]) -> None:
    watch(*written)


@given(written=long_logs(longest=120))
@effort(40)
def test_a_batch_is_as_many_heartbeats(written: tuple[list[Entry], OracleWorld]) -> None:
    """Type 6: the same codes and the same state as its entries, one record each at the same time."""
    log, wanted = written
    together, apart = (World(wanted.partition, wanted.partitions) for _ in range(2))
    spread = 10  # room for the entries' own offsets
    for offset, stamp, value in log:
        at = offset * spread
        outcome = together.apply(at, stamp, value)
        record = outcome.record
        if not isinstance(record, HeartbeatBatch) or outcome.entries is None:
            apart.apply(at, stamp, value)
            continue
        codes = []
        for index, entry in enumerate(record.entries):
            one = Heartbeat(
                record.instance_id,
                record.client_id,
                record.group_id,
                entry.topic,
                entry.partition,
                entry.epoch,
                entry.last_offset,
            )
            codes.append(apart.apply(at + index, stamp, encode(one)).code)
        assert tuple(codes) == outcome.entries
    assert look(together) == look(apart)
