"""What a state consists of: each field once, with its place in the canonical bytes (S1) and in JSON (D3).

A `Part` is one kind of thing (a lease, a group, a member); its fields stand in the order of S1, and of D3. `levels.py`
lists which level added a part, or a field to an older part. What a later level added comes last in a row, is not there
below that level, and is left out where it has its default: so rows that do not use it keep their bytes. A level may end
that for a part: from it on a row always has all of its fields.

To add a field: an attribute of the thing, a `StateField` here, its name in `levels.py`. Everything that reads a state
follows: snapshots and digests, dumps, the simulation's comparison, the scripts' words.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from rationalizer.levels import level_of_state
from rationalizer.limits import NO_RECORD, NOTHING_DONE
from rationalizer.travel import Travels
from rationalizer.wire import wellformed as ok
from rationalizer.wire.wellformed import Rule


class SnapshotError(Travels, ValueError):
    """Bytes that are no snapshot of a state this release can replay from.

    Nothing was taken over from them. Start from an older snapshot, or from the beginning of the log.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"not a usable snapshot: {why}. Nothing was restored from it.")


def want(holds: bool, why: str) -> None:
    """Raise SnapshotError unless this holds."""
    if not holds:
        raise SnapshotError(why)


def want_ascending(what: str, keys: Sequence[Any]) -> None:
    """Raise SnapshotError unless these are sorted, and distinct."""
    want(all(map(_below, keys, keys[1:])), f"its {what} are not sorted, or not distinct")


def _below(left: Any, right: Any) -> bool:
    return bool(left < right)


# -- what a declaration consists of ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateField:
    """One field of the canonical state. `rule`: what a value read back has to be in itself."""

    name: str
    rule: Rule
    #: Where the value is in the thing (dotted); "": an attribute of that name.
    path: str = ""
    #: Its key in D3; "": the name; None: D3 does not show it by itself.
    key: str | None = ""
    #: The value as S1 has it, at a level; None: as it is.
    row: Callable[[Any, int], object] | None = None
    #: The value as D3 has it, at a log time; None: as it is.
    json: Callable[[Any, int], object] | None = None
    #: Of a field that a later level added than its part: the value with which it is left out, as the thing has it.
    #: What one level added to a part comes together: all of it, or nothing.
    default: object = None
    #: Of such a field: from its level on a row always has it, and with it all fields before it.
    always: bool = False


@dataclass(frozen=True, slots=True)
class Derived:
    """What D3 shows, and other fields say: of the thing, at a log time."""

    key: str
    get: Callable[[Any, int], object]


