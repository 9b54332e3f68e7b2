"""`evict`, `forget-group` and `release-group` on a real Kafka, with working members."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from kafka_marshal import InHand, Marshal, Pause
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin.conversion import Plan, Saved
from rationalizer import (
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Upgrade,
    encode,
    route_lease,
)
from tests.cli.harness import Command, Terminal, start

A = ("a1", "a", "g")


@pytest.fixture
def reach(kafka_bootstrap: str, log_topic: str) -> tuple[str, ...]:
    return ("--bootstrap", kafka_bootstrap, "--topic", log_topic)


@pytest.fixture
def append(kafka: Command, kafka_bootstrap: str, log_topic: str) -> Iterator[Callable[..., None]]:
    """A log of two partitions, and a function that appends to it, to every CP or to the record's own."""
    assert kafka("init", "--partitions", 2).status == 0
    cluster = KafkaCluster(kafka_bootstrap, {})
    appender = cluster.appender(log_topic, delivery_timeout_ms=10_000)

    def append_one(record: Record) -> None:
        topic, number = getattr(record, "topic", None), getattr(record, "partition", None)
        named = isinstance(topic, str) and isinstance(number, int)
        cps = [route_lease(str(topic), int(number or 0), 2)] if named else [0, 1]
        for cp in cps:
            appender.append(cp, encode(record))
        assert appender.flush(10) == 0

    yield append_one
    appender.close()
    cluster.close()


@pytest.fixture
def data(topic_factory: Callable[..., str], kafka_bootstrap: str) -> str:
    """A topic of 2 partitions with 100 messages each."""
    topic = topic_factory(2)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(200):
        producer.produce(topic, str(number).encode(), partition=number % 2)
    assert producer.flush(30) == 0
    return topic


class Worker:
    """A member of group g that reads everything, in a thread."""

    def __init__(self, bootstrap: str, log_topic: str, data: str) -> None:
        self.seen: list[tuple[int, int]] = []
        self._stop = threading.Event()
        #: The handler of a message waits for this.
        self.go_on = threading.Event()
        self.go_on.set()
        self._marshal = Marshal(bootstrap, group_id="g", client_id="worker", topic=log_topic, heartbeat_interval=0.5)
        self._thread = threading.Thread(target=self._work, args=(data,))
        self._thread.start()

    def _work(self, data: str) -> None:
        with self._marshal as marshal, marshal.consumer([data]) as consumer:
            while not self._stop.is_set():
                message = consumer.poll(0.05)
                if message is None:
                    continue
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                self.seen.append((partition, offset))
                self.go_on.wait(60)
                consumer.done(message)

    def wait_until(self, met: Callable[[], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not met():
            assert time.monotonic() < deadline, f"not within {timeout_s} s; seen: {len(self.seen)}"
            time.sleep(0.01)

    def close(self) -> None:
        self.go_on.set()
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def worker(append: Callable[..., None], kafka_bootstrap: str, log_topic: str, data: str) -> Iterator[Worker]:
    working = Worker(kafka_bootstrap, log_topic, data)
    yield working
    working.close()


def everything(worker: Worker) -> bool:
    return len(set(worker.seen)) == 200


# -- evict ---------------------------------------------------------------------------------------------------


def silent_since(kafka: Command, ms: int) -> None:
    """Wait until, by the broker's clock, the (only) holder has been silent for ``ms``."""
    while kafka("status", "--tick", "--json").json["leases"][0]["silence_ms"] < ms:
        pass


def test_a_dead_holders_lease_is_released(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 600))
    silent_since(kafka, 601)
    assert kafka("evict", "g", "t", 0, "--dry-run").out.startswith("a (epoch 2, next offset: 0) would be evicted")
    assert kafka("status", "--group", "g").table[0]["holder"] == "a"
    ran = kafka("evict", "g", "t", 0, "--yes")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "released: a no longer holds t partition 0 (epoch 2).\n"
    assert kafka("status", "--group", "g").table[0]["seen"] == "free"
    told = kafka("log", "--group", "g").table[-2:]
    assert [each["what"] for each in told] == ["releases t/0", "releases t/0"]
    assert [each["client"] for each in told] == [told[0]["client"], "a"]
    assert told[0]["client"].startswith("admin-")
    assert told[0]["why"] == "a holds it, epoch 2; an operator evicts it"
    assert f"evicted by {told[0]['client']}, nothing done" in kafka("who", "g", "t", 0).out


def test_a_living_holder_is_left_alone_unless_forced(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 600_000))
    for how in ("--yes", "--dry-run"):
        ran = kafka("evict", "g", "t", 0, how)
        assert ran.status == 1
        assert "may be alive" in ran.err
    assert "would be evicted" in kafka("evict", "g", "t", 0, "--dry-run", "--force").out
    assert kafka("status", "--group", "g").table[0]["holder"] == "a"
    forced = kafka("evict", "g", "t", 0, "--yes", "--force", "--json")
    assert forced.status == 0
    assert forced.json == {
        "group": "g",
        "topic": "t",
        "partition": 0,
        "holder": "a",
        "epoch": forced.json["epoch"],
        "evicted": True,
    }


