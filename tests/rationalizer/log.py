"""A log written by hand: records of a few actors, at chosen times, replayed as they are appended."""

from __future__ import annotations

from typing import NamedTuple

from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    Lease,
    Outcome,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    World,
    encode,
)
from rationalizer import world as world_module

HI = 1000

#: Whether the compiled core is under test (setup.py): its types are checked by the compiler, so that a caller's value
#: of a wrong type is a TypeError, and its insides can't be replaced.
COMPILED = not str(world_module.__file__).endswith(".py")
CALLERS_MISTAKE = (ValueError, TypeError) if COMPILED else ValueError


class Who(NamedTuple):
    instance: str
    client: str


A1 = Who("1", "a")
A2 = Who("2", "a")  # a restart of a
B1 = Who("1", "b")  # another client that happens to have the same instance id
ADMIN = Who("1", "admin")


class Log:
    """One CP. Each method appends one record at log time `now` and returns its outcome."""

    def __init__(self, partition: int = 0, partitions: int = 1, now: int = 1000) -> None:
        self.world = World(partition, partitions)
        self.now = now

    def append(self, record: Record | bytes | None, *, stamp: int | None = None) -> Outcome:
        value = encode(record) if isinstance(record, Record) else record
        return self.world.apply(self.world.next_offset, self.now if stamp is None else stamp, value)

    @property
    def lease(self) -> Lease:
        """The lease that all methods are about by default."""
        lease = self.world.lease("g", "t", 0)
        assert lease is not None
        return lease

    def claim(
        self, who: Who, hi: int = HI, *, group: str = "g", topic: str = "t", partition: int = 0, ok: bool = False
    ) -> Outcome:
        outcome = self.append(ClaimingPartition(*who, group, topic, partition, hi))
        assert not ok or outcome.code == "OK"
        return outcome

    def beat(self, who: Who, done: int | None = None, *, epoch: int | None = None, partition: int = 0) -> Outcome:
        lease = self.world.lease("g", "t", partition)
        known = 0 if lease is None else lease.epoch
        return self.append(Heartbeat(*who, "g", "t", partition, known if epoch is None else epoch, done))

    def release(self, who: Who, done: int | None = None, *, epoch: int | None = None) -> Outcome:
        known = self._epoch() if epoch is None else epoch
        return self.append(ReleasingPartition(*who, "g", "t", 0, known, done))

    def grant(self, who: Who, proposal: int, *, epoch: int | None = None) -> Outcome:
        known = self._epoch() if epoch is None else epoch
        return self.append(ClaimingMessages(*who, "g", "t", 0, known, proposal))

    def commit(self, who: Who, *ranges: tuple[int, int], epoch: int | None = None) -> Outcome:
        known = self._epoch() if epoch is None else epoch
        return self.append(CommitRanges(*who, "g", "t", 0, known, ranges))

    def pause(self, who: Who, expires: int, group: str = "g") -> Outcome:
        return self.append(ReleaseGroup(*who, group, expires))

    def forget(self, who: Who, group: str = "g") -> Outcome:
        return self.append(ForgetGroup(*who, group))

    def tick(self, who: Who = A1) -> Outcome:
        return self.append(Tick(*who, "g"))

    def _epoch(self) -> int:
        lease = self.world.lease("g", "t", 0)
        return 0 if lease is None else lease.epoch


def held(hi: int = HI, now: int = 1000) -> Log:
    """A log in which A1 holds g/t/0 with epoch 0, last beat `now`."""
    log = Log(now=now)
    log.claim(A1, hi, ok=True)
    return log