class Part:
    """One kind of thing in a state."""

    def __init__(self, name: str, *entries: StateField | Derived) -> None:
        self.name = name
        self.fields = tuple([entry for entry in entries if isinstance(entry, StateField)])
        self.since = level_of_state(name)
        #: Fields that a later level added, with that level.
        self.later = tuple([(f, level) for f in self.fields if (level := level_of_state(name, f.name)) > self.since])
        self._first = self.fields[: len(self.fields) - len(self.later)]
        assert not any(field in self._first for field, _ in self.later), "what a later level added comes last"
        self._holds = [field.rule.holds for field in self.fields]
        defaults = [field.default for field, _ in self.later]
        self._values = namedtuple(name, [field.name for field in self.fields], defaults=defaults)  # type: ignore[misc]
        self._getters = {field.name: attrgetter(field.path or field.name) for field in self.fields}
        #: All at once: a state may have a hundred thousand leases.
        self._get: Callable[[Any], tuple[Any, ...]] = attrgetter(*(field.path or field.name for field in self._first))
        self._converted = tuple([(at, field.row) for at, field in enumerate(self._first) if field.row is not None])
        #: By level: what it added, all of it.
        self._added = {at: [field for field, level in self.later if level == at] for at in {at for _, at in self.later}}
        #: The level from which on a row has all of its fields; None: from none.
        self._always = min([level for field, level in self.later if field.always], default=None)
        self._shown = tuple([each for each in map(self._to_show, entries) if each is not None])

    def row(self, thing: Any, level: int) -> Sequence[Any]:
        """The thing as S1 has it in a CP at this level."""
        values = self._get(thing)
        if not self._converted and not self.later:
            return values
        row = list(values)
        for at, convert in self._converted:
            row[at] = convert(row[at], level)
        kept = len(row)
        for since, fields in sorted(self._added.items()):
            if since <= level:
                used = False
                for field in fields:
                    value = self._getters[field.name](thing)
                    used = used or value != field.default
                    row.append(value if field.row is None else field.row(value, level))
                kept = len(row) if used or self._is_whole(level) else kept
        return row[:kept]

    def rows(self, things: Iterable[Any], level: int) -> list[Sequence[Any]]:
        """`row` of each."""
        if self._converted:
            return [self.row(thing, level) for thing in things]
        added = [field for field, since in self.later if since <= level]
        if not added:
            return list(map(self._get, things))
        # Few leases use what later levels added: all others are read by C code alone.
        listed = list(things)
        rows: list[Sequence[Any]] = list(map(self._get, listed))
        if self._is_whole(level):
            rest = [field.default if field.row is None else field.row(field.default, level) for field in added]
            rows = [(*row, *rest) for row in rows]
        for field in added:
            getter = self._getters[field.name]
            used = [at for at, value in enumerate(map(getter, listed)) if value != field.default]
            for at in used:
                rows[at] = self.row(listed[at], level)
        return rows

    def _is_whole(self, level: int) -> bool:
        return self._always is not None and self._always <= level

    def shown(self, thing: Any, log_time: int) -> dict[str, Any]:
        """The thing as D3 has it at this log time."""
        found = {key: get(thing, log_time) for key, get in self._shown}
        if self.later:
            added = dict(self.added(thing))
            for fields in self._added.values():
                if not any(field.name in added for field in fields):
                    for field in fields:
                        if field.key is not None:
                            del found[field.key or field.name]
        return found

    def _to_show(self, entry: StateField | Derived) -> tuple[str, Callable[[Any, int], object]] | None:
        if isinstance(entry, Derived):
            return entry.key, entry.get
        if entry.key is None:
            return None
        get, convert = self._getters[entry.name], entry.json
        if convert is None:
            return entry.key or entry.name, lambda thing, _: get(thing)
        return entry.key or entry.name, lambda thing, log_time: convert(get(thing), log_time)

    def added(self, thing: Any) -> Iterator[tuple[str, Any]]:
        """(name, value) of each field that a later level added and that has another value than its default."""
        for field, _ in self.later:
            value = self._getters[field.name](thing)
            if value != field.default:
                yield field.name, value

    def read(self, row: object, level: int, what: str) -> Any:
        """The values of a row of a snapshot, as attributes; each is what its rule wants. Raises SnapshotError."""
        fields = (
            [*self._first, *(field for field, since in self.later if since <= level)] if self.later else self._first
        )
        least = len(fields) if self._is_whole(level) else len(self._first)
        if type(row) is not tuple or not least <= len(row) <= len(fields):
            raise SnapshotError(f"a {what} has not its {least} parts")
        for holds, value in zip(self._holds, row, strict=False):
            if not holds(value):
                wrong = next(field for field, value in zip(fields, row, strict=False) if not field.rule.holds(value))
                raise SnapshotError(f"{wrong.name} of a {what} must be {wrong.rule.wants}")
        return self._values(*row)

    def restore_added(self, thing: Any, values: Any) -> None:
        """Set the fields that later levels added, which are attributes of the thing, to what was read."""
        for field, _ in self.later:
            setattr(thing, field.path or field.name, getattr(values, field.name))


# -- the declarations --------------------------------------------------------------------------------------


def _or_null(offset: int, _: int = 0) -> int | None:
    """−1 and nil are one position; people are shown null (P2, D4)."""
    return None if offset == NOTHING_DONE else offset


def _done_json(pieces: Sequence[tuple[int, int, int]], _: int) -> list[list[int | None]]:
    return [[lo, hi, _or_null(offset)] for lo, hi, offset in pieces]


def _ranges_json(ranges: Sequence[tuple[int, int]], _: int) -> list[list[int]]:
    return [[first, last] for first, last in ranges]


def _is_array(value: object) -> bool:
    return type(value) is tuple


_ARRAY: Final = Rule(_is_array, "an array")
_ARRAY_OR_NONE: Final = Rule(lambda value: value is None or _is_array(value), "an array")
_ANY: Final = Rule(lambda value: True, "anything")
_METADATA: Final = Rule(ok.is_metadata, "nil or text")

_DONE: Final = (
    Derived("stable", lambda thing, _: _or_null(thing.progress.stable)),
    StateField("done_through", _ARRAY, "progress.done_through", json=_done_json),
    StateField("ranges", _ARRAY, "progress.ranges", json=_ranges_json),
)


def _holder(lease: Any, _: int) -> dict[str, str] | None:
    return {"client": lease.client_id, "instance": lease.instance_id} if lease.held else None


