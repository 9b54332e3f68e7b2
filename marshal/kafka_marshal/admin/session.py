"""One run of an admin against one group: its own replica and engine, and records appended and awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from shlex import quote
from typing import Literal, TypeVar

from kafka_marshal.client.view import holdings
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.errors import AdminError, UpgradeRequiredError, WrongKindError
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.node.serving import EndedError, Reply, Servants
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import LeaseInfo, T
from rationalizer import (
    Group,
    Lease,
    Outcome,
    PausedGroup,
    Progress,
    Record,
    ReleasingPartition,
    Tick,
    World,
    route_group,
    route_lease,
)

#: The kind of a group that the log knows (G1).
GroupKind = Literal["claimed", "coordinated"]

R = TypeVar("R", bound=Record)

#: How long the log may take to show one of our records before the operation fails.
ANSWER_TIMEOUT_S = 10.0

#: How long acknowledgements may take when a session ends.
FLUSH_TIMEOUT_S = 1.0


def key_of(lease: Lease) -> TopicPartition:
    """(topic, partition)"""
    return lease.topic, lease.partition


def bare_release(lease: Lease | LeaseInfo) -> ReleasingPartition:
    """A release in the name of the holder, or of the sharer, under the present epoch, without an offset."""
    holder = lease.instance_id or "", lease.client_id or ""
    return ReleasingPartition(*holder, lease.group_id, lease.topic, lease.partition, lease.epoch, None)


def by_sharer(info: LeaseInfo) -> list[LeaseInfo]:
    """The lease as each of its sharers has it; itself if it is not shared."""
    names = "client_id", "instance_id", "epoch", "freshness", "last_beat", "heartbeat_interval_ms"
    return [replace(info, **{name: getattr(each, name) for name in names}) for each in info.sharers] or [info]


def in_own_name(session: Session, record: R) -> R:
    """The same record under our ids: it is rejected, and names the client behind the next record."""
    return replace(record, instance_id=session.instance_id, client_id=session.client_id)


def group_in(worlds: Mapping[int, World], group_id: str) -> Group | None:
    """The coordinated group as in its home CP, else as marked in another CP."""
    home = worlds[route_group(group_id, len(worlds))].group(group_id)
    if home is not None:
        return home
    return next((group for world in worlds.values() if (group := world.group(group_id)) is not None), None)


def kind_in(worlds: Mapping[int, World], group_id: str) -> GroupKind | None:
    """The kind of the group; None: the log does not know it."""
    if group_in(worlds, group_id) is not None:
        return "coordinated"
    known = any(lease.group_id == group_id for world in worlds.values() for lease in world.leases())
    return "claimed" if known else None


def progress_in(worlds: Mapping[int, World], group_id: str, key: TopicPartition) -> Progress | None:
    """The live progress of a partition; None: the group never had it."""
    group = group_in(worlds, group_id)
    if group is not None:
        kept = group.kept(*key)
        return None if kept is None else kept.progress
    lease = worlds[route_lease(*key, len(worlds))].lease(group_id, *key)
    return None if lease is None else lease.progress


def wrong_kind(group_id: str, kind: GroupKind) -> WrongKindError:
    """The error for an operation that the group's kind does not have."""
    other = "coordinated" if kind == "claimed" else "claimed"
    return WrongKindError(
        f"group {group_id!r} is a {kind} group, not a {other} one. Nothing was changed. To make it another: "
        f"kafka-marshal convert-group {quote(group_id)} --to {other}"
    )


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


class CallerGoneError(Exception):
    """The caller has stopped waiting: an exception has ended the call, or the pause is to end."""


def never() -> bool:
    """It is not."""
    return False


@dataclass(slots=True)
class Asked:
    """One of our records, and its outcome."""

    cp: int
    record: Record
    #: Own clock (ms) when it was first handed to the producer.
    sent_at: float = 0.0
    #: None: our replica has not applied it (yet).
    outcome: Outcome | None = None
    #: Its offset in the coordination partition.
    offset: int = -1
    #: The group's pause in this CP right after it was applied.
    pause: PausedGroup | None = None

    @property
    def accepted(self) -> bool:
        """Whether our replica has applied it, and it was accepted."""
        return self.outcome is not None and self.outcome.accepted


class Session:
    """A driver under the group's id and the admin's client_id. One thread at a time, never a user's thread.

    A user's thread creates it, and other threads carry out everything else (:mod:`.node.serving`): an exception from a
    signal handler would leave the engine's lock held.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        group_id: str,
        client_id: str,
        heartbeat_interval_ms: int,
        timeout_s: float,
    ) -> None:
        """Read the log to its end (*blocking*); raises as :class:`~kafka_marshal.client.marshal.Marshal` does."""
        self.group_id = group_id
        self.client_id = client_id
        self.instance_id: str = cluster.runtime.new_instance_id()
        self.cluster = cluster
        self.now_ms: Callable[[], float] = cluster.runtime.now_ms
        #: Called, under the lock, for each record applied.
        self.on_applied: Callable[[int, int, Outcome], None] | None = None
        #: Whether the caller of the present job has stopped waiting; a wait raises it once.
        self.is_gone: Callable[[], bool] = never
        self._waiting: list[Asked] = []
        self._running = cluster.runtime.lock()
        self._closing: Reply[None] | None = None
        servants = Servants(cluster.runtime)
        answer: Reply[Driver] | None = None
        self.driver: Driver
        try:
            servants.begin()
            answer = servants.ask(
                lambda _: self._open(topic, heartbeat_interval_ms, servants, timeout_s),
                undo=lambda driver: driver.shut_down(),
            )
            driver = answer.wait()
            answer.receipt.out = True; self.driver = driver  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException:  # Ctrl-C, too: there is no other owner to close it
            if answer is not None:
                answer.receipt.left = True
            servants.end()
            raise

    def _open(self, topic: str, heartbeat_interval_ms: int, servants: Servants, timeout_s: float) -> Driver:
        try:
            driver = Driver(
                self.cluster,
                topic,
                lambda partitions: EngineSettings(
                    self.group_id, self.client_id, self.instance_id, partitions, heartbeat_interval_ms
                ),
                servants=servants,
                timeout_s=timeout_s,
            )
        except BaseException:
            self.cluster.close()
            raise
        driver.listeners.append(self._applied)
        return driver

    # Looking.

    @property
    def ids(self) -> tuple[str, str, str]:
        """The ids of all our records."""
        return self.instance_id, self.client_id, self.group_id

    @property
    def worlds(self) -> dict[int, World]:
        """The CPs as our replica knows them; call under ``locked()``."""
        return self.driver.replica.worlds

    @property
    def cps(self) -> list[int]:
        """All CPs, ascending."""
        return sorted(self.worlds)

    def cp_of(self, key: TopicPartition) -> int:
        """The CP that a lease belongs to."""
        return route_lease(*key, len(self.worlds))

    def infos(self) -> list[LeaseInfo]:
        """All leases or pieces of the group; call under ``locked()``."""
        return [info for world in self.worlds.values() for info, _ in holdings(world, self.group_id)]

    def lease(self, key: TopicPartition) -> Lease | None:
        """The lease, live; call under ``locked()``."""
        return self.worlds[self.cp_of(key)].lease(self.group_id, *key)

    @property
    def home(self) -> int:
        """The CP that keeps the group, if it is a coordinated one."""
        return route_group(self.group_id, len(self.worlds))

    def kind(self) -> GroupKind | None:
        """The kind of the group; call under ``locked()``."""
        return kind_in(self.worlds, self.group_id)

    def group(self) -> Group | None:
        """The coordinated group, live; None: it is not one; call under ``locked()``."""
        return group_in(self.worlds, self.group_id)

    def progress(self, key: TopicPartition) -> Progress | None:
        """The live progress of a partition; call under ``locked()``."""
        return progress_in(self.worlds, self.group_id, key)

    def leases(self) -> list[Lease]:
        """All leases of the group, live, sorted by topic and partition; call under ``locked()``."""
        found = [x for world in self.worlds.values() for x in world.leases() if x.group_id == self.group_id]
        return sorted(found, key=key_of)

    @contextmanager
    def locked(self) -> Iterator[Engine]:
        """Access to the engine and the worlds; raises the error that ended the session, if there is one."""
        with self.driver.lock.locked() as engine:
            self.driver.lock.check()
            yield engine

    def wait_for(self, met: Callable[[], object], until: float) -> bool:
        """Wait until met() is true, called under the lock after every change, or our clock shows until (ms).

        Raises CallerGoneError, once, if the caller has stopped waiting; later waits, to clean up, go through.
        """
        with self.driver.condition:
            left_s = max(0.0, until - self.now_ms()) / 1000
            done = bool(self.driver.wait_for(lambda: bool(met()) or self.is_gone(), left_s))
            self.driver.lock.check()
            if self.is_gone():
                self.is_gone = never
                raise CallerGoneError
        return done

    # Asking the log.

    def ask(self, *records: tuple[int, Record]) -> list[Asked]:
        """Append each (CP, record), and wait until our replica has applied it (*blocking*).

        Records without an answer within a heartbeat interval are sent again; any copy counts. An answer without an
        outcome: the log did not show it in time.
        """
        asked = [Asked(cp, record) for cp, record in records]
        self._refuse_stopped({one.cp for one in asked})
        deadline = self.driver.monotonic() + ANSWER_TIMEOUT_S
        with self.driver.condition:
            self._waiting.extend(asked)
        try:
            while (left := [x for x in asked if x.outcome is None]) and self.driver.monotonic() < deadline:
                with self.locked() as engine:
                    for one in left:
                        one.sent_at = one.sent_at or self.now_ms()
                        engine.take(None, engine.outbox.append, one.cp, one.record)
                    again_at = self.now_ms() + engine.settings.heartbeat_interval_ms
                until = min(again_at, self.now_ms() + max(0.0, deadline - self.driver.monotonic()) * 1000)
                self.wait_for(lambda: all(x.outcome is not None for x in asked), until)
        finally:
            with self.driver.condition:
                self._waiting = [x for x in self._waiting if not any(x is one for one in asked)]
        return asked

    def _refuse_stopped(self, cps: Iterable[int]) -> None:
        """Raise UpgradeRequiredError for CPs whose log this release can't follow any further (E4)."""
        with self.locked():
            for cp in sorted(cps):
                level = self.worlds[cp].required_level
                if level is not None:
                    raise UpgradeRequiredError(
                        f"partition {cp} of the coordination topic was raised to protocol level {level}, which this "
                        "release of kafka-marshal does not know. Nothing was sent. Install one that supports it",
                        level=level,
                    )

    def tick(self, cps: Iterable[int]) -> dict[int, int]:
        """Move log time: the broker's present time (ms) of each of these CPs (*blocking*)."""
        asked = self.ask(*((cp, Tick(*self.ids)) for cp in cps))
        silent = [one.cp for one in asked if one.outcome is None]
        if silent:
            raise AdminError(
                f"partition(s) {silent} of the coordination topic did not show one of our records within "
                f"{ANSWER_TIMEOUT_S:g} s. Is the broker that leads them reachable?"
            )
        return {one.cp: one.outcome.log_time for one in asked if one.outcome is not None}

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        for one in self._waiting:
            if one.cp == cp and one.outcome is None and one.record == outcome.record:
                one.outcome, one.offset = outcome, offset
                one.pause = self.worlds[cp].pause(self.group_id)
        if self.on_applied is not None:
            self.on_applied(cp, offset, outcome)

    # User threads.

    def run(self, function: Callable[[Session], T]) -> T:
        """Call function(this session) on another thread, and close the session (*blocking*).

        Both also happen if an exception ends the wait.
        """
        try:
            found = self.driver.servants.ask(lambda _: self._carry_out(function)).wait()
        except BaseException:
            self.driver.post(self._close_unused)  # an interrupt may have come before the request
            raise
        self.await_closed()
        return found

    def await_closed(self) -> None:
        """Wait until it is closed, after `begin_close`."""
        if self._closing is not None:
            with suppress(EndedError):
                self._closing.wait()

    # The end, on its own thread.

    def _carry_out(self, function: Callable[[Session], T]) -> T:
        with self._running:
            try:
                return function(self)
            finally:
                self.close_soon()

    def _close_unused(self) -> None:
        with self._running:
            self.close_soon()

    def close_soon(self) -> None:
        """Close it; nothing is released or resumed. A second call does nothing."""
        if self._closing is None:
            self._closing = self.driver.servants.ask(lambda _: self._close())

    def _close(self) -> None:
        self.driver.flush(FLUSH_TIMEOUT_S)
        self.driver.shut_down()
