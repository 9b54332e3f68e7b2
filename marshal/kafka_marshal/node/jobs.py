"""The jobs of a driver: work that takes longer than the lock may be held, each with when it is due and how it may fail.

Look-up threads do them: they check topics (:class:`TopicRounds`), publish and compare snapshots
(:class:`SnapshotUpkeep`), read further coordination partitions (:class:`Scope`), and look after the coordination topic
(:class:`LogGuard`). What removes old log is in ``log_keeper``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from shlex import quote

from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.copies import Copy
from kafka_marshal.errors import (
    ClosedError,
    KafkaUnavailableError,
    LogCutError,
    MarshalError,
    SnapshotDifferenceError,
)
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import find_problems, topic_option
from kafka_marshal.node.engine_lock import DriverPart, Shared
from kafka_marshal.node.kept import keep_of
from kafka_marshal.node.life import Life
from kafka_marshal.node.replica import Begin, ReplayStart, Replica
from kafka_marshal.node.topics import (
    FEW_PARTITIONS,
    IDS_WITHIN_MS,
    LOOKUP_TIMEOUT_S,
    METADATA_INTERVAL_MS,
    METADATA_JITTER,
    CountPartitions,
    Interest,
    TopicWatch,
)
from kafka_marshal.ports import Cluster, TopicInfo, TopicPartition
from kafka_marshal.runtime import Condition
from kafka_marshal.snapshots.publisher import SnapshotKeeper
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.snapshots.start import Difference
from kafka_marshal.topic_names import is_lock
from rationalizer import Progress, World
from rationalizer.log_hash import LogHash


class LongJob(ABC):
    """Work that takes longer than the lock may be held: begun when it is due, one run at a time."""

    _is_running = False

    @abstractmethod
    def _has_work(self, now: float) -> bool:
        """Whether there is something to do; the lock is held."""

    @abstractmethod
    def _work(self) -> None:
        """Do it (*blocking*)."""

    @abstractmethod
    def _failed(self, error: Exception) -> None:
        """It raised this: say what it means. What is no MarshalError is a fault of the library, with its traceback."""

    def _ended(self) -> None:
        """It has ended in one way or another, and may begin again."""
        self._is_running = False

    def is_due(self, now: float) -> bool:
        """Whether :meth:`run` has to be called now, which has begun then; the lock is held."""
        if not self._has_work(now) or self._is_running:
            return False
        self._is_running = True
        return True

    def run(self) -> None:
        """Do the work (*blocking*); no caller sees what this raises."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - logged: the end of a look-up is not observed
            self._failed(error)
        finally:
            self._ended()


#: A consumer's first look-up is tried again this often (s), for as long as a start waits for Kafka: if a whole fleet
#: starts at once, a broker may be too busy for the first one.
AGAIN_S = 0.1


class TopicRounds(DriverPart, LongJob):
    """The regular checks of topics by one driver."""

    def __init__(self, shared: Shared, find_snapshots: Callable[[], object], timeout_s: float) -> None:
        """find_snapshots: called after each successful check (it may block).

        timeout_s: how long a consumer's start waits for Kafka.
        """
        super().__init__(shared)
        self._find_snapshots = find_snapshots
        self._timeout_s = timeout_s
        self._watch = TopicWatch(self._cluster, self._replica.topic)
        self._runtime = self._cluster.runtime
        self._rng = self._runtime.random()
        #: When the next check is due (own clock, ms).
        self.next_at: float = 0.0

    def _has_work(self, now: float) -> bool:
        if self._lock.engine.topic_ids.wanted:
            self._lock.engine.take(None, self._lock.engine.topic_ids.take_wanted)
            self._watch.describe_next()
            self.next_at = min(self.next_at, now)
        return now >= self.next_at

    def is_due(self, now: float) -> bool:
        if not super().is_due(now):
            return False
        self.next_at = inf
        return True

    def add(self, number: int, subscription: Subscription, count: CountPartitions | None = None) -> None:
        """Check a consumer's topics regularly; the first check happens now (*blocking*).

        count: a cheap count of partitions, for the first consumer. Their ids come with the next regular check, soon.
        """
        with self._lock.condition:
            self._watch.add(number, subscription)
            engine = self._lock.engine
            if engine.topic_ids.has_marks(subscription.names, engine.consumers[number].source.view.progress):
                count = None  # nothing begins before the ids are known (P12)
        has_passed_on = False
        until = self._runtime.monotonic() + self._timeout_s
        while not has_passed_on:
            interest = self._watch.interest
            try:
                counted = self._watch.count(interest, count)
                topics = counted or self._watch.check(interest)
            except KafkaUnavailableError as error:
                left_s = until - self._runtime.monotonic()
                if left_s <= 0:
                    raise
                text = f"the consumer waits for its topics, asking again for {left_s:.0f} s: {error}"
                self._rate_limited.warn("topics_not_found", "first topics", text)
                self._events.waits[number] = text
                self._runtime.box().get(AGAIN_S)
                continue
            self._events.waits.pop(number, None)
            with self._lock.locked():
                has_passed_on = self._pass_on(interest, topics)
                if counted:
                    are_few = sum(info.partitions for info in counted.values()) <= FEW_PARTITIONS
                    self._look_again_within(0.0 if are_few else IDS_WITHIN_MS)

    def remove(self, number: int) -> None:
        """A consumer has ended: its topics need not be checked for it any more."""
        self._events.waits.pop(number, None)
        with self._lock.condition:
            self._watch.remove(number)

    def _pass_on(self, interest: Interest, topics: dict[str, TopicInfo]) -> bool:
        """Pass the result to the engine, unless a consumer came meanwhile: its topics would seem deleted."""
        if interest is not self._watch.interest:
            return False
        if interest:
            self._lock.engine.take(None, self._lock.engine.metadata, topics, self._now_ms())
        return True

    def _work(self) -> None:
        """Check, and pass the result to the engine."""
        lock, events = self._lock, self._events
        interest = self._watch.interest
        if events.in_trouble:
            self._watch.ask_afresh()
        topics = self._watch.check(interest)
        with lock.condition:
            if lock.life.ended or lock.engine.failure is not None:
                return
            self._replica.check(topics.get(self._replica.topic))
            events.heard(self._now_ms())
            self._pass_on(interest, topics)
            lock.settle()
        self._find_snapshots()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, KafkaUnavailableError):
            # A refusal may look like an outage, and a broker that stops may look like a refusal: neither is final.
            self._events.trouble(str(error), self._now_ms())
            self._rate_limited.unanswered("topics_not_found", "topics", f"topics not looked up this time: {error}")
        elif isinstance(error, MarshalError):
            self._lock.fail(error)
        else:
            log(logging.ERROR, "topics_failed", "looking up topics failed; it is tried again", error=error)

    def _ended(self) -> None:
        super()._ended()
        self._look_again_within(METADATA_INTERVAL_MS)

    def _look_again_within(self, interval_ms: float) -> None:
        jitter = self._rng.uniform(1 - METADATA_JITTER, 1 + METADATA_JITTER)
        self.next_at = min(self.next_at, self._now_ms() + interval_ms * jitter)


class SnapshotUpkeep(LongJob):
    """The snapshots of one replica, if its driver keeps them and there is a topic for them."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        condition: Condition,
        life: Life,
        report: Callable[[SnapshotDifferenceError], object],
        *,
        keep: bool,
    ) -> None:
        """keep: False: do nothing. report: makes each consumer raise the error."""
        #: Snapshots that were found to differ from our replica.
        self.alarms: list[SnapshotDifferenceError] = []
        self._cluster = cluster
        self._replica = replica
        self._condition = condition
        self._life = life
        self._report = report
        self._keep = keep
        self._keeper: SnapshotKeeper | None = None
        if keep and replica.start.snapshots is not None:
            self._keeper = self._new_keeper(replica.start.snapshots)
        elif keep:
            self._warn()

    def _warn(self) -> None:
        log(
            logging.WARNING,
            "snapshots_missing",
            "%s: members start from the beginning of the log, which takes longer as it grows, and do not compare what "
            "they hold. kafka-marshal init%s makes it, and says what is wrong with one that is there",
            self._replica.start.lacks_snapshots,
            topic_option(self._replica.topic),
        )

    def _new_keeper(self, reader: SnapshotReader) -> SnapshotKeeper:
        runtime, topic = self._cluster.runtime, self._replica.start.snapshots_topic
        return SnapshotKeeper(self._cluster, reader, topic, runtime.random(), runtime.now_ms())

    def note(self, cp: int, next_offset: int, state: bytes, log_hash: LogHash | None) -> None:
        """A snapshot is due, with this state, and the hash of the log since the last one; the lock is held."""
        if self._keeper is not None:
            self._keeper.note(cp, next_offset, state, self._cluster.runtime.now_ms(), log_hash)

    def _has_work(self, now: float) -> bool:
        return self._keeper is not None and now >= self._keeper.due_at()

    def _work(self) -> None:
        """Compare, and write what is due."""
        now, read = self._cluster.runtime.now_ms(), frozenset(self._replica.worlds)
        found = self._keeper.work(now, read) if self._keeper is not None else []
        with self._condition:
            if found and not self._life.ended:
                self.report(found)
                self._condition.notify_all()

    def _failed(self, error: Exception) -> None:
        # A bug in the library. Work continues without snapshots, as it does without a topic for them.
        text = "no more snapshots are taken by this process, nor compared"
        log(logging.ERROR, "snapshots_failed", text, error=error)
        self._keeper = None

    def report(self, found: Iterable[Difference]) -> None:
        """Report each difference, once; the lock is held."""
        for difference in found:
            if self._keeper is not None and not self._keeper.is_news(difference):
                continue
            error = difference.error(self._replica.topic, self._replica.start.snapshots_topic)
            log(logging.ERROR, "snapshot_differs", "%s", error)
            self.alarms.append(error)
            self._report(error)

    def find(self) -> None:
        """Use the topic if it was created meanwhile (*blocking*)."""
        start = self._replica.start
        if self._keep and self._keeper is None and start.snapshots is None:
            try:
                reader = SnapshotReader.find(self._cluster, start.snapshots_topic, LOOKUP_TIMEOUT_S)
            except MarshalError as error:  # was logged at start; work continues without
                log(logging.DEBUG, "snapshots_missing", "no snapshots: %s", error)
                return
            if reader is not None and len(reader.partitions) == self._replica.info.partitions:
                start.snapshots = reader
                self._keeper = self._new_keeper(reader)


#: Reading all CPs is tried again this long (ms) after it failed.
AGAIN_MS = 1_000.0


class Scope(DriverPart, LongJob):
    """Which CPs a driver reads: all, or the home of the one coordinated group of which it has a member (G2).

    Nothing is kept of a CP that is not read any more. When it is needed again, a second replica determines its state
    from snapshots, as at a start, and the working one takes it over. So it does not matter what happened to the log
    meanwhile, and no heartbeat waits for it.
    """

    def __init__(self, shared: Shared, snapshots: SnapshotUpkeep, timeout_s: float) -> None:
        """timeout_s: how long a read of more CPs waits for Kafka; progress restarts the wait."""
        super().__init__(shared)
        self._snapshots = snapshots
        self._timeout_s = timeout_s
        #: Something other than a member of a coordinated group was used: all CPs are read from then on.
        self._is_wanted = False
        #: Only the home is read, or is about to be.
        self._is_narrow = False
        self._again_at = 0.0

    def narrow(self) -> None:
        """Read the group's home only, if nothing else is needed (background thread; the lock is held)."""
        replica, engine = self._replica, self._lock.engine
        home = None if self._was_used() or self._is_narrow else _home_of(engine)
        if home is None or len(replica.worlds) == 1:
            return
        # Set before the check whether all are needed: read_all does both in the other order, without the lock.
        self._is_narrow = True
        if self._was_used():
            self._is_narrow = False
            return
        replica.leave([cp for cp in replica.worlds if cp != home])
        engine.take(None, engine.caught_up, self._now_ms())

    def _was_used(self) -> bool:
        return self._is_wanted

    def read_all(self) -> None:
        """Have all CPs read from now on, and wait until their state is determined (*blocking*, C15).

        Raises as a start does, ClosedError, and what has ended the engine.
        """
        self._is_wanted = True
        if not self._is_narrow:
            return
        condition = self._lock.condition
        with condition:
            while self._is_running and not self._is_over:
                condition.wait()
            if not self._replica.unread:
                return
            self._lock.check()
            self._is_running = True
        try:
            self._work()
        finally:
            self._ended()

    @property
    def _is_over(self) -> bool:
        return self._lock.life.ended or self._lock.engine.failure is not None

    # The job: for a member that looks into all CPs before it joins (G2).

    def _has_work(self, now: float) -> bool:
        return self._is_narrow and now >= self._again_at and _wants_all(self._lock.engine)

    def _work(self) -> None:
        """Determine the state of the CPs that are not read, and continue to read them."""
        lock, replica = self._lock, self._replica
        unread = replica.unread  # no other thread changes it while this runs
        cluster, topic = self._cluster, replica.topic
        aside = Replica(cluster, topic, self._timeout_s, Begin.SNAPSHOT, only=unread, keeps_hashes=True)
        try:
            aside.catch_up(self._timeout_s, lambda read, there: lock.check(), report=False)
            with lock.condition:
                lock.check()
                replica.take_over(aside)
                self._is_narrow = False
                self._snapshots.report(aside.differences)
                lock.engine.take(None, lock.engine.caught_up, self._now_ms())
                lock.settle()
        finally:
            aside.close()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ClosedError):
            return
        if isinstance(error, MarshalError) and not isinstance(error, KafkaUnavailableError):
            self._lock.fail(error)
            return
        self._again_at = self._now_ms() + AGAIN_MS
        if isinstance(error, KafkaUnavailableError):
            self._rate_limited.unanswered("not_looked_into", "scope", f"the group is not joined yet: {error}")
        else:
            text = "the group is not joined yet: reading all of the coordination topic failed; it is tried again"
            log(logging.ERROR, "not_looked_into", text, error=error)

    def _ended(self) -> None:
        with self._lock.condition:
            super()._ended()
            self._lock.condition.notify_all()


