"""What participants can append: the record types of sections 3, 5, 7 and 7b, as frozen values that check themselves.

A record that can be built is one that every reader accepts as well formed (E2); building any other raises
InvalidRecordError, which is the writer's mistake. (What is wrong with a value *read* is another exception,
see codec.py: that is another client's mistake, and only rejected.)

`Kind` is one row of the protocol's tables: the type's number and name, the level that knows it, its fields in
order, and what the checks of E6 need to know about it. Reading never builds the dataclasses; it judges the
plain fields by the same rules (`Kind.problem`), so nothing is checked in two ways.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Final, NamedTuple, Self, cast

from rationalizer.levels import GROUPS_LEVEL, REDO_LEVEL, SHARING_LEVEL, level_of_record
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire import wellformed as ok
from rationalizer.wire.wellformed import Rule


class InvalidRecordError(ValueError):
    """A record was built that no reader would accept: says which field, and what it has to be.

    Nothing was written. Mend the caller.
    """


@dataclass(frozen=True, slots=True)
class Record:
    """What all records begin with (E1): who says it, and about which group.

    `instance_id` names one run of a process, `client_id` what stays the same when it restarts. Each 1 … 255
    UTF-8 bytes, without control characters.
    """

    instance_id: str
    client_id: str
    group_id: str

    #: The type's number on the wire.
    TYPE: ClassVar[int] = 0

    def __post_init__(self) -> None:
        problem = ok.id_problem(self.instance_id, self.client_id, self.group_id)
        if problem is None:
            problem = KINDS[self.TYPE].problem(self.own_fields())
        if problem is not None:
            raise InvalidRecordError(f"{type(self).__name__}: {problem}. Nothing was written.")

    @property
    def version(self) -> int:
        """The version it is written with: the level that its type came with, or that what it asks for came with."""
        return KINDS[self.TYPE].level

    def own_fields(self) -> tuple[object, ...]:
        """The fields after group_id, in the order and the form of the wire."""
        return tuple(getattr(self, name) for name in KINDS[self.TYPE].field_names)

    @classmethod
    def of_fields(cls, instance_id: str, client_id: str, group_id: str, own: Sequence[Any]) -> Self:
        """The record with these fields, `own` as on the wire."""
        return cls(instance_id, client_id, group_id, *own)


@dataclass(frozen=True, slots=True)
class LeaseRecord(Record):
    """What is about one lease begins with it (L3)."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Heartbeat(LeaseRecord):
    """I live, and am this far (C5). `epoch` None: take over from my earlier instance (C7).

    `last_offset`: the last one done, −1 for nothing, None to say nothing about it (E5).
    """

    TYPE: ClassVar[int] = 1
    epoch: int | None
    last_offset: int | None


@dataclass(frozen=True, slots=True)
class ClaimingPartition(LeaseRecord):
    """I want this lease (C3), and will beat within `heartbeat_interval_ms` (100 … 600,000; C2)."""

    TYPE: ClassVar[int] = 2
    heartbeat_interval_ms: int


@dataclass(frozen=True, slots=True)
class ReleasingPartition(LeaseRecord):
    """I give the lease back (C8), done up to `last_offset` (None: says nothing about it)."""

    TYPE: ClassVar[int] = 3
    epoch: int
    last_offset: int | None


@dataclass(frozen=True, slots=True)
class ClaimingMessages(LeaseRecord):
    """Grant me, and no other client ever, what is not done up to `proposed_last_offset` (C12)."""

    TYPE: ClassVar[int] = 4
    epoch: int
    proposed_last_offset: int


@dataclass(frozen=True, slots=True)
class ReleaseGroup(Record):
    """Pause the group until log time `msg_expire_time` (ms); not after the log time: end the pause (C10)."""

    TYPE: ClassVar[int] = 5
    msg_expire_time: int


@dataclass(frozen=True, slots=True)
class BeatEntry:
    """One heartbeat within a HeartbeatBatch; its epoch is never None."""

    topic: str
    partition: int
    epoch: int
    last_offset: int | None

    def __post_init__(self) -> None:
        if not ok.are_beat_entries(((self.topic, self.partition, self.epoch, self.last_offset),)):
            raise InvalidRecordError(f"BeatEntry: {self!r} is invalid: {ok.BEAT_ENTRY_WANTS}. Nothing was written.")


