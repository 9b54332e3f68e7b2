"""Names of runs: an instance_id says on which host, in which process and by which release a Marshal ran."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from rationalizer.levels import can_follow

#: The version of this package. It stands in each instance_id: `upgrade` judges by it who can follow a level of the log,
#: so a level of the protocol that is new raises it (`rationalizer.levels`).
RELEASE: Final = "0.4.0"

#: An instance_id has 255 bytes at most (E1); a host name of DNS can have as many.
MAX_HOST = 120


class Instance(NamedTuple):
    """What an instance_id contains: where a Marshal ran. ``str`` gives host:pid."""

    host: str
    pid: int
    release: str

    @classmethod
    def parse(cls, instance_id: str | None) -> Instance | None:
        """None: it was not made by :func:`new_instance_id` (an older release, a simulation)."""
        parts = (instance_id or "").split("/")
        if len(parts) != 4 or not parts[1].isdecimal():
            return None
        return cls(parts[0], int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


def knows_level(instance_id: str | None, level: int) -> bool:
    """Whether the release that a run's name states can follow a log at this level; False too if it states none."""
    runs_at = Instance.parse(instance_id)
    if runs_at is None:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", runs_at.release)[:3])
    return can_follow(numbers, level)


def release() -> str:
    """The version of this package."""
    return RELEASE


def new_instance_id() -> str:
    """HOST/PID/RELEASE/RANDOM: names one run of one Marshal, for ever."""
    import socket
    import uuid

    host = socket.gethostname().encode("ascii", "replace").decode().replace("/", "-")[:MAX_HOST] or "?"
    return f"{host}/{os.getpid()}/{release()}/{uuid.uuid4().hex[:16]}"