def test_what_can_not_be_evicted(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 600_000))
    kafka("evict", "g", "t", 0, "--yes", "--force")
    assert "is free already" in kafka("evict", "g", "t", 0, "--yes").err
    assert "ever held" in kafka("evict", "g", "t", 1, "--yes").err
    assert kafka("evict", "g", "t", 1, "--yes").status == 1


def test_all_that_a_worker_holds_is_released(kafka: Command, append: Callable[..., None]) -> None:
    for partition in range(3):
        append(ClaimingPartition(*A, "t", partition, 600_000))
    append(ClaimingPartition("b1", "b", "g", "t", 3, 600_000))
    assert "may be alive" in kafka("evict", "--member", "a", "--dry-run").err
    assert "3 partitions" not in kafka("evict", "--member", "a", "--dry-run", "--force").out
    assert kafka("evict", "--member", "a", "--dry-run", "--force").out.count("a (epoch") == 3
    assert "may be alive" in kafka("evict", "g", "--member", "a", "--yes").err
    ran = kafka("evict", "--member", "a", "--yes", "--force")
    assert (ran.status, ran.out.count("released: a no longer holds t")) == (0, 3)
    assert [bool(row["holder"]) for row in kafka("status", "--json").json["leases"]] == [False, False, False, True]
    again = kafka("evict", "--member", "a", "--yes", "--force")
    assert (again.status, again.err) == (1, "error: 'a' holds nothing. Who does: 'b'. Nothing was changed.\n")


def test_a_worker_of_several_groups_wants_a_group(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 600_000))
    append(ClaimingPartition("a2", "a", "h", "t", 0, 600_000))
    for command in (("evict", "--member", "a", "--yes", "--force"), ("drain", "a")):
        ran = kafka(*command)
        assert ran.status == 1
        assert "several groups (g, h): name one. Nothing was changed" in ran.err
    assert kafka("drain", "h", "a").out == "asked: a is to hand over 1 partition of group h.\n"


@pytest.mark.parametrize(
    "args", [["evict"], ["evict", "g"], ["evict", "g", "t"], ["evict", "g", "t", "0", "--member", "a"]]
)
def test_an_eviction_names_a_partition_or_a_worker(kafka: Command, args: list[str]) -> None:
    ran = kafka(*args, "--yes")
    assert ran.status == 2
    assert "evict [GROUP] --member CLIENT" in ran.err


def test_a_worker_that_hands_over_nothing_is_named(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 600_000))
    ran = kafka("drain", "g", "a", "--wait", "1s")
    assert ran.status == 1
    assert "holds 1 of 1 partition still after 1 s, such as t [0]" in ran.err
    assert "warning: nobody else holds anything of group g" in ran.err
    (member,) = kafka("status", "--members").table
    assert member["progress"].startswith("asked to hand over")
    assert "1 draining" in kafka("status").table[0]["state"]
    assert kafka("status", "--json").json["leases"][0]["holder"]["client"] == "a", (
        "it is asked; nothing is taken from it"
    )


@pytest.mark.parametrize(
    "args", [["evict", "g", "t", "0", "--force"], ["forget-group", "g", "--force"], ["release-group", "g"]]
)
def test_nothing_destructive_without_yes_or_a_question(
    kafka: Command,
    append: Callable[..., None],
    reach: tuple[str, ...],
    terminal: Callable[..., Terminal],
    args: list[str],
) -> None:
    append(ClaimingPartition(*A, "t", 0, 600_000))
    ran = kafka(*args)
    assert ran.status == 2, ran.err
    assert "--yes" in ran.err
    for answer, said, status in ((b"n\n", b"Nothing was changed.", 1), (b"\x03", b"interrupted. Nothing was", 130)):
        opened = terminal(*args, *reach)
        opened.read_until(lambda shown: b"[y/N]" in shown)
        opened.type(answer)
        assert said in opened.finish(again=answer)
        assert opened.process.returncode == status
    found = kafka("status", "--json").json
    assert (found["leases"][0]["holder"]["client"], found["pauses"]) == ("a", [])


