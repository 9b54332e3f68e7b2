"""Operations that need no pause, or end one: reads, evictions, and the end of a dead admin's pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from shlex import quote
from typing import NamedTuple

from kafka_marshal.admin import coordinated
from kafka_marshal.admin.positions import check_name
from kafka_marshal.admin.session import Asked, Session, bare_release, in_own_name, key_of
from kafka_marshal.client.view import holdings, lease_info
from kafka_marshal.errors import AdminError
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.start import Begin
from kafka_marshal.observe.text import count
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import LeaseInfo
from rationalizer import Lease, Record, ReleaseGroup, ReleasingPartition
from rationalizer.leases.shares import Share


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


class _Part(NamedTuple):
    """What a member has of a partition: all of it, or a share."""

    lease: Lease
    share: Share | None

    @property
    def key(self) -> TopicPartition:
        """Its partition."""
        return key_of(self.lease)

    @property
    def release(self) -> ReleasingPartition:
        """In the member's name, without an offset."""
        lease, share = self
        if share is None:
            return bare_release(lease)
        return ReleasingPartition(share.instance_id, share.client_id, lease.group_id, *self.key, share.epoch, None)

    def info(self, session: Session) -> LeaseInfo:
        """Its present state."""
        info = lease_info(self.lease, session.worlds[session.cp_of(self.key)])
        return info if self.share is None else _as_sharer(info, self.share.client_id)


def _as_sharer(info: LeaseInfo, client_id: str) -> LeaseInfo:
    """The lease as a sharer has it."""
    found = next((each for each in info.sharers if each.client_id == client_id), None)
    if found is None:
        return info
    names = {name: getattr(found, name) for name in ("client_id", "instance_id", "epoch", "freshness", "last_beat")}
    return replace(info, **names, heartbeat_interval_ms=found.heartbeat_interval_ms)


@contextmanager
def caught_up(cluster: Cluster, topic: str, timeout_s: float) -> Iterator[Replica]:
    """A replica that has read the log to its end, for reading only (*blocking*). Closes the cluster, too."""
    try:
        replica = Replica(cluster, topic, timeout_s, Begin.SNAPSHOT)
        try:
            replica.catch_up(timeout_s)
            yield replica
        finally:
            replica.close()
    finally:
        cluster.close()


def pauses(replica: Replica, group_id: str) -> list[PausedPartition]:
    """The CPs in which the group is paused at log time, ascending."""
    found = []
    for cp, world in sorted(replica.worlds.items()):
        pause = world.pause(group_id)
        if pause is not None:
            found.append(PausedPartition(cp, pause.client_id, pause.expires, world.log_time))
    return found


def progress(replica: Replica, group_id: str) -> list[LeaseInfo]:
    """All leases or pieces of the group, sorted by topic, partition and keys."""
    return _infos(replica, lambda info: info.group_id == group_id)


def held_by(replica: Replica, client_id: str) -> list[LeaseInfo]:
    """All leases and pieces of members with this client_id, sorted by group, topic, partition and keys."""
    found = _infos(replica, lambda info: client_id in (info.client_id, *(each.client_id for each in info.sharers)))
    return [_as_sharer(info, client_id) for info in found]


def _infos(replica: Replica, is_wanted: Callable[[LeaseInfo], bool]) -> list[LeaseInfo]:
    found = [info for world in replica.worlds.values() for info, _ in holdings(world) if is_wanted(info)]
    return sorted(found, key=lambda info: (info.group_id, info.topic, info.partition, info.lo))


def evict(session: Session, topic: str, partition: int, *, force: bool, dry_run: bool) -> LeaseInfo:
    """Release a lease in its holder's name, without an offset; returns the lease as it was (*blocking*).

    dry_run: only check.
    """
    key = (topic, partition)
    check_name(key)
    where = f"{topic} [{partition}]"
    with session.locked():
        is_coordinated = session.kind() == "coordinated"
    if is_coordinated:
        raise AdminError(
            f"{where}: {session.group_id!r} is a coordinated group, whose members have no leases one by one. Nothing "
            "was changed. Evict the member that owns it (kafka-marshal who names it): kafka-marshal evict "
            f"{quote(session.group_id)} --member CLIENT"
        )
    # Without traffic log time stops, and a dead holder looks fresh: a Tick moves it.
    session.tick([session.cp_of(key)])
    with session.locked():
        lease = session.lease(key)
        held = [_Part(lease, None)] if lease is not None and lease.held else []
    if lease is None:
        raise AdminError(f"{where}: nobody of group {session.group_id!r} ever held it. Nothing was changed")
    if lease.shares is not None:
        raise _shared(where, sorted({share.client_id for share in lease.shares}))
    if not held:
        raise AdminError(
            f"{where}: is free already, nobody of group {session.group_id!r} holds it. Nothing was changed"
        )
    were = _free_to_take(session, held, force=force)
    if dry_run:
        return were[0]
    [(was, answer)] = _release_all(session, held, were)
    if not answer.accepted:
        code = "" if answer.outcome is None else answer.outcome.code
        raise AdminError(
            f"{where}: {was.client_id!r} does not hold it any more under epoch {was.epoch} ({code}): "
            "somebody was faster. Nothing was changed"
        )
    return was


