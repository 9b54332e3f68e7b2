"""The oracle's world: everything that was ever accepted, and answers worked out from it again each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from tests.rationalizer.oracle import shares as of_shares
from tests.rationalizer.oracle.group_rules import judge_at_home, may_be_forgotten, names_no_strategy
from tests.rationalizer.oracle.groups import Group, canonical
from tests.rationalizer.oracle.holes import Hole
from tests.rationalizer.oracle.judging import Moment
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.layout import (
    HIGHEST_LEVEL,
    OF_CHECKPOINTS,
    OF_COORDINATED_GROUPS,
    OF_SHARED_LEASES,
    Judged,
    home_of_group,
    judge,
)
from tests.rationalizer.oracle.msgpack_by_hand import shortest
from tests.rationalizer.oracle.progress import LARGEST_HASH, OracleProgress, Step, merged, progress_from

LeaseKey: TypeAlias = tuple[str, str, int]
Who: TypeAlias = tuple[str, str]  # client_id, instance_id

MOST_INTERVALS = 60_000  # P5, for leases
#: G1: what has no place in a coordinated group.
OF_CLAIMED_GROUPS = (
    "Heartbeat",
    "ClaimingPartition",
    "ReleasingPartition",
    "ClaimingMessages",
    "HeartbeatBatch",
    "CommitRanges",
    *OF_SHARED_LEASES,
)


@dataclass(frozen=True)
class Fact:
    """One accepted change of one lease: `kind` is claimed, took_over, beat, released or one of progress's."""

    kind: str
    offset: int
    time: int
    who: Who
    what: Any = None


@dataclass(frozen=True)
class OracleLease:
    """A lease as the facts about it show it."""

    key: LeaseKey
    holder: Who | None
    epoch: int
    heartbeat_interval_ms: int
    last_beat: int
    progress: OracleProgress
    #: R1; −1: none.
    again: int
    #: Of a lease that shares or holes have touched; the others say the same as it.
    shared: of_shares.SharedLease | None = None

    @property
    def done_through(self) -> list[tuple[int, int, int]]:
        """P1."""
        return [(0, LARGEST_HASH, self.progress.stable)] if self.shared is None else [*self.shared.progress.through]

    @property
    def added(self) -> tuple[list[of_shares.Share], list[Hole]]:
        """What level 4 adds."""
        return ([], []) if self.shared is None else ([*self.shared.shares], [*self.shared.progress.holes])

    def freshness(self, now: int) -> str:
        """C1, and "free" without a holder."""
        age = now - self.last_beat
        if self.holder is None:
            return "free"
        if age < self.heartbeat_interval_ms:
            return "fresh"
        return "unknown" if age <= 2 * self.heartbeat_interval_ms else "stale"

    def canonical(self, level: int) -> list[Any]:
        """S1."""
        client, instance = self.holder or (None, None)
        head = [*self.key, client, instance, self.epoch, self.heartbeat_interval_ms, self.last_beat]
        done = [list(piece) for piece in self.done_through]
        shares, holes = ([each.row() for each in some] for some in self.added)
        more: list[Any] = [shares, holes] if shares or holes or level >= 5 else []
        more += [self.again] if level >= 5 else []
        return [*head, done, [list(span) for span in self.progress.ranges], self.progress.granted, *more]


@dataclass(frozen=True)
class OraclePause:
    """A pause in force."""

    group: str
    client: str
    expires: int


@dataclass(frozen=True)
class OracleOutcome:
    """What D2 prints of one record, and `stopped` where the world stands before an Upgrade (E4)."""

    accepted: bool
    code: str
    type: str | None
    epoch: int | None
    log_time: int
    entries: tuple[str, ...] | None = None
    stopped: bool = False
    #: Of types 16–21, and 23–27, that passed E6's checks and the kind; `of_a_group` is set for these.
    generation: int | None = None
    member: str | None = None
    of_a_group: bool = False
    #: Of types 23, 24, 25 and 27, after the record: the newest checkpoint, and the open barrier.
    checkpoint: int | None = None
    barrier: int | None = None
    #: Of types 22 and 28.
    share: int | None = None
    taken: tuple[int, int] | None = None


