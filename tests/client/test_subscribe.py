"""``subscribe``: a consumer reads other topics while it runs; what it reads before and after never stops."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal import Batches, Claims, Consumer, Group, Keys, Marshal, aio
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.node.coordination_topic import create_topic
from rationalizer import Upgrade, encode
from tests.client.conftest import Scene, wait_until

HI = 0.3
MODES = {"claims": Claims(), "group": Group(session_timeout=3.0)}
kinds = pytest.mark.parametrize("kind", MODES)


class Reader:
    """A member whose thread reads, and keeps what it got by topic."""

    def __init__(self, marshal: Marshal, topics: list[str], mode: Any, **options: Any) -> None:
        self.marshal, self.got, self.lost = marshal, defaultdict[str, list[tuple[int, int]]](list), list[str]()
        #: Topics whose handlers wait.
        self.gates: dict[str, threading.Event] = {}
        self.waits = False
        self.calls: list[tuple[str, str]] = []
        self.consumer: Consumer = marshal.consumer(
            topics,
            mode=mode,
            on_assign=lambda _, parts: self.calls.extend(("+", x.topic) for x in parts),
            on_revoke=lambda _, parts: self.calls.extend(("-", x.topic) for x in parts),
            on_lost=lambda _, parts: self.lost.extend(x.topic for x in parts),
            **options,
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        for message in self.consumer:
            if gate := self.gates.get(message.topic() or ""):
                self.waits = True
                gate.wait(20)
            self.got[message.topic() or ""].append((message.partition() or 0, message.offset() or 0))

    def reads(self) -> set[str]:
        return {x.topic for x in self.consumer.assignment()}

    def has(self, topic: str, count: int) -> bool:
        return len(self.got[topic]) >= count

    def close(self) -> None:
        self.marshal.stop()
        self.thread.join(20)
        self.marshal.close()


class Stage:
    """A cluster in memory, and its readers."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster, self.readers = cluster, list[Reader]()

    def topic(self, name: str, messages: int = 4, partitions: int = 2) -> None:
        self.cluster.broker.create_topic(name, partitions)
        self.produce(name, messages, partitions)

    def produce(self, name: str, messages: int, partitions: int = 2) -> None:
        for number in range(messages):
            self.cluster.broker.produce(name, number % partitions, b"%d" % number)

    def marshal(self, name: str) -> Marshal:
        return Marshal.on_cluster(self.cluster.connect(name), group_id="g", client_id=name, heartbeat_interval=HI)

    def reader(self, name: str, topics: list[str], kind: str, **options: Any) -> Reader:
        reader = Reader(self.marshal(name), topics, MODES[kind], **options)
        self.readers.append(reader)
        return reader


@pytest.fixture
def stage() -> Iterator[Stage]:
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 10)
    cluster.broker.produce("__marshal", 0, encode(Upgrade("x", "admin", "any", 4)))
    made = Stage(cluster)
    for name in ("a", "b", "c"):
        made.topic(name)
    yield made
    for reader in made.readers:
        reader.close()


@kinds
def test_what_stays_never_stops_what_goes_is_released_and_what_comes_begins(stage: Stage, kind: str) -> None:
    reader = stage.reader("w", ["a", "b"], kind)
    wait_until(lambda: reader.has("a", 4) and reader.has("b", 4))
    reader.consumer.subscribe(["b", "c"])
    wait_until(lambda: reader.reads() == {"b", "c"} and reader.has("c", 4))
    stage.produce("a", 4)
    stage.produce("b", 4)
    wait_until(lambda: reader.has("b", 8))
    assert [topic for sign, topic in reader.calls if sign == "-"] == ["a", "a"]
    assert [topic for sign, topic in reader.calls if sign == "+"].count("b") == 2
    assert reader.lost == []
    assert len(reader.got["a"]) == 4
    reader.consumer.subscribe(["a"])
    wait_until(lambda: reader.has("a", 8) and reader.reads() == {"a"})
    assert {topic: len(set(got)) for topic, got in reader.got.items()} == {"a": 8, "b": 8, "c": 4}
    assert all(len(got) == len(set(got)) for got in reader.got.values())


@kinds
def test_what_it_reads_no_more_goes_to_others_when_its_handler_has_ended(stage: Stage, kind: str) -> None:
    """Its message is done where it began, and no other member gets it."""
    gate = threading.Event()
    reader = stage.reader("w", ["a", "b"], kind)
    wait_until(lambda: reader.has("a", 4) and reader.has("b", 4))
    reader.gates["a"] = gate
    stage.produce("a", 1)
    wait_until(lambda: reader.waits)
    other = stage.reader("o", ["a"], kind)
    reader.consumer.subscribe(["b"])
    gate.set()
    wait_until(lambda: len(other.consumer.assignment()) == 2 and reader.reads() == {"b"})
    stage.produce("a", 2)
    wait_until(lambda: len(reader.got["a"]) + len(other.got["a"]) == 7)
    assert sorted(reader.got["a"] + other.got["a"]) == sorted({*reader.got["a"], *other.got["a"]})