# -- forget-group --------------------------------------------------------------------------------------------


def test_a_group_that_is_gone_is_forgotten(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 200))
    append(ClaimingPartition(*A, "t", 1, 200))
    lost = kafka("forget-group", "g", "--dry-run").out
    assert lost.startswith("2 leases with their positions (of t)")
    assert "What is lost: next offsets t 0 at 0, t 1 at 0; lag is not known; last seen " in lost
    found = kafka("forget-group", "g", "--dry-run", "--json").json
    assert (found["lag"], [each["next"] for each in found["positions"]]) == (None, [0, 0])
    ran = kafka("forget-group", "g", "--yes")
    assert ran.status == 0, ran.err
    assert "forgotten: 2 leases of group g." in ran.out
    assert kafka("status").rows == []
    assert kafka("forget-group", "g", "--yes").status == 1
    assert "no group" in kafka("forget-group", "g", "--yes").err


def test_a_group_at_work_is_not_forgotten_and_continues(kafka: Command, worker: Worker) -> None:
    worker.wait_until(lambda: len(worker.seen) > 3)
    ran = kafka("forget-group", "g", "--yes", "--within", "10s")
    assert ran.status == 1
    assert "goes on" in ran.err
    worker.wait_until(lambda: everything(worker))


# -- release-group -------------------------------------------------------------------------------------------


def test_positions_are_moved_while_the_group_runs_without_a_restart(kafka: Command, worker: Worker, data: str) -> None:
    worker.wait_until(lambda: everything(worker))
    before = len(worker.seen)
    ran = kafka("release-group", "g", "--partition", f"{data}:1=90", "--partition", f"{data}:0=earliest", "--yes")
    assert ran.status == 0, ran.err
    rows = {row["partition"]: row for row in ran.rows}
    assert (rows["0"]["to"], rows["1"]["to"]) == ("0", "90")
    assert rows["1"]["means"] == "10 offsets repeated"
    assert "paused by admin-" in ran.err
    assert "moved 2 partitions; group g is resumed" in ran.err
    worker.wait_until(lambda: len(worker.seen) >= before + 110)
    assert sorted(worker.seen[before:]) == [(0, n) for n in range(100)] + [(1, n) for n in range(90, 100)]


def test_a_dry_run_shows_and_changes_nothing(
    kafka: Command, append: Callable[..., None], data: str, kafka_bootstrap: str, log_topic: str
) -> None:
    append(ClaimingPartition(*A, data, 0, 600_000))
    cluster = KafkaCluster(kafka_bootstrap, {})
    before = cluster.watermarks([(log_topic, 0), (log_topic, 1)], 10)
    ran = kafka("release-group", "g", "--to", "latest", "--dry-run")
    assert (ran.status, ran.err) == (0, "")
    assert [(row["partition"], row["now"], row["to"]) for row in ran.rows] == [("0", "0", "100"), ("1", "-", "100")]
    found = kafka("release-group", "g", "--to", "1970-01-02", "--dry-run", "--json").json
    assert [move["after"] for move in found["moves"]] == [0, 0]
    assert found["moved"] is False
    assert cluster.watermarks([(log_topic, 0), (log_topic, 1)], 10) == before


def test_what_can_not_be_moved(kafka: Command, append: Callable[..., None], data: str) -> None:
    append(ClaimingPartition(*A, data, 0, 600_000))
    outside = kafka("release-group", "g", "--partition", f"{data}:0=5000", "--yes")
    assert outside.status == 1
    assert "outside the log" in outside.err
    missing = kafka("release-group", "g", "--partition", f"{data}:9=0", "--yes")
    assert missing.status == 1
    unknown = kafka("release-group", "nobody", "--to", "latest", "--yes")
    assert unknown.status == 1
    assert "no group" in unknown.err
    no_topic = kafka("release-group", "g", "--partition", "no-such-topic", "--to", "latest", "--yes")
    assert no_topic.status == 1
    assert "not on this cluster" in no_topic.err


def test_work_in_flight_for_too_long_is_named_and_nothing_is_moved_without_wait(
    kafka: Command, append: Callable[..., None], data: str
) -> None:
    append(ClaimingPartition("d1", "dead", "g", data, 0, 300))
    append(Heartbeat("d1", "dead", "g", data, 0, 2, 41))
    ran = kafka("release-group", "g", "--partition", f"{data}:0=10", "--yes")
    assert ran.status == 1
    assert f"{data} partition 0: dead handed in what lies below offset 42" in ran.err
    assert "--wait" in ran.err
    assert "nothing was moved" in ran.err
    (lag, *_) = kafka("lag").rows
    assert lag["next"] == "42"
    assert kafka("status", "--json").json["pauses"] == []
    waited = kafka("release-group", "g", "--partition", f"{data}:0=10", "--yes", "--wait", "--json")
    assert waited.status == 0, waited.err
    assert [each["client"] for each in waited.json["in_hand"]] == ["dead"]
    assert waited.json["moved"] is True
    assert kafka("lag").rows[0]["next"] == "10"


