"""Who was heard in the log's last minutes: also workers that hold nothing, which no lease names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rationalizer import (
    ClaimingPartition,
    JoinGroup,
    LeaveGroup,
    Outcome,
    ReleaseGroup,
    ReleasingPartition,
    World,
    codes,
)

__all__ = ["Heard", "Run"]

#: Of these the leases themselves tell, see `Heard.look`.
_BEATS = frozenset(
    {"Heartbeat", "HeartbeatBatch", "ClaimingMessages", "CommitRanges", "GroupHeartbeat", "CommitOffsets"}
)


@dataclass(slots=True)
class Run:
    """One run of one worker in a group, as its last records show it. Times are log time."""

    group: str
    client: str
    instance: str
    last_at: int
    #: Its last claim was refused: it waits for a partition.
    waits: bool = False
    #: Its last record released something, or was written for it.
    released: bool = False
    #: When an operator asked it to hand over (C19), or to leave its coordinated group.
    asked_at: int | None = None
    #: Why the log did not let it into its coordinated group: a code.
    refused: str = ""


class Heard:
    """The newest run of each worker, from the records of a replica."""

    def __init__(self, worlds: Mapping[int, World]) -> None:
        self._worlds = worlds
        self._runs: dict[tuple[str, str], Run] = {}
        #: Instances that paused a group: no workers.
        self._admins: set[str] = set()

    def note(self, cp: int, offset: int, outcome: Outcome) -> None:
        """Take in one record that was applied (`Replica.apply`)."""
        if outcome.type in _BEATS:  # nearly all of them; see `look`
            return
        record = outcome.record
        match record:
            case ReleaseGroup():
                self._admins.add(record.instance_id)
            case ReleasingPartition():
                self._released(cp, record, outcome)
            case ClaimingPartition():
                run = self._run(record.group_id, record.client_id, record.instance_id, outcome.log_time)
                run.waits, run.released = not outcome.accepted, False
            case JoinGroup():
                run = self._run(record.group_id, record.client_id, record.instance_id, outcome.log_time)
                run.refused, run.released = "" if outcome.accepted else outcome.code, False
            case LeaveGroup():
                self._left(cp, record, outcome)
            case _:
                pass

    def look(self, world: World) -> None:
        """Take in who holds something, or is a member, now, and when it last beat."""
        for lease in world.leases():
            if lease.client_id is not None and lease.instance_id is not None:
                run = self._run(lease.group_id, lease.client_id, lease.instance_id, lease.last_beat)
                run.waits = run.released = False
        for group in world.groups():
            for member in group.members.values():
                run = self._run(group.group_id, member.client_id, member.instance_id, member.last_beat)
                run.refused, run.released = "", False

    def _left(self, cp: int, record: LeaveGroup, outcome: Outcome) -> None:
        run = self._runs.get((record.group_id, record.client_id))
        if run is None:
            return
        if outcome.accepted and run.instance == record.instance_id:
            run.last_at, run.released = max(run.last_at, outcome.log_time), True
        elif outcome.code == codes.UNKNOWN_CONSUMER:
            group = self._worlds[cp].group(record.group_id)
            member = None if group is None else group.clients.get(record.client_id)
            if member is not None and member.member_id == record.member_id:  # another instance's: see Admin.drain
                run.asked_at = outcome.log_time

    def _released(self, cp: int, record: ReleasingPartition, outcome: Outcome) -> None:
        run = self._runs.get((record.group_id, record.client_id))
        if run is None:
            return
        if outcome.accepted and run.instance == record.instance_id:
            run.last_at, run.released = max(run.last_at, outcome.log_time), True
            return
        lease = self._worlds[cp].lease(record.group_id, record.topic, record.partition)
        if lease is not None and (lease.client_id, lease.epoch) == (record.client_id, record.epoch):
            run.asked_at = outcome.log_time

    def _run(self, group: str, client: str, instance: str, at: int) -> Run:
        run = self._runs.get((group, client))
        if run is None or (run.instance != instance and at >= run.last_at):
            run = self._runs[group, client] = Run(group, client, instance, at)
        elif run.instance == instance:
            run.last_at = max(run.last_at, at)
        return run

    def since(self, time_ms: int) -> list[Run]:
        """The workers of which something was heard since then, by group and name."""
        runs = [run for run in self._runs.values() if run.last_at >= time_ms and run.instance not in self._admins]
        return sorted(runs, key=lambda run: (run.group, run.client))
