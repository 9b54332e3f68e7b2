"""The state of one CP, and the one thing that changes it: replaying its log (sections 1-4).

The caller's duties, in order:
  1. one World for each CP, made empty or from a snapshot (`World.restore`);
  2. hand it every record of that CP, once, in the log's order, as (offset, timestamp, value): −1 for a
     timestamp that is not the broker's (T1), None for a record without a value;
  3. check `required_level` after each `apply_many`, or the code UPGRADE_REQUIRED after `apply`: a world
     that stands before an Upgrade it can't follow stays there (E4), and what it says is of that place.

Nothing in a record can make `apply` raise: what is wrong is rejected, counted and passed over, by all
replicas alike (E3). What does raise, ValueError, and changes nothing, is the caller's own mistake: an offset
that was there already, or numbers that Kafka can't have given.

A record is judged in the order of E6: value, version, type, fields (wire/codec.py); then, log time having moved
(T1), routing, pause, the kind of its group, and the rules of its type. What a record type means is its plane's to
judge (plane.py); what is about a group or the log as a whole is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rationalizer import codes
from rationalizer import snapshot as canonical
from rationalizer.groups.group import Group
from rationalizer.groups.machine import GroupPlane
from rationalizer.leases.lease import Lease
from rationalizer.leases.machine import LeasePlane
from rationalizer.levels import CHECKPOINTS_LEVEL, FIRST_LEVEL, SUPPORTED_LEVEL
from rationalizer.limits import HEAD_FIELDS, MAX_OFFSET, MAX_PARTITION, MAX_TIME_MS
from rationalizer.outcome import NOTHING_ADDED, Added, Outcome
from rationalizer.plane import (
    ApplyContext,
    Bounds,
    Entry,
    Heard,
    PausedGroup,
    Plane,
    SeeBeats,
    Verdict,
    handlers_of,
)
from rationalizer.state import want
from rationalizer.wire.codec import RejectedValueError, read
from rationalizer.wire.records import DuringPause, Kind, Upgrade
from rationalizer.wire.unpacking import Message

#: (verdict, kind if known, fields if well formed)
_Replayed = tuple[Verdict, Kind | None, Message | None]


class World:
    """What is so in one CP after a prefix of its log.

    `partition`: the CP, of `partitions`. `log_time`: ms (T1). `next_offset`: above every record applied.
    `level`: see E4. `required_level`: None, or the level that the Upgrade before which this world stands asks
    for. `accepted`, `rejected`: records counted by code, since this object was made.
    """

    __slots__ = (
        "_context",
        "_groups",
        "_handlers",
        "_leases",
        "_pauses",
        "_plane_of",
        "_planes",
        "accepted",
        "level",
        "log_time",
        "next_offset",
        "partition",
        "partitions",
        "rejected",
        "required_level",
    )

    def __init__(self, partition: int, partitions: int) -> None:
        if type(partitions) is not int or not 1 <= partitions <= MAX_PARTITION:
            raise ValueError(f"partitions must be an int, 1 … 2^31−1, not {partitions!r}")
        if type(partition) is not int or not 0 <= partition < partitions:
            raise ValueError(f"partition must be an int, 0 … {partitions - 1}, not {partition!r}")
        self.partition = partition
        self.partitions = partitions
        self.log_time = 0
        self.next_offset = 0
        self.level = FIRST_LEVEL
        self.required_level: int | None = None
        self.accepted: dict[str, int] = {}
        self.rejected: dict[str, int] = {}
        self._pauses: dict[str, PausedGroup] = {}
        self._context = ApplyContext()
        self._leases = LeasePlane(partition, partitions)
        self._groups = GroupPlane(partition, partitions)
        self._planes: tuple[Plane, ...] = (self._leases, self._groups)
        self._plane_of: dict[int, Plane] = {}
        self._handlers = handlers_of(self)
        for plane in self._planes:
            handlers = handlers_of(plane)
            self._handlers.update(handlers)
            self._plane_of.update(dict.fromkeys(handlers, plane))

    # -- reading ---------------------------------------------------------------------------------------

    def lease(self, group_id: str, topic: str, partition: int) -> Lease | None:
        """The lease, live, or None where it was never claimed here. Read it, don't write it."""
        return self._leases.leases.get((group_id, topic, partition))

    def leases(self) -> list[Lease]:
        """All leases ever granted here and not forgotten, sorted by (group, topic, partition)."""
        leases = self._leases.leases
        return [leases[key] for key in sorted(leases)]

    @property
    def lease_count(self) -> int:
        """How many leases there are."""
        return len(self._leases.leases)

    def group(self, group_id: str) -> Group | None:
        """The coordinated group, live, or None where this CP knows none. Read it, don't write it."""
        return self._groups.groups.get(group_id)

    def groups(self) -> list[Group]:
        """All coordinated groups, and the marks of those that are at home elsewhere (G2), sorted by name."""
        groups = self._groups.groups
        return [groups[group_id] for group_id in sorted(groups)]

    @property
    def listed(self) -> int:
        """How many leases, members, partitions, checkpoints … a snapshot lists: what its place is chosen by (S2)."""
        return sum(plane.size() for plane in self._planes)

    def hole_count(self) -> int:
        """How many holes all groups have in this CP (H1). Any thread."""
        return sum(plane.hole_count() for plane in self._planes)

    def pause(self, group_id: str) -> PausedGroup | None:
        """The group's pause, while it is in force at the log time (C10)."""
        pause = self._pauses.get(group_id)
        return pause if pause is not None and self.log_time < pause.expires else None

    def pauses(self) -> list[PausedGroup]:
        """All pauses in force at the log time, sorted by group."""
        return [pause for _, pause in sorted(self._pauses.items()) if self.log_time < pause.expires]

    def snapshot(self) -> bytes:
        """The canonical state (S1)."""
        return canonical.write(
            canonical.State(self.partition, self.next_offset, self.log_time, self.level, self.pauses(), self.rows())
        )

    def rows(self) -> dict[int, Sequence[Any]]:
        """What the canonical state has of each plane, by its part of the whole: copies, to keep or compare."""
        return {plane.part: plane.rows(self.level) for plane in self._planes}

    def digest(self) -> str:
        """The digest of the canonical state: 32 hex digits (S1)."""
        return canonical.digest_of(self.snapshot())

    @classmethod
    def restore(cls, snapshot: bytes, partitions: int) -> World:
        """The world that this canonical state describes, with nothing counted. Raises SnapshotError."""
        found = canonical.read(snapshot, partitions)
        world = cls(found.partition, partitions)
        world.next_offset = found.next_offset
        world.log_time = found.log_time
        world.level = found.level
        for pause in found.pauses:
            world._pauses[pause.group_id] = pause
        bounds = Bounds(found.partition, partitions, found.next_offset, found.log_time, found.level)
        for plane in world._planes:
            plane.load(found.rows[plane.part], bounds)
        both = [group for group in world._groups.groups if world._leases.knows(group)]
        want(not both, f"the group {both} is both claimed and coordinated (G1)" if both else "")
        # Whatever else may be odd about the bytes: they have to be the ones that this state is written as.
        want(world.snapshot() == snapshot, "it is not in canonical form")
        return world

    # -- replaying -------------------------------------------------------------------------------------

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        """Replay one record; its outcome.

        Never raises on any value. ValueError, with nothing changed, where offset is below `next_offset` or
        Kafka cannot give this offset or timestamp (a timestamp below 0 means that there is none).
        """
        if self.required_level is not None:
            return Outcome(False, codes.UPGRADE_REQUIRED, None, None, self.log_time)
        self._check_position(offset, timestamp_ms, value)
        verdict, kind, message = self._replay(offset, timestamp_ms, value)
        code, accepted, entries, member, share, taken = verdict
        if code != codes.UPGRADE_REQUIRED:
            self.count(code, accepted)
        if message is None or kind is None:
            return Outcome(accepted, code, kind.name if kind else None, None, self.log_time)
        epoch = generation = None
        added = NOTHING_ADDED if share is None and taken is None else Added(share=share, taken=taken)
        plane = self._plane_of.get(kind.type)
        of_group = plane is self._groups and code not in codes.BEFORE_THE_PLANES
        if plane is self._leases and code != codes.WRONG_PARTITION:
            epoch = self._leases.epoch(kind, message)
        if of_group:
            generation = self._groups.generation(message[4])
            if kind.level == CHECKPOINTS_LEVEL:
                added = Added(*self._groups.checkpoint(message[4]))
        return Outcome(
            accepted,
            code,
            kind.name,
            epoch,
            self.log_time,
            entries,
            of_group,
            generation,
            member,
            self._context.silent if of_group else (),
            added,
            (kind, message),
        )

    def apply_many(self, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Replay records, each (offset, timestamp in ms, value): outcomes are counted, not returned.

        Ends early before an Upgrade that this release can't follow (`required_level`). ValueError as in
        `apply`; the records before the bad one have been applied.
        """
        if self.required_level is not None:
            return
        remaining, fast_path = iter(records), self._leases.fast_path
        while (record := fast_path(remaining, self, self._pauses)) is not None:
            offset, timestamp_ms, value = record
            self._check_position(offset, timestamp_ms, value)
            (code, accepted, _, _, _, _), _, _ = self._replay(offset, timestamp_ms, value)
            if code == codes.UPGRADE_REQUIRED:
                return
            self.count(code, accepted)

    def apply_beats(
        self, records: Iterator[Entry], heard: Heard | None = None, see: SeeBeats | None = None
    ) -> Entry | None:
        """Replay heartbeats that move nothing but numbers; the first other record, not applied. None: none is left.

        heard: gets the last record of each sender. see: is called after each record, instead of an outcome.
        """
        if self.required_level is not None:
            return next(records, None)
        return self._leases.fast_path(records, self, self._pauses, heard, see)

    def count(self, code: str, accepted: bool, records: int = 1) -> None:
        """Count outcomes. Only a plane's fast path calls it."""
        counts = self.accepted if accepted else self.rejected
        counts[code] = counts.get(code, 0) + records

    def _check_position(self, offset: int, timestamp_ms: int, value: bytes | None) -> None:
        """The caller's duties: raise before anything has changed."""
        if type(offset) is not int or not self.next_offset <= offset <= MAX_OFFSET:
            raise ValueError(
                f"offset {offset!r} of CP {self.partition}: an int of at least {self.next_offset}, the next "
                "offset, was due. The record was not applied; hand in each record once, in order."
            )
        if type(timestamp_ms) is not int or timestamp_ms > MAX_TIME_MS:
            raise ValueError(
                f"timestamp {timestamp_ms!r} at offset {offset} of CP {self.partition} is no int up to "
                "2^63−1 (below 0 means none). The record was not applied."
            )
        if value is not None and type(value) is not bytes:
            raise ValueError(
                f"the value at offset {offset} of CP {self.partition} is of type {type(value).__name__}; "
                "bytes or None is wanted. The record was not applied."
            )

    def _replay(self, offset: int, timestamp_ms: int, value: bytes | None) -> _Replayed:
        """E6, from the first check to the last."""
        kind: Kind | None
        message: Message | None
        try:
            kind, message = read(value, self.level)
        except RejectedValueError as rejected:
            kind, message, code = rejected.kind, None, rejected.code
        else:
            if kind.type == Upgrade.TYPE and message[HEAD_FIELDS] > SUPPORTED_LEVEL:
                self.required_level = message[HEAD_FIELDS]
                return Verdict(codes.UPGRADE_REQUIRED, False), kind, message
        self.next_offset = offset + 1
        if timestamp_ms > self.log_time:
            self.log_time = timestamp_ms
        if kind is None or message is None:
            return Verdict(code, False), kind, None
        plane = self._plane_of.get(kind.type)  # what no plane owns belongs everywhere
        if plane is not None and not plane.belongs(kind, message):
            return Verdict(codes.WRONG_PARTITION, False), kind, message
        group_id = message[4]
        pause, pausing, paused = self._pauses.get(group_id), False, False
        if pause is not None and self.log_time >= pause.expires:  # log time never goes back
            del self._pauses[group_id]
        elif pause is not None:
            pausing = pause.client_id == message[3]
            paused = not pausing
            if paused and _is_refused(kind, message):
                return Verdict(codes.PAUSED, False), kind, message
        if plane is not None and any(other.knows(group_id) for other in self._planes if other is not plane):
            return Verdict(codes.WRONG_KIND, False), kind, message
        context = self._context
        context.offset = offset
        context.log_time = self.log_time
        context.level = self.level
        context.pausing = pausing
        context.paused = paused
        context.silent = ()
        answer = self._handlers[kind.type](message, context)
        if type(answer) is str:
            return Verdict(answer, answer in codes.ACCEPTED), kind, message
        if isinstance(answer, Verdict):
            return answer, kind, message
        accepted = not codes.ACCEPTED.isdisjoint(answer)
        return Verdict(codes.of_entries(answer), accepted, tuple(answer)), kind, message

    # -- what is about a group, or the log, as a whole ---------------------------------------------------

    def _release_group(self, message: Message, context: ApplyContext) -> str:
        """C10: pause the group, replace the expiry, or end the pause."""
        _, _, _, client_id, group_id, expires = message
        if expires > context.log_time:
            self._pauses[group_id] = PausedGroup(group_id, client_id, expires)
        else:
            self._pauses.pop(group_id, None)
        return codes.OK

    def _forget_group(self, message: Message, context: ApplyContext) -> str:
        """C16: all planes forget the group, and its pause goes, or nothing does."""
        group_id = message[4]
        if any(plane.is_active(group_id, context) for plane in self._planes):
            return codes.GROUP_ACTIVE
        for plane in self._planes:
            plane.forget(group_id)
        self._pauses.pop(group_id, None)
        return codes.OK

    def _upgrade(self, message: Message, context: ApplyContext) -> str:
        """E4: a level above SUPPORTED_LEVEL never gets here."""
        self.level = max(self.level, message[HEAD_FIELDS])
        return codes.OK

    def _tick(self, message: Message, context: ApplyContext) -> str:
        """T3: log time has moved, and that is all."""
        return codes.OK


def _is_refused(kind: Kind, message: Message) -> bool:
    """Whether another client's pause rejects this record (C10)."""
    if kind.during_pause is DuringPause.HANDS_IN_WITHOUT_TAKE:
        return message[-1] is not None
    return kind.during_pause is DuringPause.REJECTED