def test_what_may_be_repeated_is_named_and_the_positions_are_moved(
    kafka: Command, append: Callable[..., None], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(ClaimingPartition("s1", "slow", "g", data, 0, 300))
    append(ReleasingPartition("s1", "slow", "g", data, 0, 2, 41))
    slow = InHand(data, 0, "slow", 2, "slow", 41)
    monkeypatch.setattr(Pause, "wait_released", lambda *_, **__: [slow])
    ran = kafka("release-group", "g", "--partition", f"{data}:0=10", "--yes", "--json")
    assert ran.status == 0, ran.err
    assert "slow handed in what lies below offset 42, late: if more was in flight, that is repeated" in ran.err
    assert (ran.json["moved"], [each["state"] for each in ran.json["in_hand"]]) == (True, ["slow"])


def test_ctrl_c_while_it_waits_moves_nothing_and_lets_the_group_continue(
    kafka: Command, worker: Worker, data: str, reach: tuple[str, ...]
) -> None:
    worker.go_on.clear()
    worker.wait_until(lambda: len(worker.seen) > 0)
    with start("release-group", "g", "--to", "latest", "--yes", "--wait", *reach) as running:
        assert running.stderr is not None
        while b"waiting" not in running.stderr.readline():
            pass
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(30) == 130
    assert b"interrupted. Nothing was moved, and the group is resumed." in said
    assert b"Traceback" not in said
    assert kafka("status", "--json").json["pauses"] == []
    worker.go_on.set()
    worker.wait_until(lambda: everything(worker))


def test_a_group_is_only_paused_until_ctrl_c(kafka: Command, worker: Worker, reach: tuple[str, ...]) -> None:
    with start("release-group", "g", "--yes", "--json", *reach) as running:
        assert running.stdout is not None
        announced = b""
        while not announced.endswith(b"}\n"):
            announced += running.stdout.readline()
        client = json.loads(announced)["client_id"]
        pauses = kafka("status", "--json").json["pauses"]
        assert [(pause["client"], pause["partition"]) for pause in pauses] == [(client, 0), (client, 1)]
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
    assert kafka("status", "--json").json["pauses"] == []
    worker.wait_until(lambda: everything(worker))


def test_a_pause_runs_out_by_itself(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 100))
    ran = kafka("release-group", "g", "--yes", "--expires", "1s")
    assert ran.status == 0
    assert "group g is resumed" in ran.err


def test_a_dead_admins_pause_is_ended(kafka: Command, append: Callable[..., None]) -> None:
    append(ClaimingPartition(*A, "t", 0, 100))
    assert kafka("release-group", "g", "--resume").out == "group g is not paused\n"
    assert kafka("release-group", "gg", "--resume").status == 1
    assert kafka("release-group", "gg", "--resume", "--dry-run").status == 1
    dry = kafka("release-group", "g", "--dry-run", "--expires", "1m")
    assert dry.out.startswith(
        "group g would be paused for 1 min at most: 1 member would finish their messages in flight"
    )
    asked = kafka("drain", "g", "a", "--dry-run")
    assert asked.out == "a would be asked to hand over 1 partition of group g.\n"
    assert kafka("status", "--json").json["pauses"] == []
    append(ReleaseGroup("x1", "dead-admin", "g", 2**62))
    refused = kafka("release-group", "g", "--resume", "--yes", "--client-id", "another")
    assert refused.status == 1
    assert "dead-admin" in refused.err
    assert kafka("release-group", "g", "--resume").status == 2
    blocked = kafka("release-group", "g", "--yes")
    assert blocked.status == 1
    assert "is paused by 'dead-admin'" in blocked.err
    dry = kafka("release-group", "g", "--resume", "--dry-run")
    assert dry.out.startswith("the pause of group g by dead-admin would end; otherwise it ends at ")
    ran = kafka("release-group", "g", "--resume", "--yes")
    assert (ran.status, ran.err) == (0, "")
    assert "its pause by dead-admin ended" in ran.out
    assert kafka("status", "--json").json["pauses"] == []


# -- `import-group`, `export-group`, `convert-group` for people and programs --------------------------------------


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


