"""A lease: who may work on one data partition for one group, since when, and how far it is.

A lease is named by (group_id, topic, partition). It is made by the first granted claim and stays until its
group is forgotten (C16): freeing it takes away the holder and nothing else (C8). Its age is counted in log
time against the holder's own heartbeat interval, HI (C1, C2):

    age < HI: fresh      HI <= age <= 2·HI: unknown      age > 2·HI: stale
"""

from __future__ import annotations

from rationalizer.leases.shares import Freshness, Share, Shares, freshness_at
from rationalizer.limits import STALE_AFTER_INTERVALS
from rationalizer.progress import Progress


class Lease:
    """One lease as its CP knows it (section 3). Live state: read it, don't write it.

    `client_id` and `instance_id` name the holder, both None while the lease is free. `epoch` is the fencing
    token (C9), `heartbeat_interval_ms` the holder's own (C2), `last_beat` in log time (C6); all three are 0 before the
    first holder. `shares` is None where there are none: it has a holder, or shares, or neither (B1).
    """

    __slots__ = (
        "client_id",
        "epoch",
        "group_id",
        "heartbeat_interval_ms",
        "instance_id",
        "last_beat",
        "partition",
        "progress",
        "shares",
        "topic",
    )

    def __init__(self, group_id: str, topic: str, partition: int) -> None:
        self.group_id = group_id
        self.topic = topic
        self.partition = partition
        self.client_id: str | None = None
        self.instance_id: str | None = None
        self.epoch = 0
        self.heartbeat_interval_ms = 0
        self.last_beat = 0
        self.progress = Progress()
        self.shares: Shares | None = None

    @property
    def was_held(self) -> bool:
        """Whether it has a holder, or had one: then `epoch` is one."""
        return self.heartbeat_interval_ms > 0

    @property
    def held(self) -> bool:
        """Whether the lease has a holder, stale or not."""
        return self.client_id is not None

    def is_held_by(self, instance_id: str, client_id: str, epoch: int) -> bool:
        """Whether this is the holder, with the lease's epoch (C5). A free lease has no holder."""
        return self.epoch == epoch and self.instance_id == instance_id and self.client_id == client_id

    def age(self, log_time: int) -> int:
        """Milliseconds of log time since the last beat (C1)."""
        return log_time - self.last_beat

    def is_stale(self, log_time: int) -> bool:
        """Whether the age is above 2·HI (C1), whichever client holds the lease."""
        return log_time - self.last_beat > STALE_AFTER_INTERVALS * self.heartbeat_interval_ms

    def freshness(self, log_time: int) -> Freshness:
        """How the lease stands at this log time: "free" without a holder, else by its age (C1)."""
        if self.client_id is None:
            return "free"
        return freshness_at(log_time - self.last_beat, self.heartbeat_interval_ms)

    @property
    def longest(self) -> Lease | Share | None:
        """The holder, or the share that goes stale last: until then no claim of the whole lease is granted (C3)."""
        if self.client_id is not None:
            return self
        return None if self.shares is None else max(self.shares, key=_deadline)

    def is_taken(self, log_time: int) -> bool:
        """Whether a claim of the whole lease is refused at this log time: a holder, or a share, is not stale (C3)."""
        if self.client_id is not None:
            return not self.is_stale(log_time)
        return self.shares is not None and not self.shares.all_stale(log_time)

    def __repr__(self) -> str:
        holder = f"{self.client_id}/{self.instance_id}" if self.held else "free"
        return (
            f"Lease({self.group_id!r}, {self.topic!r}, {self.partition}, {holder}, epoch={self.epoch}, "
            f"last_beat={self.last_beat}, stable={self.progress.stable})"
        )


def _deadline(share: Share) -> int:
    return share.deadline
