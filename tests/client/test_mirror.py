"""mirror_offsets=True: Kafka's tools see a coordinated group's progress, without harm to the group."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer

from kafka_marshal import Committed, ConfigurationError, Group, Marshal, OpenMessages
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.client import group_consumer
from kafka_marshal.engine.groups import mirror
from kafka_marshal.engine.work.topic_mark import mark_of
from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.metrics.measure import GroupLag
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.ports import TopicPartition
from rationalizer import (
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    JoinGroup,
    LeaveGroup,
    Outcome,
    Record,
    SettleOffsets,
    Upgrade,
    World,
    codes,
    encode,
)
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import take, wait_until
from tests.client.test_group import Groups, Joined, await_shared
from tests.modes import options_of

SESSION = 900
TOPIC = "t"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "MIRROR_MS", 100.0)


# -- in memory: what Kafka answers, and when --------------------------------------------------------------------------


class Kafka(MemoryCluster):
    """A cluster that records commits and answers on request."""

    def __init__(self, partitions: int = 2, messages: int = 20) -> None:
        super().__init__()
        self.commits: list[dict[TopicPartition, int]] = []
        self.tries = 0
        self.error: Exception | None = None
        #: Not set: no answer comes.
        self.answers = threading.Event()
        self.answers.set()
        self._partitions = partitions
        create_topic(self, "__marshal", 1, 10)
        self.broker.produce("__marshal", 0, encode(Upgrade("x", "admin", "any", 2)))
        self.make(messages)

    def make(self, messages: int) -> None:
        self.broker.create_topic(TOPIC, self._partitions)
        for partition in range(self._partitions):
            for number in range(messages):
                self.broker.produce(TOPIC, partition, str(number).encode())

    def connect(self, client: str) -> MemoryCluster:
        found = MemoryCluster(broker=self.broker, client=client)
        found.commit_for_group = self.commit_for_group  # type: ignore[method-assign]
        return found

    def commit_for_group(
        self, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]], timeout_s: float
    ) -> None:
        if not offsets:
            return
        self.tries += 1
        if not self.answers.wait(timeout_s):
            raise KafkaUnavailableError("no answer from the coordinator.")
        if self.error is not None:
            raise self.error
        super().commit_for_group(group_id, offsets, timeout_s)
        self.commits.append({key: offset for key, (offset, _) in offsets.items()})

    def committed(self) -> dict[int, int]:
        return {key[1]: offset for key, (offset, _) in self.broker.committed.get("g", {}).items()}

    def member(self, client_id: str = "a", **options: Any) -> Joined:
        marshal = Marshal.on_cluster(
            self.connect(client_id), group_id="g", client_id=client_id, heartbeat_interval=(SESSION // 2) / 1000
        )
        options = options_of({"mirror_offsets": True, **options}, Group, session_timeout=SESSION / 1000)
        return Joined(marshal, marshal.consumer([TOPIC], **options))


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


def test_only_what_has_changed_is_committed_in_one_request_and_the_last_at_close(kafka: Kafka) -> None:
    a = kafka.member()
    wait_until(lambda: kafka.committed() == {0: 0, 1: 0})
    assert len(kafka.commits) == 1
    a.take(40)
    a.consumer.commit()
    wait_until(lambda: kafka.committed() == {0: 20, 1: 20})
    count = kafka.tries
    until = time.monotonic() + 0.5
    wait_until(lambda: time.monotonic() > until)
    assert kafka.tries == count
    kafka.broker.produce(TOPIC, 1, b"")
    taken = a.take(1)
    a.marshal.close()
    assert taken == [(1, 20)]
    assert kafka.committed() == {0: 20, 1: 21}
    assert kafka.commits[-1] == {(TOPIC, 1): 21}


def write_holes(kafka: Kafka) -> None:
    """Of a member that has left: of partition 1 it passed 20 messages, 5 waits for a try, 7 is set aside."""
    world = World(0, 1)
    ids = ("m1", "m", "g")

    def append(record: Record) -> Outcome:
        offset, value = kafka.broker.produce("__marshal", 0, encode(record)), encode(record)
        outcome = world.apply(offset, 1_000, value)
        assert outcome.code == codes.OK, record
        return outcome

    append(Upgrade("x", "admin", "any", 4))
    append(ConfigureGroup("x", "admin", "g", ()))
    joined = append(JoinGroup(*ids, "", 0, SESSION, "sticky", False, "", ((TOPIC, 2),)))
    assert joined.member is not None
    assert joined.generation is not None
    of = (*ids, joined.member, joined.generation)
    append(SettleOffsets(*of, 99, TOPIC, 1, (), ((5, 5, 8, 1),), ((7, 9, 5, "Bad"),)))
    mark = mark_of(kafka.topic_info([TOPIC], 1.0)[TOPIC].topic_id)
    assert mark is not None
    done = (CommitEntry(TOPIC, 1, through=19), CommitEntry(TOPIC, 1, ranges=((mark, mark),)))
    append(CommitOffsets(*of, False, done))
    append(LeaveGroup(*of))


def test_what_is_open_comes_next_and_what_is_set_aside_does_not(kafka: Kafka) -> None:
    write_holes(kafka)
    a = kafka.member()
    both = [(TOPIC, 0), (TOPIC, 1)]
    wait_until(lambda: kafka.committed().get(1) == 5)
    assert [each.offset for each in a.consumer.committed(both)][1] == 5
    opened = (OpenMessages(5, 5, 1, None, None, 8), OpenMessages(7, 7, 5, None, "Bad", 9))
    assert a.consumer.committed(both, ranges=True)[1] == Committed(5, 19, ((0, MAX_KEY_HASH, 19),), (), opened)
    (lease,) = [each for each in a.marshal.world.leases() if each.partition == 1]
    assert lease.open == opened
    lag = {each["partition"]: each["lag"] for each in GroupLag(a.marshal._meter).read(closed=False)["partitions"]}
    assert lag == {0: 20, 1: 1}
    kafka.broker.produce("__marshal", 0, encode(SettleOffsets("o1", "o", "g", "", 0, 10**6, TOPIC, 1, ((5, 5),))))
    wait_until(lambda: kafka.committed().get(1) == 20)
    assert a.consumer.committed(both)[1].offset == 20, "what is set aside does not hold it back"
    assert a.consumer.committed(both, ranges=True)[1].open == opened[1:]
    a.marshal.close()


@pytest.mark.parametrize("options", [{}, {"mirror_offsets": False}])
def test_without_it_nothing_is_committed(kafka: Kafka, options: dict[str, Any]) -> None:
    with Marshal.on_cluster(kafka.connect("a"), group_id="g", heartbeat_interval=SESSION / 1000) as marshal:
        consumer = marshal.consumer([TOPIC], **options_of(options, Group, session_timeout=SESSION / 1000))
        take(consumer, 40)
        consumer.commit()
        assert marshal._driver.upkeep.jobs == []
        consumer.close()
        with pytest.raises(ConfigurationError, match="mirror_offsets"):
            marshal.consumer([TOPIC], mode=Group(mirror_offsets="yes"))  # type: ignore[arg-type]
    assert kafka.tries == 0


def test_a_position_that_stands_still_is_committed_again(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "SETTLE_MS", 0.0)
    monkeypatch.setattr(mirror, "REFRESH_MS", 400.0)
    a = kafka.member()
    both = {(TOPIC, 0), (TOPIC, 1)}  # one may be assigned before the other
    wait_until(lambda: all(sum(key in each for each in kafka.commits) >= 3 for key in both))
    assert {(key, offset) for each in kafka.commits for key, offset in each.items()} == {(key, 0) for key in both}
    a.marshal.close()


def test_a_refusal_is_logged_once_retried_and_harmless(kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    kafka.error = MarshalError("t [0]: Broker: Unknown member.")
    a = kafka.member()
    a.take(20)
    wait_until(lambda: kafka.tries >= 3)
    a.take(20)
    a.consumer.commit()
    assert a.consumer.state == "PART_OF_GROUP"
    assert a.marshal.health().ok
    kafka.error = RuntimeError("a fault of ours")
    tries = kafka.tries
    wait_until(lambda: kafka.tries > tries)
    kafka.error = None
    wait_until(lambda: kafka.committed() == {0: 20, 1: 20})
    wait_until(lambda: any(x.event == "mirror_back" for x in caplog.records))  # type: ignore[attr-defined]
    a.marshal.close()
    said = [x for x in caplog.records if x.event == "mirror_failed" and x.levelno == logging.WARNING]  # type: ignore[attr-defined]
    assert len(said) == 1
    for words in ("'g'", "Unknown member. Nothing is lost", "stop them"):
        assert words in said[0].getMessage()


@pytest.mark.parametrize("timeout", [0, 30])
def test_beats_and_close_do_not_wait_for_it(
    kafka: Kafka, timeout: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No commit is answered, and then all but the last."""
    monkeypatch.setattr(group_consumer, "MIRROR_TIMEOUT_S", 3 * SESSION / 1000)
    a = kafka.member()
    wait_until(lambda: kafka.committed() == {0: 0, 1: 0})
    kafka.answers.clear()
    a.take(40)
    a.consumer.commit()
    tries = kafka.tries
    wait_until(lambda: kafka.tries > tries)
    wait_until(lambda: kafka.tries > tries + 1)  # for three sessions
    assert a.consumer.state == "PART_OF_GROUP"
    began = time.monotonic()
    a.marshal.close(timeout)
    assert time.monotonic() - began < timeout + 1
    assert time.monotonic() - began < 1.5 * group_consumer.LAST_TIMEOUT_S
    assert not any("has not ended" in x.getMessage() for x in caplog.records)
    assert kafka.committed() == {0: 0, 1: 0}
    kafka.answers.set()


