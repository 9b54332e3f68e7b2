"""`kafka-marshal audit`: its output, its exit codes and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import SparkSetupError
from kafka_marshal.node.replica import Replica
from kafka_marshal.pipeline import session
from kafka_marshal.pipeline.audit import audit as audit_module
from kafka_marshal.pipeline.audit import task
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import (
    ClaimingPartition,
    Heartbeat,
    HeartbeatBatch,
    ReleasingPartition,
    World,
    encode,
    route_lease,
)
from rationalizer.wire.records import BeatEntry
from tests.audit import broken
from tests.audit.logs import WholeLog, forged, random_log
from tests.cli.harness import Command, Log, process
from tests.stored_snapshot import encode_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The first one starts Spark.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Names in the log may contain anything except control characters.
HOSTILE = "<script>alert(1)</script>$x_{\u202e\u2028'\"--><b>"


class Page(HTMLParser):
    """The page as a browser parses it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def files(log: WholeLog, folder: Path) -> tuple[Path, Path]:
    return log.write_dump(folder / "log.jsonl", hashed=True), log.write_snapshots(folder / "snapshots.jsonl")


def test_the_verdict_comes_first_and_the_page_needs_no_network(
    spark: SparkSession, command: Command, tmp_path: Path
) -> None:
    log = random_log(40, 400)
    log.store_snapshots(100)
    dump, snapshots = files(log, tmp_path)
    for _ in range(2):  # the second one replaces the first
        ran = command("audit", dump, "--snapshots", snapshots, "--out", tmp_path / "out")
        assert ran.status == 0, ran.err
        assert ran.lines[0] == "0 violations in 800 records"
    for digest in log.digests().values():
        assert digest in ran.out
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert page.text.split("</title>")[0].strip().startswith("Audit: 0 violations in 800 records")
    assert len(page.addresses) == 3
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe"} & set(page.tags)
    said = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert said["clean"] is True
    assert {each["partition"]: each["digest"] for each in said["partitions"]} == log.digests()


def test_violations_end_with_1_and_are_shown(spark: SparkSession, command: Command, tmp_path: Path) -> None:
    log = random_log(41, 400)
    log.store_snapshots(100)
    log.snapshots[0][1:2] = forged(log.world(0, 200))
    dump, snapshots = files(log, tmp_path)
    ran = command("audit", dump, "--snapshots", snapshots, "--out", tmp_path / "out")
    where = log.world(0, 200).next_offset
    assert ran.status == 1
    assert ran.lines[0] == (
        f"1 violation in 800 records: 1 × snapshot differs from the log; first at partition 0, offset {where}"
    )
    assert log.world(0, 200).digest() in ran.out
    assert f"the snapshot at next offset {where}" in Page((tmp_path / "out" / "report.html").read_text()).text
    ran = command("audit", dump, "--snapshots", snapshots, "--json")
    assert ran.status == 1
    assert ran.json["violations"] == {"snapshot differs from the log": 1}
    assert ran.json["examples"][0]["offset"] == where