#: A pause (C10): `PausedGroup`.
PAUSE: Final = Part(
    "pause",
    StateField("group_id", ok.ID, key="group"),
    StateField("client_id", ok.ID, key="client"),
    StateField("expires", ok.TIME),
)


def _of_holder(name: str) -> Callable[[Any, int], object]:
    """What a lease that never had a holder has not."""
    return lambda lease, _: getattr(lease, name) if lease.was_held else None


#: A share of a lease: `Share`.
SHARE: Final = Part(
    "share",
    StateField("epoch", ok.EPOCH),
    StateField("client_id", ok.ID, key=None),
    StateField("instance_id", ok.ID, key=None),
    Derived("holder", lambda share, _: {"client": share.client_id, "instance": share.instance_id}),
    StateField("heartbeat_interval_ms", ok.HEARTBEAT_INTERVAL),
    StateField("last_beat", ok.TIME),
    Derived("freshness", lambda share, log_time: share.freshness(log_time)),
    StateField("lo", ok.POSITION, key=None),
    StateField("hi", ok.POSITION, key=None),
    Derived("keys", lambda share, _: None if share.by_batches else [share.lo, share.hi]),
)

#: Offsets that are open: `Hole`.
HOLE: Final = Part(
    "hole",
    StateField("first", ok.MESSAGE_OFFSET),
    StateField("last", ok.MESSAGE_OFFSET),
    StateField("owner", ok.POSITION, json=_or_null),
    StateField("since", ok.OFFSET),
    StateField("attempts", ok.OFFSET),
    StateField("key_hash", ok.POSITION, json=_or_null),
    StateField("reason", ok.REASON_OR_NIL, key="parked"),
)


def _one(name: str, part: Part) -> StateField:
    """A field that is a thing itself, or None."""
    return StateField(
        name,
        _ANY,
        row=lambda thing, level: None if thing is None else part.row(thing, level),
        json=lambda thing, log_time: None if thing is None else part.shown(thing, log_time),
    )


def _many(name: str, part: Part, path: str = "", rule: Rule = _ARRAY_OR_NONE) -> StateField:
    """A field that is a list of things; None: there are none."""
    return StateField(
        name,
        rule,
        path,
        row=lambda things, level: [] if things is None else part.rows(things, level),
        json=lambda things, log_time: [] if things is None else [part.shown(thing, log_time) for thing in things],
    )


_HOLES: Final = _many("holes", HOLE, "progress.holes")
_AGAIN: Final = StateField("again", ok.POSITION, "progress.again", default=NO_RECORD, always=True)

#: A lease of a claimed group: `Lease`.
LEASE: Final = Part(
    "lease",
    StateField("group_id", ok.ID, key="group"),
    StateField("topic", ok.TOPIC),
    StateField("partition", ok.PARTITION, key="topic_partition"),
    StateField("client_id", ok.or_nil(ok.ID), key=None),
    StateField("instance_id", ok.or_nil(ok.ID), key=None),
    Derived("holder", _holder),
    StateField("epoch", ok.EPOCH, key=None),
    Derived("epoch", _of_holder("epoch")),
    StateField("heartbeat_interval_ms", ok.HEARTBEAT_INTERVAL_OR_NONE, key=None),
    Derived("heartbeat_interval_ms", _of_holder("heartbeat_interval_ms")),
    StateField("last_beat", ok.TIME, key=None),
    Derived("last_beat", _of_holder("last_beat")),
    Derived("freshness", lambda lease, log_time: lease.freshness(log_time)),
    *_DONE,
    StateField("granted", ok.POSITION, "progress.granted", json=_or_null),
    _many("shares", SHARE),
    _HOLES,
    _AGAIN,
)

#: What ConfigureGroup sets (G19): `Settings`.
SETTINGS: Final = Part(
    "settings",
    *(
        StateField(name, Rule(holds, "a value that it can have"), json=lambda value, _: _as_list(value), always=True)
        for name, holds in ok.SETTING_RULES.items()
    ),
)

#: A member of a coordinated group: `Member`.
MEMBER: Final = Part(
    "member",
    StateField("slot", ok.OFFSET),
    StateField("member_id", ok.MEMBER_ID, key="member"),
    StateField("client_id", ok.ID, key="client"),
    StateField("instance_id", ok.ID, key="instance"),
    StateField("session_timeout_ms", ok.SESSION_TIMEOUT),
    StateField("allow_key_share", ok.BOOLEAN),
    StateField("pattern", ok.PATTERN),
    StateField("topics", _ARRAY, row=lambda topics, _: sorted(topics), json=lambda topics, _: sorted(topics)),
    StateField("last_beat", ok.TIME),
    Derived("overdue", lambda member, log_time: member.is_overdue(log_time)),
    StateField("joined", ok.OFFSET),
)