def test_a_topic_that_is_recreated_gets_no_positions_of_the_old_one(kafka: Kafka) -> None:
    a = kafka.member()
    a.take(40)
    a.consumer.commit()
    wait_until(lambda: kafka.committed() == {0: 20, 1: 20})
    kafka.broker.produce(TOPIC, 0, b"")
    job = a.marshal._driver.upkeep.jobs[0]
    assert isinstance(job, group_consumer.OffsetMirror)
    with a.marshal._driver.condition:  # it does not check by itself
        wait_until(lambda: a.marshal._driver.condition.wait(0.01) or not job._is_running)
        job.end()
    a.take(1)
    a.consumer.commit()
    kafka.broker.delete_topic(TOPIC)
    before = kafka.tries
    job.run()
    kafka.make(5)
    job.run()
    assert kafka.tries == before
    a.marshal.close()
    assert kafka.tries == before


def test_one_member_commits_what_the_other_has_released(kafka: Kafka) -> None:
    a, b = kafka.member("a"), kafka.member("b")
    await_shared(2, a, b)
    for x in (a, b):
        x.take(20)
        x.consumer.commit()
    wait_until(lambda: kafka.committed() == {0: 20, 1: 20})
    a.consumer.close()
    await_shared(2, b)
    for partition in range(2):
        kafka.broker.produce(TOPIC, partition, b"")
    b.take(2)
    b.consumer.close()
    assert kafka.committed() == {0: 21, 1: 21}
    for key in kafka.commits[-1]:
        offsets = [commit[key] for commit in kafka.commits if key in commit]
        assert offsets == sorted(offsets), "never back"
    for x in (a, b):
        x.marshal.close()


