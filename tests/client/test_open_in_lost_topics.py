"""Open messages of a topic that was recreated, or compacted: no message is taken for another one. On a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kafka_marshal import Admin, Batches, Consumer, Group, Keys, Marshal, ShareConsumer
from kafka_marshal.errors import AdminError
from kafka_marshal.testing import LocalBroker
from tests.cli.conftest import command, environment
from tests.cli.harness import Command
from tests.client.conftest import Scene, wait_until
from tests.client.running import Crew, publish

__all__ = ["command", "environment"]

Made = Callable[[Marshal, str], Consumer]


def in_claims(marshal: Marshal, topic: str) -> Consumer:
    made: Consumer = marshal.consumer([topic])
    return made


def in_a_group(marshal: Marshal, topic: str) -> Consumer:
    made: Consumer = marshal.consumer([topic], mode=Group())
    return made


def by_batches(marshal: Marshal, topic: str) -> Consumer:
    made: Consumer = marshal.consumer([topic], mode=Batches())
    return made


def by_keys(marshal: Marshal, topic: str) -> Consumer:
    return marshal.consumer(mode=Keys({(topic, 0): [(0, 2**63 - 1)]}))


def admin_of(scene: Scene) -> Admin:
    return Admin(scene.bootstrap, topic=scene.coordination)


def work(consumer: Consumer, count: int, aside: int | None = None) -> list[int]:
    """Handle messages until there were this many; one of them is set aside."""
    found: list[int] = []
    while len(found) < count:
        if isinstance(consumer, ShareConsumer):
            batch: Any = next(consumer.batches())
            for message in batch:
                if message.offset() == aside:
                    batch.park(message, "bad")
            found += [message.offset() for message in batch]
            batch.done()
            continue
        polled: Any = consumer.poll(1.0)
        if polled is None:
            continue
        if polled.offset() == aside:
            consumer.park(polled, "bad")
        else:
            consumer.done(polled)
        found.append(polled.offset())
    return found


def recreate(scene: Scene, topic: str, messages: int) -> None:
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    admin.delete_topics([topic])[topic].result(20)
    wait_until(lambda: topic not in scene.cluster.topic_info([topic], 10))
    wait_until(lambda: admin.create_topics([NewTopic(topic, 1)])[topic].exception(20) is None)
    publish(scene, topic, [f"new {number}" for number in range(messages)])


def states(scene: Scene) -> list[tuple[int, str]]:
    return [(each.offset, each.state) for each in admin_of(scene).open_messages(scene.group)]


@pytest.mark.parametrize("made", [in_claims, in_a_group, by_batches, by_keys])
@pytest.mark.parametrize("is_redriven", [False, True])
def test_what_a_recreated_topic_has_at_that_offset_is_not_given_in_its_place(
    crew: Crew, command: Command, made: Made, is_redriven: bool
) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "c"])
    with crew.member("w") as member, made(member, topic) as consumer:
        work(consumer, 3, aside=1)
        wait_until(lambda: states(crew) == [(1, "parked")])
    admin = admin_of(crew)
    if is_redriven:
        assert admin.redrive(crew.group, "all").messages == ((topic, 0, 1),)
    recreate(crew, topic, 10)

    (found,) = admin.open_messages(crew.group)
    assert found.key is None
    assert found.value is None
    assert found.unread == (
        "position lost: the topic was deleted and recreated, and other messages have these offsets now"
    )
    ran = command("--bootstrap", crew.bootstrap, "--topic", crew.coordination, "open-messages", crew.group)
    assert "new 1" not in ran.out
    assert f"{topic} [0]: position lost: the topic was deleted and recreated" in ran.err
    if not is_redriven:
        with pytest.raises(AdminError, match=r"recreated. Its open messages can't be delivered. Nothing was changed"):
            admin.redrive(crew.group, "all")

    with crew.member("w2") as member, made(member, topic) as consumer:
        wait_until(lambda: consumer.lost_positions or _gives_nothing(consumer))
    assert states(crew) == [(1, "waiting" if is_redriven else "parked")]
    assert admin.discard(crew.group, [(topic, 0, 1)]).messages == ((topic, 0, 1),)
    assert states(crew) == []


def _gives_nothing(consumer: Consumer) -> bool:
    assert isinstance(consumer, ShareConsumer) or consumer.poll(0.1) is None, "another message was delivered"
    return False


@pytest.fixture(scope="module")
def compacting() -> Iterator[str]:
    """A broker that compacts often."""
    often = {"log.cleaner.backoff.ms": "200", "log.segment.delete.delay.ms": "100"}
    with LocalBroker(properties=often) as broker:
        yield broker.bootstrap_servers


@pytest.mark.campaign
@pytest.mark.parametrize("made", [in_claims, in_a_group, by_batches, by_keys])
def test_what_compaction_took_counts_as_done_when_it_is_redriven(
    compacting: str, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """Its successor under the same key is delivered as any message is; nothing comes in its place."""

    def new_topic(partitions: int, settings: dict[str, str] | None = None, **_: Any) -> str:
        name = f"compacted-{made.__name__}"
        admin = AdminClient({"bootstrap.servers": compacting})
        admin.create_topics([NewTopic(name, partitions, 1, config=settings or {})])[name].result(20)
        return name

    scene = Crew(compacting, new_topic)
    settings: dict[str, Any] = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.0", "segment.ms": "200"}
    topic = scene.topic(1, **settings)
    publish(scene, topic, ["a", "bad", "c"])
    member = scene.member("w")
    consumer = made(member, topic)
    work(consumer, 3, aside=1)
    wait_until(lambda: states(scene) == [(1, "parked")])
    publish(scene, topic, ["bad"])
    assert work(consumer, 1) == [3]
    producer = Producer({"bootstrap.servers": compacting})
    ended = 4

    def is_compacted() -> bool:
        """Segments roll when something is written."""
        nonlocal ended
        producer.produce(topic, b"x", f"filler {ended}")
        producer.flush(10)
        ended += 1
        work(consumer, 1)
        (found,) = admin_of(scene).open_messages(scene.group, parked=True)
        return found.gone

    wait_until(is_compacted, 180)
    done = admin_of(scene).redrive(scene.group, "all")
    assert (*done.messages, *done.gone) == ((topic, 0, 1),)
    publish(scene, topic, ["last"])
    assert work(consumer, 1) == [ended]
    wait_until(lambda: not _gives_nothing(consumer) and states(scene) == [])
    if made is not by_batches:  # there it is settled without a word, as all that was never delivered
        assert "offset 1, open until now, can't be fetched any more" in caplog.text
    scene.close()
