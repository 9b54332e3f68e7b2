"""A read-only view of the group's state, as this process's replica knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kafka_marshal import arguments
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.types import LeaseInfo, OpenMessages, Sharer
from rationalizer import Piece, Progress, route_lease
from rationalizer.groups.group import done_in, pieces_of
from rationalizer.holes import NO_KEY, Hole
from rationalizer.limits import MAX_KEY_HASH

if TYPE_CHECKING:
    from kafka_marshal.node.driver import Driver
    from rationalizer import Group, Lease, World
    from rationalizer.leases.shares import Share


def lease_info(lease: Lease, world: World) -> LeaseInfo:
    """A copy of a lease, as its partition of the coordination topic has it now."""
    progress = lease.progress
    sharers = tuple(_sharer(share, world.log_time) for share in lease.shares or ())
    holder: Lease | Share = max(lease.shares or (), key=lambda share: (share.last_beat, share.epoch), default=lease)
    return LeaseInfo(
        topic=lease.topic,
        partition=lease.partition,
        client_id=holder.client_id,
        instance_id=holder.instance_id,
        epoch=holder.epoch,
        freshness=holder.freshness(world.log_time),
        heartbeat_interval_ms=holder.heartbeat_interval_ms,
        last_beat=holder.last_beat,
        stable=progress.stable if progress.stable >= 0 else None,
        ranges=tuple((first, last) for first, last in split(progress.ranges).ranges),
        granted=progress.granted if progress.granted >= 0 else None,
        group_id=lease.group_id,
        open=open_messages(progress.open, lease),
        sharers=sharers,
    )


def _parts_of(lease: Lease, world: World) -> Iterator[LeaseInfo]:
    """The lease; if it is shared by keys, each of its parts."""
    whole = lease_info(lease, world)
    if lease.shares is None or lease.shares.by_batches:
        yield whole
        return
    for lo, hi, share in lease.shares.parts():
        done = lease.progress.floor([(lo, hi)])
        yield replace(
            whole,
            client_id=None if share is None else share.client_id,
            instance_id=None if share is None else share.instance_id,
            epoch=lease.epoch if share is None else share.epoch,
            freshness="free" if share is None else share.freshness(world.log_time),
            heartbeat_interval_ms=0 if share is None else share.heartbeat_interval_ms,
            last_beat=0 if share is None else share.last_beat,
            stable=done if done >= 0 else None,
            lo=lo,
            hi=hi,
            open=tuple(each for each in whole.open if each.key_hash is None or lo <= each.key_hash <= hi),
            sharers=(),
        )


def _sharer(share: Share, log_time: int) -> Sharer:
    return Sharer(
        share.client_id,
        share.instance_id,
        share.epoch,
        share.freshness(log_time),
        share.heartbeat_interval_ms,
        share.last_beat,
        None if share.by_batches else (share.lo, share.hi),
    )


def open_messages(holes: Iterable[Hole], lease: Lease | None = None) -> tuple[OpenMessages, ...]:
    """Holes for users; lease: whose shares may own them."""
    shares = {} if lease is None else {share.epoch: share.client_id for share in lease.shares or ()}
    return tuple(
        OpenMessages(
            hole.first,
            hole.last,
            hole.attempts,
            shares.get(hole.owner),
            hole.reason,
            None if hole.key_hash == NO_KEY else hole.key_hash,
        )
        for hole in holes
    )


def holdings(
    world: World, group_id: str | None = None, *, by_keys: bool = False
) -> Iterator[tuple[LeaseInfo, Progress]]:
    """All leases in one partition of the coordination topic, then all pieces of coordinated groups; with progress.

    group_id: those of this group only. by_keys: each part of a lease that is shared by keys. Each kind is sorted by
    group, topic, partition and keys.
    """
    for lease in world.leases():
        if group_id is None or lease.group_id == group_id:
            for info in _parts_of(lease, world) if by_keys else [lease_info(lease, world)]:
                yield info, lease.progress
    for group in world.groups():
        if group_id is None or group.group_id == group_id:
            yield from _pieces_of(group, world)


def _pieces_of(group: Group, world: World) -> Iterator[tuple[LeaseInfo, Progress]]:
    nothing = Progress()
    for topic, partition in group.partitions():
        kept = group.kept(topic, partition)
        progress = nothing if kept is None else kept.progress
        for piece in list(pieces_of(group, topic, partition)) or [Piece(0, MAX_KEY_HASH, -1, 0, -1, -1)]:
            yield _piece_info(group, topic, partition, piece, progress, world.log_time), progress


def _piece_info(group: Group, topic: str, partition: int, piece: Piece, progress: Progress, log_time: int) -> LeaseInfo:
    owner, target = group.members.get(piece.owner), group.members.get(piece.target)
    done = done_in(group, topic, partition, piece.lo, piece.hi)
    return LeaseInfo(
        topic=topic,
        partition=partition,
        client_id=None if owner is None else owner.client_id,
        instance_id=None if owner is None else owner.instance_id,
        epoch=piece.since,
        freshness="free" if owner is None else owner.freshness(log_time),
        heartbeat_interval_ms=0 if owner is None else owner.heartbeat_interval_ms,
        last_beat=0 if owner is None else owner.last_beat,
        stable=done if done >= 0 else None,
        ranges=tuple((first, last) for first, last in split(progress.ranges).ranges),
        granted=None,
        group_id=group.group_id,
        kind="coordinated",
        lo=piece.lo,
        hi=piece.hi,
        goes_to=None if owner is None or target is None or target is owner else target.client_id,
        open=open_messages(hole for hole in progress.open if piece.lo <= hole.key_hash <= piece.hi),
    )


class WorldView(OneProcess):
    """What the log says about this Marshal's group. Every call reads the present state.

    A member of a coordinated group reads only its group's part of the log. From the first call here on, it reads all
    of it. That call waits, and may raise, as a start does.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __repr__(self) -> str:
        return f"WorldView(group_id={self._driver.engine.settings.group_id!r})"

    def lease(self, topic: str, partition: int) -> LeaseInfo | None:
        """One lease; None: no member of the group ever held it."""
        partition = arguments.a_whole("partition", partition, 0, arguments.MOST_PARTITION)
        return self._driver.call(self._lease, arguments.text("topic", topic), partition)

    def _lease(self, topic: str, partition: int) -> LeaseInfo | None:
        self._driver.upkeep.scope.read_all()
        with self._driver.lock.locked(step=False) as engine:
            worlds = self._driver.replica.worlds
            world = worlds[route_lease(topic, partition, len(worlds))]
            lease = world.lease(engine.settings.group_id, topic, partition)
            return None if lease is None else lease_info(lease, world)

    def leases(self) -> list[LeaseInfo]:
        """All leases (or pieces) of the group, sorted by topic, partition and keys."""
        return self._driver.call(self._leases)

    def _leases(self) -> list[LeaseInfo]:
        self._driver.upkeep.scope.read_all()
        with self._driver.lock.locked(step=False) as engine:
            found = [
                info
                for world in self._driver.replica.worlds.values()
                for info, _ in holdings(world, engine.settings.group_id)
            ]
        return sorted(found, key=lambda lease: (lease.topic, lease.partition, lease.lo))

    def digests(self) -> dict[int, tuple[int, str]]:
        """Partition of the coordination topic → (its next offset, the digest of the state there), live.

        Members at the same next offset have the same digest. ``kafka-marshal status --json``, ``replay --state`` and
        the audit show it, too.
        """
        return self._driver.call(self._digests)

    def _digests(self) -> dict[int, tuple[int, str]]:
        self._driver.upkeep.scope.read_all()
        with self._driver.condition:
            return {
                cp: (world.next_offset, world.digest()) for cp, world in sorted(self._driver.replica.worlds.items())
            }

    @property
    def log_time(self) -> int:
        """The latest log time (ms) of any partition of the coordination topic."""
        return self._driver.call(self._log_time)

    def _log_time(self) -> int:
        self._driver.upkeep.scope.read_all()
        with self._driver.condition:
            return max(world.log_time for world in self._driver.replica.worlds.values())

    def wait_for(self, predicate: Callable[[WorldView], object], timeout: float | None = None) -> bool:
        """Wait until predicate(this view) is true, at most timeout seconds; whether it became true.

        The predicate is called after every change. It must be quick: it runs under this Marshal's lock, on one of its
        threads.
        """
        arguments.a_function("predicate", predicate, "view")
        if timeout is not None:
            arguments.seconds("timeout", timeout)
        self._driver.life.refuse_fork()
        return self._driver.servants.ask(self._wait_for, predicate, timeout).wait()

    def _wait_for(
        self, is_gone: Callable[[], bool], predicate: Callable[[WorldView], object], timeout: float | None
    ) -> bool:
        from kafka_marshal.node.engine_lock import under_lock

        self._driver.upkeep.scope.read_all()

        def is_met() -> bool:
            token = under_lock.set(True)  # the predicate may call methods that take the lock
            try:
                return is_gone() or bool(arguments.a_result("predicate", predicate(self)))
            finally:
                under_lock.reset(token)

        with self._driver.condition:
            return bool(self._driver.wait_for(is_met, timeout))