def evict_member(session: Session, client_id: str, *, force: bool, dry_run: bool) -> list[LeaseInfo]:
    """Release all that a member holds, as :func:`evict`; returns what was released, as it was (*blocking*)."""
    with session.locked():
        is_coordinated = session.kind() == "coordinated"
    if is_coordinated:
        return coordinated.evict(session, client_id, force=force, dry_run=dry_run)
    session.tick(session.cps)
    held = _held_by(session, client_id)
    were = _free_to_take(session, held, force=force)
    if dry_run:
        return were
    return [was for was, answer in _release_all(session, held, were) if answer.accepted]


def _parts_of(session: Session, client_id: str) -> list[_Part]:
    """The lock is held."""
    leases = session.leases()
    found = [_Part(lease, None) for lease in leases if lease.held and lease.client_id == client_id]
    return found + [_Part(x, share) for x in leases for share in x.shares or () if share.client_id == client_id]


def _held_by(session: Session, client_id: str) -> list[_Part]:
    with session.locked():
        found = _parts_of(session, client_id)
    if not found:
        raise AdminError(
            f"{client_id!r} holds nothing in group {session.group_id!r}. Nothing was changed. kafka-marshal status "
            "--members names who holds what"
        )
    return found


def _shared(where: str, clients: list[str]) -> AdminError:
    """Several members share the partition: which of them is meant?"""
    return AdminError(
        f"{where}: is shared ({', '.join(map(repr, clients[:4]))}). Nothing was changed. What a dead worker "
        "has of it goes to the others by itself, two of its heartbeat intervals after its last one. To take all shares "
        "of one: kafka-marshal evict GROUP --member CLIENT"
    )


def _free_to_take(session: Session, held: list[_Part], *, force: bool) -> list[LeaseInfo]:
    """The present state of these leases. Raises AdminError if a holder is alive, unless force is set."""
    with session.locked():
        were = [part.info(session) for part in held]
    alive = [was for was in were if was.freshness == "fresh"]
    if alive and not force:
        raise AdminError(
            f"{alive[0].topic} [{alive[0].partition}]: {alive[0].client_id!r} beat less than "
            f"{alive[0].heartbeat_interval_ms} ms ago and may be alive. Nothing was changed. End that process and "
            "wait, or force it: it loses the lease then, and what it has in hand is repeated"
        )
    return were


def _release_all(session: Session, held: list[_Part], were: list[LeaseInfo]) -> list[tuple[LeaseInfo, Asked]]:
    """Release these leases in their holders' names; (the lease as it was, the answer) for each."""
    with session.locked():
        releases = [(session.cp_of(part.key), part.release) for part in held]
    told = [(cp, in_own_name(session, release)) for cp, release in releases]
    answers = session.ask(*told, *releases)[len(told) :]
    if silent := [was for was, answer in zip(were, answers, strict=True) if answer.outcome is None]:
        raise AdminError(
            f"{silent[0].topic} [{silent[0].partition}]: the log did not show the release in time"
            + (f", nor that of {len(silent) - 1} more" if len(silent) > 1 else "")
            + "; it may be written or not. Look at kafka-marshal status, and do it again"
        )
    return list(zip(were, answers, strict=True))


def drain(session: Session, client_id: str, timeout: float | None) -> list[LeaseInfo]:
    """Ask a member to release all it holds, and to claim no more; returns what it held (*blocking*).

    timeout: seconds to wait until it holds nothing; None: do not wait.
    """
    with session.locked():
        is_coordinated = session.kind() == "coordinated"
    if is_coordinated:
        return coordinated.ask_to_leave(session, client_id, timeout)
    session.tick(session.cps)
    held = _held_by(session, client_id)
    with session.locked():
        were = [part.info(session) for part in held]
        by_cp = {session.cp_of(part.key): part for part in held}
        asks: list[tuple[int, Record]] = [
            (cp, replace(part.release, instance_id=session.instance_id)) for cp, part in by_cp.items()
        ]
    if all(answer.outcome is None for answer in session.ask(*asks)):
        raise AdminError(
            f"the log did not show the request to {client_id!r} in time; it may be written or not. Nothing was taken "
            "from it. Do it again"
        )
    if timeout is None:
        return were

    def left() -> list[_Part]:
        return _parts_of(session, client_id)

    if not session.wait_for(lambda: not left(), session.now_ms() + timeout * 1000):
        with session.locked():
            keys = tuple(part.key for part in left())
        raise AdminError(
            f"{client_id!r} was asked to hand over, and holds {len(keys)} of {count(len(were), 'partition')} still "
            f"after {timeout:g} s, such as {keys[0][0]} [{keys[0][1]}]: it finishes what it has in hand first. Nothing "
            "is lost. Wait, or look for a handler that hangs: kafka-marshal status --members",
            in_hand=keys,
        )
    return were


def end_pause(session: Session, client_id: str | None) -> list[PausedPartition]:
    """End a pause in every CP, in its client's name; returns what was paused (*blocking*).

    What that client still holds is released, too, so that members need not wait until it goes stale.
    """
    session.tick(session.cps)
    with session.locked():
        paused = pauses(session.driver.replica, session.group_id)
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
