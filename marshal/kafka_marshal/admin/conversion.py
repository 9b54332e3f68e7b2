"""A group changed to the other kind: saved to a file first, then forgotten, then set again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import quote

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.groups import configure
from kafka_marshal.admin.pause import PauseWork
from kafka_marshal.admin.repositioning import aside_of, move_all, set_around
from kafka_marshal.admin.session import GroupKind, group_in, kind_in
from kafka_marshal.admin.topic import below_level, refuse_groups_below_level
from kafka_marshal.admin.transfer import Open, check_open, refuse_open, refuse_transactional
from kafka_marshal.engine.work.copies import Aside
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.files import read_json, write_json
from kafka_marshal.node.jobs import progress_of_all
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.text import listed
from kafka_marshal.ports import TopicPartition
from kafka_marshal.types import Placed
from rationalizer import Progress, World
from rationalizer.levels import GROUPS_LEVEL
from rationalizer.limits import MAX_KEY_HASH

_FORMAT: Final = "kafka-marshal convert-group 1"

#: saved: nothing is changed yet. changing: the group may be forgotten in a part of the log, or in all, and its
#: positions set in a part. done: they are set.
Phase = Literal["saved", "changing", "done"]

_REMEDY: Final = "Stop its workers first: those of the other kind take their place"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Done offsets that are delivered again after the conversion: for key hashes lo … hi."""

    topic: str
    partition: int
    first: int
    last: int
    lo: int = 0
    hi: int = MAX_KEY_HASH

    @property
    def is_of_all_keys(self) -> bool:
        """Whether they are repeated for every key."""
        return self.lo == 0 and self.hi == MAX_KEY_HASH


@dataclass(frozen=True, slots=True)
class Saved(Placed):
    """The progress of one partition. `offset` is read next; `ranges`: done above it; `keyed`: (lo, hi, last done)."""

    topic: str
    partition: int
    offset: int
    ranges: tuple[tuple[int, int], ...] = ()
    keyed: tuple[tuple[int, int, int], ...] = ()
    metadata: str | None = None
    #: (offset, key hash, deliveries, reason) of messages that were set aside: they stay so.
    parked: tuple[tuple[int, int, int, str], ...] = ()
    #: Other open messages (first, last): they come again, or count as done, as `offset` says.
    open: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, key: TopicPartition, progress: Progress, metadata: str | None, open_messages: Open = None) -> Self:
        """The present progress. open_messages: what happens to those that are not set aside."""
        keyed = () if progress.pieces is None else tuple((lo, hi, done) for lo, hi, done in progress.done_through)
        ranges = tuple((first, last) for first, last in split(progress.ranges).ranges)
        parked = tuple(
            (hole.first, hole.key_hash, hole.attempts, hole.reason) for hole in progress.open if hole.reason is not None
        )
        others = tuple((hole.first, hole.last) for hole in progress.open if hole.reason is None)
        offset = progress.stable + 1
        if open_messages == "repeat" and others and others[0][0] < offset:
            ranges = ((others[0][0], progress.stable), *ranges)
            offset = others[0][0]
        return cls(*key, offset, ranges, keyed, metadata, parked, others)

    @property
    def aside(self) -> list[Aside]:
        """What is to be set aside again."""
        return [Aside(offset, offset, key_hash, attempts, why) for offset, key_hash, attempts, why in self.parked]

    def repeats(self) -> list[Repeat]:
        """What will be repeated: only the position is carried over."""
        found = [Repeat(*self.key, first, last) for first, last in self.ranges]
        ahead = [(lo, hi, done) for lo, hi, done in self.keyed if done >= self.offset]
        return [*found, *(Repeat(*self.key, self.offset, done, lo, hi) for lo, hi, done in ahead)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The contents of the file."""

    group: str
    #: The coordination topic.
    log: str
    to: GroupKind
    #: Of the admin that pauses the group; the next run continues under it.
    client_id: str
    phase: Phase
    saved: tuple[Saved, ...]
    #: Settings of a coordinated group, for information: claimed groups have none.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def open_messages(self) -> Open:
        """What happens to open messages that are not set aside; None: there are none."""
        some = [each for each in self.saved if each.open]
        return ("repeat" if any(each.offset <= each.open[0][0] for each in some) else "drop") if some else None

    def write(self, path: Path, phase: Phase) -> Plan:
        """Write it to the file, atomically."""
        plan = replace(self, phase=phase)
        refused = (
            "the group's progress can't be saved there ({}). Nothing was changed since it was saved last. Name another "
            "file"
        )
        write_json(path, _FORMAT, asdict(plan), refused)
        return plan

    def check(self, path: Path, group: str, log: str, to: GroupKind) -> None:
        """Raise ConfigurationError if the file is of another, unfinished conversion."""
        if self.phase != "done" and (self.group, self.log, self.to) != (group, log, to):
            raise ConfigurationError(
                f"{path} is of a conversion of group {self.group!r} of {self.log!r} to a {self.to} one that was not "
                "finished. Nothing was changed. Finish that one, or name another file"
            )

    def conversion(self, path: Path, *, resumed: bool) -> Conversion:
        """The result for the caller."""
        repeats = tuple(repeat for each in self.saved for repeat in each.repeats())
        positions = {each.key: each.offset for each in self.saved}
        parked = tuple((*each.key, offset) for each in self.saved for offset, *_ in each.parked)
        return Conversion(self.group, self.to, path, positions, repeats, resumed, parked)

    @classmethod
    def read(cls, path: Path) -> Plan | None:
        """The file's contents; None: there is no file. Raises ConfigurationError for another file."""
        try:
            found = read_json(path, _FORMAT)
            saved = tuple(
                Saved(
                    **{
                        **each,
                        "ranges": tuple((first, last) for first, last in each["ranges"]),
                        "keyed": tuple((lo, hi, done) for lo, hi, done in each["keyed"]),
                        "parked": tuple(map(tuple, each.get("parked", ()))),
                        "open": tuple(map(tuple, each.get("open", ()))),
                    }
                )
                for each in found.pop("saved")
            )
            return cls(**found, saved=saved)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is no file of convert-group ({error}). Nothing was changed; name another one"
            ) from error


