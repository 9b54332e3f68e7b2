"""`redrive` killed with -9 between any two records, on a real Kafka: the next run continues; none twice, none lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.testing.fail_points import CallMoment, Moment
from rationalizer import ClaimingPartition, Heartbeat, SettlingMessages, key_hash
from tests.cli.harness import Command
from tests.cli.test_kafka import A, Append, append, cluster

__all__ = ["append", "cluster"]  # fixtures

SCRIPT = Path(__file__).with_name("killed_redrive.py")
MESSAGES = 6

#: Messages of one record, and of one transaction, of a run that is killed.
BATCH = 2


def killed(bootstrap: str, at: tuple[str, str, int], *words: str) -> None:
    """Run the command in a process, which dies there."""
    arguments = json.dumps({"bootstrap": bootstrap, "at": at})
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), arguments, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == -9, (ran.stdout, ran.stderr)


LONG = pytest.mark.campaign


@pytest.mark.parametrize("times", [pytest.param(1, marks=LONG), 2, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("moment", list(Moment))
def test_redrive_is_continued(
    kafka: Command, append: Append, topic_factory: Callable[..., str], kafka_bootstrap: str, moment: Moment, times: int
) -> None:
    """Each of the three records opens two messages. What the log shows is counted, by the run that asks next, too."""
    topic = topic_factory(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(MESSAGES):
        producer.produce(topic, b"%d" % number, "k", 0)
    assert producer.flush(30) == 0
    epoch = append(ClaimingPartition(*A, topic, 0, 60_000))
    parked = tuple((at, key_hash(b"k", at), 5, "ValueError") for at in range(MESSAGES))
    append(SettlingMessages(*A, topic, 0, epoch, 2**40, parked=parked))
    append(Heartbeat(*A, topic, 0, epoch, MESSAGES - 1))

    killed(kafka_bootstrap, ("settle", moment, times), *kafka.before, "redrive", "g", "--all")
    before = shown(kafka)
    waiting = {offset: since for offset, (state, since) in before.items() if state == "waiting"}
    least = BATCH * (times - (moment in (Moment.BEFORE, Moment.APPENDED)))
    # The broker may have had it before the kill; and the log may show a record before its acknowledgement is served.
    more = {Moment.APPENDED: {least + BATCH}, Moment.ACKNOWLEDGED: set(range(least, MESSAGES + 1, BATCH))}
    assert len(waiting) in {least, *more.get(moment, ())}
    ran = kafka("redrive", "g", "--all", "--json")
    assert len(ran.json["messages"]) == MESSAGES - len(waiting)
    after = shown(kafka)
    assert {state for state, _ in after.values()} == {"waiting"}
    assert {offset: after[offset][1] for offset in waiting} == waiting, "opened again"


def shown(kafka: Command) -> dict[int, tuple[str, int]]:
    """Offset → its state, and the record since which it has it."""
    found = [json.loads(line) for line in kafka("open-messages", "g", "--json").lines]
    return {each["offset"]: (each["state"], each["since"]) for each in found}


CALLS: list[tuple[str, Moment | CallMoment, int]] = [
    ("commit", CallMoment.BEFORE, 2),
    ("commit", CallMoment.RETURNED, 2),
    ("release", Moment.BEFORE, 1),
    ("send", CallMoment.BEFORE, 2),
    ("send", CallMoment.RETURNED, 2),
    ("init", CallMoment.BEFORE, 1),
    ("init", CallMoment.RETURNED, 1),
    ("begin", CallMoment.RETURNED, 2),
    ("claim", Moment.READ, 1),
    ("beat", Moment.BEFORE, 1),
    ("release", Moment.ACKNOWLEDGED, 1),
]
#: Of them those that run with every test; each waits for the lease of a dead process.
SHORT = 3


@pytest.mark.parametrize(
    "at",
    [*CALLS[:SHORT], *(pytest.param(at, marks=LONG) for at in CALLS[SHORT:])],
    ids=lambda at: "-".join(map(str, at)).replace(" ", "-"),
)
def test_dead_letters_are_continued(
    kafka: Command, topic_factory: Callable[..., str], kafka_bootstrap: str, at: tuple[str, str, int]
) -> None:
    """Produced in transactions: a reader of committed messages sees each once, and the counts add up."""
    dead, to = topic_factory(1), topic_factory(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(MESSAGES):
        source: Any = MemoryMessage("orders", 0, number, b"k", b"%d" % number, (1, 0), None)
        headers: Any = headers_of(source, "g", 7, 5, ValueError("bad"))
        producer.produce(dead, b"%d" % number, b"k", 0, headers=headers)
    assert producer.flush(30) == 0
    assert kafka("init", "--partitions", 1).status == 0
    command = ("redrive", "g", "--from", dead, "--to", to)
    killed(kafka_bootstrap, at, *kafka.before, *command)
    before = len(committed(kafka_bootstrap, to))
    ran = kafka(*command, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["redriven"] == MESSAGES - before
    assert sorted(committed(kafka_bootstrap, to)) == [b"%d" % number for number in range(MESSAGES)]
    assert kafka(*command, "--json").json["redriven"] == 0


def committed(bootstrap: str, topic: str) -> list[bytes]:
    """What a reader of committed messages sees, to the end of the topic."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    reader.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    while (message := reader.poll(30)) is not None:
        if message.error() is not None:
            break
        found.append(message.value() or b"")
    reader.close()
    return found
