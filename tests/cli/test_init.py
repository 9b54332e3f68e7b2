"""`init` on a real Kafka: creates the topic, checks it, says how to repair it (L1, L2)."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewPartitions

from kafka_marshal import Batches, ConfigurationError, Consumer, Group, Marshal, Retry
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.node.coordination_topic import _first_records, required_settings
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    ConfigureGroup,
    JoinGroup,
    Record,
    SettlingMessages,
    Tick,
    Upgrade,
    World,
    encode,
)
from rationalizer.levels import SHARING_LEVEL, SUPPORTED_LEVEL
from rationalizer.marker import marker
from rationalizer.routing import route_lease
from tests.cli.harness import Command, process, start
from tests.client.conftest import wait_until

GOOD = required_settings(1)


@pytest.fixture
def make(kafka_bootstrap: str, log_topic: str) -> Callable[..., None]:
    """Creates the topic by hand, without the required settings."""

    def create(partitions: int = 2, **settings: str) -> None:
        changed = GOOD | {name.replace("_", "."): value for name, value in settings.items()}
        Probe(kafka_bootstrap).create_topic(log_topic, partitions, 1, changed)

    return create


@pytest.fixture
def cluster(kafka_bootstrap: str) -> KafkaCluster:
    return KafkaCluster(kafka_bootstrap, {})


def test_it_makes_the_topic_and_may_be_run_again(kafka: Command, cluster: KafkaCluster, log_topic: str) -> None:
    ran = kafka("init", "--partitions", 3)
    assert (ran.status, ran.err) == (0, "")
    assert f"created '{log_topic}': 3 partitions" in ran.out
    config = cluster.topic_config(log_topic, 10)
    assert config is not None
    assert config.info.partitions == 3
    assert {name: config.settings[name] for name in GOOD} == GOOD
    snapshots = cluster.topic_config(f"{log_topic}_snapshots", 10)
    assert snapshots is not None
    assert snapshots.info.partitions == 3
    assert {name: snapshots.settings[name] for name in GOOD} == GOOD
    again = kafka("init")
    assert (again.status, again.err) == (0, "")
    assert "is fit for use (3 partitions" in again.out
    assert kafka("init", "--check").status == 0
    ends = cluster.watermarks([(log_topic, cp) for cp in range(3)], 10)
    assert set(ends.values()) == {(0, 2)}, "exactly one marker and one Upgrade in each partition"


def test_the_first_record_of_every_partition_says_how_many_there_are(kafka: Command) -> None:
    kafka("init", "--partitions", 3)
    rows = kafka("log").rows
    first, second = ([row["what"] for row in rows if row["offset"] == offset] for offset in "01")
    assert first == ["fixes the number of partitions of the log at 3"] * 3
    assert second == [f"raises the log to level {SUPPORTED_LEVEL}"] * 3
    assert len(rows) == 6


def test_check_changes_nothing_and_says_no_where_the_topic_is_missing(
    kafka: Command, cluster: KafkaCluster, log_topic: str
) -> None:
    ran = kafka("init", "--check")
    assert ran.status == 1
    assert "does not exist" in ran.out
    assert f"--topic {log_topic}" in ran.out
    assert cluster.topic_config(log_topic, 10) is None


def mend(kafka_bootstrap: str, line: str) -> None:
    """Do what this kafka-configs.sh command would do."""
    words = shlex.split(line)
    assert words[0] == "kafka-configs.sh"
    said = dict(pairwise(words))
    assert said["--bootstrap-server"] == kafka_bootstrap
    name, _, value = said["--add-config"].partition("=")
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, said["--entity-name"], incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(10)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("message.timestamp.type", "CreateTime"),
        ("cleanup.policy", "compact"),
        ("retention.ms", "604800000"),
        ("retention.bytes", "1000000000"),
        ("max.message.bytes", "1000000"),
        ("unclean.leader.election.enable", "true"),
    ],
)
def test_a_wrong_setting_is_named_with_the_command_that_mends_it(
    kafka: Command, kafka_bootstrap: str, make: Callable[..., None], setting: str, value: str
) -> None:
    make(**{setting.replace(".", "_"): value})
    ran = kafka("init")
    assert ran.status == 1
    assert f"wrong: {setting} is {value}" in ran.out
    assert "is not fit for use" in ran.out
    commands = [line.strip() for line in ran.lines if "kafka-configs.sh" in line]
    assert len(commands) == 1
    mend(kafka_bootstrap, commands[0])
    while kafka("init", "--check").status == 1:  # the controller has it at once, the broker a moment later
        pass
    assert kafka("init", "--check").status == 0
    assert kafka("status").status == 0


def test_a_log_of_snapshots_that_is_missing_is_noted_and_made(
    kafka: Command, make: Callable[..., None], cluster: KafkaCluster, log_topic: str
) -> None:
    make(2)
    ran = kafka("init", "--check")
    assert f"note: there is no log of snapshots, '{log_topic}_snapshots'" in ran.out
    assert cluster.topic_config(f"{log_topic}_snapshots", 10) is None
    assert "the log of snapshots: 2 partitions" in kafka("init").out
    assert cluster.topic_info([f"{log_topic}_snapshots"], 10)[f"{log_topic}_snapshots"].partitions == 2
    assert "note" not in kafka("init", "--check").out


def test_a_log_of_snapshots_made_wrongly_is_noted(kafka: Command, kafka_bootstrap: str, log_topic: str) -> None:
    settings = {"cleanup.policy": "compact", "retention.ms": "1000"}
    Probe(kafka_bootstrap).create_topic(f"{log_topic}_snapshots", 3, 1, settings)
    ran = kafka("init", "--partitions", 2)
    assert ran.status == 0, "workers can do without it"
    notes = [line for line in ran.lines if line.startswith(f"note: '{log_topic}_snapshots'")]
    wrong = ("cleanup.policy is compact", "retention.ms is 1000", "max.message.bytes", "partitions is 3, and must be 2")
    assert [what for what in wrong if not any(what in note for note in notes)] == ["max.message.bytes"]
    mends = [line for line in ran.lines if "kafka-configs.sh" in line]
    assert all(f"--entity-name {log_topic}_snapshots" in line for line in mends)
    assert len(mends) == 2
    assert f"delete the topic '{log_topic}_snapshots'" in ran.out


def test_workers_are_refused_and_status_names_the_way_out(kafka: Command, make: Callable[..., None]) -> None:
    make(message_timestamp_type="CreateTime")
    ran = kafka("status")
    assert ran.status == 1
    assert "message.timestamp.type" in ran.err
    assert "kafka-marshal init" in ran.err


def test_a_topic_made_by_hand_gets_its_markers(kafka: Command, make: Callable[..., None]) -> None:
    make(2)
    checked = kafka("init", "--check")
    assert checked.status == 1
    assert "partition(s) 0, 1 lack the first record" in checked.out
    assert kafka("log").rows == []
    assert kafka("init").status == 0
    assert len(kafka("log").rows) == 4
    checked = kafka("init", "--check")
    assert checked.status == 0
    assert "level" not in checked.out


def appended(cluster: KafkaCluster, topic: str, *records: tuple[int, Record]) -> None:
    appender = cluster.appender(topic, delivery_timeout_ms=10_000)
    for cp, record in records:
        appender.append(cp, encode(record))
    assert appender.flush(10) == 0
    appender.close()


def test_a_creation_that_was_cut_short_gets_what_it_lacks(
    kafka: Command, make: Callable[..., None], cluster: KafkaCluster, log_topic: str
) -> None:
    make(3)
    first = marker("init-1", 3)
    appended(cluster, log_topic, (0, first), (0, Upgrade("i", "c", "g", SUPPORTED_LEVEL)), (1, first))
    assert kafka("init").status == 0
    assert [row["code"] for row in kafka("log").rows] == ["OK"] * 6
    assert {each["level"] for each in kafka("status", "--json").json["partitions"]} == {SUPPORTED_LEVEL}


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ({0: 0, 1: 0}, [(0, Tick), (0, Upgrade), (1, Tick), (1, Upgrade)]),
        ({0: 2, 1: 1, 2: 0}, [(1, Upgrade), (2, Tick), (2, Upgrade)]),
        ({0: 3, 1: 1, 2: 0}, [(2, Tick)]),  # possibly members of an older release are working
    ],
)
def test_what_partitions_lack_of_their_first_records(ends: dict[int, int], wanted: list[tuple[int, type]]) -> None:
    assert [(cp, type(record)) for cp, record in _first_records(ends)] == wanted


def test_a_topic_of_an_older_release_keeps_its_level_until_it_is_upgraded(
    kafka: Command, make: Callable[..., None], cluster: KafkaCluster, log_topic: str
) -> None:
    make(2)
    appended(cluster, log_topic, *((cp, marker("init-1", 2)) for cp in range(2)), (1, Tick("i", "c", "g")))
    ran = kafka("init")
    assert ran.status == 0
    assert f"note: partition(s) 0, 1 are below level {SUPPORTED_LEVEL} of the protocol" in ran.out
    assert f"kafka-marshal upgrade --bootstrap {kafka.before[1]} --topic {log_topic}" in ran.out
    assert {each["level"] for each in kafka("status", "--json").json["partitions"]} == {1}
    assert (
        kafka("upgrade", "--dry-run").out
        == f"partition(s) 0, 1 of '{log_topic}' would be raised to level {SUPPORTED_LEVEL}.\n"
    )
    assert kafka("upgrade").status == 2, "nobody to ask"
    assert "There is no way back" in kafka("upgrade", "--help").out
    assert {each["level"] for each in kafka("status", "--json").json["partitions"]} == {1}
    assert kafka("upgrade", "--yes").out == f"raised: partition(s) 0, 1 of '{log_topic}' to level {SUPPORTED_LEVEL}.\n"
    assert {each["level"] for each in kafka("status", "--json").json["partitions"]} == {SUPPORTED_LEVEL}
    again = kafka("upgrade", "--yes", "--json")
    assert (again.status, again.json["partitions"], again.json["raised"]) == (0, [], False)
    assert "note" not in kafka("init").out


@pytest.mark.parametrize(
    ("instance", "is_old"), [("h/17/0.4.0/x", False), ("h/17/0.3.0/x", True), ("old-1", True), ("h/17/0/x", True)]
)
def test_upgrade_names_members_whose_release_does_not_know_the_level(
    kafka: Command, make: Callable[..., None], cluster: KafkaCluster, log_topic: str, instance: str, is_old: bool
) -> None:
    make(1)
    appended(cluster, log_topic, (0, marker("init-1", 1)), (0, ClaimingPartition(instance, "w", "g", "t", 0, 60_000)))
    looked = kafka("upgrade", "--dry-run", "--json")
    assert [each["client"] for each in looked.json["old_members"]] == ["w"] * is_old
    ran = kafka("upgrade", "--yes")
    assert ran.status == is_old
    if is_old:
        assert "warning: w of group g (" in ran.err
        assert "would stop for good" in ran.err
        assert "Nothing was changed" in ran.err
        assert kafka("upgrade", "--yes", "--force").status == 0


def test_members_of_level_two_are_named_before_checkpoints_come(
    kafka: Command, make: Callable[..., None], cluster: KafkaCluster, log_topic: str
) -> None:
    """They work beside members of this release until the upgrade, and would stop at it."""
    make(1)
    join = (10_000_000, 600_000, "sticky", False, "", (("t", 2),))
    joins = [
        JoinGroup(f"h/17/{number}/x", client, "g", "", *join) for client, number in (("old", "0.2.4"), ("new", "0.4.0"))
    ]
    first: list[tuple[int, Record]] = [(0, marker("init-1", 1)), (0, Upgrade("u", "u", "u", 2))]
    appended(cluster, log_topic, *first, *((0, each) for each in joins))
    looked = kafka("upgrade", "--dry-run", "--json").json
    assert (looked["level"], looked["partitions"]) == (SUPPORTED_LEVEL, [0])
    assert [(each["client"], each["release"]) for each in looked["old_members"]] == [("old", "0.2.4")]
    assert "Checkpoints need level 3." in kafka("upgrade", "--help").out
    refused = kafka("upgrade", "--yes")
    assert refused.status == 1
    assert f"1 member would stop at level {SUPPORTED_LEVEL}" in refused.err
    assert "warning: old of group g (at h:17, release 0.2.4) would stop for good." in refused.err
    assert kafka("checkpoints", "g", "--start").status == 1, "not before the upgrade"
    assert kafka("upgrade", "--yes", "--force").status == 0
    assert kafka("status", "--json").json["groups"][0]["members"] == 2, "nothing else changes"


def test_partitions_that_were_added_later_are_found(
    kafka: Command, kafka_bootstrap: str, log_topic: str, cluster: KafkaCluster
) -> None:
    assert kafka("init", "--partitions", 2).status == 0
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.create_partitions([NewPartitions(log_topic, 3)])[log_topic].result(10)

    def known() -> int:
        return cluster.topic_info([log_topic], 10)[log_topic].partitions

    while known() < 3:
        pass
    ran = kafka("init", "--check")
    assert ran.status == 1
    assert "it has 3 partitions, and its first record in partition(s) 0, 1 says 2" in ran.out
    for args in (["status"], ["log"], ["who", "g", "t", "0"]):
        refused = kafka(*args)
        assert refused.status == 1
        assert "made with 2" in refused.err


def test_another_count_than_asked_for_is_wrong(kafka: Command) -> None:
    assert kafka("init", "--partitions", 2).status == 0
    ran = kafka("init", "--partitions", 5)
    assert ran.status == 1
    assert "it has 2 partitions, not 5" in ran.out


def test_a_log_that_begins_with_something_else_is_only_noted(
    kafka: Command, make: Callable[..., None], cluster: KafkaCluster, log_topic: str
) -> None:
    make(1)
    appender = cluster.appender(log_topic, delivery_timeout_ms=10_000)
    appender.append(0, encode(Tick("i", "c", "g")))
    appender.close(10)
    ran = kafka("init")
    assert ran.status == 0
    assert "note: partition(s) 0 begin with another record" in ran.out


def test_json(kafka: Command, make: Callable[..., None], log_topic: str) -> None:
    make(1, retention_ms="1000")
    ran = kafka("init", "--json")
    assert ran.status == 1
    found = ran.json
    assert (found["topic"], found["fit"], found["existed"], found["partitions"]) == (log_topic, False, True, 1)
    assert [problem["fatal"] for problem in found["problems"]] == [True]
    assert "retention.ms" in found["problems"][0]["mend"]
    assert len(found["done"]) == 2


def test_how_long_the_log_is_kept(kafka: Command, cluster: KafkaCluster, log_topic: str) -> None:
    def settings() -> tuple[str, str]:
        config = cluster.topic_config(log_topic, 10)
        assert config is not None
        assert config.settings["retention.ms"] == "-1"
        return config.settings["min.compaction.lag.ms"], config.settings["max.compaction.lag.ms"]

    ran = kafka("init", "--partitions", 1, "--keep", "30d")
    assert ran.status == 0 and "members remove log that is older than 30 d" in ran.out
    assert settings() == ("2592000000", "2592000000")
    assert kafka("init", "--check").status == 0
    found = kafka("topic", "--json").json
    assert (found["keep_ms"], found["records"], found["next_prune_ms"], found["warnings"]) == (
        2_592_000_000,
        2,
        None,
        [],
    )
    assert 0 <= found["age_ms"] < 600_000 and 200 < found["bytes"] < 600
    assert "kept for 2 h" in kafka("topic", "--keep", "2h").out
    short = kafka("topic", "--keep", "1m")
    assert short.status == 2 and "an hour at least" in short.err and "Nothing was changed" in short.err
    assert kafka("topic", "--keep", "soon").status == 2
    assert kafka("init", "--check", "--keep", "2d").status == 2
    assert settings() == ("7200000", "7200000")
    assert kafka("check", "--max-log", 1).status == 1 and kafka("check").status == 0
    assert "kept for ever" in kafka("topic", "--keep", "forever").out
    assert settings() == ("0", str(2**63 - 1))
    assert kafka("init", "--keep", "forever").status == 0


# -- `broker`: a local Kafka for as long as the command runs ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif("KAFKA_MARSHAL_BROKER" in os.environ, reason="another kind of broker was asked for")
def test_broker_runs_until_ctrl_c(tmp_path: Path, kafka_bootstrap: str) -> None:
    """Waits for the session's broker first, which has fetched the jars."""
    kept = tmp_path / "data"
    with start("broker", "--json", "--keep", str(kept), env={"KAFKA_MARSHAL_BROKER": "native"}) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        announced = json.loads(running.stdout.readline())
        assert announced["brokers"] == 1
        assert process("init", "--bootstrap", announced["bootstrap"]).returncode == 0
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(40) == 0
    assert b"Traceback" not in said
    assert kept.is_dir()
    assert any(kept.iterdir()), "the data stays where --keep says"
    assert process("status", "--bootstrap", announced["bootstrap"], "--timeout", "0.5").returncode == 3