@dataclass(frozen=True, slots=True)
class Conversion:
    """What :meth:`Admin.convert_group` did."""

    group: str
    to: GroupKind
    #: The file with all progress as it was before.
    file: Path
    #: (topic, partition) → the offset to read next.
    positions: Mapping[TopicPartition, int]
    repeats: tuple[Repeat, ...]
    #: This run finished an earlier, interrupted one.
    resumed: bool
    #: (topic, partition, offset) of messages that were set aside, and stay so.
    parked: tuple[tuple[str, int, int], ...] = ()


class GroupConversion(AdminBase):
    """The method of :class:`~kafka_marshal.admin.Admin` that changes a group to the other kind."""

    def convert_group(
        self,
        group: str,
        to: GroupKind,
        *,
        file: str | os.PathLike[str] | None = None,
        force: bool = False,
        dry_run: bool = False,
        timeout: float = 30.0,
        open_messages: Open = None,
    ) -> Conversion:
        """Make a claimed group a coordinated one, or the other way round, with its positions.

        Stop its workers first. All progress is saved to ``file`` (default: kafka-marshal-convert-GROUP.json in the
        working directory) before anything is changed; the group is paused until all positions are set. After a kill at
        any point, the same call continues. Only positions are carried over: messages done above them are repeated, and
        named in ``repeats``. Messages that were set aside stay so.

        ``open_messages``: of other open messages: with ``"repeat"`` they come again, and all above them; with
        ``"drop"`` they count as done; None: AdminError if there are some.

        Convert sinks, too: ``sink.convert(group, to)``.

        ``force``: set the saved positions although the group was at work after an earlier, interrupted run.

        Raises AdminError if the group is unknown, of that kind already, or alive, and if it was not finished: then call
        it again.

        Raises ConfigurationError if the file is another one, or can't be written.
        """
        arguments.one_of("to", to, ("claimed", "coordinated"))
        check_open(open_messages)
        path = file_of(group) if file is None else Path(file)
        timeout = arguments.seconds("timeout", timeout)
        self._check_group(group)
        plan = Plan.read(path)
        if plan is not None:
            plan.check(path, group, self.topic, to)
        if dry_run and plan is not None and plan.phase == "changing":
            return plan.conversion(path, resumed=True)
        if dry_run:
            return self._look(lambda _, replica: self._planned(replica, group, to, path, open_messages))
        # The pause of a killed admin may still be in force: it is continued in its name.
        client_id = self.client_id if plan is None or plan.phase == "done" else plan.client_id
        if client_id == self.client_id:
            self._refuse_living(group, timeout, "Nothing was changed", _REMEDY)
        with self._paused(group, timeout, client_id) as pause:
            return pause.carry_out("convert", _convert, self.topic, to, path, force, open_messages)

    def _planned(self, replica: Replica, group: str, to: GroupKind, path: Path, open_messages: Open) -> Conversion:
        kind, too_low = kind_in(replica.worlds, group), below_level(replica.worlds, GROUPS_LEVEL)
        saved = saved_in(replica.worlds, group, open_messages)
        plan = _plan_conversion(group, self.topic, self.client_id, kind, to, saved, too_low)
        return plan.conversion(path, resumed=False)


