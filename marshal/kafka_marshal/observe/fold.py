"""Workers in a log: what each holds, when it was last heard, whether it waits, was evicted or asked to hand over.

Coordination partitions are read one after the other. So each fact about a worker carries its place in the whole log
(log time, partition, offset), and the later place prevails, as if all partitions were merged by log time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafka_marshal.observe.checkpoint_history import CheckpointHistory
from kafka_marshal.topic_names import is_lock, named
from rationalizer import codes, route_group
from rationalizer.groups.history import Assignments
from rationalizer.history import End, Owners

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoint_history import Happened
    from kafka_marshal.observe.checkpoints import Unsaved
    from rationalizer import Outcome, World
    from rationalizer.groups.history import Rebalance
    from rationalizer.history import LeaseKey, Span
    from rationalizer.plane import Heard

#: A record's place in the whole log: (log time, coordination partition, offset).
Place = tuple[int, int, int]

_NEVER: Final[Place] = (-1, -1, -1)

#: Workers write these. Operators and watchdogs write releases and leaves in others' names, and settings in their own.
_OF_WORKERS: Final = frozenset(
    {
        "AnswerBarrier",
        "ClaimingMessages",
        "ClaimingPartition",
        "ClaimingShare",
        "CommitOffsets",
        "CommitRanges",
        "GroupHeartbeat",
        "Heartbeat",
        "HeartbeatBatch",
        "JoinGroup",
        "SettleOffsets",
        "SettlingMessages",
        "TopicsChanged",
    }
)

#: A worker that is refused these is alive; a refused beat may be an old one.
_REQUESTS: Final = frozenset({"ClaimingMessages", "ClaimingPartition", "ClaimingShare", "JoinGroup"})

#: The sender of a claim with this outcome repeats it: it waits.
_WAITS: Final = (codes.HELD, codes.PAUSED)


def is_of_worker(outcome: Outcome) -> bool:
    """Whether a worker wrote the record, or a client that has paused the group: those write such records, too."""
    return outcome.message is not None and outcome.type in _OF_WORKERS and not outcome.by_operator


def shows_life(outcome: Outcome) -> bool:
    """Whether the sender is at work: neither a dead client's last record nor a release in its name shows that."""
    return is_of_worker(outcome) and (outcome.accepted or outcome.type in _REQUESTS)


@dataclass(slots=True)
class WorkerInstance:
    """One instance of one worker in a group, as its records show it."""

    group: str
    client: str
    instance: str
    #: Its first record, and its last one. A release that an operator wrote in its name does not count.
    begun: Place = _NEVER
    heard: Place = _NEVER
    #: Its last claim or join, and the code of its refusal; "": it was accepted.
    claimed: Place = _NEVER
    refused: str = ""
    #: What it claimed, if it waits for it.
    waits_for: str = "a partition"
    #: That was a join: the group is a coordinated one.
    joins: bool = False
    #: Its heartbeat interval (ms); in a coordinated group half its session. 0: not known.
    interval_ms: int = 0
    #: What it lost last, and how.
    lost: Place = _NEVER
    ended: End = End.OPEN
    #: That was a share: no record shows the end of others that it has.
    lost_share: bool = False
    #: When an operator last released something in its name (C20).
    evicted: Place = _NEVER
    evictor: str = ""
    #: Its last own record before that.
    heard_before: Place = _NEVER
    #: When an operator asked it to hand over (C19), or to leave its coordinated group.
    asked: Place = _NEVER

    @property
    def last_at(self) -> int:
        """Log time of its last own record (ms)."""
        return self.heard[0]

    @property
    def waits(self) -> bool:
        """Whether its last claim found the partition held, or the group paused, and it has lost nothing since."""
        return self.refused in _WAITS and not self.joins and self.claimed > self.lost

    @property
    def rejected(self) -> str:
        """The code with which the log refused its last claim or join, unless it waits; "": none."""
        return self.refused if self.claimed > self.lost and not self.waits else ""

    @property
    def released(self) -> bool:
        """Whether it released the last partition that it held."""
        is_last = not self.lost_share or self.heard <= self.lost
        return is_last and self.lost > self.claimed and self.ended in (End.RELEASED, End.LEFT)

    @property
    def is_evicted(self) -> bool:
        """Whether an operator evicted it, and it has claimed nothing since."""
        return self.evicted > self.claimed

    @property
    def was_alive(self) -> bool:
        """Whether it wrote a record after its eviction, or within its interval before it."""
        return self.heard > self.evicted or self.evicted[0] - self.heard_before[0] <= self.interval_ms

    @property
    def asked_at(self) -> int | None:
        """Log time (ms) of an operator's request to hand over; None: no such request since its last eviction."""
        return self.asked[0] if self.asked > self.evicted else None


