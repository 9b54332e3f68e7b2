"""What needs no pause, or ends one: evict, drain, settings of a group, the end of a dead admin's pause; and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from shlex import quote
from typing import overload

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.positions import check_name
from kafka_marshal.admin.session import Asked, Session, bare_release, by_sharer, in_own_name, key_of, wrong_kind
from kafka_marshal.admin.topic import refuse_groups_below_level
from kafka_marshal.client.view import holdings, lease_info
from kafka_marshal.errors import AdminError, ConfigurationError, GroupPausedError
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.checkpoints import repeated_text
from kafka_marshal.observe.text import count
from kafka_marshal.types import LeaseInfo
from rationalizer import (
    ConfigureGroup,
    Group,
    InvalidRecordError,
    LeaveGroup,
    Member,
    Record,
    ReleaseGroup,
    Settings,
    codes,
)
from rationalizer.groups.assignors import STRATEGIES
from rationalizer.levels import GROUPS_LEVEL, REDO_LEVEL


@dataclass(frozen=True, slots=True)
class PausedPartition:
    """One coordination partition in which a group is paused."""

    #: Partition of the coordination topic.
    partition: int
    client_id: str
    #: Log time (ms) at which the pause ends.
    expires: int
    #: Log time (ms) of the CP: that of its last record. Without traffic it stops, and the pause may be over.
    log_time: int


class Groups(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` that need no pause, or end one."""

    @overload
    def evict(
        self, group: str, topic: str, partition: int, *, force: bool = False, dry_run: bool = False
    ) -> LeaseInfo: ...
    @overload
    def evict(
        self, group: str, client_id: str, /, *, force: bool = False, dry_run: bool = False
    ) -> list[LeaseInfo]: ...
    def evict(
        self, group: str, topic: str, partition: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> LeaseInfo | list[LeaseInfo]:
        """Release a lease in its dead holder's name, without an offset; returns the lease as it was.

        ``evict(group, client_id)`` releases all that a member holds, and returns the list; a member of a coordinated
        group leaves it. The holder's messages in flight are repeated by the next one. A holder that is alive
        (``force``) claims nothing, or does not join again, until its handler has returned, and not this partition for
        three heartbeat intervals (three sessions). The log names the client that evicted it.
        ``dry_run``: only check, and return what would be released.

        Raises AdminError if the lease is free, if the holder beat within the last heartbeat interval (``force`` takes
        the lease from a live holder), and if another client was faster.
        """
        self._check_group(group)
        if partition is None:
            arguments.text("client_id", topic)
            return self._act(group, lambda session: _evict_member(session, topic, force=force, dry_run=dry_run))
        check_name((topic, partition))
        return self._act(group, lambda session: _evict(session, topic, partition, force=force, dry_run=dry_run))

    def drain(self, group: str, client_id: str, *, timeout: float | None = None) -> list[LeaseInfo]:
        """Ask a live member to finish its messages in flight, to release, and to claim no more; returns what it held.

        ``timeout`` (seconds): wait until it holds nothing, and has left a coordinated group; None: don't wait. Only a
        restart of the member undoes it. Members of a release before this one ignore it. Raises AdminError if it holds
        nothing, or still holds something after the timeout.
        """
        self._check_group(group)
        return self._act(group, lambda session: _drain(session, client_id, timeout))

    def configure_group(self, group: str, **settings: object) -> Settings:
        """Set these settings of a coordinated group while it runs; returns all of its settings.

        ``accept_individual_commit`` (bool), ``accept_range_fetch`` (topics whose partitions may be shared by key),
        ``max_session_timeout_ms``, ``max_individual_commits``. An unknown group is created as a coordinated one.
        Members need no restart, and keep the session that they joined with.

        ``strategy``: ``"sticky"``, ``"range"`` or ``"roundrobin"``: the group has it from now on, whatever its members
        name, and those that name another stay and join as ever (R6). None: what members name is compared again.

        Raises ConfigurationError for invalid settings, and for ``strategy`` below level 5 of the protocol
        (``upgrade``); WrongKindError for a claimed group, GroupPausedError, and AdminError if the topic is at level 1.
        """
        self._check_group(group)
        _check_settings(settings)
        return self._act(group, lambda session: configure(session, settings))

    def resume(self, group: str, client_id: str | None = None) -> list[PausedPartition]:
        """End a dead admin's pause, in its name; returns what was paused, [] for nothing.

        ``client_id``: end the pause of this client only (None: of any). What that admin still holds is released, too.
        If it is alive, its next step fails. Raises AdminError if it is another client's pause.
        """
        self._check_group(group)
        if client_id is not None:
            arguments.text("client_id", client_id)
        return self._act(group, lambda session: _end_pause(session, client_id))

    def pauses(self, group: str) -> list[PausedPartition]:
        """The coordination partitions where the group is paused, by which client, until when; nothing is appended."""
        self._check_group(group)
        return self._look(lambda _, replica: _pauses(replica, group))

    def progress(self, group: str) -> list[LeaseInfo]:
        """All leases or pieces of the group with their positions, sorted by topic, partition and keys.

        Nothing is appended.
        """
        self._check_group(group)
        return self._look(lambda _, replica: _infos(replica, lambda info: info.group_id == group))

    def held_by(self, client_id: str) -> list[LeaseInfo]:
        """All leases and pieces of members with this client_id, in every group, sorted; nothing is appended."""

        def has_some(info: LeaseInfo) -> bool:
            return client_id in (info.client_id, *(each.client_id for each in info.sharers))

        found = self._look(lambda _, replica: _infos(replica, has_some))
        return [next((each for each in by_sharer(info) if each.client_id == client_id), info) for info in found]


def _pauses(replica: Replica, group_id: str) -> list[PausedPartition]:
    """The CPs in which the group is paused at log time, ascending."""
    worlds = sorted(replica.worlds.items())
    found = [(cp, world, pause) for cp, world in worlds if (pause := world.pause(group_id)) is not None]
    return [PausedPartition(cp, pause.client_id, pause.expires, world.log_time) for cp, world, pause in found]


def _infos(replica: Replica, is_wanted: Callable[[LeaseInfo], bool]) -> list[LeaseInfo]:
    found = [info for world in replica.worlds.values() for info, _ in holdings(world) if is_wanted(info)]
    return sorted(found, key=lambda info: (info.group_id, info.topic, info.partition, info.lo))


# -- evict and drain --------------------------------------------------------------------------------------------------


def _evict(session: Session, topic: str, partition: int, *, force: bool, dry_run: bool) -> LeaseInfo:
    key = (topic, partition)
    where = f"{topic} [{partition}]"
    with session.locked():
        if session.group() is not None:
            raise AdminError(
                f"{where}: {session.group_id!r} is a coordinated group, whose members have no leases one by one. "
                "Nothing was changed. Evict the member that owns it (kafka-marshal who names it): kafka-marshal evict "
                f"{quote(session.group_id)} --member CLIENT"
            )
    session.tick([session.cp_of(key)])
    with session.locked():
        lease = session.lease(key)
        if lease is None:
            raise AdminError(f"{where}: nobody of group {session.group_id!r} ever held it. Nothing was changed")
        if lease.shares is not None:
            raise _shared(where, sorted({share.client_id for share in lease.shares}))
        if not lease.held:
            raise AdminError(
                f"{where}: is free already, nobody of group {session.group_id!r} holds it. Nothing was changed"
            )
        was, release = lease_info(lease, session.worlds[session.cp_of(key)]), bare_release(lease)
    if not force:
        _refuse_fresh([was])
    if dry_run:
        return was
    (answer,) = _release_all(session, [was], [(session.cp_of(key), release)])
    if not answer.accepted:
        code = "" if answer.outcome is None else answer.outcome.code
        raise AdminError(
            f"{where}: {was.client_id!r} does not hold it any more under epoch {was.epoch} ({code}): "
            "somebody was faster. Nothing was changed"
        )
    return was


def _evict_member(session: Session, client_id: str, *, force: bool, dry_run: bool) -> list[LeaseInfo]:
    is_coordinated = _tick(session)
    with session.locked():
        ends, were = _ends(session, client_id), _has(session, client_id)
        if is_coordinated and not force:
            _refuse_beating(session, client_id)
    if not is_coordinated and not force:
        _refuse_fresh(were)
    if dry_run:
        return were
    if not is_coordinated:
        answers = _release_all(session, were, ends)
        if not any(answer.accepted for answer in answers):
            raise AdminError(
                f"{client_id!r} holds nothing of what it held in group {session.group_id!r} any more: somebody was "
                "faster. Nothing was changed"
            )
        return [was for was, answer in zip(were, answers, strict=True) if answer.accepted]
    outcome = _end(session, ends)[0].outcome
    if outcome is None:
        raise AdminError(
            f"the log did not show that {client_id!r} leaves in time; it may be written or not. Look at kafka-marshal "
            f"group {quote(session.group_id)}, and do it again"
        )
    if not outcome.accepted:
        raise AdminError(
            f"{client_id!r} is no member any more as it was ({outcome.code}): somebody was faster. Nothing was changed"
        )
    return were


def _drain(session: Session, client_id: str, timeout: float | None) -> list[LeaseInfo]:
    """Every replica rejects what we ask, as it names the member under our instance; the member reads it."""
    is_coordinated = _tick(session)
    with session.locked():
        ends, were = _ends(session, client_id), _has(session, client_id)
    asks = {cp: replace(record, instance_id=session.instance_id) for cp, record in ends}
    if all(answer.outcome is None for answer in session.ask(*asks.items())):
        raise AdminError(
            f"the log did not show the request to {client_id!r} in time; it may be written or not. Nothing was taken "
            "from it. Do it again"
        )
    if timeout is None:
        return were

    def is_there() -> bool:
        group = session.group()  # a member that owns nothing may be about to get something
        return client_id in group.clients if group is not None else bool(_has(session, client_id))

    session.wait_for(lambda: not is_there(), session.now_ms() + timeout * 1000)
    with session.locked():
        is_still = is_there()
        keys = tuple(sorted({(info.topic, info.partition) for info in _has(session, client_id)}))
    if is_still:
        has = f"holds {len(keys)} of {count(len(were), 'partition')}"
        if is_coordinated:
            has = f"owns {count(len(keys), 'partition')}"
        such = f", such as {keys[0][0]} [{keys[0][1]}]" if keys else ", and has not left"
        raise AdminError(
            f"{client_id!r} was asked to hand over, and {has} still after {timeout:g} s{such}: it finishes what it has "
            "in hand first. Nothing is lost. Wait, or look for a handler that hangs: kafka-marshal status --members",
            in_hand=keys,
        )
    return were


def _tick(session: Session) -> bool:
    """Move log time: without traffic it stops, and a dead holder looks fresh. Whether the group is coordinated."""
    with session.locked():
        is_coordinated = session.group() is not None
    session.tick([session.home] if is_coordinated else session.cps)
    return is_coordinated


def _has(session: Session, client_id: str) -> list[LeaseInfo]:
    """What a member of a group of either kind has now, whole or shared; the lock is held."""
    found = [part for info in session.infos() for part in by_sharer(info) if part.client_id == client_id]
    return sorted(found, key=lambda each: (each.topic, each.partition, each.lo, each.epoch))


def _ends(session: Session, client_id: str) -> list[tuple[int, Record]]:
    """The records that end what it has, in its name; the lock is held. Raises AdminError if there is nothing."""
    if (group := session.group()) is not None:
        member = _member_of(group, client_id)
        ids = member.instance_id, client_id, session.group_id
        return [(session.home, LeaveGroup(*ids, member.member_id, group.generation))]
    if not (held := _has(session, client_id)):
        raise AdminError(
            f"{client_id!r} holds nothing in group {session.group_id!r}. Nothing was changed. kafka-marshal status "
            "--members names who holds what"
        )
    return [(session.cp_of((each.topic, each.partition)), bare_release(each)) for each in held]


def _member_of(group: Group, client_id: str) -> Member:
    member = group.clients.get(client_id)
    if member is None:
        raise AdminError(
            f"{client_id!r} is no member of group {group.group_id!r}. Nothing was changed. kafka-marshal group "
            f"{quote(group.group_id)} names its members"
        )
    return member


def _shared(where: str, clients: list[str]) -> AdminError:
    """Several members share the partition: which of them is meant?"""
    return AdminError(
        f"{where}: is shared ({', '.join(map(repr, clients[:4]))}). Nothing was changed. What a dead worker "
        "has of it goes to the others by itself, two of its heartbeat intervals after its last one. To take all shares "
        "of one: kafka-marshal evict GROUP --member CLIENT"
    )


def _refuse_fresh(were: list[LeaseInfo]) -> None:
    """Raise AdminError if the holder of a lease is alive."""
    alive = [was for was in were if was.freshness == "fresh"]
    if alive:
        raise AdminError(
            f"{alive[0].topic} [{alive[0].partition}]: {alive[0].client_id!r} beat less than "
            f"{alive[0].heartbeat_interval_ms} ms ago and may be alive. Nothing was changed. End that process and "
            "wait, or force it: it loses the lease then, and what it has in hand is repeated"
        )


def _refuse_beating(session: Session, client_id: str) -> None:
    """Raise AdminError if a member of a coordinated group is alive; the lock is held."""
    if (group := session.group()) is None:
        return
    member = _member_of(group, client_id)
    silence = session.worlds[session.home].log_time - member.last_beat
    if 2 * silence <= member.session_timeout_ms:
        raise AdminError(
            f"{client_id!r} beat {silence} ms ago, within half its session ({member.session_timeout_ms} ms), and may "
            f"be alive. Nothing was changed. End that process and wait, or force it: "
            f"{repeated_text(group.checkpoints)} then, and it joins again only when its handler has come back and "
            "three sessions have gone by"
        )


def _end(session: Session, ends: list[tuple[int, Record]]) -> list[Asked]:
    """Append these, each with one before it that names us; their answers."""
    told = [(cp, in_own_name(session, record)) for cp, record in ends]
    return session.ask(*told, *ends)[len(told) :]


def _release_all(session: Session, were: list[LeaseInfo], ends: list[tuple[int, Record]]) -> list[Asked]:
    """The same for leases. Raises AdminError if the log did not show the end of all."""
    answers = _end(session, ends)
    if silent := [was for was, answer in zip(were, answers, strict=True) if answer.outcome is None]:
        raise AdminError(
            f"{silent[0].topic} [{silent[0].partition}]: the log did not show the release in time"
            + (f", nor that of {len(silent) - 1} more" if len(silent) > 1 else "")
            + "; it may be written or not. Look at kafka-marshal status, and do it again"
        )
    return answers


# -- settings, and the end of a pause ---------------------------------------------------------------------------------


def _check_settings(settings: Mapping[str, object]) -> ConfigureGroup:
    """The record for these settings (without ids). Raises ConfigurationError for invalid settings."""
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise ConfigurationError(f"a group has no setting {name!r}: {hint} Nothing was changed")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if values.get("strategy") is not None:
        arguments.one_of("strategy", values["strategy"], tuple(STRATEGIES))
    try:
        return ConfigureGroup("i", "c", "g", tuple(values.items()))  # type: ignore[arg-type]  # it checks itself
    except (InvalidRecordError, TypeError) as error:
        raise ConfigurationError(f"{dict(settings)!r} can't be set. {error}") from error


def configure(session: Session, settings: Mapping[str, object]) -> Settings:
    """Set these in every CP, which creates a coordinated group if it is unknown; returns all settings."""
    record = ConfigureGroup(*session.ids, _check_settings(settings).settings)
    with session.locked():
        if session.kind() == "claimed":
            raise wrong_kind(session.group_id, "claimed")
        low = [cp for cp in session.cps if session.worlds[cp].level < GROUPS_LEVEL]
        level = session.worlds[session.home].level
    refuse_groups_below_level(low)
    others = [cp for cp in session.cps if cp != session.home]
    if "strategy" in settings:
        if level < REDO_LEVEL:
            raise ConfigurationError(
                f"strategy: level {REDO_LEVEL} of the coordination topic is needed, which is at level {level}. Nothing "
                "was changed. Once all members have this release, raise it: kafka-marshal upgrade"
            )
        _mark(session, others)
        others = []
    # Home first: what it refuses is marked nowhere.
    _check_configured(session, session.ask((session.home, record)))
    _check_configured(session, session.ask(*((cp, record) for cp in others)))
    with session.locked():
        group = session.group()
        return Settings() if group is None else group.settings


def _mark(session: Session, cps: Sequence[int]) -> None:
    """Let these CPs know that the group is a coordinated one (G2), where they do not: a mark keeps no setting."""
    with session.locked():
        unmarked = [cp for cp in cps if session.worlds[cp].group(session.group_id) is None]
    _check_configured(session, session.ask(*((cp, ConfigureGroup(*session.ids)) for cp in unmarked)))


def _check_configured(session: Session, answers: Sequence[Asked]) -> None:
    for asked in answers:
        code = None if asked.outcome is None else asked.outcome.code
        where = f"partition {asked.cp} of the coordination topic"
        if asked.pause is not None and code == codes.PAUSED:
            raise GroupPausedError(
                f"group {session.group_id!r} is paused by {asked.pause.client_id!r}: its settings can't be changed "
                f"until that ends. Do it again then, or end a dead admin's pause: kafka-marshal release-group "
                f"{quote(session.group_id)} --resume",
                client_id=asked.pause.client_id,
                expires=asked.pause.expires,
            )
        if code == codes.WRONG_KIND:
            raise wrong_kind(session.group_id, "claimed")
        if code is None:
            raise AdminError(f"{where} did not show the settings in time; they may be written or not. Do it again")
        if not asked.accepted:
            raise AdminError(f"{where} rejected the settings ({code}). Nothing was changed there")


def _end_pause(session: Session, client_id: str | None) -> list[PausedPartition]:
    """End a pause in every CP, in its client's name; returns what was paused (*blocking*).

    What that client still holds is released, too, so that members need not wait until it goes stale.
    """
    session.tick(session.cps)
    with session.locked():
        paused = _pauses(session.driver.replica, session.group_id)
        names = {client_id} if client_id is not None else {x.client_id for x in paused}
        ended = [x for x in paused if x.client_id in names]
        others = [x for x in paused if x.client_id not in names]
        records: list[tuple[int, Record]] = [
            (cp, bare_release(lease))
            for lease in session.leases()
            if lease.held
            and (cp := session.cp_of(key_of(lease)), lease.client_id) in {(x.partition, x.client_id) for x in ended}
        ]
    if others and not ended:
        raise AdminError(
            f"group {session.group_id!r} is not paused by {client_id!r}, but by {others[0].client_id!r}. Nothing was "
            "changed"
        )
    _ask_all(session, records)
    by_cp = {x.partition: x.client_id for x in paused}
    ends: list[tuple[int, Record]] = [
        (cp, ReleaseGroup(session.instance_id, by_cp.get(cp, name), session.group_id, 0))
        for name in sorted(names)
        for cp in session.cps
        if by_cp.get(cp, name) == name
    ]
    _ask_all(session, ends)
    return ended


def _ask_all(session: Session, records: list[tuple[int, Record]]) -> None:
    silent = sorted({x.cp for x in session.ask(*records) if x.outcome is None})
    if silent:
        raise AdminError(
            f"partition(s) {silent} of the coordination topic did not answer in time: the pause of "
            f"{session.group_id!r} may last there until it runs out. Do it again when the brokers are back"
        )
