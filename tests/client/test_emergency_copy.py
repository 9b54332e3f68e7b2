"""A log that was given a retention, and the way to a new one that the error names, on a real broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin, Retry
from kafka_marshal.engine.work.copies import Copy
from kafka_marshal.node.coordination_topic import create_topic
from tests.client.conftest import wait_until
from tests.client.running import KINDS, QUICK, Crew, Handlers, Running, places, publish

#: No second try while the test runs; it is in the log that the message waits for one.
LATER = Retry(5, (60.0, 60.0), durable=True)


def fails_once(message: Any) -> None:
    if message.key().startswith(b"bad"):
        raise ValueError("not today")


def copy(crew: Crew, topic: str) -> Copy:
    """What Kafka's group of the name holds."""
    return Copy.read(*crew.cluster.kafka_group(crew.group, 10).committed.get((topic, 0), (-1, "")))


def test_a_mirror_names_what_it_passes(crew: Crew) -> None:
    """Its offset is the lag that Kafka's tools show; an import reads the metadata."""
    crew.kind = "group"
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b"])
    member, consumer = crew.consumer("a", topic, mirror_offsets=True)
    running = Running(consumer, Handlers("threads", fails_once), retry=QUICK, park=True)
    wait_until(lambda: [each.first for each in copy(crew, topic).open] == [1], 90, "the mirrored offset")
    assert (copy(crew, topic).offset, copy(crew, topic).position) == (3, 3)
    member.stop()
    running.ended()


@pytest.mark.parametrize("kind", KINDS)
def test_open_and_parked_messages_reach_the_new_log(crew: Crew, kind: str, tmp_path: Path) -> None:
    crew.kind = kind
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b", "bad too", "c", "d"])  # 1 waits for its next try, 3 is set aside
    old, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers := Handlers("threads", fails_once), retry=LATER, park=True)
    handlers.await_ended(places(6) - {(0, 1), (0, 3)})
    admin = Admin(crew.bootstrap, topic=crew.coordination)
    wait_until(lambda: len(admin.open_messages(crew.group)) == 2)
    admin.park(crew.group, [(topic, 0, 3)], reason="later")
    crew.cluster.alter_topic(crew.coordination, {"retention.ms": "86400000"}, 20)
    wait_until(lambda: len(copy(crew, topic).open) == 2 and copy(crew, topic).position == 6, 90, "the emergency copy")
    assert copy(crew, topic).offset == 1, "consumers of Kafka's own miss nothing either"
    assert [(each.first, each.reason) for each in copy(crew, topic).open] == [(1, None), (3, "later")]
    [harm] = [each for each in old.health().problems if "harmed" in each]
    assert "with its open messages in the metadata" in harm and "import-group" in harm
    assert ("convert-group" in harm) == (kind == "claims")
    old.stop()
    running.ended()
    old.close()

    crew.coordination = f"{crew.coordination}-new"
    create_topic(crew.cluster, crew.coordination, 3, 10)
    admin = Admin(crew.bootstrap, topic=crew.coordination)
    [move] = admin.import_group(crew.group)
    assert (move.after, move.restored, move.done_ahead) == (6, (1, 3), 0)
    assert [(x.offset, x.reason) for x in admin.open_messages(crew.group)] == [(1, None), (3, "later")]
    again = set[tuple[int, int]]()
    if kind == "claims":
        admin.convert_group(crew.group, "claimed", open_messages="repeat", file=tmp_path / "kept.json")
        again = {(0, 2), (0, 4), (0, 5)}  # what is done behind the first open message
    publish(crew, topic, ["e"])
    _, consumer = crew.consumer("b", topic)
    running = Running(consumer, handlers := Handlers("threads"), retry=LATER, park=True)
    handlers.await_ended({(0, 1), (0, 6)} | again)
    admin.redrive(crew.group, [(topic, 0, 3)])
    handlers.await_ended({(0, 3)})
    assert set(handlers.ended) == {(0, 1), (0, 3), (0, 6)} | again
