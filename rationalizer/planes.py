"""The planes of this release."""

from __future__ import annotations

from rationalizer.groups.machine import GroupPlane
from rationalizer.leases.machine import LeasePlane
from rationalizer.plane import FastPath, Plane


class Planes:
    """All state machines of one CP: each by its name, for its readers, and `all` for the replay."""

    __slots__ = ("all", "fast_path", "groups", "leases")

    def __init__(self, partition: int, partitions: int) -> None:
        self.leases = LeasePlane(partition, partitions)
        self.groups = GroupPlane(partition, partitions)
        self.all: tuple[Plane, ...] = (self.leases, self.groups)
        #: The short cut for most of a log.
        self.fast_path: FastPath = self.leases.fast_path
