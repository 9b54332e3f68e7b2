"""A member on a cluster in memory, a user's loop that continues after interrupts, and a record of every message."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kafka_marshal import Consumer, LeaseInfo, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node.coordination_topic import create_topic
from tests.interrupts import Interrupts, Report, StuckError, run_within, stacks
from tests.modes import options_of

HI = 300
PARTITIONS = 2
MESSAGES = 6
TOPIC = "t"
GROUP = "g"

#: No interrupts in the cluster's code, which stands in for librdkafka in C.
WITHOUT = ("kafka_marshal.testing", "kafka_marshal.adapters.memory")

#: Dropped messages must be delivered again within this time: some heartbeat intervals.
AGAIN_S = 4.0
#: Everything else ends within this time, also on a busy machine; what hangs hangs for ever.
ANSWER_S = 10.0
#: At most once nothing is repeated, so a silence of this length counts as the end.
QUIET_S = 0.15
LONG_QUIET_S = 1.5

Key = tuple[int, int]


def offsets(keys: Iterable[Key]) -> str:
    """For messages: t[0]: 0-3, 7; t[1]: 0."""
    runs: dict[int, list[list[int]]] = {}
    for partition, offset in sorted(keys):
        found = runs.setdefault(partition, [])
        if found and found[-1][1] == offset - 1:
            found[-1][1] = offset
        else:
            found.append([offset, offset])
    return "; ".join(f"{TOPIC}[{partition}]: {_written(found)}" for partition, found in runs.items())


def _written(runs: list[list[int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("kafka-marshal")


def memory_cluster(partitions: int = PARTITIONS, messages: int = MESSAGES) -> MemoryCluster:
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 10)
    cluster.broker.create_topic(TOPIC, partitions)
    for partition in range(partitions):
        for number in range(messages):
            cluster.broker.produce(TOPIC, partition, str(number).encode())
    return cluster


def member(cluster: MemoryCluster, client_id: str = "a", hi: int = HI) -> Marshal:
    return Marshal.on_cluster(
        cluster.connect(client_id), group_id=GROUP, client_id=client_id, heartbeat_interval=hi / 1000
    )


def await_assigned(consumer: Any) -> None:
    """All partitions: on_assign was called or would have been, so that an end calls on_revoke."""
    until = time.monotonic() + AGAIN_S
    while len(consumer.assignment()) < PARTITIONS:
        assert time.monotonic() < until, f"only {consumer.assignment()} assigned after {AGAIN_S:g} s"
        time.sleep(0.002)


class Story:
    """One run: everything delivered, marked as done, and found in the log at the end."""

    def __init__(self, hi: int = HI, **options: Any) -> None:
        self.at_most_once = options.get("delivery") == "at-most-once"
        self._threads_before = set(threading.enumerate())
        self.cluster = memory_cluster()
        self.marshal = member(self.cluster, hi=hi)
        self._options = options
        #: How often each message was delivered.
        self.seen: Counter[Key] = Counter()
        #: Messages for which done() has returned, and those of them delivered again.
        self.done: set[Key] = set()
        self.after_done: set[Key] = set()
        #: Delivered for the first time after a later one.
        self.behind: set[Key] = set()
        self.was_interrupted = False
        #: Delivered and not marked as done yet: keys, and the function that marks them.
        self.pending: list[tuple[list[Key], Callable[[], object]]] = []
        #: Never to be delivered: skipped by a seek.
        self.skipped: set[Key] = set()
        self.everything = {(partition, number) for partition in range(PARTITIONS) for number in range(MESSAGES)}
        self._last_news = time.monotonic()
        self._ended = threading.Event()
        self._threads_at_start: set[threading.Thread] = set()

    def make_consumer(self) -> Consumer:
        made: Consumer = self.marshal.consumer([TOPIC], **options_of(self._options))
        return made

    # The user's side.

    def hand_out(self, message: Any) -> Key:
        key = (message.partition(), message.offset())
        if key not in self.seen and key[1] < max((x for p, x in self.seen if p == key[0]), default=-1):
            self.behind.add(key)
        self._note([key])
        return key

    def _note(self, keys: Sequence[Key]) -> None:
        self.seen.update(keys)
        self.after_done.update(key for key in keys if key in self.done)
        self._last_news = time.monotonic()

    def hand_out_range(self, given: Any) -> list[Key]:
        keys = [(given.partition, offset) for offset in range(given.first, given.last + 1)]
        self._note(keys)
        return keys

    def will_do(self, keys: list[Key], done: Callable[[], object]) -> None:
        self.pending.append((keys, done))

    def say_done(self, leave: int = 0) -> None:
        """Mark pending messages as done; repeated after an interrupt, when the result is unknown."""
        while len(self.pending) > leave:
            keys, done = self.pending[0]
            done()
            self.done.update(keys)
            self.pending.pop(0)

    @property
    def is_complete(self) -> bool:
        return self.seen.keys() >= self.everything - self.skipped and not self.pending

    def work(self, interrupts: Interrupts, loop: Callable[[Story], object]) -> None:
        """Run the loop, again after each interrupt, until all messages arrived or no more do."""
        self._threads_at_start = self.threads()
        watch = threading.Thread(target=self._watch, name="watch", daemon=True)
        watch.start()
        try:
            while not self.is_complete and not self.marshal.stopping:
                self.interrupted(interrupts, lambda: loop(self), once=True)
        finally:
            self._ended.set()
            watch.join()

    def interrupted(self, interrupts: Interrupts, call: Callable[[], Any], *, once: bool = False) -> Any:
        """Call, and call again after an interrupt, as a user does."""
        while True:
            try:
                with interrupts:
                    return call()
            except BaseException as error:
                if not isinstance(error, interrupts.exception):  # type: ignore[arg-type]
                    raise
                self._last_news = time.monotonic()
                self.was_interrupted = True
                if once:
                    return None

    def _watch(self) -> None:
        """End loops that would wait for ever. stop() takes no lock."""
        while not self._ended.wait(0.01):
            quiet_s = time.monotonic() - self._last_news
            is_last = {(p, MESSAGES - 1) for p in range(PARTITIONS)} <= self.seen.keys()
            limit_s = (QUIET_S if is_last else LONG_QUIET_S) if self.at_most_once else AGAIN_S
            if quiet_s > limit_s:
                self.marshal.stop()

    # Afterwards.

    def threads(self) -> set[threading.Thread]:
        return {each for each in set(threading.enumerate()) - self._threads_before if is_ours(each)}

    def check(self, consumer: Any) -> None:
        """Check that nothing is locked or hangs, no thread has died, and no message is lost or repeated."""
        answer("a call of another thread", lambda: (consumer.assignment(), self.marshal.world.leases()))
        dead = sorted(each.name for each in self._threads_at_start if not each.is_alive())
        assert not dead, f"threads ended before close(): {dead}"
        answer("Consumer.close()", consumer.close)
        leases = answer("WorldView.lease()", self.leases)
        unprocessed = {(p, x) for _, p, first, last in consumer.unprocessed for x in range(first, last + 1)}
        self.close()
        (self._check_at_most_once if self.at_most_once else self._check_at_least_once)(leases, unprocessed)

    def close(self) -> None:
        """Close, and check that the threads end."""
        answer("Marshal.close()", self.marshal.close)
        until = time.monotonic() + ANSWER_S
        while self.threads():
            left = sorted(each.name for each in self.threads())
            assert time.monotonic() < until, f"threads are left {ANSWER_S:g} s after close(): {left}\n{stacks()}"
            time.sleep(0.002)

    def leases(self) -> dict[int, LeaseInfo]:
        found = {p: self.marshal.world.lease(TOPIC, p) for p in range(PARTITIONS)}
        return {p: info for p, info in found.items() if info is not None}

    def check_nothing_lost(self, consumer: Any) -> None:
        """After a close at any moment: what the log calls done or granted was delivered or is reported."""
        leases = answer("WorldView.lease()", self.leases)
        unprocessed = {(p, x) for _, p, first, last in consumer.unprocessed for x in range(first, last + 1)}
        if self.at_most_once:
            self._check_granted(leases, unprocessed)
        else:
            self._done_in_the_log(leases)

    def _done_in_the_log(self, leases: dict[int, LeaseInfo]) -> set[Key]:
        done = set()
        for partition, info in leases.items():
            done |= {(partition, x) for x in range(-1 if info.stable is None else info.stable + 1)}
            done |= {(partition, x) for first, last in info.ranges for x in range(first, last + 1)}
        lost = done - self.seen.keys() - self.skipped
        assert not lost, f"done in the log and never handed out: {offsets(lost)}"
        return done

    def _check_at_least_once(self, leases: dict[int, LeaseInfo], _unprocessed: set[Key]) -> None:
        done = self._done_in_the_log(leases)
        missing = self.everything - self.seen.keys() - self.skipped
        assert not missing, f"not handed out within {AGAIN_S:g} s of the last message: {offsets(missing)}"
        assert not self.pending, f"done() was never answered for {offsets(self.pending[0][0])}"
        # A lease lost meanwhile (the machine stopped) forgets what was done.
        if len(held_throughout(leases)) == len(leases):
            forgotten = self.done - done
            assert not forgotten, f"done() returned, and the log does not have it after close(): {offsets(forgotten)}"
            again = [key for key, times in self.seen.items() if times > 1 and not self.was_interrupted]
            assert not again, f"handed out again, and nothing was interrupted: {offsets(again)}"
            # Between poll() and such a loop, a message has already left the library: it was dropped.
            behind = self.behind if self._options.get("auto_done", True) else set()
            assert not behind, f"handed out after later ones: {offsets(behind)}"
            assert not self.after_done, f"handed out again after done() had returned: {offsets(self.after_done)}"

    def _check_at_most_once(self, leases: dict[int, LeaseInfo], unprocessed: set[Key]) -> None:
        self._check_granted(leases, unprocessed)
        missing = self.everything - self.seen.keys() - unprocessed - self.skipped
        assert not missing, f"never granted, within {LONG_QUIET_S:g} s of the last message: {offsets(missing)}"

    def _check_granted(self, leases: dict[int, LeaseInfo], unprocessed: set[Key]) -> None:
        twice = [key for key, times in self.seen.items() if times > 1]
        assert not twice, f"handed out more than once: {offsets(twice)}"
        wrong = unprocessed & self.seen.keys()
        assert not wrong, f"in unprocessed, and handed out all the same: {offsets(wrong)}"
        granted = {
            (partition, x)
            for partition, info in leases.items()
            for x in range(0 if info.granted is None else info.granted + 1)
        }
        lost = granted - self.seen.keys() - unprocessed - self.skipped
        assert not lost, f"granted, and neither handed out nor in unprocessed: {offsets(lost)}"


def held_throughout(leases: Mapping[int, LeaseInfo | None]) -> set[int]:
    """The partitions whose leases were claimed only once; with several CPs, some of them.

    A CP counts epochs for all its leases.
    """
    epochs = {partition: info.epoch for partition, info in leases.items() if info is not None}
    if sorted(epochs.values()) == list(range(1, len(epochs) + 1)):
        return set(epochs)
    return {partition for partition, epoch in epochs.items() if epoch == 1}


def answer(what: str, call: Callable[[], Any]) -> Any:
    """The call's result, from a new thread, within ANSWER_S."""
    return run_within(ANSWER_S, call, what)


def verdict(report: Report) -> str:
    """A line for each failure, and the stacks of the first hang."""
    text = [str(report).splitlines()[0]]
    stuck = ""
    for failure in report.failures:
        first, *rest = str(failure).splitlines()
        is_assertion = isinstance(failure.error, AssertionError)
        text.append(first if is_assertion else "\n".join([first, *rest[-6:]]))
        if isinstance(failure.error, StuckError) and not stuck:
            stuck = f"\nof the first that is stuck: {failure}"
    return "\n".join(text) + stuck