def is_unfinished(group: str, file: Path | None) -> Path | None:
    """The file of an earlier, unfinished conversion that has begun to change the group; None: there is none."""
    path = file_of(group) if file is None else file
    plan = Plan.read(path)
    return path if plan is not None and plan.group == group and plan.phase == "changing" else None


def file_of(group: str) -> Path:
    """The default file for the progress of a group, in the working directory."""
    return Path(f"kafka-marshal-convert-{quote(group, safe='')}.json")


#: Called between two steps with the name of the last one. For tests.
passed: Callable[[str], None] = lambda _: None  # noqa: E731


def _plan_conversion(
    group: str, log: str, client_id: str, kind: GroupKind | None, to: GroupKind, saved: list[Saved], too_low: list[int]
) -> Plan:
    """The plan. Raises AdminError if the group can't be converted."""
    if kind is None:
        raise AdminError(
            f"the log knows no group {group!r}. Nothing was changed. kafka-marshal status names the groups"
        )
    if kind == to:
        raise AdminError(f"group {group!r} is a {to} group already. Nothing was changed")
    refuse_groups_below_level(too_low if to == "coordinated" else [])
    return Plan(group, log, to, client_id, "saved", tuple(saved))


def _convert(
    work: PauseWork, log: str, to: GroupKind, path: Path, force: bool, open_messages: Open = None
) -> Conversion:
    """Carry out the plan, or continue it, under our pause."""
    work.ready()
    _refuse_living(work)
    plan = Plan.read(path)
    is_old = plan is not None and plan.phase != "done"
    if plan is None or plan.phase != "changing":
        plan = _saved(work, log, to, open_messages).write(path, "saved")
        passed("saved")
        plan = plan.write(path, "changing")
    else:
        plan = _gone_on(work, plan, force, open_messages).write(path, "changing")
    passed("changing")
    _forget_old(work, to)
    _set(work, plan)
    plan.write(path, "done")
    passed("done")
    return plan.conversion(path, resumed=is_old)


def _saved(work: PauseWork, log: str, to: GroupKind, open_messages: Open) -> Plan:
    """All progress as it is now."""
    session = work.session
    with session.locked():
        kind, too_low = session.kind(), below_level(session.worlds, GROUPS_LEVEL)
        saved = saved_in(session.worlds, session.group_id, open_messages)
        group = session.group()
    plan = _plan_conversion(session.group_id, log, session.client_id, kind, to, saved, too_low)
    return plan if group is None else replace(plan, settings=asdict(group.settings))


def saved_in(worlds: Mapping[int, World], group_id: str, open_messages: Open = None) -> list[Saved]:
    """The progress of all partitions, sorted. open_messages: what happens to those that are not set aside."""
    found = progress_of_all(worlds, group_id)
    group = group_in(worlds, group_id)
    refuse_transactional(
        group_id,
        found,
        "Kafka's offsets count, and the log's positions, which a conversion carries over, may be behind them. Nothing "
        "more was changed. Set the positions to Kafka's first: kafka-consumer-groups --describe shows them, and "
        "kafka-marshal release-group GROUP --partition TOPIC:PARTITION=OFFSET sets them",
    )
    if open_messages is None:
        refuse_open(group_id, found, lambda hole: not hole.is_parked)
    saved = []
    for key in sorted(found):
        kept = None if group is None else group.kept(*key)
        saved.append(Saved.of(key, found[key], None if kept is None else kept.metadata, open_messages))
    return saved