@kinds
def test_new_topics_begin_where_start_says(stage: Stage, kind: str) -> None:
    reader = stage.reader("w", ["a"], kind, start="latest")
    wait_until(lambda: reader.reads() == {"a"})
    reader.consumer.subscribe(["a", "c"])
    wait_until(lambda: all(x.offset == 2 for x in reader.consumer.committed([("c", 0), ("c", 1)])))
    stage.produce("c", 2)
    wait_until(lambda: reader.has("c", 2))
    assert sorted(reader.got["c"]) == [(0, 2), (1, 2)]


def test_p9_what_comes_later_begins_at_its_beginning_also_while_other_topics_are_subscribed_to(stage: Stage) -> None:
    """Its messages are younger than the group: none may be passed over."""
    reader = stage.reader("w", ["a", "d"], "claims", start="latest")
    wait_until(lambda: reader.reads() == {"a"})
    stage.topic("d", 2)
    reader.consumer.subscribe(["a", "c", "d", "e"])
    wait_until(lambda: reader.reads() == {"a", "c", "d"} and reader.has("d", 2))
    stage.topic("e", 2)
    wait_until(lambda: reader.has("e", 2))


@kinds
def test_patterns_come_and_go(stage: Stage, kind: str) -> None:
    reader = stage.reader("w", ["a"], kind)
    wait_until(lambda: reader.has("a", 4))
    reader.consumer.subscribe(["^[bc]$"])
    wait_until(lambda: reader.reads() == {"b", "c"} and reader.has("b", 4) and reader.has("c", 4))
    reader.consumer.subscribe(["^[ab]$"])
    wait_until(lambda: reader.reads() == {"a", "b"})
    assert len(reader.got["a"]) == len(reader.got["b"]) == 4


@kinds
def test_it_may_be_called_again_before_the_first_call_has_had_an_effect(stage: Stage, kind: str) -> None:
    reader = stage.reader("w", ["a"], kind)
    for topics in (["b"], ["c"], ["a"], ["c", "b"]):
        reader.consumer.subscribe(topics)
    wait_until(lambda: reader.reads() == {"b", "c"} and reader.has("b", 4) and reader.has("c", 4))


async def test_coroutines(stage: Stage) -> None:
    async with aio.Marshal.on_cluster(stage.cluster.connect("w"), group_id="g", client_id="w") as marshal:
        consumer = marshal.consumer(["a"])
        async with consumer:
            got = list[str]()
            async for message in consumer:
                got.append(message.topic() or "")
                if len(got) == 4:
                    await consumer.subscribe(["b"])
                if len(got) == 8:
                    break
    assert got == ["a"] * 4 + ["b"] * 4


def test_what_can_not_be_subscribed_to_is_refused_and_nothing_changes(stage: Stage) -> None:
    reader = stage.reader("w", ["a"], "claims")
    other = reader.marshal.consumer(["b"])
    for topics, text in (
        ([], "topics must be"),
        (["__marshal"], "by which members coordinate"),
        (["^("], "no regular expression"),
        (["a", "b"], "another consumer of this Marshal reads 'b' already"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            reader.consumer.subscribe(topics)
    other.close()
    reader.consumer.subscribe(["a", "b"])
    wait_until(lambda: reader.reads() == {"a", "b"})
    with stage.marshal("s") as marshal, marshal.consumer(["c"], mode=Batches()) as consumer:
        refused(consumer)
    with stage.marshal("k") as marshal, marshal.consumer(mode=Keys({("c", 0): []})) as consumer:
        refused(consumer)


def refused(consumer: Consumer) -> None:
    with pytest.raises(ConfigurationError, match=r"subscribe\(\) changes the topics of consumers with mode=Claims\(\)"):
        consumer.subscribe(["a"])


@pytest.mark.broker
@kinds
def test_on_a_broker(scene: Scene, kind: str) -> None:
    topics = [scene.topic(2, 3) for _ in range(3)]
    reader = Reader(scene.member(), topics[:2], MODES[kind])
    try:
        wait_until(lambda: reader.has(topics[0], 6) and reader.has(topics[1], 6))
        reader.consumer.subscribe(topics[1:])
        wait_until(lambda: reader.has(topics[2], 6) and reader.reads() == set(topics[1:]))
        assert {topic: sorted(got) for topic, got in reader.got.items()} == {
            topic: [(p, o) for p in range(2) for o in range(3)] for topic in topics
        }
    finally:
        reader.close()
