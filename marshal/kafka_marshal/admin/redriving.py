"""Dead letters redriven: each produced into a topic of the group, in a transaction that also says that it was.

A group `GROUP.redrive` reads the dead-letter topic, so what was redriven is in the log and in Kafka: a run that was
killed is continued by the next one, and several at a time share the partitions.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kafka_marshal.admin.dead_letters import DeadLetters
from kafka_marshal.client.dead_letters import DeadLetter, OddLetter, read_letter
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.errors import AdminError, MarshalError, TransactionError
from kafka_marshal.ports import Cluster, TopicPartition

#: Letters of one transaction; with a rate, as many as are due in this time (s).
MOST_LETTERS = 500
STEP_S = 0.25

#: How often Kafka is asked whether all letters are done, by this run or by another (s).
WATCH_S = 0.5

#: How long a batch is gathered (s).
GATHER_S = 0.1

LOOKUP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class RedrivenLetters:
    """What a run did with the letters of a topic, or would do (``dry_run``)."""

    #: The dead-letter topic, and the topic that the messages were produced into.
    source: str
    to: str
    #: The group whose positions say what was redriven.
    group: str
    redriven: int = 0
    #: Copies of a letter before them.
    repeats: int = 0
    #: Letters of other groups, and with other reasons; later runs begin behind them.
    passed_over: int = 0
    #: Records that are no dead letters, or that hold no message.
    others: int = 0


@dataclass(slots=True)
class LetterPlan:
    """The letters that are not redriven yet, read once."""

    found: RedrivenLetters
    of_group: str
    reason: str | None
    #: Partition → the last letter's offset, where there are letters to be done.
    last: dict[TopicPartition, int] = field(default_factory=dict)
    #: What identifies a message → the place of its first letter.
    first: dict[tuple[str, str, int, int], tuple[str, int, int]] = field(default_factory=dict)
    #: Class of the exception → letters of the group that are not redriven yet.
    reasons: Counter[str] = field(default_factory=Counter)

    def judge(self, letter: DeadLetter | OddLetter | None, found: RedrivenLetters) -> bool:
        """Whether this letter is to be redriven; it is counted."""
        is_whole = isinstance(letter, DeadLetter) and not (letter.epoch is None and letter.value is None)
        if not isinstance(letter, DeadLetter) or not is_whole:
            found.others += 1
        elif letter.group != self.of_group or self.reason not in (None, letter.error, class_of(letter)):
            found.passed_over += 1
        elif self.first.setdefault(letter.source, letter.place) != letter.place:
            found.repeats += 1
        else:
            found.redriven += 1
            return True
        return False


def redriving_group(group: str) -> str:
    """The group that reads a dead-letter topic for this one."""
    return f"{group}.redrive"


def class_of(letter: DeadLetter) -> str:
    """The exception's class without its module; "": not said."""
    return (letter.error or "").rpartition(".")[2]


def plan_letters(
    cluster: Cluster,
    group: str,
    source: str,
    to: str,
    reason: str | None,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> LetterPlan:
    """Read the dead-letter topic to its present end (*blocking*). Raises AdminError if a topic is missing."""
    if cluster.topic_info([to], timeout_s).get(to) is None:
        raise AdminError(f"there is no topic {to!r}. Nothing was changed. Create it, or name another one")
    plan = LetterPlan(RedrivenLetters(source, to, redriving_group(group)), group, reason)
    with DeadLetters(cluster, source, None, timeout_s, close=False) as letters:
        at = _committed(cluster, plan.found.group, source, timeout_s)
        with suppress(StopIteration):
            while True:
                letter = letters.next_of_all()
                key = letter.place[:2]
                if letter.place[2] >= at.get(key, 0):
                    plan.last[key] = letter.place[2]
                    plan.judge(letter, plan.found)
                    if isinstance(letter, DeadLetter) and letter.group == group:
                        plan.reasons[class_of(letter)] += 1
                elif isinstance(letter, DeadLetter):
                    plan.first.setdefault(letter.source, letter.place)
                if progress is not None:
                    progress(letters.done, letters.total)
        plan.found.others += letters.others
    return plan


def _committed(cluster: Cluster, group: str, source: str, timeout_s: float) -> dict[TopicPartition, int]:
    """The next offset of each partition, as Kafka has it: what counts in transactions."""
    partitions = cluster.topic_info([source], timeout_s)[source].partitions
    found = {key: cluster.committed_offset(group, key, timeout_s) for key in ((source, n) for n in range(partitions))}
    return {key: at[0] for key, at in found.items() if at is not None}


def redrive_letters(
    open_member: Callable[[str], Marshal],
    cluster: Cluster,
    plan: LetterPlan,
    rate: float | None,
    progress: Callable[[int, int], None] | None = None,
) -> RedrivenLetters:
    """Produce the letters of the plan into their topic (*blocking*).

    Letters that are written meanwhile may be among them. Raises MarshalError; what was done before that is done.
    """
    done = RedrivenLetters(plan.found.source, plan.found.to, plan.found.group)
    if not plan.last:
        return done
    most = MOST_LETTERS if rate is None else max(1, min(MOST_LETTERS, int(rate * STEP_S)))
    with open_member(done.group) as marshal, marshal.consumer([done.source], transactions=True) as consumer:
        watch = _Watch(cluster, done.group, plan.last, consumer.stop)
        monotonic, begun = cluster.runtime.monotonic, cluster.runtime.monotonic()
        try:
            for batch in consumer.batches(max_messages=most, timeout=GATHER_S):
                found = RedrivenLetters(done.source, done.to, done.group)
                try:
                    with consumer.transaction(batch) as tx:
                        for message in batch:
                            letter = read_letter(message)
                            if plan.judge(letter, found) and isinstance(letter, DeadLetter):
                                tx.produce(done.to, letter.value, letter.key, letter.headers)
                except TransactionError as error:
                    if not error.retry:
                        raise
                    continue  # it comes again, or was committed
                for name in ("redriven", "repeats", "passed_over", "others"):
                    setattr(done, name, getattr(done, name) + getattr(found, name))
                if progress is not None:
                    progress(done.redriven, plan.found.redriven)
                if watch.reached({(done.source, batch.partition): batch.last_offset + 1}):
                    break
                if rate is not None and watch.over.wait(max(0.0, begun + done.redriven / rate - monotonic())):
                    break
        finally:
            watch.end()
    watch.check()
    return done


class _Watch:
    """Stops the consumer when Kafka has the last letter of each partition as done: another run may have some."""

    def __init__(
        self, cluster: Cluster, group: str, last: Mapping[TopicPartition, int], stop: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._left = dict(last)
        self._lock = threading.Lock()
        self._stop = stop
        self._error: MarshalError | None = None
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-marshal-redrive", daemon=True)
        self._thread.start()

    def reached(self, at: Mapping[TopicPartition, int]) -> bool:
        """Note the next offsets of partitions; whether all is done."""
        with self._lock:
            for key, offset in at.items():
                if key in self._left and offset > self._left[key]:
                    del self._left[key]
            return not self._left

    def _run(self) -> None:
        try:
            while not self.over.wait(WATCH_S):
                with self._lock:
                    left = list(self._left)
                found = {key: self._cluster.committed_offset(self._group, key, LOOKUP_TIMEOUT_S) for key in left}
                if self.reached({key: at[0] for key, at in found.items() if at is not None}):
                    break
        except MarshalError as error:
            self._error = error
        self.over.set()
        self._stop()

    def end(self) -> None:
        """It is not needed any more (*blocking*)."""
        self.over.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what ended it early."""
        if self._error is not None:
            raise self._error