@dataclass(slots=True)
class Fold:
    """Takes each record of a log after its world has applied it.

    beats: also keep the last heartbeat of each lease. Without, only that of its worker is known, at less cost.
    """

    beats: bool = True
    #: How many rebalances of each coordinated group it remembers, the last ones.
    keep: int = 1
    owners: dict[int, Owners] = field(default_factory=dict)
    #: group → the pieces and the checkpoints of a coordinated one, by its home's log.
    assignments: dict[str, Assignments] = field(default_factory=dict)
    checkpoints: dict[str, CheckpointHistory] = field(default_factory=dict)
    #: What the last record did to checkpoints.
    happened: tuple[Happened, ...] = ()
    _worlds: dict[int, World] = field(default_factory=dict)
    #: (group, client) → instance → run
    _workers: dict[tuple[str, str], dict[str, WorkerInstance]] = field(default_factory=dict)
    #: group → who has paused it, since when (log time, ms), and until when.
    paused: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    #: Instances that paused a group: they are not workers.
    _admins: set[str] = field(default_factory=set)
    #: (CP, epoch of a share) → the client that is about to evict it (C20).
    _evictors: dict[tuple[int, int], str] = field(default_factory=dict)

    def follows(self, world: World) -> bool:
        """Whether it has every record of this world since `begin`."""
        return self._worlds.get(world.partition) is world

    def begin(self, world: World) -> None:
        """Start this coordination partition from the state of its world."""
        cp = world.partition
        self._worlds[cp] = world
        for pause in world.pauses():
            self._pauses(pause.group_id, pause.client_id, world.log_time, pause.expires)
        owners = self.owners[cp] = Owners()
        owners.begin(world)
        for lease in world.leases():
            if lease.client_id is not None and lease.instance_id is not None:
                run = self._run(lease.group_id, lease.client_id, lease.instance_id)
                run.heard = max(run.heard, (lease.last_beat, cp, -1))
                run.interval_ms = max(run.interval_ms, lease.heartbeat_interval_ms)
        for group in world.groups():
            if cp == route_group(group.group_id, world.partitions):
                self.assignments[group.group_id] = Assignments(group.group_id, self.keep)
                self.assignments[group.group_id].begin(world)
                self.checkpoints[group.group_id] = CheckpointHistory(group.group_id)
                self.checkpoints[group.group_id].begin(world)
                for member in group.members.values():
                    run = self._run(group.group_id, member.client_id, member.instance_id)
                    run.heard = max(run.heard, (member.last_beat, cp, -1))
                    run.interval_ms = member.heartbeat_interval_ms

    def before(self, outcome: Outcome, cp: int) -> Span | None:
        """The span of the lease that this record names, before the record: call it before `see`."""
        return None if (key := outcome.lease) is None else self.owners[cp].now.get(key)

    def silent(self, outcome: Outcome) -> list[tuple[str, int]]:
        """Members that this record found overdue, with their silence (ms) since their own last record: before `see`."""
        group, at = outcome.group_id, outcome.log_time
        return [
            (client, max([at - run.last_at for run in self._newest(group, client)], default=silence_ms))
            for client, silence_ms in outcome.silent
        ]

    def see(self, cp: int, outcome: Outcome) -> None:
        """Take in a record that the world of this coordination partition has just applied."""
        message, kind = outcome.message, outcome.type
        self.happened = ()
        if message is None or not (group := outcome.group_id):
            return
        world = self._worlds[cp]
        place = (outcome.log_time, cp, world.next_offset - 1)
        instance, client = message.instance_id, message.client_id
        if kind == "HeartbeatBatch" and outcome.code == codes.OK:  # nearly all of a claimed group's log
            self._hear(group, client, instance, place)
            if self.beats:
                now = self.owners[cp].now
                for entry in message.entries:
                    now[group, entry[0], entry[1]].last_beat = outcome.log_time
            return
        if kind == "ReleaseGroup":
            self._admins.add(instance)
            if outcome.accepted:
                self._pauses(group, client, outcome.log_time, message.msg_expire_time)
            return
        self._claims(outcome, place)
        is_evicted = self._changed(world, outcome, place)
        is_own = is_of_worker(outcome) or instance in self._workers.get((group, client), ())
        if is_own and not is_evicted:
            self._hear(group, client, instance, place)

    def hear(self, cp: int, heard: Heard) -> None:
        """Take in plain heartbeats of this coordination partition: of each sender the last one."""
        for (group, client, instance), (log_time, offset) in heard.items():
            self._hear(group, client, instance, (log_time, cp, offset))

    def unsaved(self, group: str) -> Iterable[Unsaved]:
        """The members of a group whose states are not saved."""
        return self.checkpoints[group].unsaved.values() if group in self.checkpoints else ()

    def workers(self, since: int = 0) -> list[WorkerInstance]:
        """The newest instance of each worker that was heard since that log time (ms), by group and name."""
        found = []
        for key in sorted(self._workers):
            run = max(self._workers[key].values(), key=lambda run: (run.begun, run.heard))
            if run.last_at >= since and run.instance not in self._admins:
                found.append(run)
        return found

    @property
    def groups(self) -> set[str]:
        """All groups in the records so far."""
        leases = {key[0] for owners in self.owners.values() for key in owners.now}
        return leases | {group for group, _ in self._workers}

    # -- inside ------------------------------------------------------------------------------------------------

    def _pauses(self, group: str, client: str, at: int, until: int) -> None:
        """A pause, in one coordination partition: it begins, or continues until then."""
        _, since, expires = self.paused.get(group, (client, at, until))
        self.paused[group] = client, min(since, at) if at <= expires else at, max(until, expires)
        if until <= at:
            del self.paused[group]

    def _run(self, group: str, client: str, instance: str) -> WorkerInstance:
        of_client = self._workers.setdefault((group, client), {})
        run = of_client.get(instance)
        if run is None:
            run = of_client[instance] = WorkerInstance(group, client, instance)
        return run

    def _hear(self, group: str, client: str, instance: str, place: Place) -> None:
        run = self._run(group, client, instance)
        if place > run.heard:
            run.heard = place
        if run.begun == _NEVER or place < run.begun:
            run.begun = place
        if run.evicted > place > run.heard_before:
            run.heard_before = place

    def _claims(self, outcome: Outcome, place: Place) -> None:
        message = outcome.message
        is_join = outcome.type == "JoinGroup"
        if message is None or not (is_join or outcome.type in ("ClaimingPartition", "ClaimingShare")):
            return
        run = self._run(message.group_id, message.client_id, message.instance_id)
        if place > run.claimed:
            run.claimed, run.joins, run.refused = place, is_join, "" if outcome.accepted else outcome.code
            of_lock = not is_join and is_lock(message.topic)
            run.waits_for = named(message.topic, message.partition) if of_lock else "a partition"
        run.interval_ms = (message.session_timeout_ms + 1) // 2 if is_join else message.heartbeat_interval_ms

    def _changed(self, world: World, outcome: Outcome, place: Place) -> bool:
        """Apply what the record changed; returns whether it is an eviction."""
        owners, message = self.owners[world.partition], outcome.message
        assert message is not None
        if not outcome.accepted:
            owners.overhear(outcome)
        is_evicted = False
        for key in owners.touched(outcome):
            is_evicted = self._lease(owners, key, world, outcome, place) or is_evicted
        group = message.group_id
        if world.partition == route_group(group, world.partitions):
            if outcome.of_group or (outcome.type == "ForgetGroup" and group in self.assignments):
                is_evicted = self._pieces(world, outcome, place) or is_evicted
            elif outcome.type == "LeaveGroup":
                self._asked_to_leave(world, outcome, place)
        if outcome.type == "ReleasingPartition":
            if not outcome.accepted:
                self._asked(world, outcome, place)
            else:
                is_evicted = self._share_ended(world, outcome, place) or is_evicted
        return is_evicted

    def _lease(self, owners: Owners, key: LeaseKey, world: World, outcome: Outcome, place: Place) -> bool:
        before = owners.now.get(key)
        owners.see(key, world, outcome)
        if before is None or not before.held or before.until is None:
            return False
        self._lost(before, place, before.ended_by if before.ended is End.EVICTED else "")
        return before.ended is End.EVICTED

    def _pieces(self, world: World, outcome: Outcome, place: Place) -> bool:
        message = outcome.message
        assert message is not None
        name = message.group_id
        if name not in self.assignments:
            self.assignments[name], self.checkpoints[name] = Assignments(name, self.keep), CheckpointHistory(name)
        fold = self.assignments[name]
        last = fold.rebalances[-1] if fold.rebalances else None
        known = 0 if last is None else len(last.moved)
        fold.see(world, outcome)
        self.happened = self.checkpoints[name].see(world, outcome)
        if not outcome.accepted:
            if outcome.type == "LeaveGroup":
                self._asked_to_leave(world, outcome, place)
            return False
        newest = fold.rebalances[-1] if fold.rebalances else None
        if newest is None:
            return False
        for moved in newest.moved[known if newest is last else 0 :]:
            if moved.before is not None and moved.before.held:
                self._lost(moved.before, place, moved.before.evictor)
        return newest is not last and self._rebalanced(name, newest, place)

    def _rebalanced(self, group: str, found: Rebalance, place: Place) -> bool:
        """Members that left, with or without partitions; returns whether one was evicted."""
        for client, ended, by in (
            *((client, End.LEFT, "") for client in found.left),
            *((client, End.EVICTED, by) for client, by in found.evicted),
            *((client, End.REPLACED, "") for client, _ in found.silent),
        ):
            for run in self._newest(group, client):
                self._end(run, place, ended, by)
        return bool(found.evicted)

    def _newest(self, group: str, client: str) -> Iterator[WorkerInstance]:
        known = self._workers.get((group, client))
        if known:
            yield max(known.values(), key=lambda run: (run.begun, run.heard))

    def _lost(self, span: Span, place: Place, evictor: str) -> None:
        self._end(self._run(span.key[0], span.client_id, span.instance_id), place, span.ended, evictor)

    @staticmethod
    def _end(run: WorkerInstance, place: Place, ended: End, evictor: str) -> None:
        if place >= run.lost:
            run.lost, run.ended, run.lost_share = place, ended, False
        if ended is End.EVICTED and place > run.evicted:
            run.evicted, run.evictor = place, evictor
            run.heard_before = run.heard if run.heard < place else run.heard_before

    def _share_ended(self, world: World, outcome: Outcome, place: Place) -> bool:
        """A share was released (B2): by its sharer, or in its name by an operator, who said so before."""
        message = outcome.message
        assert message is not None
        lease = world.lease(message.group_id, message.topic, message.partition)
        if lease is None or lease.epoch == message.epoch:
            return False
        evictor = self._evictors.pop((world.partition, message.epoch), "")
        run = self._run(message.group_id, message.client_id, message.instance_id)
        self._end(run, place, End.EVICTED if evictor else End.RELEASED, evictor)
        run.lost_share = run.lost == place
        return bool(evictor)

    def _asked(self, world: World, outcome: Outcome, place: Place) -> None:
        """A request to hand over is a release under another instance that names the holder and its epoch (C19)."""
        message = outcome.message
        assert message is not None
        client, group = message.client_id, message.group_id
        lease = world.lease(group, message.topic, message.partition)
        for share in () if lease is None else lease.shares or ():
            if share.epoch == message.epoch and share.client_id != client:
                self._evictors[world.partition, share.epoch] = client
            elif share.epoch == message.epoch and share.instance_id != message.instance_id:
                run = self._run(group, client, share.instance_id)
                run.asked = max(run.asked, place)
        if lease is None or lease.instance_id in (None, message.instance_id):
            return
        if (lease.client_id, lease.epoch) == (client, message.epoch):
            run = self._run(group, client, lease.instance_id or "")
            run.asked = max(run.asked, place)

    def _asked_to_leave(self, world: World, outcome: Outcome, place: Place) -> None:
        message = outcome.message
        assert message is not None
        group = world.group(message.group_id)
        member = None if group is None else group.clients.get(message.client_id)
        if member is not None and member.member_id == message.member_id and member.instance_id != message.instance_id:
            run = self._run(message.group_id, message.client_id, member.instance_id)
            run.asked = max(run.asked, place)