def _refuse_living(work: PauseWork) -> None:
    alive = sorted(work.signs_of_life())
    if alive:
        raise AdminError(
            f"group {work.group_id!r} is alive: {', '.join(map(repr, alive[:4]))} answered the pause. Nothing was "
            f"changed, and it goes on. {_REMEDY}"
        )


def _gone_on(work: PauseWork, plan: Plan, force: bool, open_messages: Open) -> Plan:
    """The plan of an earlier run, compared with the present log."""
    session = work.session
    with session.locked():
        found = progress_of_all(session.worlds, session.group_id)
        now = saved_in(session.worlds, session.group_id, open_messages or plan.open_messages)
    as_saved = {(each.key, each.offset) for each in now}
    moved = [
        f"{x.topic} [{x.partition}]: {x.offset} was saved, {found[x.key].stable + 1} is there"
        for x in plan.saved
        if x.key in found and (x.key, x.offset) not in as_saved and not _is_as_left(x, found[x.key])
    ]
    if moved and not force:
        raise AdminError(
            f"group {plan.group!r} was at work after its conversion was interrupted: {listed(moved, 3, '; ')}. "
            "Nothing more was changed. If workers of the new kind have gone on from the saved positions, it is done: "
            "remove the file. Else force it: the saved positions are set, which loses nothing, and repeats what was "
            "done since"
        )
    known = {each.key for each in plan.saved}
    return replace(plan, saved=(*plan.saved, *(each for each in now if each.key not in known)))


def _is_as_left(saved: Saved, now: Progress) -> bool:
    """Whether the position is the saved one, or not set yet: our own claim has created the lease."""
    lowest = saved.parked[0][0] if saved.parked else saved.offset  # where it is while these are set aside again
    return now.stable + 1 in (saved.offset, lowest, 0) and not (now.stable + 1 == 0 and now.intervals.firsts)


def _forget_old(work: PauseWork, to: GroupKind) -> None:
    """Forget the group in each CP that still has the old kind, home first (G2)."""
    session = work.session
    for cp in sorted(session.cps, key=lambda cp: cp != session.home):
        with session.locked():
            world = session.worlds[cp]
            is_claimed = any(lease.group_id == session.group_id for lease in world.leases())
            is_left = is_claimed if to == "coordinated" else world.group(session.group_id) is not None
        if not is_left:
            continue
        if not work.hold.forget(cp):
            raise AdminError(
                f"partition {cp} of the coordination topic did not show in time that group {session.group_id!r} is "
                "forgotten and paused again, or a member came in between. Its progress is in the file. Run it again"
            )
        passed(f"forgotten in {cp}")


def _set(work: PauseWork, plan: Plan) -> None:
    """Set the positions that are not set yet."""
    session = work.session
    work.hold.extend_if_short()
    work.hold.check()
    with session.locked():
        kind = session.kind()
        found = progress_of_all(session.worlds, plan.group)
        now = {key: (progress.stable + 1, list(aside_of(progress))) for key, progress in found.items()}
    if kind not in (None, plan.to):
        raise AdminError(
            f"group {plan.group!r} is a {kind} group again: one of its workers came in between. Its progress is in the "
            "file. Stop the workers, and run it again"
        )
    left = [each for each in plan.saved if now.get(each.key) != (each.offset, each.aside)]
    targets = {each.key: each.offset for each in left}
    if plan.to == "coordinated":
        configure(session, {})
        passed("marked")
        metadata = {each.key: each.metadata for each in left if each.metadata}
        set_around(session, targets, {each.key: each.aside for each in left}, metadata, passed)
    elif targets:
        move_all(work.hold, session, targets, aside={each.key: each.aside for each in left if each.parked})
    passed("set")