# -- on a real broker --------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Groups]:
    made = Groups(kafka_bootstrap, topic_factory)
    yield made
    made.close()


def lag(groups: Groups) -> dict[int, tuple[int, int]]:
    """Partition → (committed, lag), by Kafka's API."""
    committed = groups.cluster.kafka_group(groups.group, 10).committed
    ends = groups.cluster.watermarks(committed, 10)
    return {key[1]: (offset, ends[key][1] - offset) for key, (offset, _) in sorted(committed.items())}


def test_kafka_shows_what_is_done_and_true_lag(groups: Groups) -> None:
    topic = groups.topic(2, 50)
    a = groups.joined("a", topic, mirror_offsets=True)
    wait_until(lambda: lag(groups) == {0: (0, 50), 1: (0, 50)})
    found: list[Any] = []
    while len(found) < 30:
        found += a.consumer.consume(10, timeout=10)
    held = next(message for message in found if message.offset() == 3)
    for message in found:
        if message is not held:
            a.consumer.done(message)
    a.consumer.commit()
    done = Counter(message.partition() for message in found)
    stable = {p: 3 if p == held.partition() else done[p] for p in range(2)}
    wait_until(lambda: lag(groups) == {p: (offset, 50 - offset) for p, offset in stable.items()})
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert lag(groups)[held.partition()][0] == 3, "a message in the middle is in hand"
    a.consumer.done(held)
    a.marshal.close()
    assert lag(groups) == {p: (done[p], 50 - done[p]) for p in range(2)}, "close has committed the last"


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_kafkas_own_consumers_keep_the_mirror_out_and_continue_where_it_was(
    groups: Groups, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = groups.topic(1, 50)
    a = groups.joined("a", topic, mirror_offsets=True)
    a.take(10)
    wait_until(lambda: lag(groups) == {0: (10, 40)})
    settings = {"bootstrap.servers": groups.bootstrap, "group.id": groups.group, "group.protocol": protocol}
    kafka = Consumer({**settings, "auto.offset.reset": "error", "enable.auto.commit": False})
    try:
        kafka.subscribe([topic])
        first = wait_until(lambda: kafka.poll(0.1))
        assert (first.error(), first.offset()) == (None, 10)
        a.take(20)
        wait_until(lambda: [x for x in caplog.records if x.event == "mirror_failed"])  # type: ignore[attr-defined]
        a.take(10)
        a.consumer.commit()
        assert a.consumer.state == "PART_OF_GROUP"
        assert lag(groups) == {0: (10, 40)}
    finally:
        kafka.close()
    wait_until(lambda: lag(groups) == {0: (40, 10)})
    (said,) = [x for x in caplog.records if x.event == "mirror_failed"]  # type: ignore[attr-defined]
    assert f"{topic} [0]: Broker: " in said.getMessage()
    a.marshal.close()


def test_a_topic_of_the_same_name_begins_without_a_position(groups: Groups) -> None:
    name, probe = f"again-{os.urandom(4).hex()}", Probe(groups.bootstrap)
    probe.create_topic(name, 1, 1, {})
    try:
        groups.publish(name, 1, 10)
        a = groups.joined("a", name, mirror_offsets=True)
        a.take(10)
        wait_until(lambda: lag(groups) == {0: (10, 0)})
        probe.delete_topics([name])
        wait_until(lambda: lag(groups) == {}, what="Kafka drops them with the topic")
        probe.create_topic(name, 1, 1, {})
        wait_until(lambda: a.consumer.lost_positions)
        a.marshal.close()
        assert lag(groups) == {}
    finally:
        probe.delete_topics([name])