@pytest.mark.parametrize(
    ("world_type", "kind"),
    [
        (broken.Generous, "two owners at one offset"),
        (broken.Forgetful, "progress moved back without a reposition"),
        (broken.Spendthrift, "overlapping grants"),
        (broken.Trusting, "record accepted with a stale epoch"),
    ],
)
def test_each_kind_of_violation_ends_with_1(
    world_type: type[World],
    kind: str,
    spark: SparkSession,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No log makes the rationalizer do these, so the audit gets a broken one (Audit's seam for tests)."""
    from pyspark import cloudpickle

    monkeypatch.setattr(audit_module, "DEFAULT_WORLD", world_type)
    cloudpickle.register_pickle_by_value(broken)  # type: ignore[no-untyped-call]
    try:
        ran = command("audit", random_log(4, 300).write_dump(tmp_path / "log.jsonl"))
    finally:
        cloudpickle.unregister_pickle_by_value(broken)  # type: ignore[no-untyped-call]
    assert ran.status == 1
    assert kind in ran.lines[0]


def hostile_log() -> WholeLog:
    who, other = (HOSTILE, HOSTILE, HOSTILE), ("2", "_b", HOSTILE)
    records = [
        (ClaimingPartition(*who, HOSTILE, 0, 1000), 0),
        (Heartbeat(*who, HOSTILE, 0, 0, 10), 500),
        (HeartbeatBatch(*who, (BeatEntry(HOSTILE, 0, 0, 20),)), 900),
        (ClaimingPartition(*other, HOSTILE, 0, 1000), 9000),
        (ReleasingPartition(*other, HOSTILE, 0, 3, 30), 9100),
        (ClaimingPartition(*who, HOSTILE, 0, 1000), 9500),
        (ClaimingPartition(*other, HOSTILE, 0, 1000), 9600),
    ]
    return WholeLog(1, {0: [(offset, stamp, encode(record)) for offset, (record, stamp) in enumerate(records)]})


def test_names_from_the_log_are_shown_and_do_nothing(
    spark: SparkSession, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import cloudpickle

    monkeypatch.setattr(audit_module, "DEFAULT_WORLD", broken.Generous)
    cloudpickle.register_pickle_by_value(broken)  # type: ignore[no-untyped-call]
    try:
        ran = command("audit", hostile_log().write_dump(tmp_path / "log.jsonl"), "--out", tmp_path / "out")
    finally:
        cloudpickle.unregister_pickle_by_value(broken)  # type: ignore[no-untyped-call]
    assert ran.status == 1
    assert "\u202e" not in ran.out
    assert "\\u202e" in ran.out
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert "\u202e" not in text
    assert not {"script", "b"} & set(page.tags)
    assert "\u2028" not in text
    assert "<script>alert(1)</script>$x_{\\u202e\\u2028'\"--><b>" in page.text


def test_a_report_of_one_group_or_a_no_that_names_one(spark: SparkSession, command: Command, tmp_path: Path) -> None:
    log = Log()
    log.add(ClaimingPartition("a1", "a", "delays", "flights", 0, 1_000), 1_000)
    log.add(ClaimingPartition("b1", "b", "billing", "orders", 0, 1_000), 2_000)
    dump = tmp_path / "log.jsonl"
    dump.write_bytes(log.dump)
    ran = command("audit", dump, "--out", tmp_path / "out", "--group", "delays")
    assert ran.status == 4, ran.err  # this dump carries no hashes
    assert "partition 0: the dump carries no hash of offsets 0 to 1, where kafka-marshal dump writes one" in ran.err
    assert "billing" not in (tmp_path / "out" / "report.html").read_text()
    mistyped = command("audit", dump, "--group", "delay")
    assert mistyped.status == 1
    assert "no group 'delay'; did you mean 'delays'?" in mistyped.err


def test_a_file_needs_no_connector(
    spark: SparkSession, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jars that are not in the cache can't be downloaded everywhere, and a file is read without them."""
    monkeypatch.setattr(session, "connector_jars", lambda: pytest.fail("a file was to be read"))
    ran = command("audit", random_log(4, 50).write_dump(tmp_path / "log.jsonl"))
    assert ran.out.startswith("0 violations in 100 records")


def test_the_session_for_a_file_compiles_little(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JVM's compiler took as much processor time as 200,000 records. From Kafka, records pass the JVM."""
    asked: list[dict[str, str]] = []

    def refuse(name: str, *, config: dict[str, str], **others: object) -> None:
        asked.append(config)
        raise SparkSetupError("not in this test")

    monkeypatch.setattr(task, "is_spark_running", lambda: False)
    monkeypatch.setattr(session, "spark_session", refuse)
    assert command("audit", random_log(4, 50).write_dump(tmp_path / "log.jsonl")).status != 0
    assert asked[0]["spark.driver.defaultJavaOptions"] == "-XX:TieredStopAtLevel=1"


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "either a FILE or --from-kafka"),
        (["x.jsonl", "--from-kafka"], "either a FILE or --from-kafka"),
        (["--from-kafka", "--partitions", "8"], "go with a FILE"),
        (["there-is-no-such-file"], "No such file"),
        (["there-is-no-such-file", "--out", "s3://bucket/audit"], "s3://bucket/audit is a URL"),
        (["--from-kafka"], "which Kafka?"),
    ],
)
def test_wrong_use_ends_with_2(args: list[str], words: str, command: Command) -> None:
    ran = command("audit", *args)
    assert ran.status == 2
    assert words in ran.err


def test_a_file_that_is_no_dump_ends_with_2_before_spark_starts(command: Command, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    ran = command("audit", tmp_path / "x")
    assert ran.status == 2
    assert "line 1" in ran.err


def test_a_kafka_out_of_reach_ends_with_3(spark: SparkSession, command: Command) -> None:
    ran = command("--bootstrap", "127.0.0.1:1", "--timeout", "1", "audit", "--from-kafka")
    assert ran.status == 3, ran.err


def test_without_the_extra_it_says_which(tmp_path: Path) -> None:
    """In a Python without pyarrow, as after pip install kafka-marshal[cli]."""
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('No module named pyarrow', name='pyarrow')\n")
    dump = random_log(1, 5).write_dump(tmp_path / "log.jsonl")
    ran = process("audit", str(dump), env={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 2
    assert b"kafka-marshal[cli,spark]" in ran.stderr


# -- the topic itself --------------------------------------------------------------------------------------------------


def append(cluster: KafkaCluster, topic: str, values: dict[int, list[bytes]]) -> None:
    appender = cluster.appender(topic, delivery_timeout_ms=10_000)
    for partition, each in values.items():
        for value in each:
            appender.append(partition, value)
    assert appender.flush(10) == 0
    appender.close()


def log_values(topic: str, partitions: int) -> dict[int, list[bytes]]:
    """Heartbeats, releases and claims of two workers on four data partitions."""
    values: dict[int, list[bytes]] = {cp: [] for cp in range(partitions)}
    next_offset = dict.fromkeys(range(partitions), 2)  # behind the marker and the Upgrade (L2, E4)
    for number in range(4):
        cp = route_lease(topic, number, partitions)
        epoch = next_offset[cp]
        who = ("1", f"worker-{number % 2}", "delays")
        mine = [ClaimingPartition(*who, topic, number, 1000)]
        mine += [Heartbeat(*who, topic, number, epoch, done) for done in range(300)]  # type: ignore[misc]
        mine += [ReleasingPartition(*who, topic, number, epoch, 300)]  # type: ignore[list-item]
        values[cp] += map(encode, mine)
        next_offset[cp] += len(mine)
    return values


def test_a_topic_with_its_snapshots(
    spark: SparkSession,
    kafka: Command,
    kafka_bootstrap: str,
    log_topic: str,
    topic_factory: Callable[..., str],
    tmp_path: Path,
) -> None:
    """Digests equal a live replica's, and a forged snapshot in the topic is found."""
    assert kafka("init", "--partitions", 2).status == 0
    data = topic_factory(4)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(4 * 301):
        producer.produce(data, b"", partition=number % 4)
    assert producer.flush(20) == 0
    cluster = KafkaCluster(kafka_bootstrap, {})
    append(cluster, log_topic, log_values(data, 2))
    dump = tmp_path / "log.jsonl"
    assert kafka("dump", "--output", dump).status == 0
    stored = 0
    worlds = {cp: World(cp, 2) for cp in range(2)}
    for cp, entry in _entries(dump):
        worlds[cp].apply(*entry)
        if worlds[cp].next_offset % 150 == 0:
            stored += 1
            append(cluster, snapshots_topic(log_topic), {cp: encode_snapshot(worlds[cp])})
    replica = Replica(cluster, log_topic, 10)
    replica.catch_up(10)
    digests = {cp: world.digest() for cp, world in replica.worlds.items()}
    replica.close()
    ran = kafka("audit", "--from-kafka", "--out", tmp_path / "out", "--json")
    assert ran.status == 0, ran.err
    assert {each["partition"]: each["digest"] for each in ran.json["partitions"]} == digests
    assert sum(each["snapshots"] for each in ran.json["partitions"]) == stored >= 4
    assert "<h2>How far groups were behind</h2>" in (tmp_path / "out" / "report.html").read_text()
    assert kafka("dump", "--snapshots", "--output", tmp_path / "snapshots.jsonl").status == 0
    ran = kafka("audit", dump, "--snapshots", tmp_path / "snapshots.jsonl", "--json")
    assert {each["partition"]: each["digest"] for each in ran.json["partitions"]} == digests
    assert sum(each["snapshots"] for each in ran.json["partitions"]) == stored >= 4
    assert kafka("archive", "--to", tmp_path / "archive").status == 0
    assert kafka("prune", "--keep", "2", "--yes").status == 0
    joined = kafka("audit", "--from-kafka", "--archive", tmp_path / "archive", "--json")
    assert (joined.status, joined.json["records"]) == (0, ran.json["records"])
    assert {each["partition"]: each["digest"] for each in joined.json["partitions"]} == digests
    cp = max(worlds, key=lambda each: worlds[each].next_offset)
    append(cluster, snapshots_topic(log_topic), {cp: forged(worlds[cp])})
    ran = kafka("audit", "--from-kafka")
    assert ran.status == 1
    assert re.match(r"1 violation in [\d,]+ records: 1 × snapshot differs from the log", ran.lines[0])
    cluster.close()


def _entries(dump: Path) -> list[tuple[int, Any]]:
    from rationalizer.dump import DumpReader

    with dump.open("rb") as lines:
        return [(record.partition, tuple(record[1:])) for record in DumpReader(lines)]


def test_a_topic_that_is_not_there(spark: SparkSession, kafka: Command) -> None:
    ran = kafka("audit", "--from-kafka")
    assert ran.status == 1
    assert "kafka-marshal init" in ran.err
