"""Marshal: one member of one group, on one coordination topic."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, Unpack, overload
from weakref import ref

from kafka_marshal import arguments
from kafka_marshal.adapters.opening import open_cluster
from kafka_marshal.client.base import AnyConsumer, take_handle
from kafka_marshal.client.closing import (
    CLOSE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    EXIT_TIMEOUT_S,
    Limit,
    calling,
    carry_out,
    close_if_dropped,
    cut_off,
    end_all,
    late_text,
)
from kafka_marshal.client.consumer import Consumer, PartitionsCallback
from kafka_marshal.client.handling import Hooks
from kafka_marshal.client.health import Health, examine
from kafka_marshal.client.lease import ClaimedLease, serve_claim
from kafka_marshal.client.locks import Leader, Locking
from kafka_marshal.client.modes import Batches, Claims, Group, Keys, Mode
from kafka_marshal.client.one_process import OneProcess, WithBlock
from kafka_marshal.client.options import (
    ConsumerArguments,
    ConsumerOptions,
    RangesArguments,
    Renamed,
    check_log_name,
    check_mode,
    check_shared,
    checked,
    checked_isolation,
    checked_topics,
    says_new,
    takes,
)
from kafka_marshal.client.shared_reads import DEFAULT_SHARED_BYTES
from kafka_marshal.client.view import WorldView
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.errors import ClosedError, SnapshotDifferenceError
from kafka_marshal.logs import Event, log
from kafka_marshal.node.config import (
    MOST_START_S,
    START_TIMEOUT_S,
    check_bootstrap,
    check_ids,
    check_threads,
    new_client_id,
)
from kafka_marshal.node.coordination_topic import log_name
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.serving import Reply, Servants
from kafka_marshal.ports import Cluster
from kafka_marshal.runtime import Runtime
from kafka_marshal.topic_names import DEFAULT_TOPIC

if TYPE_CHECKING:
    from kafka_marshal.client.group_consumer import GroupConsumer, PiecesCallback
    from kafka_marshal.client.ranges import GroupRangeConsumer, PiecesOfRangesCallback, RangeConsumer, RangesCallback
    from kafka_marshal.client.shared import ShareConsumer
    from kafka_marshal.metrics.measure import MarshalMeter
    from kafka_marshal.metrics.rows import Metrics
    from kafka_marshal.metrics.server import MetricsServer
    from kafka_marshal.watchdog import Watchdog


class Opened(NamedTuple):
    """What a Marshal has open."""

    driver: Driver
    watchdog: Watchdog | None
    world: WorldView

    def undo(self) -> None:
        """End it again: it did not reach the caller."""
        self.driver.shut_down()
        if self.watchdog is not None:
            self.watchdog.close()


class Shutdown:
    """The end of one Marshal: it happens once, however often it is asked for."""

    def __init__(self, runtime: Runtime) -> None:
        self._limit = Limit(runtime)
        self._lock = runtime.lock()
        self._has_ended = False
        #: All consumers ever made, closed ones included.
        self.consumers: list[AnyConsumer[Any]] = []
        #: Leaderships that are not resigned.
        self.leaders: set[Leader] = set()
        #: Closed last: they answer until the end.
        self.servers: list[MetricsServer] = []

    def stop_all(self) -> None:
        """Ask all loops to end (any thread, and a signal's handler)."""
        for consumer in self.consumers:
            consumer.stop()

    def run(self, driver: Driver, watchdog: Watchdog | None, release: bool, timeout: float | None) -> None:
        """End everything (*blocking*), on one of our threads; a warning names what takes longer than timeout."""
        self._limit.lower(timeout)
        in_callback = calling.get() is not None
        carry_out(
            driver,
            lambda: self._carry_out(driver, watchdog, release, in_callback),
            timeout,
            lambda: _cut_off(driver, timeout),
        )

    @property
    def has_begun(self) -> bool:
        """Whether it ends, or has ended (any thread, without a lock)."""
        return self._has_ended

    def end_dropped(self, driver: Driver, watchdog: Watchdog | None) -> None:
        """End everything: nothing refers to the Marshal any more (*blocking*; on one of our threads)."""
        self._limit.lower(DEFAULT_TIMEOUT_S)
        self._carry_out(driver, watchdog, True, False)

    def _carry_out(self, driver: Driver, watchdog: Watchdog | None, release: bool, in_callback: bool) -> None:
        with driver.condition:
            driver.condition.notify_all()  # threads that wait may have a shorter limit now
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            try:
                if release:
                    self._release_all(driver, in_callback)
                else:
                    _call_off(watchdog)  # it would release what must be kept
                    for consumer in self.consumers:
                        consumer._leaving.abandon()
                    with driver.lock.locked() as engine:
                        engine.take(None, engine.last_words, driver.now_ms())
                driver.flush(CLOSE_TIMEOUT_S)
                if release and self._release_unseen(driver):
                    driver.flush(CLOSE_TIMEOUT_S)
                for consumer in self.consumers:
                    consumer._leaving.await_answers()
            finally:
                for consumer in self.consumers:
                    consumer._free()
                how = "left" if release else "left without releasing; a restart takes its partitions over"
                driver.say(Event.LEFT, how)
                driver.shut_down()
                _call_off(watchdog)
                for server in self.servers:
                    server.close()

    @staticmethod
    def _release_unseen(driver: Driver) -> bool:
        """Release what the log may grant after this: no heartbeat follows that would. Whether there was any."""
        with driver.lock.locked() as engine:
            return engine.failure is None and bool(engine.take(None, engine.release_unseen, driver.now_ms()))

    def _resign_all(self, driver: Driver, in_callback: bool) -> None:
        """Have leaders call on_loss, and release, within the limit."""
        for leader in list(self.leaders):
            leader._end_soon()
        with driver.condition:
            have_left = in_callback or driver.wait_for(lambda: not self.leaders, self._limit.left_s)
            if not have_left and driver.engine.failure is None:
                names = ", ".join(sorted(leader.name for leader in self.leaders))
                text = "close() does not wait any longer for on_loss of %s: another member leads before it has returned"
                log(logging.WARNING, "close_late", text, names)

    def _release_all(self, driver: Driver, in_callback: bool) -> None:
        self._resign_all(driver, in_callback)
        consumers = [consumer for consumer in self.consumers if not consumer._closed]
        for consumer in consumers:
            consumer._limit.join(self._limit)
        for consumer in consumers if not in_callback else ():
            consumer._leaving.end_work(consumer._limit)
        for consumer in consumers:
            consumer._leaving.identify()
        with driver.lock.locked() as engine:
            for consumer in consumers:
                consumer._leaving.begin(consumer._limit, in_callback)
            manual = list(engine.leases.manual.values())
            for lease in manual:
                engine.take(None, lease.release, None, driver.now_ms())
        end_all(driver, consumers, in_callback, manual, for_good=True)
        for consumer in consumers:
            consumer._leaving.end(consumer._limit)


def _cut_off(driver: Driver, timeout: float | None) -> str:
    """The end is late: stop heartbeats and all waiting calls, leave the rest to the background; returns a text."""
    text = late_text(driver, "close() of a Marshal", timeout)
    cut_off(driver)
    return (
        f"{text} It goes on in the background, and no heartbeat is sent any more: leases that are not released end "
        "after two heartbeat intervals, and what was not reported as done is repeated by others"
    )


def _call_off(watchdog: Watchdog | None) -> None:
    if watchdog is not None:
        watchdog.close()


class Watched:
    """The part of a Marshal that only reads: at once, from any thread, without a lock."""

    _driver: Driver
    _closed: bool
    _ending: Shutdown

    def health(self) -> Health:
        """The present state of this member: for probes, and for people (``str()`` of it).

        Returns at once, from any thread, also in a signal handler: it takes no lock and waits for no thread. Use
        ``health().ready`` for a readiness probe, ``not health().needs_restart`` for a liveness probe.
        """
        return examine(self._driver, closed=self._closed or self._driver.is_over)

    @property
    def _meter(self) -> MarshalMeter:
        from kafka_marshal.metrics.measure import MarshalMeter  # not for a Marshal that is not measured

        meter: MarshalMeter = self.__dict__.setdefault("meter", MarshalMeter(self._driver, self._ending.consumers))
        return meter  # the same one for all threads: it counts

    def metrics(self) -> Metrics:
        """The present measurements: lag, leases, messages, the log, handlers (docs/metrics.md).

        Returns at once, from any thread. A metric that is not read costs nothing.
        """
        return self._meter.read(closed=self._closed)

    def timing(self) -> Hooks:
        """Hooks for ``run(…, hooks=[marshal.timing()])``: ``metrics().processing`` has how long handlers take."""
        return self._meter.timing()

    def serve(self, port: int, host: str = "127.0.0.1") -> MetricsServer:
        """Answer over HTTP: ``/metrics`` (for Prometheus), ``/livez``, ``/readyz``, and ``/lag`` (JSON, of the group).

        It runs on separate threads, which no handler and no outage of Kafka can block, until this Marshal ends or
        ``close()`` of the result. ``port`` 0: a free one, given by ``.port`` and ``.url``. ``host``: loopback by
        default; at another address, everyone on that network can read what is served. ``/metrics`` needs the extra
        ``[prometheus]``. Raises ConfigurationError if the server can't listen on the address, ClosedError.
        """
        from kafka_marshal.metrics.server import MetricsServer, checked_address  # not for a Marshal that serves nothing

        port, host = checked_address(port, host)
        self._driver.life.refuse_fork()
        if self._closed or self._driver.is_over:
            raise ClosedError("this Marshal is closed; make a new one")
        mine = ref(self)
        server = MetricsServer(self._meter, port, host, lambda: (marshal := mine()) is None or marshal._closed)
        self._ending.servers.append(server)
        return server

    @property
    def alarms(self) -> tuple[SnapshotDifferenceError, ...]:
        """Snapshots that contradict this member's replica, each reported once. Also logged as errors."""
        return tuple(self._driver.upkeep.snapshots.alarms)


class Sharing:
    """The part of a Marshal that says what it shares, and what never."""

    def _share(self, ordered_topics: object, max_bytes: object) -> None:
        names = arguments.several("ordered_topics", ordered_topics, "a list of topics")
        #: No partition of these is shared.
        self._ordered = frozenset(arguments.text("ordered_topics", name, "a list of topics") for name in names)
        #: How much is kept for other members of this process that read the same (U13).
        self.max_bytes_shared_reads: int = arguments.a_whole("max_bytes_shared_reads", max_bytes, 0)


M = TypeVar("M", bound=AnyConsumer[Any])
H = TypeVar("H", bound=ClaimedLease | Leader)

#: Seconds.
DEFAULT_HEARTBEAT_INTERVAL = 3.0

_CLAIMS = Claims()

#: Mode → the consumer that delivers so, and its module: a worker imports that of its mode only.
_OF_MESSAGES: Mapping[type[Mode], tuple[str, str]] = {
    Claims: ("consumer", "Consumer"),
    Group: ("group_consumer", "GroupConsumer"),
    Batches: ("shared", "ShareConsumer"),
    Keys: ("shared", "AssignedConsumer"),
}
_OF_RANGES: Mapping[type[Mode], tuple[str, str]] = {
    Claims: ("ranges", "RangeConsumer"),
    Group: ("ranges", "GroupRangeConsumer"),
}


class Marshal(Watched, Sharing, Locking, OneProcess, WithBlock, Renamed):
    """One member of a group: claims partitions through the log, and keeps them with heartbeats.

    The constructor returns when the log is read to its end.

    Attributes:
        world: what the log says about this group, read-only (WorldView): leases, holders, positions.
        watchdog: the process that releases for this one if it dies; None: there is none.
        bootstrap_servers, group_id, client_id, topic, heartbeat_interval, config: as given, or the defaults.
        instance_id: identifies this run of this Marshal; never used again (HOST/PID/RELEASE/RANDOM).
    """

    @says_new
    def __init__(
        self,
        bootstrap_servers: str,
        *,
        group_id: str,
        client_id: str | None = None,
        topic: str = DEFAULT_TOPIC,
        heartbeat_interval: float = DEFAULT_HEARTBEAT_INTERVAL,
        config: Mapping[str, object] | None = None,
        watchdog: bool = False,
        ordered_topics: Sequence[str] = (),
        max_bytes_shared_reads: int = DEFAULT_SHARED_BYTES,
        timeout: float = START_TIMEOUT_S,
    ) -> None:
        """Connect, and read the log to its end (*blocking*).

        ``bootstrap_servers``, ``config``: they go to librdkafka as they are.

        ``group_id``: the group to work in.

        ``client_id``: names this member, unique in the group at any time. If a restarted process keeps it, it takes
        over its partitions at once. None: a unique one is made.

        ``topic``: the coordination topic.

        ``heartbeat_interval`` (seconds, 0.1 … 600): a silent member is replaced after two intervals.

        ``watchdog`` (Linux): a small process beside this one. If this one dies without a release (kill -9, a segfault,
        out of memory), it releases what it held at once, so that others need not wait for two intervals;
        docs/watchdog.md.

        ``ordered_topics``: their partitions are never shared by this member, neither by keys nor by batches.

        ``max_bytes_shared_reads``: members of this process that have keys of one partition read it once, and keep at
        most this much for those that are behind (0: each reads alone).

        ``timeout`` (seconds): how long a start waits for Kafka without progress.

        Raises KafkaUnavailableError if no broker answers, CoordinationTopicError if the topic can't be trusted (the
        message names the remedy), ConfigurationError for settings that can't work.
        """
        check_bootstrap(bootstrap_servers)
        self.bootstrap_servers = bootstrap_servers
        self.config: Mapping[str, object] = arguments.a_mapping("config", config)
        arguments.a_flag("watchdog", watchdog)
        self._share(ordered_topics, max_bytes_shared_reads)
        self._name(group_id, client_id, topic, heartbeat_interval, timeout)
        check_threads()
        self._start(open_cluster(bootstrap_servers, self.config), watchdog=watchdog)

    @classmethod
    @says_new
    def on_cluster(
        cls,
        cluster: Cluster,
        *,
        group_id: str,
        client_id: str | None = None,
        topic: str = DEFAULT_TOPIC,
        heartbeat_interval: float = DEFAULT_HEARTBEAT_INTERVAL,
        ordered_topics: Sequence[str] = (),
        max_bytes_shared_reads: int = DEFAULT_SHARED_BYTES,
        timeout: float = START_TIMEOUT_S,
    ) -> Self:
        """A member on any implementation of the adapters' Cluster, such as the in-memory one."""
        if not hasattr(cluster, "runtime"):
            raise arguments.wrong("cluster", "a Cluster of kafka_marshal.adapters", cluster)
        marshal = cls.__new__(cls)
        marshal.bootstrap_servers = ""
        marshal.config = {}
        marshal._share(ordered_topics, max_bytes_shared_reads)
        marshal._name(group_id, client_id, topic, heartbeat_interval, timeout)
        marshal._start(cluster); return marshal  # fmt: skip  # noqa: E702 - one line: nothing may come in between

    def _name(
        self, group_id: str, client_id: str | None, topic: str, heartbeat_interval: float, timeout: float
    ) -> None:
        self.group_id = group_id
        self.client_id: str = new_client_id() if client_id is None else client_id
        self._heartbeat_interval_ms: int = check_ids(self.group_id, self.client_id, heartbeat_interval)
        self.topic: str = check_log_name(topic)
        self._timeout_s = arguments.seconds("timeout", timeout, above=0, below=MOST_START_S)

    def _start(self, cluster: Cluster, *, watchdog: bool = False) -> None:
        self.instance_id: str = cluster.runtime.new_instance_id()
        self._is_stopped = False
        self._closed = False
        self._ending = Shutdown(cluster.runtime)
        #: The process that releases for this one if it dies; None: there is none.
        self.watchdog: Watchdog | None = None
        self._driver: Driver
        #: What the log says about this group, read-only.
        self.world: WorldView
        servants = Servants(cluster.runtime)
        answer: Reply[Opened] | None = None
        try:
            servants.begin()
            answer = servants.ask(lambda _: self._open(cluster, servants, watchdog=watchdog), undo=Opened.undo)
            opened = answer.wait()
            answer.receipt.out = True; self._driver, self.watchdog, self.world = opened  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException:  # Ctrl-C, too: nothing else would end what has begun
            if answer is not None:
                answer.receipt.left = True
            servants.end()
            raise

    def _open(self, cluster: Cluster, servants: Servants, *, watchdog: bool) -> Opened:
        """Open everything, on one of our threads, where no signal can interrupt it."""
        beside: Watchdog | None = None
        try:
            if watchdog:
                beside = self._start_watchdog()
            cluster.expect(self.topic, delivery_timeout_ms=self._heartbeat_interval_ms)
            driver = Driver(
                cluster,
                self.topic,
                lambda partitions: EngineSettings(
                    self.group_id,
                    self.client_id,
                    self.instance_id,
                    partitions,
                    self._heartbeat_interval_ms,
                    log_name(self.topic),
                ),
                keep_snapshots=True,
                servants=servants,
                timeout_s=self._timeout_s,
            )
            driver.life.owner = ref(self)
            driver.life.at_exit = partial(_end_at_exit, ref(self), self._ending, driver, beside)
        except BaseException:
            if beside is not None:
                beside.close()
            cluster.close()
            raise
        if beside is not None:
            beside.watch(driver)
        driver.say(Event.JOINED, f"joined (topic {self.topic})", instance=self.instance_id)
        ending = self._ending

        def end() -> None:
            ending.stop_all()
            ending.end_dropped(driver, beside)

        close_if_dropped(self, driver, lambda: driver.is_over or ending.has_begun, end)
        return Opened(driver, beside, WorldView(driver))

    def _start_watchdog(self) -> Watchdog:
        """It starts while the log is read."""
        from kafka_marshal.watchdog.parent import Watchdog, producer_properties  # not for a Marshal without

        watchdog = Watchdog(
            f"worker {self.client_id!r} of group {self.group_id!r} (process {os.getpid()})",
            self.topic,
            (self.instance_id, self.client_id, self.group_id),
            producer_properties(self.bootstrap_servers, self.config, self._heartbeat_interval_ms),
            self._heartbeat_interval_ms,
        )
        watchdog.start()
        return watchdog

    # Work.

    @overload
    def consumer(
        self,
        topics: Sequence[str],
        *,
        mode: Claims = ...,
        **options: Unpack[ConsumerArguments[PartitionsCallback]],
    ) -> Consumer: ...
    @overload
    def consumer(
        self, topics: Sequence[str], *, mode: Group, **options: Unpack[ConsumerArguments[PiecesCallback]]
    ) -> GroupConsumer: ...
    @overload
    def consumer(
        self, topics: Sequence[str], *, mode: Batches, **options: Unpack[ConsumerArguments[PartitionsCallback]]
    ) -> ShareConsumer: ...
    @overload
    def consumer(self, *, mode: Keys, **options: Unpack[ConsumerArguments[PartitionsCallback]]) -> Consumer: ...
    @takes(ConsumerArguments)
    def consumer(
        self, topics: Sequence[str] = (), *, mode: Mode = _CLAIMS, **options: Unpack[ConsumerArguments[Any]]
    ) -> Consumer:
        """A consumer of messages of these topics. The mode says how the members of the group share the partitions.

        ``topics``: names, or regular expressions starting with ``^``. With ``mode=Keys({…})``, which names partitions,
        it is left out.

        ``mode``: :class:`Claims` (the default: each member claims partitions, as its policy decides), :class:`Group`
        (a coordinated group assigns them; the result is a GroupConsumer), :class:`Batches` (members work on one
        partition, batch by batch; a ShareConsumer) or :class:`Keys` (these partitions, or some of their keys).

        ``delivery``: ``"at-least-once"`` (done is reported; a crash repeats what was not) or ``"at-most-once"`` (each
        batch of ``batch_size`` is claimed in the log first; a crash loses it).

        ``start``: where the group begins on partitions it never held: ``"earliest"``, ``"latest"`` or a datetime.

        ``batch_size``: the most messages of a batch that is claimed at most once.

        ``exactly_once``: :class:`Transactions`; what is produced and progress are committed to Kafka together, by
        ``transaction(batch)`` or by ``run``: once for read_committed readers, see docs/transactions.md.

        ``checkpoints``: a CheckpointPolicy, for groups with state (``mode=Group(…)``): docs/checkpoints.md. The
        coordination topic must be at level 3. If an exception leaves the ``with`` block, what was done since the last
        checkpoint is done again, by others.

        ``handler_timeout`` (seconds): a message in flight for longer costs the lease, or the membership; the member
        continues, or joins again, when nothing is in flight. If none of your threads has come back for that long, all
        partitions are released, and none is claimed until one comes back.

        ``revoke_timeout`` (seconds; default: ``handler_timeout`` or, without one, 60): how long a release waits for
        ``on_revoke`` and for messages in flight. What is still in flight then is left behind and comes again at the
        next owner; ``on_lost`` is called and an ERROR is logged.

        ``auto_done=False``: iterating marks nothing as done; call ``done(message)``.

        ``max_bytes_in_flight``: the bytes of messages that this consumer keeps: half fetched, half delivered and not
        done. At this limit batches are smaller, and a partition with messages in flight gets no more until some are
        done; one message of each partition is delivered in any case.

        ``position_lost``: what to do with a partition whose log does not hold the group's position. ``"leave"``: no
        member works on it until the position is set; ``on_lost``, an ERROR log and ``lost_positions`` report it, and
        other partitions continue. ``"raise"``: the next call raises PositionLostError as well, once.

        ``partition_stuck``: the same for one that can't be read (``stuck``, PartitionStuckError).

        ``on_assign``, ``on_revoke``, ``on_lost``: get (consumer, partitions), in a group (consumer, pieces), on a
        separate thread. Finish work and call ``done`` in ``on_revoke``: a partition is released when it has returned
        and every message in flight is done. If the reason for the release (a pause) ends before it, the partition
        stays: ``on_assign`` follows ``on_revoke``.

        ``config``: librdkafka properties for the fetching consumer.

        Raises ConfigurationError for options that can't work, or not together, KeyRangeError (89) for a mode that
        would share a topic of ``Marshal(ordered_topics=…)``.
        """
        if isinstance(mode, Keys):
            if topics:
                raise arguments.wrong("topics", "left out with mode=Keys({…}), which names the partitions", topics)
            topics = mode.topics
        made: Consumer = self._made(topics, mode, ConsumerArguments, options)
        return made

    @overload
    def ranges(
        self, topics: Sequence[str], *, mode: Claims = ..., **options: Unpack[RangesArguments[RangesCallback]]
    ) -> RangeConsumer: ...
    @overload
    def ranges(
        self, topics: Sequence[str], *, mode: Group, **options: Unpack[RangesArguments[PiecesOfRangesCallback]]
    ) -> GroupRangeConsumer: ...
    @takes(RangesArguments)
    def ranges(
        self, topics: Sequence[str], *, mode: Claims | Group = _CLAIMS, **options: Unpack[RangesArguments[Any]]
    ) -> RangeConsumer:
        """A consumer that gets partitions as ``consumer`` does, and delivers ranges of their offsets.

        For callers that do their own reading (Spark does): no message is fetched. The arguments are those of
        ``consumer``, as far as they are not about messages.

        ``mode``: :class:`Claims`, or :class:`Group`, without what shares partitions.

        ``revoke_timeout`` (seconds): 600 by default.

        ``checkpoints``: a partition is cut when no range of it is in flight, and waits for that as long as the
        checkpoint does (``timeout``; ``drain`` means nothing).

        ``config`` (and this Marshal's own): ``isolation.level`` counts: ranges end at the last stable offset, or, under
        ``read_uncommitted``, at the high watermark. Read them with the same level.
        """
        made: RangeConsumer = self._made(topics, mode, RangesArguments, options)
        return made

    def _made(self, topics: Sequence[str], mode: Mode, kind: Any, given: Mapping[str, Any]) -> Any:
        """A consumer of the class that this mode has; raises ConfigurationError for options that can't work."""
        ranges = kind is RangesArguments
        options = checked("Marshal.ranges" if ranges else "Marshal.consumer", kind, given)
        check_mode(mode, options, ranges=ranges)
        names = checked_topics(topics, self.topic)
        check_shared(self._ordered, names, mode)
        found = ConsumerOptions.of(names, options, self.group_id, mode, ranges=ranges)
        if ranges:
            found = replace(found, committed=checked_isolation({**self.config, **found.config}))
        module, name = (_OF_RANGES if ranges else _OF_MESSAGES)[type(mode)]
        return self._open_consumer(getattr(import_module(f"kafka_marshal.client.{module}"), name), found)

    def _open_consumer(self, kind: Callable[[Marshal, Driver, ConsumerOptions], M], options: ConsumerOptions) -> M:
        """A consumer, made on a thread of the library; it ends if it does not reach the caller."""
        self._check_open()
        self._driver.call(self._check)

        def made(_: object) -> M:
            consumer = kind(self, self._driver, options)
            self._ending.consumers.append(consumer)
            if self._is_stopped:  # before stop() could know of it
                consumer.stop()
            return take_handle(consumer)

        answer = self._driver.servants.ask(made, undo=lambda consumer: consumer._end(True))
        try:
            consumer = answer.wait()
            answer.receipt.out = True; return consumer  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException:
            answer.receipt.left = True
            raise

    def claim(self, topic: str, partition: int, timeout: float = 5.0) -> ClaimedLease:
        """Claim one lease by hand; wait up to timeout seconds until it is free.

        ``topic`` need not exist: then the lease is on its name alone. If it exists, so must the partition. Raises
        HeldError (it names the holder), GroupPausedError, ClaimTimeoutError (the log did not answer, or does not show
        our own release yet), UpgradeRequiredError (that part of the log needs a newer release), or ConfigurationError
        if this Marshal holds it already, or the topic has no such partition.
        """
        arguments.text("topic", topic)
        partition = arguments.a_whole("partition", partition, 0, arguments.MOST_PARTITION)
        timeout = arguments.seconds("timeout", timeout)
        return self._get(serve_claim, ClaimedLease.release, topic, partition, timeout)

    def _get(self, serve: Callable[..., H], undo: Callable[[H], object], *args: object) -> H:
        """Have a thread of the library get a lease; it is released if it does not reach the caller."""
        self._check_open()
        answer = self._driver.servants.ask(serve, self._driver, *args, undo=undo)
        try:
            held = answer.wait()
            held._keeps = self
            answer.receipt.out = True; return held  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException:
            answer.receipt.left = True
            raise

    @property
    def heartbeat_interval(self) -> float:
        """Seconds."""
        return self._heartbeat_interval_ms / 1000

    def __repr__(self) -> str:
        state = "closed" if self._closed else "stopping" if self.stopping else "open"
        return f"Marshal(group_id={self.group_id!r}, client_id={self.client_id!r}, topic={self.topic!r}, {state})"

    # Ending.

    def stop(self) -> None:
        """Ask all loops over this Marshal's consumers to end. Safe in a signal handler; returns at once."""
        self._is_stopped = True
        self._ending.stop_all()

    @property
    def stopping(self) -> bool:
        """Whether stop() was called."""
        return self._is_stopped

    @property
    def draining(self) -> bool:
        """Whether an operator has asked this member to hand over (``kafka-marshal drain``): it claims nothing more."""
        return self._driver.engine.leases.draining

    def close(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Release everything with its offsets, and end. A second call does nothing.

        Waits up to ``timeout`` seconds (None: without a limit) for callbacks (``on_assign``, ``on_revoke``,
        ``on_lost``) to return, except one that calls it, and until members that take checkpoints have left at one. A
        consumer whose own ``close()`` has used up its timeout is not waited for again. A warning names callbacks that
        have not returned; the leases of their partitions end by themselves after two heartbeat intervals, and all other
        partitions are released. It returns at most one second after ``timeout``: in any thread, a callback, a signal
        handler, and at the interpreter's end (after threads have been stopped there, it does nothing). In Kubernetes,
        choose a timeout well below ``terminationGracePeriodSeconds``.
        """
        self._end(True, None if timeout is None else arguments.seconds("timeout", timeout))

    def terminate(self) -> None:
        """End without releasing: a restart of the same client_id takes over within a heartbeat interval."""
        self._end(False, CLOSE_TIMEOUT_S)

    def _end(self, release: bool, timeout: float | None) -> None:
        if self._closed and calling.get() is not None:
            return  # another thread ends it, and waits for this callback
        self._closed = True
        self.stop()
        if not self._driver.life.forked:
            self._ending.run(self._driver, self.watchdog, release, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this Marshal is closed; make a new one")
        self._driver.life.refuse_fork()

    def _check(self) -> None:
        with self._driver.lock.locked(step=False):
            self._driver.lock.check()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._left_by(error)
        self.close()

    def _left_by(self, error: BaseException) -> None:
        """An exception leaves a ``with`` block."""
        for consumer in [each for each in self._ending.consumers if not each._closed]:
            consumer._left_by(error)


def _end_at_exit(mine: ref[Marshal], ending: Shutdown, driver: Driver, watchdog: Watchdog | None) -> None:
    """End a Marshal that was not closed when the interpreter ends; the handle may be gone, or its start was ended."""
    if (marshal := mine()) is not None and hasattr(marshal, "_driver"):
        marshal._end(True, EXIT_TIMEOUT_S)
    else:
        ending.stop_all()
        ending.run(driver, watchdog, True, EXIT_TIMEOUT_S)