# -- The highest level comes to a log while members of this release and of the one before it work on it (E4) --------


WORKER = Path(__file__).parents[1] / "client" / "worker.py"
BEFORE = SUPPORTED_LEVEL - 1
#: A process of the release before: it can follow no higher level, and its instance_id says which release it is.
OLD = f"""
import runpy, kafka_marshal.instance, rationalizer.world
rationalizer.world.SUPPORTED_LEVEL = {BEFORE}
kafka_marshal.instance.RELEASE = "0.3.0"
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
            command = [sys.executable, "-c", OLD, json.dumps(told)]
            env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
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
        ConfigurationError, match=rf"level {SHARING_LEVEL} .* at level {SHARING_LEVEL - 1}.*kafka-marshal upgrade"
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
        assert world.level == SUPPORTED_LEVEL
        assert world.rejected["UNSUPPORTED_VERSION"] == 2
        seen = [each[cp] for each in digests if each[cp][0] in known]
        assert len({at for at, _ in seen}) > PLACES
        assert all(known[at] == digest for at, digest in seen)


def test_what_needs_level_4_names_the_command_below_it(
    kafka_bootstrap: str, log_topic: str, topic_factory: Callable[..., str]
) -> None:
    Probe(kafka_bootstrap).create_topic(log_topic, 1, 1, required_settings(1))
    appender = KafkaCluster(kafka_bootstrap, {}).appender(log_topic, delivery_timeout_ms=10_000)
    for record in (marker("init-1", 1), Upgrade("i", "init", "g", SHARING_LEVEL - 1)):
        appender.append(0, encode(record))
    assert appender.flush(10) == 0
    refused_below_the_level(kafka_bootstrap, log_topic, topic_factory(1))


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
        redo = SettlingMessages("s1", "s", "elsewhere", topic, 0, None, 99, open=((2, 2, None, 0),), redo=True)
        for cp in range(2):  # of a later version than the level: rejected by all alike
            append(cp, redo)
            append(cp, ConfigureGroup("s1", "s", "coordinated", (("strategy", "range"),)))
        looked = kafka("upgrade", "--dry-run", "--json").json
        assert looked["level"] == SUPPORTED_LEVEL
        assert sorted((each["client"], each["release"]) for each in looked["old_members"]) == [
            ("old-claimed", "0.3.0"),
            ("old-coordinated", "0.3.0"),
        ]
        refused = kafka("upgrade", "--yes")
        assert refused.status == 1
        assert f"2 members would stop at level {SUPPORTED_LEVEL}" in refused.err
        assert kafka("upgrade", "--yes", "--force").status == 0
        for process in members.old:
            _, told = process.communicate(timeout=60)
            assert process.returncode == 1
            assert f"was raised to protocol level {SUPPORTED_LEVEL}, which this release" in told
        for cp in range(2):  # of leases that no member wants
            append(cp, ClaimingShare("s1", "s", "elsewhere", topic, 0, 60_000, start=9))
            append(cp, redo)
        every = {(partition, offset) for partition in range(2) for offset in range(MESSAGES // 2)}
        both = [set(members.handled(out)) for out in members.outs]

        def is_through() -> bool:
            places = [len({each[cp][0] for each in digests}) for cp in range(2)]
            return min(places) > PLACES and all(old | set(new) == every for old, new in zip(both, taken, strict=True))

        wait_until(lambda: all_work(is_through), what="the new ones go on with all of it")
    no_digest_differs(kafka_bootstrap, log_topic, digests)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []
