"""RangeConsumer: ranges of offsets of the partitions that this member holds, for whoever reads them by himself.

Nothing is fetched here. The user's thread asks the leaders where the logs end, the engine cuts ranges from there down
to what is done, and what the user says is done goes into the log with the beats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future

from kafka_marshal import arguments
from kafka_marshal.client.base import Host, Membership, TopicPartition
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.engine.work.ranges import OffsetRange, RangeDelivery, RangeRun
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.serving import LOOK_S, EndedError, LateError
from kafka_marshal.types import Key

__all__ = ["OffsetRange", "RangeConsumer", "RangesCallback"]


#: (log start, log end) by partition.
Marks = dict[Key, tuple[int, int]]

#: While there is nothing new, the leaders are asked again this often.
POLL_S = 0.1

#: How long the leaders may take to answer.
LOOKUP_TIMEOUT_S = 10.0

RangesCallback = Callable[["RangeConsumer", list[TopicPartition]], object]


class RangeConsumer(Membership["RangeConsumer"]):
    """Hands out offset ranges of the partitions this member holds. Made by :meth:`Marshal.ranges`.

    ``done``, ``give_back``, ``is_valid``, ``close`` … may be called from any thread; ``take`` by one at a time.
    """

    def __init__(
        self,
        marshal: Host,
        driver: Driver,
        options: ConsumerOptions,
        callbacks: Mapping[str, RangesCallback | None],
        committed: bool,
    ) -> None:
        self._options = options
        #: Ranges end at the last stable offset, as a read_committed reader does.
        self.committed = committed
        self._aside = driver.cluster.runtime.executor(1, "kafka-marshal-ahead")
        self._ahead: Future[Marks] | None = None
        self._ends: dict[Key, int] = {}
        settings = options.settings(callbacks, ranges=True)
        super().__init__(marshal, driver, options.topics, settings, callbacks)

    @property
    def _delivery(self) -> RangeDelivery:
        assert self._engine.ranges is not None, "made with ranges=True"
        return self._engine.ranges

    # Getting ranges.

    def take(
        self, max_records: int, ends: Mapping[Key, int] | None = None, timeout: float | None = None
    ) -> list[OffsetRange]:
        """Ranges of at most max_records records in all, in hand from here on; at most one of each partition.

        They run from the first offset that is neither done nor in hand to where the log ends now (its last stable
        offset under read_committed), leave out what is done (P6), and share max_records fairly. ``ends`` bounds them:
        (topic, partition) → the first offset not wanted; partitions that it does not name are left alone. Waits up to
        timeout seconds (None: until there is something) and returns [] then, and when ``stop()`` or ``close()`` ends
        the wait. After ``stop()`` it waits its timeout out, after ``close()`` it raises ClosedError.

        At most once, every range is granted by the log before it is returned (C12, C13).

        Raises KafkaUnavailableError where the leaders do not answer, what ended the Marshal, and, made with
        ``position_lost="raise"``, PositionLostError (P11).
        """
        max_records = arguments.a_whole("max_records", max_records, 1)
        if ends is not None:
            arguments.offsets("ends", ends)
        deadline = self._begin(timeout)
        if self._marshal.stop_signal:
            self._wait_stopped(deadline)
            return []
        answer = self._driver.servants.ask(self._serve, max_records, ends, timeout, undo=self.give_back)
        try:
            # At most once, what is granted late is as good as lost: it is waited for.
            found = answer.wait(None if timeout is None or self._options.at_most_once else timeout + LOOK_S)
            answer.receipt.out = True; return found  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except EndedError:
            return []
        except BaseException as error:
            answer.receipt.left = True
            if isinstance(error, LateError):  # our own threads are held up
                return []
            raise

    def _serve(
        self, is_gone: Callable[[], bool], max_records: int, ends: Mapping[Key, int] | None, timeout: float | None
    ) -> list[OffsetRange]:
        """Carry out ``take``, on a thread of our own."""
        deadline = None if timeout is None else self._driver.monotonic() + timeout
        while not is_gone():
            keys = self._open_keys(ends)
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

    def _open_keys(self, ends: Mapping[Key, int] | None) -> list[Key] | None:
        """Partitions to take from, None: it is over."""
        with self._driver.locked(step=False):
            if self._is_over():
                return None
            keys = self._delivery.open(self._driver.now_ms())
        return [key for key in keys if ends is None or key in ends]

    def _pause(self, keys: list[Key], ends: Mapping[Key, int] | None, timeout_s: float) -> None:
        """Wait until other partitions can be taken from, or it is time to ask for the log ends again."""
        known = set(keys)

        def changed() -> bool:
            if self._closed or self._engine.errors:
                return True
            return any(
                key not in known and (ends is None or key in ends) for key in self._delivery.open(self._driver.now_ms())
            )

        with self._driver.condition:
            self._driver.wait_for(changed, timeout_s)

    def _take_known(self, max_records: int, ends: Mapping[Key, int] | None, keys: Collection[Key]) -> list[RangeRun]:
        """Take from what ``look_ahead`` has found, if that fills a round: then nobody need be asked."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return []
        marks = _bounded(ahead.result(), ends)
        if not all(key in marks for key in keys):
            return []
        return self._take(marks, max_records, only_full=True)

    def _take_fresh(self, max_records: int, ends: Mapping[Key, int] | None, keys: list[Key]) -> list[RangeRun]:
        if not keys:
            return []
        marks = self._look_up(keys)
        with self._driver.locked():
            self._delivery.beyond_end({key: end for key, (_, end) in marks.items()}, self._driver.now_ms())
        return self._take(_bounded(marks, ends), max_records, only_full=False)

    def _look_up(self, keys: Collection[Key]) -> Marks:
        """Ask the leaders (*blocking*)."""
        cluster = self._driver.cluster
        ask = cluster.committed_watermarks if self.committed else cluster.watermarks
        marks = ask(keys, LOOKUP_TIMEOUT_S)
        self._ends |= {key: end for key, (_, end) in marks.items()}
        return marks

    def _take(self, marks: Marks, max_records: int, *, only_full: bool) -> list[RangeRun]:
        with self._driver.locked(step=False):
            if self._is_over():
                return []
            now = self._driver.now_ms()
            if only_full and self._delivery.available(marks, now) < max_records:
                return []
            runs = self._delivery.take(marks, max_records, now)
        return self._await_grants(runs) if self._options.at_most_once else runs

    def _await_grants(self, runs: list[RangeRun]) -> list[RangeRun]:
        """Wait until our replica has applied all proposals (C13); those that were granted."""
        granted: list[RangeRun] = []
        waiting = list(runs)
        try:
            with self._driver.condition:
                self._driver.wait_for(lambda: all(map(self._delivery.is_answered, runs)), None)
            with self._driver.locked():
                while waiting:
                    run = waiting.pop()
                    if self._delivery.collect_range(run, self._driver.now_ms()):
                        granted.insert(0, run)
        except BaseException:  # Ctrl-C while waiting: what was granted will reach nobody
            with self._driver.locked():
                for run in granted:
                    self._delivery.never_handed_out(run, self._driver.now_ms())
                for run in waiting:
                    self._delivery.grants.give_up(run.assignment, self._driver.now_ms())
            raise
        return granted

    def look_ahead(self) -> None:
        """Ask where the logs end in the background: the next ``take`` uses the answer if that makes a full round."""
        self._driver.call(self._look_ahead)

    def _look_ahead(self) -> None:
        with self._driver.locked(step=False):
            if self._closed:
                return
            keys = [key for key, x in self._engine.assignments.items() if x.shown and not x.releasing]
        self._ahead = self._aside.submit(self._look_up, keys) if keys else None

    # Saying what becomes of them.

    def done(self, ranges: Iterable[OffsetRange], *, flush: bool = False, together: bool = False) -> list[OffsetRange]:
        """These ranges are done: the next beats say so in the log (C14), with flush at once. Returns what counted.

        A range whose lease has ended commits nothing, and is counted in ``ignored_done``. With ``together`` nothing
        is done, nor counted, unless all of them are still in hand.
        """
        arguments.a_flag("flush", flush)
        arguments.a_flag("together", together)
        return self._driver.call(self._done, _checked(ranges), flush, together)

    def _done(self, ranges: list[OffsetRange], flush: bool, together: bool) -> list[OffsetRange]:
        with self._driver.locked() as engine:
            now = self._driver.now_ms()
            if together and not all(map(self._delivery.find, ranges)):
                return []
            counted = [given for given in ranges if self._delivery.done_range(given, now)]
            if flush and not self._options.at_most_once:
                for given in counted:
                    if (lease := engine.book.leases.get((given.topic, given.partition))) is not None:
                        engine.book.beat_soon(lease.cp, now)
                engine.commit_ranges_soon(now)
        return counted

    def give_back(self, ranges: Iterable[OffsetRange]) -> None:
        """These ranges are in hand no longer, and not done: they come again, here or at the next holder.

        At most once they can't: they are reported in ``unprocessed``, and nobody gets them (C13).
        """
        self._driver.call(self._give_back, _checked(ranges))

    def _give_back(self, ranges: list[OffsetRange]) -> None:
        with self._driver.locked():
            for given in ranges:
                self._delivery.give_back_range(given, self._driver.now_ms())

    def is_valid(self, given: OffsetRange) -> bool:
        """Whether the range's lease is proven at this moment, by this process's own clock (T4)."""
        return self._driver.call(self._is_valid, *_checked([given]))

    def _is_valid(self, given: OffsetRange) -> bool:
        with self._driver.locked(step=False):
            run = self._delivery.find(given)
            return run is not None and self._driver.now_ms() < run.assignment.lease.proven_until

    # Looking.

    def ends(self) -> dict[Key, int]:
        """Where the logs of all subscribed partitions end now, held here or not (*blocking*)."""
        keys = self._driver.call(self._partitions)
        marks = self._look_up(keys)
        if missing := [key for key in keys if key not in marks]:
            topic, partition = missing[0]
            raise KafkaUnavailableError(
                f"{topic} [{partition}] told no log end: it has no leader at the moment, or is gone. Nothing was "
                "taken; try again when the brokers are well"
            )
        return {key: marks[key][1] for key in keys}

    def _partitions(self) -> Collection[Key]:
        with self._driver.locked(step=False):
            return self._engine.subscription.partitions

    def starts(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Where these partitions' logs begin now (*blocking*); those without a leader are left out."""
        return {key: low for key, (low, _) in self._look_up(arguments.partitions("keys", keys)).items()}

    def missing_topics(self) -> list[str]:
        """Topics asked for by name that do not exist (yet)."""
        return self._driver.call(self._missing_topics)

    def _missing_topics(self) -> list[str]:
        with self._driver.locked(step=False):
            known = {topic for topic, _ in self._engine.subscription.partitions}
            return sorted(self._engine.subscription.names - known)

    @property
    def closed(self) -> bool:
        """Whether it was closed, here or with its Marshal."""
        return self._closed

    def holds(self, given: OffsetRange) -> bool:
        """Whether the range is in hand still: its lease is not over, as far as we know."""
        return self._driver.call(self._holds, *_checked([given]))

    def _holds(self, given: OffsetRange) -> bool:
        with self._driver.locked(step=False):
            return self._delivery.find(given) is not None

    def wait_lost(self, ranges: Iterable[OffsetRange], timeout: float) -> bool:
        """Wait until one of the ranges is not in hand any more, at most timeout seconds; whether that came."""
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
        with self._driver.locked(step=False):
            return all(self._engine.known_stable(key) >= end - 1 for key, end in ends.items())

    def wait_done(self, ends: Mapping[Key, int], timeout: float) -> bool:
        """Wait for ``is_done``, or for a partition to take from, at most timeout seconds; whether all is done.

        What has lost its position is not waited for: nobody works on it (``lost_positions``).
        """
        arguments.offsets("ends", ends)
        timeout = arguments.seconds("timeout", timeout)
        return self._driver.servants.ask(self._wait_done, ends, timeout).wait()

    def _wait_done(self, is_gone: Callable[[], bool], ends: Mapping[Key, int], timeout: float) -> bool:
        known = set(self._open_keys(ends) or ())

        def settled() -> bool:
            opened = any(key in ends and key not in known for key in self._delivery.open(self._driver.now_ms()))
            return opened or is_gone() or self._closed or bool(self._engine.errors) or all_done()

        def all_done() -> bool:
            return self._is_done({key: end for key, end in ends.items() if key not in self._engine.blocked})

        with self._driver.condition:
            self._driver.wait_for(settled, timeout)
        return all_done()

    def _log_end(self, key: Key) -> int | None:
        """The log end as of the last look."""
        return self._ends.get(key)

    def _freed(self) -> None:
        self._aside.shutdown(wait=False, cancel_futures=True)


def _checked(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    wanted = "a list of ranges that take() has returned"
    found = arguments.several("ranges", ranges, wanted)
    for each in found:
        arguments.an_instance("ranges", each, OffsetRange, wanted)
    return found


def _bounded(marks: Marks, ends: Mapping[Key, int] | None) -> Marks:
    if ends is None:
        return marks
    return {key: (low, min(end, ends[key])) for key, (low, end) in marks.items() if key in ends}