#: What is done of a partition of a coordinated group: `PartitionProgress`.
PROGRESS: Final = Part(
    "progress",
    StateField("initial", ok.POSITION, json=_or_null),
    *_DONE,
    StateField("metadata", _METADATA),
    _HOLES,
    _AGAIN,
)


def _pieces_json(pieces: Sequence[tuple[int, ...]], _: int) -> list[list[int | None]]:
    return [[*piece[:4], *map(_or_null, piece[4:])] for piece in pieces]


#: A partition of a coordinated group that has pieces or progress: `Assigned`.
PARTITION: Final = Part(
    "partition",
    StateField("topic", ok.TOPIC),
    StateField("partition", ok.PARTITION, key="topic_partition"),
    StateField("pieces", _ARRAY, json=_pieces_json),
    _one("progress", PROGRESS),
)


def _states_json(states: Sequence[tuple[int, int, int]], _: int) -> list[list[int | None]]:
    return [[lo, hi, checkpoint or None] for lo, hi, checkpoint in states]


#: What is done of a partition from one checkpoint on: `checkpoints.Version`.
VERSION: Final = Part(
    "version",
    StateField("checkpoint", ok.OFFSET),
    StateField("states", _ARRAY, json=_states_json),
    StateField("done_through", _ARRAY, json=_done_json),
    StateField("ranges", _ARRAY, json=_ranges_json),
    StateField("metadata", _METADATA),
)

#: A partition of a group that takes checkpoints: `Assigned`. In S1 its versions are elements of the row itself.
DATED: Final = Part(
    "dated",
    StateField("topic", ok.TOPIC),
    StateField("partition", ok.PARTITION, key="topic_partition"),
    StateField("pieces", _ARRAY, json=_pieces_json),
    StateField("initial", ok.or_nil(ok.POSITION), key=None),
    Derived("progress", lambda each, now: None if each.progress is None else PROGRESS.shown(each.progress, now)),
    _many("versions", VERSION, rule=_ARRAY),
)

#: The open barrier of a group: `checkpoints.Barrier`.
BARRIER: Final = Part(
    "barrier",
    StateField("id", ok.OFFSET),
    StateField("opened", ok.TIME),
    StateField("timeout_ms", ok.TIMEOUT),
    StateField("passing", ok.BOOLEAN),
    StateField(
        "answers",
        _ARRAY,
        "answer_rows",
        json=lambda rows, _: [dict(zip(("slot", "generation", "answer"), row, strict=True)) for row in rows],
    ),
)

#: The checkpoints of a group: `Checkpoints`.
CHECKPOINTS: Final = Part(
    "checkpoints",
    StateField("keep", ok.KEEP),
    StateField("hold", ok.BOOLEAN),
    _one("barrier", BARRIER),
    StateField("kept", _ARRAY, "rows", json=lambda rows, _: [list(row) for row in rows]),
)


def _partition_row(each: Any, level: int) -> Sequence[Any]:
    if each.versions is None:
        return PARTITION.row(each, level)
    *head, versions = DATED.row(each, level)
    return [*head, *versions]


def _partition_json(each: Any, now: int) -> dict[str, Any]:
    return (PARTITION if each.versions is None else DATED).shown(each, now)


#: A coordinated group: `Group`.
GROUP: Final = Part(
    "group",
    StateField("group_id", ok.ID, key="group"),
    Derived("state", lambda group, log_time: group.state(log_time)),
    StateField("generation", ok.GENERATION),
    StateField("strategy", ok.or_nil(ok.STRATEGY)),
    StateField("settings", _ARRAY, row=SETTINGS.row, json=SETTINGS.shown),
    StateField(
        "topics",
        _ARRAY,
        "counts",
        row=lambda counts, _: sorted(counts.items()),
        json=lambda counts, _: dict(sorted(counts.items())),
    ),
    StateField(
        "members",
        _ARRAY,
        row=lambda members, level: MEMBER.rows(members.values(), level),
        json=lambda members, log_time: [MEMBER.shown(member, log_time) for member in members.values()],
    ),
    StateField(
        "partitions",
        _ARRAY,
        "assigned",
        row=lambda assigned, level: [_partition_row(each, level) for each in assigned()],
        json=lambda assigned, log_time: [_partition_json(each, log_time) for each in assigned()],
    ),
    _one("checkpoints", CHECKPOINTS),
)


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
