"""Level 4 comes to a log while members of this release and of the one before it work on it (E4)."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition

from kafka_marshal import Batches, ConfigurationError, Consumer, Group, Marshal, Retry
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.node.coordination_topic import required_settings
from rationalizer import ClaimingShare, Record, SettlingMessages, Upgrade, World, encode
from rationalizer.levels import SHARING_LEVEL
from rationalizer.marker import marker
from rationalizer.routing import route_lease
from tests.cli.harness import Command
from tests.client.conftest import wait_until

WORKER = Path(__file__).parents[1] / "client" / "worker.py"
BEFORE = SHARING_LEVEL - 1
#: A process of the release before: it can follow no higher level, and its instance_id says which release it is.
OLD = f"""
import runpy, kafka_marshal.instance, rationalizer.world
rationalizer.world.SUPPORTED_LEVEL = {BEFORE}
kafka_marshal.instance.RELEASE = "0.2.0"
runpy.run_path({str(WORKER)!r}, run_name="__main__")
"""
MESSAGES = 120
#: At more places than this of each log, digests are compared.
PLACES = 5
HI, SESSION = 300, 900


class Members:
    """Of two groups, one of each kind: an old process, and a member of this release."""

    def __init__(self, bootstrap: str, log_topic: str, topic: str, folder: Path, leave: ExitStack) -> None:
        self.new: list[tuple[Marshal, Consumer]] = []
        self.old: list[subprocess.Popen[str]] = []
        self.outs = [folder / kind for kind in ("claimed", "coordinated")]
        for out in self.outs:
            told = {"bootstrap": bootstrap, "coordination": log_topic, "topic": topic, "group": out.name, "hi": HI}
            told |= {"client_id": f"old-{out.name}", "out": str(out), "pause_s": 0.05}
            told |= {"session": SESSION} if out.name == "coordinated" else {}
            process = subprocess.Popen([sys.executable, "-c", OLD, json.dumps(told)], stderr=subprocess.PIPE, text=True)
            leave.callback(process.kill)
            self.old.append(process)
        wait_until(lambda: all(map(self.handled, self.outs)), what="the old ones work")
        for out in self.outs:
            name = f"new-{out.name}"
            marshal = Marshal(
                bootstrap, topic=log_topic, group_id=out.name, client_id=name, heartbeat_interval=HI / 1000
            )
            leave.callback(marshal.terminate)
            if out.name == "claimed":
                self.new.append((marshal, marshal.consumer([topic])))
            else:
                self.new.append((marshal, marshal.consumer([topic], mode=Group(session_timeout=SESSION / 1000))))

    @staticmethod
    def handled(out: Path) -> list[tuple[int, int]]:
        """What an old one has handled."""
        lines = map(json.loads, out.read_text().splitlines()) if out.exists() else ()
        return [(line["partition"], line["offset"]) for line in lines if line["what"] == "handled"]


def records_of(bootstrap: str, topic: str, cp: int) -> Iterator[tuple[int, int, bytes | None]]:
    reader = KafkaConsumer({"bootstrap.servers": bootstrap, "group.id": "x", "enable.partition.eof": True})
    reader.assign([TopicPartition(topic, cp, 0)])
    while (message := reader.poll(10)) is not None and message.error() is None:
        yield message.offset() or 0, message.timestamp()[1], message.value()
    reader.close()


def refused_below_the_level(bootstrap: str, log_topic: str, topic: str) -> None:
    """What needs level 4 names the command, and writes nothing."""
    below = pytest.raises(
        ConfigurationError, match=rf"level {SHARING_LEVEL} .* at level {BEFORE}.*kafka-marshal upgrade"
    )
    with Marshal(bootstrap, topic=log_topic, group_id="third", heartbeat_interval=HI / 1000) as marshal:
        with below:
            marshal.consumer([topic], mode=Batches())
        with marshal.consumer([topic]) as consumer:
            with below:
                consumer.run(print, park=True)
            with below:
                consumer.run(print, retry=Retry(durable=True))


def no_digest_differs(bootstrap: str, log_topic: str, digests: list[dict[int, tuple[int, str]]]) -> None:
    """What members of this release had at each place is what a replay of all of it has."""
    for cp in range(2):
        world, known = World(cp, 2), {}
        for entry in records_of(bootstrap, log_topic, cp):
            world.apply(*entry)
            known[world.next_offset] = world.digest()
        assert world.level == SHARING_LEVEL
        seen = [each[cp] for each in digests if each[cp][0] in known]
        assert len({at for at, _ in seen}) > PLACES
        assert all(known[at] == digest for at, digest in seen)


def test_e4_old_members_stop_and_say_why_and_the_others_go_on(
    kafka: Command,
    kafka_bootstrap: str,
    log_topic: str,
    topic_factory: Callable[..., str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Probe(kafka_bootstrap).create_topic(log_topic, 2, 1, required_settings(1))
    appender = KafkaCluster(kafka_bootstrap, {}).appender(log_topic, delivery_timeout_ms=10_000)

    def append(cp: int, record: Record) -> None:
        appender.append(cp, encode(record))
        assert appender.flush(10) == 0

    for cp in range(2):
        append(cp, marker("init-1", 2))
        append(cp, Upgrade("i", "init", "g", BEFORE))
    # Its name decides where its leases are: one in each part of the log, which otherwise does not grow.
    made = (topic_factory(2) for _ in range(20))
    topic = next(name for name in made if {route_lease(name, number, 2) for number in range(2)} == {0, 1})
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(MESSAGES):
        producer.produce(topic, b"", partition=number % 2)
    assert producer.flush(20) == 0
    with ExitStack() as leave:
        members = Members(kafka_bootstrap, log_topic, topic, tmp_path, leave)
        taken: list[list[tuple[int, int]]] = [[], []]
        digests: list[dict[int, tuple[int, str]]] = []

        def all_work(until: Callable[[], bool]) -> bool:
            for (marshal, consumer), found in zip(members.new, taken, strict=True):
                while (message := consumer.poll(0.02)) is not None:
                    found.append((message.partition() or 0, message.offset() or 0))
                digests.append(marshal.world.digests())
            return until()

        wait_until(lambda: all_work(lambda: all(taken)), what="members of both releases work on each group")
        refused_below_the_level(kafka_bootstrap, log_topic, topic)
        looked = kafka("upgrade", "--dry-run", "--json").json
        assert looked["level"] == SHARING_LEVEL
        assert sorted((each["client"], each["release"]) for each in looked["old_members"]) == [
            ("old-claimed", "0.2.0"),
            ("old-coordinated", "0.2.0"),
        ]
        refused = kafka("upgrade", "--yes")
        assert refused.status == 1
        assert "2 members would stop at level 4" in refused.err
        assert kafka("upgrade", "--yes", "--force").status == 0
        for process in members.old:
            _, told = process.communicate(timeout=60)
            assert process.returncode == 1
            assert f"was raised to protocol level {SHARING_LEVEL}, which this release" in told
        for cp in range(2):  # of leases that no member wants
            append(cp, ClaimingShare("s1", "s", "elsewhere", topic, 0, 60_000, start=0))
            append(cp, SettlingMessages("s1", "s", "elsewhere", topic, 0, None, 9, ((0, 0),)))
        every = {(partition, offset) for partition in range(2) for offset in range(MESSAGES // 2)}
        both = [set(members.handled(out)) for out in members.outs]

        def is_through() -> bool:
            places = [len({each[cp][0] for each in digests}) for cp in range(2)]
            return min(places) > PLACES and all(old | set(new) == every for old, new in zip(both, taken, strict=True))

        wait_until(lambda: all_work(is_through), what="the new ones go on with all of it")
    no_digest_differs(kafka_bootstrap, log_topic, digests)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []
