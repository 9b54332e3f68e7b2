"""A pause of a group (C10)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """A group that one client has paused (C10): in force while log time < expires (ms of log time)."""

    group_id: str
    client_id: str
    expires: int
