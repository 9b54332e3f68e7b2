"""On a broker with common settings (see conftest.py), queries change nothing, and members work."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kafka_marshal import Admin, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.range_reader import read_range
from kafka_marshal.errors import MarshalError, TopicUnsafeError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.ports import Ack
from kafka_marshal.testing import LocalBroker
from kafka_marshal.topic_names import snapshots_topic
from rationalizer.limits import MAX_WRITTEN_BYTES
from rationalizer.snapshot_log import MAX_RECORD_BYTES
from tests.cli.harness import Command

pytestmark = [pytest.mark.broker, pytest.mark.slow]

#: Internal topics of Kafka.
OF_KAFKA = {"__consumer_offsets", "__transaction_state", "__share_group_state"}

#: Duration of a query before the topics are listed again.
LOOK_S = 0.8

#: Time until a topic that a broker creates is listed.
CREATED_S = 0.3

#: Longest stop of other threads while a Marshal is closed (2 to 20 ms are usual).
LONGEST_GAP_S = 0.1


def missing() -> str:
    """A name of a topic that does not exist, different each time."""
    return f"flihgts-{uuid.uuid4().hex[:6]}"


class Ground:
    """The broker, with a coordination topic, the topic t and a group g that has worked on it."""

    def __init__(self, broker: LocalBroker, folder: Path) -> None:
        self.bootstrap = broker.bootstrap_servers
        self.config = dict(broker.client_config)
        self.config_file = folder / "client.properties"
        self.config_file.write_text("".join(f"{name}={value}\n" for name, value in self.config.items()))
        self.cluster = self.connected()
        self.topic = f"t-{uuid.uuid4().hex[:6]}"
        create_topic(self.cluster, "__marshal", 2, 30)
        self.cluster.create_topic(self.topic, 2, 1, {}, 30)
        self._admin = AdminClient(self.librdkafka)
        with self.member() as marshal:
            marshal.claim(self.topic, 0, timeout=10)
            #: The log has a lease of it, but the cluster does not have it.
            self.gone = missing()
            marshal.claim(self.gone, 0, timeout=10)

    @property
    def librdkafka(self) -> dict[str, Any]:
        return {**self.config, "bootstrap.servers": self.bootstrap}

    @property
    def options(self) -> list[str]:
        """Of a command."""
        return ["--bootstrap", self.bootstrap, "--config", str(self.config_file)]

    def connected(self) -> KafkaCluster:
        return KafkaCluster(self.bootstrap, self.config)

    def member(self, config: Mapping[str, object] | None = None, **options: Any) -> Marshal:
        return Marshal(self.bootstrap, config={**self.config, **(config or {})}, **{"group_id": "g", **options})

    def admin(self, **options: Any) -> Admin:
        return Admin(self.bootstrap, config=self.config, **options)

    def names(self) -> set[str]:
        return set(self._admin.list_topics(timeout=10).topics) - OF_KAFKA

    def delete(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result(20)
        until = time.monotonic() + 10
        while name in self.names():
            assert time.monotonic() < until, f"{name} is still there"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def ground(real_life: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(real_life, tmp_path_factory.mktemp("ground"))


@contextlib.contextmanager
def nothing_created(ground: Ground, within_s: float = CREATED_S) -> Iterator[None]:
    before = ground.names()
    yield
    until = time.monotonic() + within_s
    while (after := ground.names()) == before and time.monotonic() < until:
        time.sleep(0.05)
    for name in after - before:
        ground.delete(name)  # else it would hide the same fault from later tests
    assert after == before


# The library.


def consume(ground: Ground) -> None:
    with ground.member() as marshal, marshal.consumer([missing()]) as consumer:
        assert consumer.poll(LOOK_S) is None


def consume_beside_another(ground: Ground) -> None:
    with ground.member() as marshal, marshal.consumer([ground.topic, missing()]) as consumer:
        assert consumer.poll(LOOK_S) is None


def consume_with_own_settings(ground: Ground) -> None:
    # Then the reader counts partitions with a separate client.
    with ground.member() as marshal, marshal.consumer([missing()], config={"fetch.min.bytes": 2}) as consumer:
        assert consumer.poll(LOOK_S) is None


def consume_against_our_setting(ground: Ground) -> None:
    config = {"allow.auto.create.topics": True}
    with ground.member(config=config) as marshal, marshal.consumer([missing()], config=config) as consumer:
        assert consumer.poll(LOOK_S) is None


def take_ranges(ground: Ground) -> None:
    with ground.member() as marshal, marshal.ranges([missing()]) as ranges:
        assert not ranges.take(10, timeout=LOOK_S)


def claim(ground: Ground) -> None:
    with ground.member() as marshal, contextlib.suppress(MarshalError):
        marshal.claim(missing(), 0, timeout=LOOK_S)


def begin_without_a_log(ground: Ground) -> None:
    with pytest.raises(MarshalError, match="kafka-marshal init"):
        ground.member(topic=missing())


def admin_without_a_log(ground: Ground) -> None:
    with pytest.raises(MarshalError, match="kafka-marshal init"), ground.admin(topic=missing()) as admin:
        admin.progress("g")


def plan(ground: Ground) -> None:
    with ground.admin() as admin, contextlib.suppress(MarshalError):
        admin.plan("g", {(missing(), 0): "earliest"})


LIBRARY = [
    consume,
    consume_beside_another,
    consume_with_own_settings,
    consume_against_our_setting,
    take_ranges,
    claim,
    begin_without_a_log,
    admin_without_a_log,
    plan,
]


# The adapters.


def topic_info(ground: Ground) -> None:
    assert ground.cluster.topic_info([missing()], 10) == {}


def topic_config(ground: Ground) -> None:
    assert ground.cluster.topic_config(missing(), 10) is None


def watermarks(ground: Ground) -> None:
    name = missing()
    assert ground.cluster.watermarks([(name, 0)], 10) == {}
    assert ground.cluster.committed_watermarks([(name, 0)], 10) == {}


def offsets_for_time(ground: Ground) -> None:
    assert ground.cluster.offsets_for_time([(missing(), 0)], 1, 10) == {}


def delete_records(ground: Ground) -> None:
    assert ground.cluster.delete_records({(missing(), 0): 1}, 10) == {}


def tail(ground: Ground) -> None:
    cluster, name = ground.connected(), missing()
    cluster.expect(name, delivery_timeout_ms=1_000)
    reading = cluster.tail(name, {0: 0})
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until:
        reading.read(0.1)
    reading.close()
    cluster.close()


def append(ground: Ground) -> None:
    cluster, acks = ground.connected(), list[Ack]()
    appender = cluster.appender(missing(), delivery_timeout_ms=1_000)
    appender.append(0, b"x", acks.append)
    appender.flush(5)
    appender.close()
    cluster.close()
    assert [ack.offset for ack in acks] == [None]
    assert acks[0].error


def data_reader(ground: Ground) -> None:
    cluster, name = ground.connected(), missing()
    reader = cluster.data_reader("g", {})
    assert reader.partition_counts([name], 5) == {}
    reader.assign({(name, 0): 0})
    reader.read(1, LOOK_S)
    assert not reader.high_watermark(name, 0)
    reader.close()
    cluster.close()


def range_of_messages(ground: Ground) -> None:
    with pytest.raises(MarshalError):
        list(read_range(ground.bootstrap, ground.config, missing(), 0, 0, 9, timeout_s=LOOK_S))


ADAPTERS = [
    topic_info,
    topic_config,
    watermarks,
    offsets_for_time,
    delete_records,
    tail,
    append,
    data_reader,
    range_of_messages,
]


@pytest.mark.parametrize("look", [*LIBRARY, *ADAPTERS], ids=lambda look: look.__name__)
def test_looking_creates_no_topic(ground: Ground, look: Callable[[Ground], None]) -> None:
    with nothing_created(ground):
        look(ground)


# The command.

COMMANDS = [
    ("init", "--check"),
    ("status",),
    ("status", "--tick"),
    ("check",),
    ("lag",),
    ("log",),
    ("who", "g", "{gone}", "0"),
    ("evict", "g", "{gone}", "0", "--dry-run"),
    ("forget-group", "g", "--dry-run"),
    ("release-group", "g", "--to", "earliest", "--dry-run"),
    ("prune", "--dry-run"),
    ("dump",),
    ("dump", "--snapshots"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_creates_the_log_that_it_looks_for(ground: Ground, command: Command, words: tuple[str, ...]) -> None:
    with nothing_created(ground):
        ran = command(*(word.format(gone=ground.gone) for word in words), *ground.options, "--topic", missing())
    assert ran.status in (1, 3), ran.err


COMMANDS_ON_DATA = [
    ("status",),
    ("check",),
    ("lag",),
    ("release-group", "g", "--to", "earliest", "--dry-run"),
    ("release-group", "g", "--partition", "{missing}:0=0", "--dry-run"),
    ("release-group", "g", "--partition", "{missing}:0=earliest", "--yes"),
]


@pytest.mark.parametrize("words", COMMANDS_ON_DATA, ids=" ".join)
def test_no_command_creates_a_topic_of_a_group_that_is_gone(
    ground: Ground, command: Command, words: tuple[str, ...]
) -> None:
    with nothing_created(ground):
        ran = command(*(word.format(missing=missing()) for word in words), *ground.options)
    assert ran.status in (0, 1, 2), ran.err


def test_an_audit_without_a_log_creates_none(ground: Ground, command: Command) -> None:
    with nothing_created(ground):
        ran = command("audit", "--from-kafka", *ground.options, "--topic", missing())
    assert ran.status in (1, 2, 3), ran.err


def test_members_do_not_create_a_deleted_log_again(ground: Ground) -> None:
    log = f"__marshal-{uuid.uuid4().hex[:6]}"
    create_topic(ground.cluster, log, 2, 30)
    with ground.member(topic=log, heartbeat_interval=0.6) as marshal:
        marshal.claim(ground.topic, 0, timeout=10)
        ground.delete(log)
        with nothing_created(ground, within_s=3):
            pass
    assert log not in ground.names()


def test_a_member_works_where_consumer_groups_can_not(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    topic = f"t-{uuid.uuid4().hex[:6]}"
    ground.cluster.create_topic(topic, 1, 1, {}, 30)
    producer = Producer(ground.librdkafka)
    for number in range(100):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(20) == 0
    group = uuid.uuid4().hex
    with ground.member(group_id=group) as marshal, marshal.consumer([topic], start="earliest") as consumer:
        got: list[int | None] = []
        until = time.monotonic() + 20
        while len(got) < 100 and time.monotonic() < until:
            if (message := consumer.poll(0.5)) is not None:
                got.append(message.offset())
                consumer.done(message)
        assert got == list(range(100))
        began = time.monotonic()
    assert time.monotonic() - began < 5
    with ground.admin() as admin:
        assert [lease.stable for lease in admin.progress(group)] == [99]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_the_largest_records_fit_where_the_broker_takes_small_ones_only(ground: Ground) -> None:
    """L1: topics created by init set their own limit, for the log and for snapshots."""
    log, acks = f"__marshal-{uuid.uuid4().hex[:6]}", list[Ack]()
    create_topic(ground.cluster, log, 1, 30)
    for topic, size in ((log, MAX_WRITTEN_BYTES), (snapshots_topic(log), MAX_RECORD_BYTES)):
        appender = ground.cluster.appender(topic, delivery_timeout_ms=10_000)
        appender.append(0, b"x" * size, acks.append)
        appender.flush(15)
        appender.close()
    assert [ack.error for ack in acks] == [None, None]


def test_a_limit_that_is_too_small_is_named_with_what_mends_it(ground: Ground) -> None:
    name, acks = f"t-{uuid.uuid4().hex[:6]}", list[Ack]()
    ground.cluster.create_topic(name, 1, 1, {"max.message.bytes": "1000"}, 30)
    appender = ground.cluster.appender(name, delivery_timeout_ms=10_000)
    appender.append(0, b"x" * 2_000, acks.append)
    appender.flush(15)
    appender.close()
    assert "max.message.bytes" in str(acks[0].error)
    assert "kafka-marshal init --check" in str(acks[0].error)


def test_a_log_that_the_broker_created_is_refused(ground: Ground) -> None:
    log = f"__marshal-{uuid.uuid4().hex[:6]}"
    producer = Producer(ground.librdkafka)
    producer.produce(log, b"hello")
    assert producer.flush(20) == 0
    with pytest.raises(TopicUnsafeError, match=r"max\.message\.bytes is 100000, must be at least 2097152.*init"):
        ground.member(topic=log)


class Ticks:
    """A thread that takes the interpreter's lock a thousand times a second and records when it got it."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.001):
            self._times.append(time.perf_counter())

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in pairwise([*self._times, time.perf_counter()]))


def test_a_close_does_not_stop_other_threads_of_its_process(ground: Ground) -> None:
    gaps = []
    for number in range(5):
        marshal = ground.member(group_id=uuid.uuid4().hex)
        marshal.consumer([ground.topic]).poll(
            0.5 + 0.1 * number
        )  # fetches and look-ups are at different places each time
        with Ticks() as ticks:
            marshal.close()
        gaps.append(ticks.longest_gap_s())
    # A client destroyed with the interpreter's lock held would stop all threads while a fetch is in flight.
    assert median(gaps) < LONGEST_GAP_S, gaps