def _home_of(engine: Engine) -> int | None:
    """The only CP that this engine needs (G2); None: it needs others, too."""
    if not engine.groups or len(engine.groups) < len(engine.consumers) or engine.book.leases or engine.leases.manual:
        return None
    (client, *_) = engine.groups.values()  # all are of the Marshal's group
    return client.member.home if client.member.generation > 0 else None


def _wants_all(engine: Engine) -> bool:
    """Whether a member has to read all CPs before it joins: none has joined yet."""
    return any(client.failure is None and client.member.generation == 0 for client in engine.groups.values())


#: The topic is checked once a heartbeat interval, but no more often than this (ms).
SHORTEST_MS = 1_000.0

#: While the log is harmed, positions are written this often (ms).
SAVE_EVERY_MS = 5_000.0

#: The most positions of one request, each with up to 4 KB of metadata: a batch of __consumer_offsets has 1 MB.
AT_ONCE = 100


class LogGuard(DriverPart, LongJob):
    """Whether the coordination topic is harmed while members work: emptied, or given a retention (L1).

    Members at work continue: they know what they have read. But no member can start on such a log, so only running
    members know what the group has done. They write it to Kafka's own consumer group of that name, where an import
    finds it.
    """

    def __init__(self, shared: Shared, *, keep: bool) -> None:
        """keep: the driver is a member's, which has positions to keep; otherwise nothing is checked."""
        super().__init__(shared)
        self._keep = keep
        self._next_at = self._now_ms() + self._interval_ms
        #: Where the logs began when a start was last known to be possible.
        self._begins = {cp: start.log_start for cp, start in self._replica.starts.items()}
        self._save_at = 0.0
        self._kept = ""
        #: What is wrong with the topic, for people; "": nothing. Any thread may ask.
        self.harm: str = ""
        #: How long the log is to be kept (ms), as its topic says (Q52); None: for ever, or it was not asked yet.
        self.keep_ms: int | None = None
        #: How many offsets the log has, in the CPs that are read; None: it was not asked yet.
        self.records: int | None = None

    @property
    def _interval_ms(self) -> float:
        return max(SHORTEST_MS, self._lock.engine.settings.heartbeat_interval_ms)

    def _has_work(self, now: float) -> bool:
        return self._keep and now >= self._next_at

    def _work(self) -> None:
        """Check the topic."""
        topic = self._replica.topic
        config = self._cluster.topic_config(topic, LOOKUP_TIMEOUT_S)
        wrong = [] if config is None else [str(problem) for problem in find_problems(config) if problem.fatal]
        self.keep_ms = None if config is None else keep_of(config.settings)
        self._report(self._cut(), wrong)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, MarshalError):  # a missing broker or permission is reported elsewhere
            log(logging.DEBUG, "topic_not_checked", "%r is not checked this time: %s", self._replica.topic, error)
        else:
            log(logging.ERROR, "topic_not_checked", "checking the coordination topic failed", error=error)

    def _ended(self) -> None:
        self._next_at = self._now_ms() + self._interval_ms
        super()._ended()

    def _cut(self) -> list[str]:
        """Texts about CPs whose log was cut so that no member can start; a prune leaves the snapshots needed."""
        topic, cps = self._replica.topic, sorted(self._begins)
        marks = self._cluster.watermarks([(topic, cp) for cp in cps], LOOKUP_TIMEOUT_S)
        begins = {cp: low for (_, cp), (low, _) in marks.items()}
        self.records = sum(high - low for low, high in marks.values())
        if all(low <= self._begins.get(cp, low) for cp, low in begins.items()):
            return []
        start = ReplayStart(self._cluster, topic, LOOKUP_TIMEOUT_S, Begin.SNAPSHOT)
        start.found(start.read(), self._replica.info.partitions)
        start.check({cp: marks[topic, cp] for cp in begins}, self._replica.info.partitions)
        cut = []
        for cp, low in begins.items():
            try:
                start.world(cp)
                self._begins[cp] = low
            except (LogCutError, SnapshotDifferenceError):
                cut.append(f"partition {cp} was emptied up to offset {low}, and not by kafka-marshal prune")
        return cut

    def _report(self, cut: Sequence[str], wrong: Sequence[str]) -> None:
        """wrong: settings that lose nothing yet."""
        before = bool(self.harm)
        if not cut and not wrong:
            self.harm = ""
            if before:
                log(logging.WARNING, "topic_mended", "%r is as it must be again", self._replica.topic)
            return
        saved, found = self._save(), "; ".join([*cut, *wrong])
        group = quote(self._lock.engine.settings.group_id)
        claimed = "" if self._lock.engine.groups else f", then convert-group {group} --to claimed"
        harmed = f"the coordination topic {self._replica.topic!r} was harmed while members work: {found}"
        self.harm = (
            f"{harmed}. Members that run continue, but none can start or restart. Only the running members know what "
            f"the group has done: stop none of them. {saved}. Then make a new topic (kafka-marshal init --topic "
            f"NEW-NAME), take the positions over (kafka-marshal --topic NEW-NAME import-group {group}{claimed}), and "
            "move all members to it"
            if cut
            else f"{harmed}. Nothing is lost yet. Mend its settings: kafka-marshal init"
            f"{topic_option(self._replica.topic)} says how. Until then none can start or restart, and a member whose "
            f"records the broker refuses loses what it holds: stop none of them. {saved}"
        )
        if not before:
            log(logging.ERROR, "topic_harmed", "%s", self.harm)

    def _save(self) -> str:
        """Write the group's positions to Kafka's own group of that name, if due; returns the result in words."""
        group_id, now = self._lock.engine.settings.group_id, self._now_ms()
        kept = f"Its positions are kept in Kafka's own consumer group {group_id!r}"
        if now < self._save_at:
            return self._kept or kept
        self._save_at = now + SAVE_EVERY_MS
        with self._lock.condition:
            copies = self._copies(group_id)
        try:
            there = self._cluster.kafka_group(group_id, LOOKUP_TIMEOUT_S)
            if there.members:
                return (
                    "Its positions could not be kept: Kafka's own consumer group of that name has members. Stop them, "
                    "or note what marshal.world.leases() says"
                )
            new = [
                (key, (copy.offset, copy.text))
                for key, copy in copies.items()
                if copy.replaces(Copy.read(*there.committed.get(key, (0, ""))))
            ]
            for at in range(0, len(new), AT_ONCE):
                self._cluster.commit_for_group(group_id, dict(new[at : at + AT_ONCE]), LOOKUP_TIMEOUT_S)
        except MarshalError as error:
            return f"Its positions could not be kept in Kafka's own consumer group of that name, trying again ({error})"
        short = [f"{key[0]} [{key[1]}]" for key, copy in copies.items() if copy.is_short]
        self._kept = kept + (", with its open messages in the metadata" if any(x.open for x in copies.values()) else "")
        if short:
            self._kept += (
                f" (of {', '.join(short[:3])}{f' and {len(short) - 3} more' * (len(short) > 3)} only some: the others "
                "come again, with what is done behind them)"
            )
        return self._kept

    def _copies(self, group_id: str) -> dict[TopicPartition, Copy]:
        """What Kafka's group is to hold; the lock is held."""
        copies = {}
        groups = [group for world in self._replica.worlds.values() if (group := world.group(group_id)) is not None]
        for key, progress in sorted(progress_of_all(self._replica.worlds, group_id).items()):
            kept = [each for group in groups if (each := group.kept(*key)) is not None]
            if progress.stable >= 0:
                copies[key] = Copy.of(progress, kept[0].metadata if kept else None)
        return copies


def progress_of_all(worlds: Mapping[int, World], group_id: str) -> dict[TopicPartition, Progress]:
    """Partition → the group's live progress."""
    found: dict[TopicPartition, Progress] = {}
    for world in worlds.values():
        group = world.group(group_id)
        for topic, partition, kept in () if group is None else group.all_progress():
            found[topic, partition] = kept.progress
        for lease in world.leases():
            if lease.group_id == group_id and not is_lock(lease.topic):
                found[lease.topic, lease.partition] = lease.progress
    return found
