"""`import-group`, `export-group`, `convert-group` for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin.conversion import Plan, Saved
from rationalizer import ClaimingPartition, CommitRanges, Record, ReleasingPartition, Upgrade, encode, route_lease
from tests.cli.harness import Command

A = ("a1", "a", "g")


class Ground:
    """A coordination topic of two partitions at level 2, and a data topic of two."""

    def __init__(self, bootstrap: str, log_topic: str, data: str) -> None:
        self.cluster = KafkaCluster(bootstrap, {})
        self.log_topic = log_topic
        self.data = data

    def append(self, *records: tuple[int, Record]) -> None:
        appender = self.cluster.appender(self.log_topic, delivery_timeout_ms=10_000)
        for cp, record in records:
            appender.append(cp, encode(record))
        assert appender.flush(10) == 0
        appender.close()

    def claimed(self) -> None:
        """Partition 0 of group g is at 8, and 10 … 12 are done."""
        cp = route_lease(self.data, 0, 2)
        self.append((cp, ClaimingPartition(*A, self.data, 0, 60_000)))
        end = self.cluster.watermarks([(self.log_topic, cp)], 10)[self.log_topic, cp][1]
        epoch = end - 1
        self.append(
            (cp, CommitRanges(*A, self.data, 0, epoch, ((10, 12),))),
            (cp, ReleasingPartition(*A, self.data, 0, epoch, 7)),
        )


@pytest.fixture
def ground(
    kafka: Command,
    kafka_bootstrap: str,
    log_topic: str,
    topic_factory: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Ground]:
    assert kafka("init", "--partitions", 2).status == 0
    made = Ground(kafka_bootstrap, log_topic, topic_factory(2))  # type: ignore[operator]
    made.append(*((cp, Upgrade("x", "admin", "g", 2)) for cp in (0, 1)))
    monkeypatch.chdir(tmp_path)
    yield made
    made.cluster.close()


def test_in_and_out_again(kafka: Command, ground: Ground) -> None:
    group = f"g-{ground.data}"
    missing = kafka("import-group", group, "--yes")
    assert missing.status == 1
    assert "no committed offsets" in missing.err
    ground.cluster.commit_for_group(group, {(ground.data, 0): (5, ""), (ground.data, 1): (9, "")}, 10)
    planned = kafka("import-group", group, "--dry-run", "--json")
    assert planned.json["done"] is False
    assert kafka("import-group", group).status == 2, "nobody to ask"
    done = kafka("import-group", group, "--yes")
    assert (done.status, done.err) == (0, "")
    assert "imported: 2 partitions" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())
    again = kafka("import-group", group, "--yes", "--json").json
    assert again["done"] is True
    assert [(x["partition"], x["before"], x["after"], x["left_out"]) for x in again["moves"]] == [
        (0, 5, 5, None),
        (1, 9, 9, None),
    ]
    ground.cluster.commit_for_group(group, {(ground.data, 0): (2, "")}, 10)
    refused = kafka("import-group", group, "--yes")
    assert refused.status == 1
    assert "has positions already" in refused.err


def test_export_names_what_comes_again_and_a_name_that_may_be_meant(kafka: Command, ground: Ground) -> None:
    ground.cluster.delete_records({}, 5)
    ground.claimed()
    unknown = kafka("export-group", "gg", "--yes")
    assert unknown.status == 1
    assert "did you mean 'g'?" in unknown.err
    planned = kafka("export-group", "g", "--dry-run")
    assert planned.status == 0
    # The topic is empty, so that position 8 is outside its log.
    assert "left out" in " ".join(planned.out.split())


def test_convert_says_what_comes_again_and_keeps_a_file(kafka: Command, ground: Ground, tmp_path: Path) -> None:
    ground.claimed()
    planned = kafka("convert-group", "g", "--to", "coordinated", "--dry-run", "--json").json
    assert (planned["done"], planned["positions"]) == (False, [{"topic": ground.data, "partition": 0, "offset": 8}])
    assert [(x["first"], x["last"]) for x in planned["repeats"]] == [(10, 12)]
    assert list(tmp_path.iterdir()) == []
    done = kafka("convert-group", "g", "--to", "coordinated", "--yes")
    assert done.status == 0, done.err
    assert "comes again" in done.out
    assert "sink.convert('g', 'coordinated')" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["kafka-marshal-convert-g.json"]
    again = kafka("convert-group", "g", "--to", "coordinated", "--yes")
    assert again.status == 1
    assert "is a coordinated group already" in again.err
    back = kafka("convert-group", "g", "--to", "claimed", "--yes", "--json").json
    assert (back["done"], back["repeats"]) == (True, [])
    assert kafka("convert-group", "gg", "--to", "claimed", "--yes").status == 1
    assert kafka("convert-group", "g").status == 2


def test_a_dry_run_of_what_was_interrupted_changes_nothing(kafka: Command, ground: Ground, tmp_path: Path) -> None:
    ground.claimed()
    saved = (Saved(ground.data, 0, 8),)
    path = tmp_path / "kafka-marshal-convert-g.json"
    Plan("g", ground.log_topic, "coordinated", "admin-1", "saved", saved).write(path, "changing")
    planned = kafka("convert-group", "g", "--to", "coordinated", "--dry-run")
    assert planned.status == 0
    assert "an earlier run was interrupted" in planned.err
    assert kafka("groups", "--json").json["groups"][0]["kind"] == "claimed"
    done = kafka("convert-group", "g", "--to", "coordinated", "--yes", "--json").json
    assert (done["done"], done["resumed"]) == (True, True)
    assert kafka("groups", "--json").json["groups"][0]["kind"] == "coordinated"