@dataclass(frozen=True, slots=True)
class HeartbeatBatch(Record):
    """As many Heartbeats, in order. All of its leases belong to one CP (L3)."""

    TYPE: ClassVar[int] = 6
    entries: tuple[BeatEntry, ...]

    def __post_init__(self) -> None:
        # Entries have checked themselves, and are many: a holder of a thousand leases beats all of them every HI/3.
        problem = ok.id_problem(self.instance_id, self.client_id, self.group_id)
        if problem is None and (type(self.entries) is not tuple or set(map(type, self.entries)) != {BeatEntry}):
            problem = "entries must be a tuple of at least one BeatEntry"
        if problem is not None:
            raise InvalidRecordError(f"{type(self).__name__}: {problem}. Nothing was written.")

    def own_fields(self) -> tuple[object, ...]:
        """The entries as on the wire: [topic, partition, epoch, last_offset] each."""
        return (tuple([(e.topic, e.partition, e.epoch, e.last_offset) for e in self.entries]),)

    @classmethod
    def of_fields(cls, instance_id: str, client_id: str, group_id: str, own: Sequence[Any]) -> Self:
        """The record with these fields, `own` as on the wire."""
        return cls(instance_id, client_id, group_id, tuple(BeatEntry(*entry) for entry in own[0]))


@dataclass(frozen=True, slots=True)
class CommitRanges(LeaseRecord):
    """These offsets are done (P3-P5): 1 … 10,000 inclusive (first, last), in any order."""

    TYPE: ClassVar[int] = 7
    epoch: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ForgetGroup(Record):
    """Drop what this CP knows of the group, unless it is at work (C16)."""

    TYPE: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Tick(Record):
    """Nothing but the broker's stamp, which moves log time (T3)."""

    TYPE: ClassVar[int] = 32


@dataclass(frozen=True, slots=True)
class Upgrade(Record):
    """From here on the CP is at `level` (E4)."""

    TYPE: ClassVar[int] = 33
    level: int


# -- the group plane (section 5) -------------------------------------------------------------------------

#: Topics as a member reports them: (topic, number of partitions; 0: not there yet).
Topics = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class JoinGroup(Record):
    """I want to be a member (G11): a new one, again with other values, or in place of my earlier instance.

    `member_id`: "" where the sender has none. `seen`: the next offset of the sender's replica. `pattern`: a regular
    expression, or "". `topics`: each with its partitions, as the sender sees them.
    """

    TYPE: ClassVar[int] = 16
    member_id: str
    seen: int
    session_timeout_ms: int
    strategy: str
    allow_key_share: bool
    pattern: str
    topics: Topics


@dataclass(frozen=True, slots=True)
class GroupHeartbeat(Record):
    """I live, and know this generation (G13)."""

    TYPE: ClassVar[int] = 17
    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class LeaveGroup(Record):
    """I am a member no longer (G13)."""

    TYPE: ClassVar[int] = 18
    member_id: str
    generation: int


class CommitEntry(NamedTuple):
    """What is done of one partition, for the key hashes lo … hi (G14).

    `action`: COMMIT, LET_GO (commit, and release what is revoked) or START. Either `through`, −1 or an offset, or
    `ranges`, inclusive (first, last), or neither. `metadata`: None leaves what was kept.
    """

    topic: str
    partition: int
    lo: int = 0
    hi: int = MAX_KEY_HASH
    action: int = ok.COMMIT
    through: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    metadata: str | None = None


class _OfEntries(Record):
    """A record whose last field is ``entries``, each a `CommitEntry`; on the wire an array."""

    __slots__ = ()

    def own_fields(self) -> tuple[object, ...]:
        """The fields as on the wire."""
        *head, entries = super().own_fields()
        return *head, tuple(map(tuple, cast("tuple[CommitEntry, ...]", entries)))

    @classmethod
    def of_fields(cls, instance_id: str, client_id: str, group_id: str, own: Sequence[Any]) -> Self:
        """The record with these fields, `own` as on the wire."""
        *head, entries = own
        found = tuple([CommitEntry(*entry) for entry in entries])
        return super().of_fields(instance_id, client_id, group_id, (*head, found))


@dataclass(frozen=True, slots=True)
class CommitOffsets(_OfEntries):
    """This is done (G14); with member_id "": the pausing client sets these positions (G21).

    `in_order`: ranges that would leave a gap below them are rejected (K8).
    """

    TYPE: ClassVar[int] = 19
    member_id: str
    generation: int
    in_order: bool
    entries: tuple[CommitEntry, ...]


@dataclass(frozen=True, slots=True)
class TopicsChanged(Record):
    """My pattern matches these topics now, with these numbers of partitions (G12, G13)."""

    TYPE: ClassVar[int] = 20
    member_id: str
    topics: Topics


#: A setting's value: a boolean, a number, topics, or a strategy.
Setting = bool | int | tuple[str, ...] | str | None


@dataclass(frozen=True, slots=True)
class ConfigureGroup(Record):
    """Change these settings (G19); in other CPs than the group's home: it is a coordinated group (G2).

    `settings`: (name, value) pairs, each name once.
    """

    TYPE: ClassVar[int] = 21
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def version(self) -> int:
        """The version it is written with: that of its newest setting."""
        return max([GROUPS_LEVEL, *(ok.SETTING_VERSIONS.get(name, GROUPS_LEVEL) for name, _ in self.settings)])

    def own_fields(self) -> tuple[object, ...]:
        """The settings as on the wire: a map."""
        return (dict(self.settings),)

    @classmethod
    def of_fields(cls, instance_id: str, client_id: str, group_id: str, own: Sequence[Any]) -> Self:
        """The record with these fields, `own` as on the wire."""
        return cls(instance_id, client_id, group_id, tuple(dict(own[0]).items()))


# -- checkpoints (section 7) -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginCheckpoint(Record):
    """Take a checkpoint (X4): the first one, or a barrier opens.

    `after`: the newest checkpoint, 0 where the group takes none. `timeout_ms`: how long the barrier waits, in log time.
    `keep`: how many periodic checkpoints are kept; 0: this one is for a hand-over. `hold`: of the first one, the kind
    of group.
    """

    TYPE: ClassVar[int] = 23
    after: int
    timeout_ms: int
    keep: int
    hold: bool


@dataclass(frozen=True, slots=True)
class AnswerBarrier(_OfEntries):
    """My cut for this barrier (X5): `answer` is REFUSED, REACHED or REACHED_AND_LEAVES, `entries` what is done."""

    TYPE: ClassVar[int] = 24
    member_id: str
    generation: int
    barrier: int
    answer: int
    entries: tuple[CommitEntry, ...]


@dataclass(frozen=True, slots=True)
class Rollback(Record):
    """All go back to this checkpoint, 0: the newest (X8), if the group's generation still is this one."""

    TYPE: ClassVar[int] = 25
    generation: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class KeepCheckpoint(Record):
    """Change what is kept (X9): `action` is RETIRE, PIN or END."""

    TYPE: ClassVar[int] = 27
    checkpoint: int
    action: int


# -- holes and shares (section 7b) -----------------------------------------------------------------------

#: Offsets that are done: (first, last), both included.
Done = tuple[tuple[int, int], ...]
#: Offsets that wait for their next try: (first, last, key hash or None, attempts).
Opened = tuple[tuple[int, int, int | None, int], ...]
#: Messages that are set aside: (offset, key hash, attempts, reason).
Parked = tuple[tuple[int, int, int, str], ...]
#: Messages that a sharer asks for: (count, the last offset that its reader may read, at most once).
Take = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class ClaimingShare(LeaseRecord):
    """I want a part of this lease (B3): the key hashes lo … hi, or, without both, batches.

    `start`: where the lease begins if the CP does not know it; None: at the earliest offset.
    """

    TYPE: ClassVar[int] = 22
    heartbeat_interval_ms: int
    lo: int | None = None
    hi: int | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class SettlingMessages(LeaseRecord):
    """These messages of a lease are done, opened or parked (H3), and `take`: the next batch for me (B5).

    `epoch`: of the lease or of a share; None: as an operator. `seen`: the next offset of the sender's replica.
    `redo`: what is done may open again (R2); it is no field on the wire, but the version.
    """

    TYPE: ClassVar[int] = 28
    epoch: int | None
    seen: int
    done: Done = ()
    open: Opened = ()
    parked: Parked = ()
    take: Take | None = None
    redo: bool = False

    @property
    def version(self) -> int:
        """The version it is written with."""
        return REDO_LEVEL if self.redo else SHARING_LEVEL


@dataclass(frozen=True, slots=True)
class SettleOffsets(Record):
    """These messages of a coordinated group are done, opened or parked (H4); with member_id "": as an operator.

    `redo`: as in a SettlingMessages.
    """

    TYPE: ClassVar[int] = 29
    member_id: str
    generation: int
    seen: int
    topic: str
    partition: int
    done: Done = ()
    open: Opened = ()
    parked: Parked = ()
    redo: bool = False

    @property
    def version(self) -> int:
        """The version it is written with."""
        return REDO_LEVEL if self.redo else SHARING_LEVEL


class Belongs(Enum):
    """How a kind of record finds its CP (L3)."""

    LEASE = "by topic and partition"
    ENTRIES = "by the topic and partition of all entries"
    GROUP = "by group"
    EVERYWHERE = "everywhere"


class DuringPause(Enum):
    """What a pause by another client does to a kind of record (C10)."""

    REJECTED = "rejected"
    HANDS_IN = "passes: it hands work in"
    HANDS_IN_WITHOUT_TAKE = "with a take rejected; else passes: it hands work in"
    NOT_OF_THE_GROUP = "passes: it is not about the group"


#: What every message begins with (E1).
_HEAD: Final = ("version", "type", "instance_id", "client_id", "group_id")


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the tables of sections 3, 5, 7 and 7b. `whole`: what must hold of all own fields together."""

    type: int
    name: str
    level: int
    build: Callable[[str, str, str, Sequence[Any]], Record]
    field_names: tuple[str, ...]
    rules: tuple[Rule, ...]
    belongs: Belongs
    during_pause: DuringPause
    whole: Rule | None = None
    #: A whole message with its fields by name: version, type, the three ids, then the type's own.
    named: Callable[[Sequence[Any]], Any] = field(init=False, repr=False, compare=False)
    #: The method that judges such a record, in its plane or in the World.
    handler: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", cast("Any", namedtuple(self.name, [*_HEAD, *self.field_names]))._make)
        object.__setattr__(self, "handler", re.sub("(?=[A-Z])", "_", self.name).lower())

    @property
    def names_lease(self) -> bool:
        """Whether the record names exactly one lease, by its first two own fields (D2)."""
        return self.belongs is Belongs.LEASE

    def problem(self, own: Sequence[object]) -> str | None:
        """What is wrong with these fields (as on the wire), or None (E2, E6)."""
        rules = self.rules
        if len(own) != len(rules):
            return f"{len(rules)} fields wanted after group_id, {len(own)} found"
        for place, value in enumerate(own):
            if not rules[place].holds(value):
                return f"{self.field_names[place]} must be {rules[place].wants}"
        if self.whole is not None and not self.whole.holds(own):
            return self.whole.wants
        return None


def _kind(
    record: type[Record],
    belongs: Belongs,
    during_pause: DuringPause,
    *rules: Rule,
    whole: Rule | None = None,
) -> Kind:
    names = tuple(each.name for each in fields(record))[3 : 3 + len(rules)]
    build = cast("Any", record.of_fields)
    level = level_of_record(record.__name__)
    return Kind(record.TYPE, record.__name__, level, build, names, rules, belongs, during_pause, whole)


def _topics_or_pattern(own: Sequence[Any]) -> bool:
    *_, pattern, topics = own
    return bool(pattern or topics)


def _refused_without_entries(own: Sequence[Any]) -> bool:
    *_, answer, entries = own
    return answer != ok.REFUSED or not entries


_LEASE = (ok.TOPIC, ok.PARTITION)
_LEASE_EPOCH = (*_LEASE, ok.EPOCH)

#: Every kind this release knows, by type.
KINDS: Final[dict[int, Kind]] = {
    kind.type: kind
    for kind in (
        _kind(Heartbeat, Belongs.LEASE, DuringPause.REJECTED, *_LEASE, ok.EPOCH_OR_NIL, ok.LAST_OFFSET),
        _kind(ClaimingPartition, Belongs.LEASE, DuringPause.REJECTED, *_LEASE, ok.HEARTBEAT_INTERVAL),
        _kind(ReleasingPartition, Belongs.LEASE, DuringPause.HANDS_IN, *_LEASE_EPOCH, ok.LAST_OFFSET),
        _kind(ClaimingMessages, Belongs.LEASE, DuringPause.REJECTED, *_LEASE_EPOCH, ok.OFFSET),
        _kind(ReleaseGroup, Belongs.EVERYWHERE, DuringPause.REJECTED, ok.TIME),
        _kind(HeartbeatBatch, Belongs.ENTRIES, DuringPause.REJECTED, ok.BEAT_ENTRIES),
        _kind(CommitRanges, Belongs.LEASE, DuringPause.HANDS_IN, *_LEASE_EPOCH, ok.RANGES),
        _kind(ForgetGroup, Belongs.EVERYWHERE, DuringPause.REJECTED),
        _kind(
            JoinGroup,
            Belongs.GROUP,
            DuringPause.REJECTED,
            *(ok.MEMBER_ID_OR_NONE, ok.SEEN, ok.SESSION_TIMEOUT, ok.STRATEGY, ok.BOOLEAN, ok.PATTERN, ok.TOPICS),
            whole=Rule(_topics_or_pattern, "topics may be empty only beside a pattern"),
        ),
        _kind(GroupHeartbeat, Belongs.GROUP, DuringPause.REJECTED, ok.MEMBER_ID, ok.GENERATION),
        _kind(LeaveGroup, Belongs.GROUP, DuringPause.HANDS_IN, ok.MEMBER_ID, ok.GENERATION),
        _kind(
            CommitOffsets,
            Belongs.GROUP,
            DuringPause.HANDS_IN,
            *(ok.MEMBER_ID_OR_NONE, ok.GENERATION, ok.BOOLEAN, ok.COMMIT_ENTRIES),
        ),
        _kind(TopicsChanged, Belongs.GROUP, DuringPause.REJECTED, ok.MEMBER_ID, ok.TOPICS),
        _kind(ConfigureGroup, Belongs.EVERYWHERE, DuringPause.REJECTED, ok.SETTINGS),
        _kind(BeginCheckpoint, Belongs.GROUP, DuringPause.HANDS_IN, ok.OFFSET, ok.TIMEOUT, ok.KEEP, ok.BOOLEAN),
        _kind(
            AnswerBarrier,
            Belongs.GROUP,
            DuringPause.HANDS_IN,
            *(ok.MEMBER_ID, ok.GENERATION, ok.OFFSET, ok.ANSWER, ok.ANSWER_ENTRIES),
            whole=Rule(_refused_without_entries, "entries must be empty beside answer 0"),
        ),
        _kind(Rollback, Belongs.GROUP, DuringPause.REJECTED, ok.GENERATION, ok.OFFSET),
        _kind(KeepCheckpoint, Belongs.GROUP, DuringPause.REJECTED, ok.OFFSET, ok.KEEPING),
        _kind(
            ClaimingShare,
            Belongs.LEASE,
            DuringPause.REJECTED,
            *(*_LEASE, ok.HEARTBEAT_INTERVAL, ok.KEY_OR_NIL, ok.KEY_OR_NIL, ok.START_OR_NIL),
            whole=ok.BOTH_KEYS,
        ),
        _kind(
            SettlingMessages,
            Belongs.LEASE,
            DuringPause.HANDS_IN_WITHOUT_TAKE,
            *(*_LEASE, ok.EPOCH_OR_NIL, ok.SEEN, ok.DONE, ok.OPENED, ok.PARKED, ok.TAKE_OR_NIL),
            whole=ok.SETTLES_LEASE,
        ),
        _kind(
            SettleOffsets,
            Belongs.GROUP,
            DuringPause.HANDS_IN,
            *(ok.MEMBER_ID_OR_NONE, ok.GENERATION, ok.SEEN, *_LEASE, ok.DONE, ok.OPENED, ok.PARKED),
            whole=ok.SETTLES_GROUP,
        ),
        _kind(Tick, Belongs.EVERYWHERE, DuringPause.NOT_OF_THE_GROUP),
        _kind(Upgrade, Belongs.EVERYWHERE, DuringPause.NOT_OF_THE_GROUP, ok.LEVEL),
    )
}
