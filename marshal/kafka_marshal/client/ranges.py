"""RangeConsumer: ranges of offsets of the partitions that this member holds, for callers that do their own reading.

GroupRangeConsumer is the same in a coordinated group. If that takes checkpoints, a cut waits until no range of its
partition is in flight: the end of a round of ranges is the cut (X13).

Nothing is fetched here. Our threads ask the leaders where the logs end, and the engine cuts ranges between what
is done and there. What the user reports as done goes into the log with the heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future

from kafka_marshal import arguments
from kafka_marshal.client.base import AnyConsumer, ConsumerHost
from kafka_marshal.client.group_consumer import GroupMember, MemberPiece
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.engine.work.ranges import OffsetRange, RangeDelivery, RangeRun
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.serving import LOOK_S, EndedError, LateError
from kafka_marshal.ports import Cluster
from kafka_marshal.types import Key, TopicPartition

#: (log start, log end) by partition.
Marks = dict[Key, tuple[int, int]]

#: How long the leaders may take to answer (s).
LOOKUP_TIMEOUT_S = 10.0


class Watermarks:
    """The log starts and ends of one consumer's partitions, as their leaders answered."""

    def __init__(self, cluster: Cluster, *, committed: bool) -> None:
        """committed: logs end at the last stable offset, as for a read_committed reader."""
        self._ask = cluster.committed_watermarks if committed else cluster.watermarks
        self._aside = cluster.runtime.executor(1, "kafka-marshal-ahead")
        self.ahead: Future[Marks] | None = None
        self._ends: dict[Key, int] = {}

    def look_up(self, keys: Collection[Key]) -> Marks:
        """Ask the leaders (*blocking*)."""
        marks = self._ask(keys, LOOKUP_TIMEOUT_S)
        self._ends |= {key: end for key, (_, end) in marks.items()}
        return marks

    def look_ahead(self, keys: Collection[Key]) -> None:
        """Ask them in the background."""
        self.ahead = self._aside.submit(self.look_up, keys) if keys else None

    def take_ahead(self) -> Marks | None:
        """The answer to ``look_ahead``, returned once; None: there is none (yet)."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return None
        return ahead.result()

    def end_of(self, key: Key) -> int | None:
        """The log end, as last read."""
        return self._ends.get(key)

    def close(self) -> None:
        """Send no more requests."""
        self._aside.shutdown(wait=False, cancel_futures=True)


#: While there is nothing new, the leaders are asked again this often (s).
POLL_S = 0.1


class RangeTaker:
    """Takes ranges for the calls of one consumer; one at a time."""

    def __init__(self, consumer: RangeConsumer, driver: Driver, marks: Watermarks) -> None:
        self._consumer = consumer
        self._driver = driver
        self._marks = marks

    def serve(
        self, is_gone: Callable[[], bool], max_records: int, ends: Mapping[Key, int] | None, timeout: float | None
    ) -> list[OffsetRange]:
        """Carry out a ``take``, on one of our threads."""
        deadline = None if timeout is None else self._driver.monotonic() + timeout
        while not is_gone():
            keys = self.open_keys(ends)
            if keys is None:
                break
            found = self._take_known(max_records, ends, keys) or self._take_fresh(max_records, ends, keys)
            if found:
                return [run.offsets() for run in found]
            left = None if deadline is None else deadline - self._driver.monotonic()
            if left is not None and left <= 0:
                break
            self._pause(keys, ends, POLL_S if left is None else min(POLL_S, left))
        return []

    def open_keys(self, ends: Mapping[Key, int] | None) -> list[Key] | None:
        """Partitions to take from; None: the consumer has ended."""
        with self._driver.lock.locked(step=False):
            if self._consumer._is_over():
                return None
            keys = self._open()
        return [key for key in keys if ends is None or key in ends]

    def _open(self) -> list[Key]:
        return self._consumer._take(self._consumer._delivery.open) or []

    def _pause(self, keys: list[Key], ends: Mapping[Key, int] | None, timeout_s: float) -> None:
        """Wait until there are other partitions to take from, or it is time to ask for the log ends again."""
        known = set(keys)

        def changed() -> bool:
            if self._consumer._closed or self._consumer._engine.errors:
                return True
            return any(key not in known and (ends is None or key in ends) for key in self._open())

        with self._driver.condition:
            self._driver.lock.wait_for(changed, timeout_s)  # it may last: the log is read in steps

    def _take_known(self, max_records: int, ends: Mapping[Key, int] | None, keys: Collection[Key]) -> list[RangeRun]:
        """Take from what ``look_ahead`` has found, if that fills a round: then no request is needed."""
        ahead = self._marks.take_ahead()
        if ahead is None:
            return []
        marks = _bounded(ahead, ends)
        if not all(key in marks for key in keys):
            return []
        return self._take(marks, max_records, only_full=True)

    def _take_fresh(self, max_records: int, ends: Mapping[Key, int] | None, keys: list[Key]) -> list[RangeRun]:
        if not keys:
            return []
        marks = self._marks.look_up(keys)
        with self._driver.lock.locked(step=False):
            found = self._consumer._engine.assignments
            new = {key[0] for key, (_, end) in marks.items() if key in found and found[key].tracker.open_from() < end}
        # No reader would notice here. The answer is younger than the log ends: those are of this topic.
        infos = self._driver.cluster.topic_info(sorted(new), LOOKUP_TIMEOUT_S) if new else {}
        with self._driver.lock.locked():
            for name, info in infos.items():
                known = self._consumer._engine.subscription.topic_id(name)
                if known is not None and info.topic_id not in ("", known):
                    self._consumer._take(self._consumer._engine.positions.reader_found, name, info.topic_id)
            ends_found = {key: end for key, (_, end) in marks.items()}
            self._consumer._take(self._consumer._delivery.beyond_end, ends_found)
        return self._take(_bounded(marks, ends), max_records, only_full=False)

    def _take(self, marks: Marks, max_records: int, *, only_full: bool) -> list[RangeRun]:
        with self._driver.lock.locked(step=False):
            if self._consumer._is_over():
                return []
            runs = self._consumer._take(self._consumer._delivery.take_if, marks, max_records, only_full) or []
        return self._await_grants(runs) if self._consumer._engine.at_most_once else runs

    def _await_grants(self, runs: list[RangeRun]) -> list[RangeRun]:
        """Wait until our replica has applied all proposals (C13); returns those that were granted."""
        granted: list[RangeRun] = []
        waiting = list(runs)
        try:
            with self._driver.condition:
                self._driver.wait_for(lambda: all(map(self._consumer._delivery.is_answered, runs)), None)
            with self._driver.lock.locked():
                while waiting:
                    run = waiting.pop()
                    if self._consumer._take(self._consumer._delivery.collect_range, run):
                        granted.insert(0, run)
        except BaseException:  # Ctrl-C while waiting: the caller won't get what was granted
            with self._driver.lock.locked():
                self._consumer._take(self._consumer._delivery.lose, granted, waiting)
            raise
        return granted


def _bounded(marks: Marks, ends: Mapping[Key, int] | None) -> Marks:
    if ends is None:
        return marks
    return {key: (low, min(end, ends[key])) for key, (low, end) in marks.items() if key in ends}


RangesCallback = Callable[["RangeConsumer", list[TopicPartition]], object]
PiecesOfRangesCallback = Callable[["GroupRangeConsumer", list[MemberPiece]], object]


class RangeConsumer(AnyConsumer["RangeConsumer"]):
    """Delivers offset ranges of the partitions this member holds. Made by :meth:`Marshal.ranges`.

    Any thread may call ``done``, ``give_back``, ``is_valid``, ``close`` …; only one at a time may call ``take``.
    """

    def __init__(self, marshal: ConsumerHost, driver: Driver, options: ConsumerOptions) -> None:
        self._marks = Watermarks(driver.cluster, committed=options.committed)
        #: Called when the consumer has ended, to end what serves its readers.
        self.at_end: Callable[[], object] = lambda: None
        self._taker = RangeTaker(self, driver, self._marks)
        super().__init__(marshal, driver, options)

    @property
    def _delivery(self) -> RangeDelivery:
        assert self._engine.ranges is not None, "made with ranges=True"
        return self._engine.ranges

    # Getting ranges.

    def take(
        self, max_records: int, ends: Mapping[Key, int] | None = None, timeout: float | None = None
    ) -> list[OffsetRange]:
        """Ranges of at most max_records records in total, at most one of each partition; they are in flight then.

        They begin at the first offset that is neither done nor in flight, end where the log ends now (under
        read_committed, at the last stable offset), leave out what is done, and share max_records fairly. ``ends``
        limits them: (topic, partition) → the first offset not wanted; other partitions give no range. Waits up to
        timeout seconds (None: until there is something), then returns []; so it does if ``stop()`` or ``close()``
        ends the wait. After ``stop()`` it waits for its timeout; after ``close()`` it raises ClosedError.

        At most once, the log grants every range before it is returned.

        Raises KafkaUnavailableError if the leaders do not answer, what ended the Marshal, and, if the consumer was
        made with ``position_lost="raise"``, PositionLostError.
        """
        max_records = arguments.a_whole("max_records", max_records, 1)
        if ends is not None:
            arguments.offsets("ends", ends)
        deadline = self._begin(timeout)
        if self._stop_signal:
            self._wait_stopped(deadline)
            return []
        answer = self._driver.servants.ask(self._taker.serve, max_records, ends, timeout, undo=self.give_back)
        try:
            # At most once, a grant that comes after the timeout would be lost: so this waits without one.
            found = answer.wait(None if timeout is None or self._options.settings.at_most_once else timeout + LOOK_S)
            answer.receipt.out = True; return found  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except EndedError:
            return []
        except BaseException as error:
            answer.receipt.left = True
            if isinstance(error, LateError):  # our own threads are blocked
                return []
            raise

    def look_ahead(self) -> None:
        """Ask where the logs end in the background: the next ``take`` uses the answer if that makes a full round."""
        self._driver.call(self._look_ahead)

    def _look_ahead(self) -> None:
        with self._driver.lock.locked(step=False):
            if self._closed:
                return
            keys = [key for key, x in self._engine.assignments.items() if x.shown and not x.releasing]
        self._marks.look_ahead(keys)

    # Reporting results.

    def done(self, ranges: Iterable[OffsetRange], *, flush: bool = False, together: bool = False) -> list[OffsetRange]:
        """These ranges are done: the next heartbeats report it; with flush, it is sent at once. Returns what counted.

        A range whose lease has ended commits nothing, and is counted in ``ignored_done``. With ``together``, the call
        has no effect unless all of them are still in flight.
        """
        arguments.a_flag("flush", flush)
        arguments.a_flag("together", together)
        return self._driver.call(self._done, _checked(ranges), flush, together)

    def _done(self, ranges: list[OffsetRange], flush: bool, together: bool) -> list[OffsetRange]:
        with self._driver.lock.locked():
            of = self._engine.number, ranges, flush, together
            return self._take(self._driver.engine.done_ranges, *of) or []

    def give_back(self, ranges: Iterable[OffsetRange]) -> None:
        """Give these ranges back, not done: they come again, here or at the next holder.

        At most once they can't come again: they are reported in ``unprocessed``, and no member gets them.
        """
        self._driver.call(self._give_back, _checked(ranges))

    def _give_back(self, ranges: list[OffsetRange]) -> None:
        with self._driver.lock.locked():
            self._take(self._delivery.give_back_ranges, ranges)

    def is_valid(self, given: OffsetRange) -> bool:
        """Whether the range's lease is proven at this moment, by this process's own clock."""
        until = self._proven_until(given)
        return until is not None and self._driver.now_ms() < until

    def _proven_until(self, given: OffsetRange) -> float | None:
        """Until when its lease is proven (ms, own clock); None: the range is not in flight."""
        _checked([given])

        def look(_: float) -> float | None:
            run = self._delivery.find(given)
            return None if run is None else run.assignment.lease.proven_until

        return self._look(look)

    # Looking.

    def ends(self) -> dict[Key, int]:
        """Partition → log end, of all subscribed partitions, held here or not (*blocking*).

        Raises KafkaUnavailableError if one has no leader, or is gone.
        """
        keys = self._look(lambda now: self._engine.subscription.partitions)
        marks = self._marks.look_up(keys)
        if missing := [key for key in keys if key not in marks]:
            topic, partition = missing[0]
            raise KafkaUnavailableError(
                f"{topic} [{partition}] told no log end: it has no leader at the moment, or is gone. Nothing was "
                "taken; try again when the brokers are well"
            )
        return {key: marks[key][1] for key in keys}

    def starts(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Partition → log start (*blocking*); partitions without a leader are left out."""
        return {key: low for key, (low, _) in self._marks.look_up(arguments.partitions("keys", keys)).items()}

    def missing_topics(self) -> list[str]:
        """Topics asked for by name that do not exist (yet)."""
        asked = self._engine.subscription
        return self._look(lambda now: sorted(asked.names - {topic for topic, _ in asked.partitions}))

    @property
    def closed(self) -> bool:
        """Whether it was closed, here or with its Marshal."""
        return self._closed

    def holds(self, given: OffsetRange) -> bool:
        """Whether the range is still in flight: its lease is not over, as far as this member knows."""
        return self._proven_until(given) is not None

    def wait_lost(self, ranges: Iterable[OffsetRange], timeout: float) -> bool:
        """Wait until one of the ranges is not in flight any more, at most timeout seconds; whether that happened."""
        timeout = arguments.seconds("timeout", timeout)
        return self._driver.servants.ask(self._wait_lost, _checked(ranges), timeout).wait()

    def _wait_lost(self, is_gone: Callable[[], bool], ranges: list[OffsetRange], timeout: float) -> bool:
        with self._driver.condition:
            return self._driver.wait_for(lambda: is_gone() or not all(map(self._delivery.find, ranges)), timeout)

    def is_done(self, ends: Mapping[Key, int]) -> bool:
        """Whether the log says that the group has done everything below these offsets."""
        arguments.offsets("ends", ends)
        return self._driver.call(self._is_done, ends)

    def _is_done(self, ends: Mapping[Key, int]) -> bool:
        with self._driver.lock.locked(step=False):
            return all(self._engine.known_stable(key) >= end - 1 for key, end in ends.items())

    def wait_done(self, ends: Mapping[Key, int], timeout: float) -> bool:
        """Wait for ``is_done``, or for a partition to take from, at most timeout seconds; whether all is done.

        It does not wait for partitions that have lost their position: no member works on them (``lost_positions``).
        """
        arguments.offsets("ends", ends)
        timeout = arguments.seconds("timeout", timeout)
        return self._driver.servants.ask(self._wait_done, ends, timeout).wait()

    def _wait_done(self, is_gone: Callable[[], bool], ends: Mapping[Key, int], timeout: float) -> bool:
        known = set(self._taker.open_keys(ends) or ())

        def settled() -> bool:
            opened = any(key in ends and key not in known for key in self._take(self._delivery.open) or ())
            return opened or is_gone() or self._closed or bool(self._engine.errors) or all_done()

        def all_done() -> bool:
            return self._is_done({key: end for key, end in ends.items() if key not in self._engine.blocked})

        with self._driver.condition:
            self._driver.wait_for(settled, timeout)
        return all_done()

    def _log_end(self, key: Key) -> int | None:
        """The log end, as last read."""
        return self._marks.end_of(key)

    def _freed(self) -> None:
        self._marks.close()
        self.at_end()


class GroupRangeConsumer(GroupMember, RangeConsumer):
    """A member of a coordinated group, and a RangeConsumer. Made by ``marshal.ranges(…, mode=Group())``."""

    def wait_done(self, ends: Mapping[Key, int], timeout: float) -> bool:
        """As :meth:`RangeConsumer.wait_done`; what this member has done goes into a checkpoint for it."""
        arguments.offsets("ends", ends)
        self._driver.call(self._ask_for, ends)
        return super().wait_done(ends, timeout)

    def _ask_for(self, ends: Mapping[Key, int]) -> None:
        """Begin a checkpoint if something below these ends is done that the newest one does not see."""
        with self._driver.lock.locked():
            found = self._member.checkpoints
            if found is None or found.newest is None or found.shown.barrier is not None:
                return
            done = {key: x.tracker.done.stable for key, x in self._engine.assignments.items() if key in ends}
            if any(self._engine.known_stable(key) < stable for key, stable in done.items()):
                self._take(found.take)


def _checked(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    wanted = "a list of ranges that take() has returned"
    found = arguments.several("ranges", ranges, wanted)
    for each in found:
        arguments.an_instance("ranges", each, OffsetRange, wanted)
    return found