# -- `release-group` with files: positions from one, and the plan that undoes a move ------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def positions(kafka: Command) -> list[int | None]:
    return [each["next"] for each in kafka("lag", "--group", "g", "--json").json["partitions"]]


def test_from_a_file_and_back_by_the_plan(kafka: Command, append: Callable[..., None], data: str, here: Path) -> None:
    first = kafka("release-group", "g", "--partition", f"{data}:0=10", "--yes", "--json").json
    assert first["plan"].startswith(str(here))
    rows = [
        "# from kafka-consumer-groups --export",
        f'"g","{data}",0,40',
        f'"other","{data}",0,7',
        f'"g","{data}",1,50',
    ]
    (here / "offsets.csv").write_text("\r\n".join(rows), encoding="utf-8-sig")
    dry = kafka("release-group", "g", "--from-file", "offsets.csv", "--dry-run")
    assert [row["means"] for row in dry.table] == ["30 offsets skipped", "never claimed"]
    assert len(list(here.glob("*.json"))) == 1, "a dry run saves nothing"
    ran = kafka("release-group", "g", "--from-file", "offsets.csv", "--yes")
    assert (ran.status, positions(kafka)) == (0, [40, 50])
    (told,) = [line for line in ran.err.splitlines() if line.startswith("as it was: ")]
    plan = told.removeprefix("as it was: ").partition(". To put it back: ")[0]
    assert f"release-group g --undo {plan}" in told
    undone = kafka("release-group", "g", "--undo", plan, "--yes", "--plan", "again.json")
    assert (undone.status, positions(kafka)) == (0, [10, 50])
    assert "1 partition had no position before that move" in undone.err
    again = kafka("release-group", "g", "--undo", "again.json", "--yes", "--json").json
    assert [(move["before"], move["after"]) for move in again["moves"]] == [(10, 40)]
    moved = kafka("release-group", "g", "--from-file", again["plan"], "--dry-run")
    assert moved.status == 2, "a plan is undone, not taken for positions"
    assert kafka("release-group", "other", "--undo", plan, "--yes").status == 2
    assert kafka("release-group", "g", "--to", "earliest", "--yes", "--plan", here / "no" / "where").status == 2
    assert positions(kafka) == [40, 50]


def test_a_time_is_said_with_its_moment(kafka: Command, append: Callable[..., None], data: str, here: Path) -> None:
    (here / "p.json").write_text(json.dumps([{"topic": data, "partition": 0, "offset": "1d"}]))
    for args in (["--partition", f"{data}:0=1d"], ["--from-file", "p.json"]):
        ran = kafka("release-group", "g", *args, "--dry-run")
        assert (ran.status, f"{args[0]} 1d is 20" in ran.err) == (0, True)
        (moment,) = kafka("release-group", "g", *args, "--dry-run", "--json").json["times"]
        assert (moment["option"], moment["text"]) == (args[0], "1d")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("t,0", "line 1: topic,partition,offset or"),
        ("t,0,1\nt,x,2", "line 2: invalid literal"),
        ("t,0,1\nt,0,2", "line 2: t [0] stands there twice"),
        ("t,0,sideways", "line 1: 'sideways' is no time"),
        ("t,-1,5", "line 1: a topic and a partition from 0 on"),
        ("other,t,0,5", "it has no positions of group 'g'"),
        ("", "it has no positions of group 'g'"),
        ("{", "it is no JSON"),
        ('{"a": 1}', "a list of objects"),
        ('[{"topic": "t", "partition": 0}]', "object 1: it has no offset"),
    ],
)
def test_a_file_that_can_not_be_meant_is_refused(command: Command, here: Path, text: str, why: str) -> None:
    (here / "file").write_text(text)
    ran = command("--bootstrap", "127.0.0.1:1", "release-group", "g", "--from-file", "file", "--yes")
    assert (ran.status, why in ran.err, "Nothing was changed" in ran.err) == (2, True, True), ran.err


@pytest.mark.parametrize(
    "args",
    [
        ["--undo", "file", "--to", "latest"],
        ["--undo", "file", "--from-file", "file"],
        ["--from-file", "file", "--partition", "t:0=1"],
        ["--keep-done"],
        ["--undo", "file", "--keep-done"],
        ["--resume", "--undo", "file"],
        ["--undo", "file"],  # it is no plan
    ],
)
def test_what_contradicts_itself_is_refused(command: Command, here: Path, args: list[str]) -> None:
    (here / "file").write_text("t,0,1")
    assert command("--bootstrap", "127.0.0.1:1", "release-group", "g", *args, "--yes").status == 2