class OracleWorld:
    """One CP of the coordination topic, as a reader sees it who supports levels up to `highest_level` (E4)."""

    def __init__(self, partition: int, partitions: int, highest_level: int = HIGHEST_LEVEL) -> None:
        self.partition = partition
        self.partitions = partitions
        self.stamps: list[int] = [0]
        self.offsets: list[int] = [-1]
        self.facts: dict[LeaseKey, list[Fact]] = {}
        self.shared: dict[LeaseKey, of_shares.SharedLease] = {}  # leases that were in facts before
        self.groups: dict[str, Group] = {}  # coordinated ones, marks too (G2)
        self.pause_records: list[OraclePause] = []  # every accepted ReleaseGroup, in order
        self.outcomes: list[OracleOutcome] = []
        self.level = 1
        self.highest_level = highest_level
        self.required_level: int | None = None

    # What follows from the lists above.

    @property
    def log_time(self) -> int:
        """T1."""
        return max(self.stamps)

    @property
    def next_offset(self) -> int:
        """The offset that no record so far has reached."""
        return max(self.offsets) + 1

    @property
    def accepted(self) -> dict[str, int]:
        """Accepted records by code."""
        return dict(Counter(outcome.code for outcome in self.outcomes if outcome.accepted))

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected records by code."""
        return dict(Counter(outcome.code for outcome in self.outcomes if not outcome.accepted))

    def lease(self, key: LeaseKey) -> OracleLease | None:
        """The lease by the facts; None if it was never claimed here, or forgotten since."""
        if key in self.shared:
            its = self.shared[key]
            progress = OracleProgress(its.progress.stable, its.progress.ranges, its.granted)
            return OracleLease(
                *(key, its.holder, its.epoch, its.heartbeat_interval_ms, its.last_beat, progress),
                *(its.progress.again, its),
            )
        facts = self.facts.get(key)
        if not facts:
            return None
        gains = [fact for fact in facts if fact.kind in ("claimed", "took_over")]
        holder: Who | None = gains[-1].who
        if any(fact.kind == "released" for fact in facts[facts.index(gains[-1]) :]):
            holder = None
        beats = [fact for fact in facts if fact.kind in ("claimed", "took_over", "beat")]
        return OracleLease(
            key,
            holder,
            epoch=gains[-1].offset,
            heartbeat_interval_ms=[fact for fact in facts if fact.kind == "claimed"][-1].what,
            last_beat=beats[-1].time,
            progress=progress_from(self._steps(key)),
            again=max((fact.offset for fact in facts if fact.kind == "again"), default=-1),
        )

    def _steps(self, key: LeaseKey) -> list[Step]:
        kinds = ("raised", "committed", "granted", "repositioned")
        return [(fact.kind, fact.what) for fact in self.facts[key] if fact.kind in kinds]

    def leases(self) -> list[OracleLease]:
        """Every lease, in canonical order."""
        keys = sorted({*self.facts, *self.shared}, key=lambda key: (key[0].encode(), key[1].encode(), key[2]))
        return [lease for lease in map(self.lease, keys) if lease is not None]

    def pause(self, group: str) -> OraclePause | None:
        """The group's pause in force at log time: its last ReleaseGroup, unless that is over (C10)."""
        last = [pause for pause in self.pause_records if pause.group == group][-1:]
        return last[0] if last and self.log_time < last[0].expires else None

    def pauses(self) -> list[OraclePause]:
        """All of them, in canonical order."""
        groups = sorted({pause.group for pause in self.pause_records}, key=lambda group: group.encode())
        return [pause for pause in map(self.pause, groups) if pause is not None]

    def kind(self, group: str) -> str | None:
        """G1: claimed, coordinated, or neither (None)."""
        if any(key[0] == group for key in {*self.facts, *self.shared}):
            return "claimed"
        return "coordinated" if group in self.groups else None

    def coordinated(self) -> list[Group]:
        """Every coordinated group, in canonical order."""
        return [self.groups[name] for name in sorted(self.groups, key=lambda name: name.encode())]

    def snapshot(self) -> bytes:
        """S1."""
        leases = [lease.canonical(self.level) for lease in self.leases()]
        pauses = [[pause.group, pause.client, pause.expires] for pause in self.pauses()]
        head = [1, self.partition, self.next_offset, self.log_time, self.level]
        return shortest([*head, leases, pauses, [canonical(group, self.level) for group in self.coordinated()]])

    def digest(self) -> str:
        """S1."""
        return f"{xxhash.xxh3_128_intdigest(self.snapshot(), 0):032x}"

    # Applying a record.

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> OracleOutcome:
        """Judge one record of the log, and store its changes."""
        judged = judge(value, self.level, self.partition, self.partitions)
        upgrade = judged.code is None and judged.type == "Upgrade"
        if self.required_level is None and upgrade and judged.fields[0] > self.highest_level:
            self.required_level = judged.fields[0]
        if self.required_level is not None:
            return OracleOutcome(False, "UPGRADE_REQUIRED", None, None, self.log_time, stopped=True)
        self.stamps.append(timestamp_ms)
        self.offsets.append(offset)
        code, entries = judged.code, None
        if code is None and self._shut_out(judged):
            code = "PAUSED"
        if code is None and self._of_the_other_kind(judged):
            code = "WRONG_KIND"
        if code is None and judged.type in OF_COORDINATED_GROUPS:
            outcome = self._of_a_group(judged)
            self.outcomes.append(outcome)
            return outcome
        if code is not None:
            accepted = False
        elif judged.type == "HeartbeatBatch":
            accepted, code, entries = self._batch(judged)
        elif judged.type in OF_SHARED_LEASES:
            outcome = self._of_a_shared_lease(judged)
            self.outcomes.append(outcome)
            return outcome
        else:
            accepted, code = self._apply_one(judged)
        named = self.lease(judged.lease_key) if judged.lease_key else None
        epoch = named.epoch if named and named.heartbeat_interval_ms else None
        outcome = OracleOutcome(accepted, code, judged.type, epoch, self.log_time, entries)
        self.outcomes.append(outcome)
        return outcome

    def _shut_out(self, record: Judged) -> bool:
        """C10: whether a pause by another client stands against this record."""
        if record.type in ("Tick", "Upgrade", "ReleasingPartition", "CommitRanges", "LeaveGroup", "CommitOffsets"):
            return False
        if record.type in ("BeginCheckpoint", "AnswerBarrier", "SettleOffsets"):  # sections 7 and 7b
            return False
        if record.type == "SettlingMessages" and record.fields[7] is None:
            return False
        return self._paused_by_another(record)

    def _paused_by_another(self, record: Judged) -> bool:
        pause = self.pause(record.group)
        return pause is not None and pause.client != record.client

    def _at(self, record: Judged) -> of_shares.At:
        pausing, paused_by_another = self._pausing(record), self._paused_by_another(record)
        return of_shares.At(self.offsets[-1], self.log_time, pausing, paused_by_another, self.level)

    def _of_a_shared_lease(self, record: Judged) -> OracleOutcome:
        """Types 22 and 28; the first that is accepted takes the lease out of the facts."""
        key = (record.group, record.fields[0], record.fields[1])
        known = self.shared.get(key)
        if known is None and key in self.facts:
            found = self._known(key)
            through = ((0, LARGEST_HASH, found.progress.stable),)
            raised = KeyedProgress(through=through, ranges=found.progress.ranges, again=found.again)
            known = of_shares.SharedLease(
                found.holder,
                found.epoch,
                found.heartbeat_interval_ms,
                found.last_beat,
                raised,
                found.progress.granted,
            )
        judge_it = of_shares.claim_share if record.type == "ClaimingShare" else of_shares.settle_messages
        answer = judge_it(known, record, self._at(record))
        if answer.accepted:
            assert answer.lease is not None
            self.shared[key] = answer.lease
            self.facts.pop(key, None)
        after = self.lease(key)
        epoch = after.epoch if after and after.heartbeat_interval_ms else None
        return OracleOutcome(
            answer.accepted,
            answer.code,
            record.type,
            epoch,
            self.log_time,
            answer.entries,
            share=answer.share,
            taken=answer.taken,
        )

    def _of_a_known_shared_lease(self, record: Judged, key: LeaseKey) -> tuple[bool, str]:
        """Types 2, 3, 4 and 7 (1 and 6 are in _heartbeat)."""
        lease, at = self.shared[key], self._at(record)
        if record.type == "ClaimingPartition":
            answer = of_shares.claim(lease, record, at)
        elif record.type == "ReleasingPartition":
            answer = of_shares.release(lease, record, at)
        elif record.type == "ClaimingMessages":
            answer = of_shares.grant(lease, record, at)
        else:
            answer = of_shares.commit(lease, record)
        return self._take_up(key, answer)

    def _take_up(self, key: LeaseKey, answer: of_shares.Answer) -> tuple[bool, str]:
        if answer.accepted:
            assert answer.lease is not None
            self.shared[key] = answer.lease
        return answer.accepted, answer.code

    def _of_the_other_kind(self, record: Judged) -> bool:
        """G1: types 1–4, 6 and 7 on a coordinated group, 16–21 and 23–27 on a claimed one."""
        kind = self.kind(record.group)
        if record.type in OF_CLAIMED_GROUPS:
            return kind == "coordinated"
        return record.type in OF_COORDINATED_GROUPS and kind == "claimed"

    def _of_a_group(self, record: Judged) -> OracleOutcome:
        """Section 5, at the group's home; elsewhere only ConfigureGroup gets here, and leaves a mark (G2)."""
        if home_of_group(record.group, self.partitions) != self.partition:
            assert record.type == "ConfigureGroup"
            if names_no_strategy(record):  # R5, "elsewhere than at home too"
                return OracleOutcome(
                    *(False, "UNKNOWN_PARTITIONING_STRATEGY", record.type, None, self.log_time),
                    generation=self.groups[record.group].generation if record.group in self.groups else None,
                    of_a_group=True,
                )
            mark = self.groups.setdefault(record.group, Group(record.group))
            return OracleOutcome(
                True, "OK", record.type, None, self.log_time, generation=mark.generation, of_a_group=True
            )
        verdict = judge_at_home(self.groups.get(record.group), record, self._moment(record))
        if verdict.accepted:
            assert verdict.group is not None
            self.groups[record.group] = verdict.group
        after = self.groups.get(record.group)
        known = None if after is None or record.type not in OF_CHECKPOINTS else after.checkpoints
        return OracleOutcome(
            verdict.accepted,
            verdict.code,
            record.type,
            epoch=None,
            log_time=self.log_time,
            entries=verdict.entries,
            generation=None if after is None else after.generation,
            member=verdict.member,
            of_a_group=True,
            checkpoint=None if known is None else known.newest,
            barrier=None if known is None or known.barrier is None else known.barrier.id,
        )

    def _moment(self, record: Judged) -> Moment:
        others = [group for group in self.coordinated() if group.name != record.group]
        taken = sum(group.partitions_subscribed_to() for group in others)
        return Moment(self.partition, self.offsets[-1], self.log_time, taken, self._pausing(record), self.level)

    def _pausing(self, record: Judged) -> bool:
        """C11: whether the sender is the one that has the group paused."""
        pause = self.pause(record.group)
        return pause is not None and pause.client == record.client

    def _apply_one(self, record: Judged) -> tuple[bool, str]:
        assert record.type is not None
        if record.type == "Upgrade":  # E4: a level not above the current one changes nothing
            self.level = max(self.level, record.fields[0])
        if record.type in ("Tick", "Upgrade"):
            return True, "OK"
        if record.type == "ReleaseGroup":
            self.pause_records.append(OraclePause(record.group, record.client, record.fields[0]))
            return True, "OK"
        if record.type == "ForgetGroup":
            return self._forget(record)
        key = (record.group, record.fields[0], record.fields[1])
        if key in self.shared and record.type != "Heartbeat":
            return self._of_a_known_shared_lease(record, key)
        if record.type == "ClaimingPartition":
            return self._claim(record)
        topic, partition, epoch, what = record.fields
        if record.type == "Heartbeat":
            return self._heartbeat(record, (record.group, topic, partition), epoch, what)
        key = (record.group, topic, partition)
        refusal = self._refusal(record, key, epoch)
        if refusal is not None:
            return False, refusal
        if record.type == "ReleasingPartition":
            code = self._last_offset(record, key, what)
            self._remember(record, key, "released")
            return True, code
        if record.type == "ClaimingMessages":
            return self._grant(record, key, what)
        assert record.type == "CommitRanges"
        return self._commit(record, key, [(pair[0], pair[1]) for pair in what])

    def _remember(self, record: Judged, key: LeaseKey, kind: str, what: Any = None) -> None:
        who = (record.client, record.instance)
        self.facts.setdefault(key, []).append(Fact(kind, self.offsets[-1], self.log_time, who, what))

    def _known(self, key: LeaseKey) -> OracleLease:
        lease = self.lease(key)
        assert lease is not None
        return lease

    def _refusal(self, record: Judged, key: LeaseKey, epoch: int) -> str | None:
        """C5: the two rejections for every record that carries an epoch."""
        lease = self.lease(key)
        if lease is None or lease.holder is None:
            return "NOT_HELD"
        if lease.holder != (record.client, record.instance) or lease.epoch != epoch:
            return "FENCED"
        return None

    def _claim(self, record: Judged) -> tuple[bool, str]:
        """C3."""
        key = (record.group, record.fields[0], record.fields[1])
        lease = self.lease(key)
        if lease is None or lease.freshness(self.log_time) in ("free", "stale"):
            self._remember(record, key, "claimed", record.fields[2])
            return True, "OK"
        if lease.holder == (record.client, record.instance):
            return True, "ALREADY_HELD"
        return False, "HELD"

    def _heartbeat(self, record: Judged, key: LeaseKey, epoch: int | None, last_offset: int | None) -> tuple[bool, str]:
        """C5 with an epoch, C7 without."""
        if key in self.shared:
            answer = of_shares.heartbeat(self.shared[key], record, self._at(record), epoch, last_offset)
            return self._take_up(key, answer)
        if epoch is None:
            refusal = self._refusal_of_takeover(record, key)
        else:
            refusal = self._refusal(record, key, epoch)
        if refusal is not None:
            return False, refusal
        self._remember(record, key, "took_over" if epoch is None else "beat")
        return True, self._last_offset(record, key, last_offset)

    def _refusal_of_takeover(self, record: Judged, key: LeaseKey) -> str | None:
        lease = self.lease(key)
        if lease is None or lease.holder is None:
            return "NOT_HELD"
        client, instance = lease.holder
        if client != record.client or instance == record.instance:
            return "FENCED"
        return None if lease.freshness(self.log_time) == "fresh" else "NOT_FRESH"

    def _last_offset(self, record: Judged, key: LeaseKey, last_offset: int | None) -> str:
        """C5 and C11: what a last_offset does to the progress, and the code that says so."""
        if last_offset is None:
            return "OK"
        before = self._known(key).progress
        if self._pausing(record):
            self._remember(record, key, "repositioned", last_offset)
            if self._known(key).progress == before:
                return "OK"
            if self.level >= 5:  # R1
                self._remember(record, key, "again")
            return "REPOSITIONED"
        if last_offset < before.stable:
            return "OFFSET_REGRESSION"
        self._remember(record, key, "raised", last_offset)
        return "OK"

    def _batch(self, record: Judged) -> tuple[bool, str, tuple[str, ...]]:
        """Type 6: as many heartbeats, in order."""
        answers = []
        for topic, partition, epoch, last_offset in record.fields[0]:
            answers.append(self._heartbeat(record, (record.group, topic, partition), epoch, last_offset))
        codes = tuple(code for _, code in answers)
        if all(accepted for accepted, _ in answers):
            return True, "OK", codes
        return any(accepted for accepted, _ in answers), "PARTIAL", codes

    def _grant(self, record: Judged, key: LeaseKey, proposal: int) -> tuple[bool, str]:
        """C12."""
        lease = self._known(key)
        if lease.freshness(self.log_time) == "stale":
            return False, "STALE"
        if proposal <= lease.progress.granted or proposal <= lease.progress.stable:
            return False, "PROPOSAL_TOO_LOW"
        self._remember(record, key, "granted", proposal)
        return True, "OK"

    def _commit(self, record: Judged, key: LeaseKey, spans: list[tuple[int, int]]) -> tuple[bool, str]:
        """P3 to P5."""
        before = self._known(key).progress
        above = merged((max(first, before.stable + 1), last) for first, last in spans if last > before.stable)
        if not above:
            return False, "INDIVIDUAL_COMMIT_TOO_OLD"
        if all(any(low <= first and last <= high for low, high in before.ranges) for first, last in above):
            return True, "DUPLICATE_COMMIT"
        if len(progress_from([*self._steps(key), ("committed", spans)]).ranges) > MOST_INTERVALS:
            return False, "MAX_INDIVIDUAL_COMMIT_REACHED"
        self._remember(record, key, "committed", spans)
        return True, "OK"

    def _forget(self, record: Judged) -> tuple[bool, str]:
        """C16."""
        group = self.groups.get(record.group)
        if group is not None and not may_be_forgotten(group, self._moment(record)):
            return False, "GROUP_ACTIVE"
        self.groups.pop(record.group, None)
        mine = [lease for lease in self.leases() if lease.key[0] == record.group]
        if any(lease.freshness(self.log_time) in ("fresh", "unknown") for lease in mine):
            return False, "GROUP_ACTIVE"
        if any(not share.is_stale(self.log_time) for lease in mine for share in lease.added[0]):
            return False, "GROUP_ACTIVE"
        for lease in mine:
            self.facts.pop(lease.key, None)
            self.shared.pop(lease.key, None)
        self.pause_records = [pause for pause in self.pause_records if pause.group != record.group]
        return True, "OK"
