"""`dump`, `status`, `lag`, `log` and `who` on a real Kafka."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.replica import Replica
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
from tests.cli.harness import Command, Terminal, process, start

A = ("a1", "a", "g")
B = ("b1", "b", "g")

Append = Callable[..., int]


@pytest.fixture
def cluster(kafka_bootstrap: str) -> KafkaCluster:
    return KafkaCluster(kafka_bootstrap, {})


@pytest.fixture
def append(kafka: Command, cluster: KafkaCluster, log_topic: str) -> Iterator[Append]:
    """Creates a log of two partitions; a function that appends to it: record (and CP) → offset."""
    assert kafka("init", "--partitions", 2).status == 0
    appender = cluster.appender(log_topic, delivery_timeout_ms=10_000)

    def append_one(record: Record | bytes, partition: int | None = None) -> int:
        if partition is None:
            topic, number = getattr(record, "topic", None), getattr(record, "partition", None)
            assert isinstance(topic, str)
            assert isinstance(number, int)
            partition = route_lease(topic, number, 2)
        offsets: list[int | None] = []
        value = encode(record) if isinstance(record, Record) else record
        appender.append(partition, value, lambda ack: offsets.append(ack.offset))
        assert appender.flush(10) == 0
        (offset,) = offsets
        assert offset is not None
        return offset

    yield append_one
    appender.close()


@pytest.fixture
def data(topic_factory: Callable[..., str], kafka_bootstrap: str) -> str:
    """A topic of 3 partitions with 10, 20 and 30 messages."""
    topic = topic_factory(3)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for partition in range(3):
        for number in range(10 * (partition + 1)):
            producer.produce(topic, str(number).encode(), partition=partition)
    assert producer.flush(30) == 0
    return topic


def digests(cluster: KafkaCluster, topic: str) -> dict[int, str]:
    """The digests of a worker's replica."""
    replica = Replica(cluster, topic, 10)
    try:
        replica.catch_up(10)
        return {cp: world.digest() for cp, world in replica.worlds.items()}
    finally:
        replica.close()


# -- dump ----------------------------------------------------------------------------------------------------


def fill(append: Append, count: int = 300) -> None:
    epoch = append(ClaimingPartition(*A, "t", 0, 100_000))
    other = append(ClaimingPartition(*B, "t", 1, 100_000))
    for number in range(count):
        append(Heartbeat(*A, "t", 0, epoch, number))
        append(CommitRanges(*B, "t", 1, other, ((2 * number + 1, 2 * number + 1),)))
    append(b"\xc1junk", 0)
    append(b"", 1)


def test_a_dump_replays_to_what_the_live_replicas_hold(
    kafka: Command, append: Append, cluster: KafkaCluster, log_topic: str
) -> None:
    fill(append)
    dumped = kafka("dump")
    assert (dumped.status, dumped.err) == (0, "")
    ends = [sum(json.loads(line)["partition"] == cp for line in dumped.lines[1:]) for cp in range(2)]
    bounds = [[0, end] for end in ends]
    assert json.loads(dumped.lines[0]) == {"topic": log_topic, "partitions": 2, "format": 1, "bounds": bounds}
    state = kafka("replay", "-", "--state", stdin=dumped.out.encode()).json
    assert {each["partition"]: each["digest"] for each in state["partitions"]} == digests(cluster, log_topic)
    assert sum(each["next_offset"] for each in state["partitions"]) == len(dumped.lines) - 1
    assert kafka("dump").out == dumped.out, "two dumps of one log are equal"


def test_a_dump_into_a_file_appears_when_it_is_complete(kafka: Command, append: Append, tmp_path: Path) -> None:
    fill(append, 3)
    path = tmp_path / "log.jsonl"
    assert kafka("dump", "--output", path).status == 0
    assert path.read_text() == kafka("dump").out
    assert [each.name for each in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_dump_that_fails_leaves_no_file(kafka: Command, tmp_path: Path) -> None:
    assert kafka("dump", "-o", tmp_path / "log.jsonl").status == 1  # the topic is not there
    assert list(tmp_path.iterdir()) == []
    assert kafka("dump", "-o", tmp_path / "no" / "where").status == 2


def test_a_topic_with_client_stamps_is_dumped_with_none(
    kafka: Command, topic_factory: Callable[..., str], cluster: KafkaCluster
) -> None:
    topic = topic_factory(1)  # CreateTime
    appender = cluster.appender(topic, delivery_timeout_ms=10_000)
    appender.append(0, encode(ClaimingPartition(*A, "t", 0, 1000)))
    appender.close(10)
    ran = kafka("dump", "--topic", topic)
    assert ran.status == 0
    assert json.loads(ran.lines[1])["timestamp"] == -1


def test_a_log_whose_beginning_is_gone_is_refused_unless_asked_for(
    kafka: Command, append: Append, kafka_bootstrap: str, log_topic: str
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    fill(append, 5)
    cp = route_lease("t", 0, 2)
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    for future in admin.delete_records([TopicPartition(log_topic, cp, 2)]).values():
        future.result(10)
    for args in (["dump"], ["status"], ["log"], ["who", "g", "t", "0"]):
        ran = kafka(*args)
        assert ran.status == 1
        assert f"[{cp}]" in ran.err
        assert ran.out == ""
    ran = kafka("dump", "--allow-cut")
    assert ran.status == 0
    assert next(line["offset"] for line in map(json.loads, ran.lines[1:]) if line["partition"] == cp) == 2
    assert f"beginning is gone in partition(s) {cp}" in kafka("init").out


# -- status --------------------------------------------------------------------------------------------------


def test_status_shows_live_leases(kafka: Command, kafka_bootstrap: str, log_topic: str, data: str) -> None:
    assert kafka("init", "--partitions", 2).status == 0
    with Marshal(kafka_bootstrap, group_id="delays", client_id="worker-1", topic=log_topic) as marshal:
        lease = marshal.claim(data, 0, timeout=10)
        marshal.claim(data, 2, timeout=10).heartbeat(9)
        assert marshal.world.wait_for(lambda w: (w.lease(data, 2) or lease).stable == 9, 10)  # type: ignore[union-attr]
        ran = kafka("status", "--group", "delays")
        assert ran.status == 0, ran.err
        first, _, second = ran.rows
        assert (first["group"], first["topic"], first["partition"]) == ("delays", data, "0")
        assert (first["holder"], first["epoch"], first["seen"][-4:]) == ("worker-1", str(lease.epoch), " ago")
        assert (first["next"], first["lag"]) == ("0", "10")
        assert (second["next"], second["lag"]) == ("10", "20")
        found = kafka("status", "--json", "--group", "delays").json
        assert found["clock"]["source"] == "traffic", "the member's beats tell the broker's time"
        assert all(0 <= each["silence_ms"] < 3_000 for each in found["leases"])
        assert {each["state"] for each in found["leases"]} == {"seen"}
        (member,) = kafka("status", "--members").rows
        assert (member["member"], member["pid"], member["partitions"]) == ("worker-1", str(os.getpid()), "2")
        (group,) = kafka("status").table
        assert (group["group"], group["members"], group["partitions"]) == ("delays", "1", "2/3")
        assert (group["lag"], group["state"]) == ("50", "1 without a holder")
    free = kafka("status", "--group", "delays").rows
    assert [(row["holder"], row["seen"]) for row in free] == [("-", "free"), ("-", "never claimed"), ("-", "free")]


def test_a_dead_holder_is_gone_though_log_time_stands_still(kafka: Command, append: Append) -> None:
    append(ClaimingPartition(*A, "t", 0, 100))

    ran = kafka("status", "--group", "g")
    while "gone" not in ran.out:
        ran = kafka("status", "--group", "g")
    (row,) = ran.table
    assert row["seen"].startswith("gone ")
    assert "fresh" not in ran.out + ran.err
    assert "this machine's clock" in ran.err
    ticked = kafka("status", "--tick", "--json").json
    assert ticked["clock"]["source"] == "tick"
    assert [each["state"] for each in ticked["leases"]] == ["gone"]
    assert sum(each["next_offset"] for each in ticked["partitions"]) == 4 + 1 + 2, "first records, the claim, two Ticks"


def test_status_only_reads(kafka: Command, append: Append, cluster: KafkaCluster, log_topic: str) -> None:
    append(ClaimingPartition(*A, "t", 0, 100))
    partitions = [(log_topic, cp) for cp in range(2)]
    before = cluster.watermarks(partitions, 10)
    for args in (["status"], ["lag"], ["log"], ["who", "g", "t", "0"], ["dump"], ["init", "--check"], ["check"]):
        assert kafka(*args).status <= (args == ["check"])  # its holder may be gone by then
    assert cluster.watermarks(partitions, 10) == before


def test_status_names_pauses(kafka: Command, append: Append) -> None:
    expires = int(time.time() * 1000) + 600_000
    for cp in range(2):
        append(ReleaseGroup("x", "the-admin", "g", expires), cp)
    found = kafka("status", "--json").json["pauses"]
    assert all(each.pop("lasts_ms") >= 0 for each in found)
    assert found == [{"partition": cp, "group": "g", "client": "the-admin", "expires": expires} for cp in range(2)]
    table = [line.split("\t") for line in kafka("status").lines[-2:]]
    assert table[0][:2] == ["paused group", "by"]
    assert table[1][:2] == ["g", "the-admin"]
    assert table[1][-1] == "everywhere"
    assert kafka("status", "--group", "g").status == 0


def test_an_unknown_group_is_a_no(kafka: Command, append: Append) -> None:
    for name in ("status", "lag"):
        ran = kafka(name, "--group", "nobody")
        assert ran.status == 1
        assert "no group 'nobody'" in ran.err


def test_a_log_raised_to_a_newer_level_is_a_no_that_still_shows_the_rest(kafka: Command, append: Append) -> None:
    cp = route_lease("t", 0, 2)
    append(ClaimingPartition(*A, "t", 0, 1000))
    append(Upgrade(*A, 109), cp)
    append(ClaimingPartition(*B, "t", 0, 1000))
    for args in (["status", "--group", "g"], ["lag"]):
        ran = kafka(*args)
        assert ran.status == 1
        assert "level 109" in ran.err
        assert ran.table[0]["holder"] == "a"
    assert kafka("status", "--tick").status == 1
    assert kafka("log").status == 1


# -- lag -----------------------------------------------------------------------------------------------------


def test_lag_of_every_partition_and_in_all(kafka: Command, append: Append, data: str) -> None:
    epoch = append(ClaimingPartition(*A, data, 1, 100_000))
    append(Heartbeat(*A, data, 1, epoch, 4))
    append(CommitRanges(*A, data, 1, epoch, ((8, 9), (12, 12))))
    zero, one, two, total = kafka("lag").rows
    assert (zero["holder"], zero["log end"], zero["next"], zero["lag"]) == ("never claimed", "10", "-", "10")
    assert (one["holder"], one["log end"], one["next"]) == ("a", "20", "5")
    assert (one["beyond"], one["in flight"], one["lag"]) == ("3", "5", "12")
    assert two["lag"] == "30"
    assert (total["topic"], total["lag"], total["in flight"]) == ("total", "52", "5")
    found = kafka("lag", "--json", "--group", "g").json
    assert [each["lag"] for each in found["partitions"]] == [10, 12, 30]
    assert [each["claimed"] for each in found["partitions"]] == [False, True, False]
    assert found["totals"][0]["lag"] == 52


def test_speed_comes_from_the_log_itself(kafka: Command, append: Append, data: str) -> None:
    epoch = append(ClaimingPartition(*A, data, 2, 100_000))
    begun = time.monotonic()
    while time.monotonic() - begun < 2.5:  # log time is the broker's: it must pass
        append(Heartbeat(*A, data, 2, epoch, min(29, int(10 * (time.monotonic() - begun)))))
    (each,) = [each for each in kafka("lag", "--json").json["partitions"] if each["claimed"]]
    assert 2 < each["messages_per_second"] < 25
    assert kafka("lag", "--json", "--window", "1ms").json["totals"][0]["messages_per_second"] is None


def test_a_topic_that_is_gone_has_no_lag(kafka: Command, append: Append) -> None:
    append(ClaimingPartition(*A, "deleted-topic", 0, 1000))
    (row,) = kafka("status", "--group", "g").table
    assert row["lag"] == "-"
    assert kafka("lag").table[0]["log end"] == "-"
    for command in ("status", "lag", "check"):
        assert "deleted-topic 0" in kafka(command).out
        assert "there is no such topic" in kafka(command).out


# -- log, who ------------------------------------------------------------------------------------------------


def test_log_and_who_from_kafka_and_from_a_dump_agree(kafka: Command, append: Append) -> None:
    epoch = append(ClaimingPartition(*A, "t", 0, 1000))
    append(ClaimingPartition(*B, "t", 0, 1000))
    append(ReleasingPartition(*A, "t", 0, epoch, 41))
    dump = kafka("dump").out.encode()
    for args in (
        ["log"],
        ["log", "-n", "3"],
        ["log", "--json"],
        ["who", "g", "t", "0"],
        ["who", "g", "t", "0", "--json"],
    ):
        live, later = kafka(*args), kafka(*args, "--from-dump", "-", stdin=dump)
        assert live == later
        assert live.status == 0
    assert [row["code"] for row in kafka("log", "--no-beats").rows] == ["OK", "OK", "OK", "HELD", "OK"], (
        "two Upgrades first"
    )
    assert kafka("who", "g", "t", "0", "--offset", 10_000).status == 2


def test_following_the_log(kafka: Command, append: Append, kafka_bootstrap: str, log_topic: str) -> None:
    for _ in range(15):
        append(ClaimingPartition(*A, "t", 0, 100_000))  # on a busy machine the command takes seconds to start
    reach = ("--bootstrap", kafka_bootstrap, "--topic", log_topic)
    with start("log", "--follow", "--json", *reach) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        past = [json.loads(running.stdout.readline()) for _ in range(10)]
        assert [line["code"] for line in past] == ["ALREADY_HELD"] * 10
        append(ClaimingPartition(*B, "t", 0, 1000))
        assert json.loads(running.stdout.readline())["code"] == "HELD"
        append(Heartbeat(*A, "t", 0, 99, None))
        assert json.loads(running.stdout.readline())["code"] == "FENCED"
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == b""
        assert running.stderr.read() == b"\ninterrupted. Nothing was changed.\n"
        assert running.wait(20) == 130


# -- on a terminal -------------------------------------------------------------------------------------------


def test_tables_on_a_terminal_escape_what_the_log_holds(
    append: Append, kafka_bootstrap: str, log_topic: str, terminal: Callable[..., Terminal]
) -> None:
    append(ClaimingPartition("i", "w\u202e[bold]x\u200b", "g", "t", 0, 1000))
    for name in ("status", "lag"):
        opened = terminal(
            name, *(("--group", "g") if name == "status" else ()), "--bootstrap", kafka_bootstrap, "--topic", log_topic
        )
        shown = opened.finish().decode()
        assert opened.process.returncode == 0, shown
        assert "w\\u202e[bold]x\\u200b" in shown
        assert "\u202e" not in shown
        assert "\u200b" not in shown


def test_watching_continues_until_ctrl_c_and_leaves_the_last_picture(
    append: Append, kafka_bootstrap: str, log_topic: str, terminal: Callable[..., Terminal]
) -> None:
    append(ClaimingPartition(*A, "t", 0, 100_000))
    reach = ("--bootstrap", kafka_bootstrap, "--topic", log_topic)
    opened = terminal("status", "--members", "--watch", "--interval", "0.2", *reach)
    opened.read_until(lambda shown: b"Ctrl-C ends" in shown)
    append(ClaimingPartition("late1", "latecomer", "g", "t", 1, 100_000))
    opened.read_until(lambda shown: b"latecomer" in shown)
    opened.type(b"\x03")
    shown = opened.finish()
    assert opened.process.returncode == 130, shown
    left = shown.rpartition(b"\x1b[?1049l")[2]
    assert b"latecomer" in left
    assert b"interrupted." in left
    assert b"Traceback" not in shown


def test_watching_without_a_terminal_prints_one_picture_after_the_other(
    append: Append, kafka_bootstrap: str, log_topic: str
) -> None:
    append(ClaimingPartition(*A, "t", 0, 100_000))
    reach = ("--bootstrap", kafka_bootstrap, "--topic", log_topic)
    with start("lag", "--watch", "--interval", "0.1", "--json", *reach) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["partitions"][0]["holder"] == "a"
        append(ClaimingPartition(*B, "t", 1, 100_000))
        while len(json.loads(running.stdout.readline())["totals"]) != 1:
            pass
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130


def test_a_progress_bar_is_for_terminals_only(append: Append, kafka_bootstrap: str, log_topic: str) -> None:
    fill(append, 20)
    done = process("dump", "--bootstrap", kafka_bootstrap, "--topic", log_topic)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_of_the_log_that_has_seen_enough(append: Append, kafka_bootstrap: str, log_topic: str) -> None:
    fill(append, 400)
    for name in ("log", "dump"):
        with start(name, "--bootstrap", kafka_bootstrap, "--topic", log_topic) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.readline()
            running.stdout.close()
            assert running.stderr.read() == b""
            assert running.wait(30) == 141


# -- lost positions, groups at a glance, check ---------------------------------------------------------------


def test_a_position_beyond_the_logs_end_is_lost_everywhere(kafka: Command, append: Append, data: str) -> None:
    """The topic's id is unknown here: no member has marked it."""
    epoch = append(ClaimingPartition(*A, data, 0, 100_000))
    append(Heartbeat(*A, data, 0, epoch, 23))  # of a topic that has 10
    for args in (["lag"], ["status"], ["status", "--group", "g"], ["status", "--members"], ["check"]):
        ran = kafka(*args)
        assert ran.status == 1, args
        assert "position lost" in ran.out, args
    for args in (["lag", "--group", "g"], ["status"]):
        ran = kafka(*args, "--json")
        assert ran.status == 1
        (each,) = [each for each in ran.json.get("leases", ran.json.get("partitions")) if each["next"] == 24]
        assert (each["lag"], each["position_lost"]) == (None, True)
    assert ("position_lost", 1) in [
        (each["kind"], each["amount"]) for each in kafka("check", "--json").json["problems"]
    ]
    planned = kafka("release-group", "g", "--partition", f"{data}:0=earliest", "--dry-run")
    assert planned.rows[0]["means"] == "position lost: done up to 23, but the log ends at 10"


def test_what_is_done_out_of_order_can_be_lost_too(kafka: Command, append: Append, data: str) -> None:
    epoch = append(ClaimingPartition(*A, data, 0, 100_000))
    append(CommitRanges(*A, data, 0, epoch, ((12, 15),)))
    (row, *_) = kafka("lag").table
    assert row["lag"] == "position lost"


def test_a_closed_group_has_no_speed(kafka: Command, append: Append, data: str) -> None:
    epoch = append(ClaimingPartition(*A, data, 2, 100_000))
    done = 0
    while kafka("lag", "--json").json["totals"][0]["messages_per_second"] is None:
        done = min(done + 1, 29)
        append(Heartbeat(*A, data, 2, epoch, done))
    append(ReleasingPartition(*A, data, 2, epoch, 29))
    assert kafka("lag", "--json").json["totals"][0]["messages_per_second"] is None


def test_groups_that_are_dead_for_a_day_fold_into_one_line(
    kafka: Command, append: Append, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = append(ClaimingPartition(*A[:2], "nightly", "t", 0, 100_000))
    append(ReleasingPartition(*A[:2], "nightly", "t", 0, epoch, 9))
    for number in range(3):
        append(ClaimingPartition(*B[:2], "daily", data, number, 100_000))
    monkeypatch.setattr("kafka_marshal.observe.rows.DAY_MS", -1)
    assert [row["group"] for row in kafka("status").table] == ["daily", "nightly"], "programs get all"
    monkeypatch.setattr("kafka_marshal.cli.status.is_terminal", lambda: True)
    assert [row["group"] for row in kafka("status").table] == ["daily"]
    assert [row["group"] for row in kafka("status", "--all").table] == ["daily", "nightly"]
    assert len(kafka("status", "--group", "nightly").table) == 1
    fine = kafka("check")
    assert fine.status == 0, "a group that is gone is nobody's alarm"
    assert fine.out.endswith("left out: 1 group of which nobody was seen for a day (nightly)\n")
    assert kafka("check", "--json").json["left_out"] == ["nightly"]
    assert kafka("check", "--min-members", "nightly=1").status == 1


def test_check_says_ok_or_why_not(kafka: Command, append: Append, data: str) -> None:
    assert kafka("check").out == "ok: the log knows no group that was at work within a day\n"
    assert kafka("check", "--min-members", 1).lines == ["0 members alive, fewer than 1"]
    for number in range(3):
        append(ClaimingPartition(*A, data, number, 100_000))
    fine = kafka("check", "--group", "g")
    assert (fine.status, fine.out) == (0, "ok: 1 group, 3 partitions, 60 messages behind\n")
    assert kafka("check", "--json").json["ok"] is True
    behind = kafka("check", "--max-lag", 59)
    assert (behind.status, behind.out) == (1, "g: 60 messages behind, more than 59\n")
    assert kafka("check", "--max-silence", "1ms").status == 1
    assert kafka("check", "--min-members", 1).status == 0
    few = kafka("check", "--min-members", 1, "--min-members", "g=2", "--min-members", "none=1")
    assert few.lines == ["g: 1 member alive, fewer than 2", "none: 0 members alive, fewer than 1"]
    assert kafka("check", "--group", "g", "--min-members", 2, "--json").json["problems"][0]["kind"] == "members"
    assert kafka("check", "--min-members", "g=few").status == 2
    append(ClaimingPartition(*B[:2], "h", data, 0, 100))
    while len(problems := kafka("check", "--json").json["problems"]) < 2:  # of two partitions, and soon of the third
        pass
    assert [(each["group"], each["kind"]) for each in problems] == [("h", "gone"), ("h", "no_holder")]
    assert len(kafka("check").lines) == 2
    assert kafka("check", "--group", "g").status == 0


@pytest.mark.parametrize(
    "args",
    [
        ["status", "--group", "delay"],
        ["lag", "--group", "delay"],
        ["check", "--group", "delay"],
        ["log", "--group", "delay"],
        ["who", "delay", "flights", "0"],
        ["evict", "delay", "flights", "0", "--yes"],
        ["forget-group", "delay", "--yes"],
        ["release-group", "delay", "--yes"],
        ["release-group", "delay", "--to", "earliest", "--yes"],
        ["release-group", "delay", "--resume", "--yes"],
    ],
)
def test_a_mistyped_group_is_a_no_that_names_the_one_that_may_be_meant(
    kafka: Command, append: Append, args: list[str]
) -> None:
    append(ClaimingPartition("i", "c", "delays", "flights", 0, 100_000))
    ran = kafka(*args)
    assert ran.status == 1
    assert "no group 'delay'; did you mean 'delays'?" in ran.out + ran.err


def test_a_mistyped_topic_too(kafka: Command, append: Append, data: str) -> None:
    append(ClaimingPartition("i", "c", "delays", data, 0, 100_000))
    for args in (
        ["who", "delays", data[:-1], "0"],
        ["evict", "delays", data[:-1], "0", "--yes"],
        ["release-group", "delays", "--partition", f"{data[:-1]}:0=0", "--yes"],
        ["skip", "delays", f"{data[:-1]}:0", "--yes"],
    ):
        ran = kafka(*args)
        assert ran.status == 1
        assert f"did you mean {data!r}?" in ran.err, args


def test_shells_complete_groups_topics_and_clients(
    append: Append, kafka_bootstrap: str, log_topic: str, data: str
) -> None:
    append(ClaimingPartition("i", "worker-1", "delays", data, 0, 100_000))

    def completed(words: str, bootstrap: str = kafka_bootstrap) -> tuple[bytes, bytes]:
        typed = f"kafka-marshal --bootstrap {bootstrap} --topic {log_topic} {words}"
        env = {
            "_KAFKA_MARSHAL_COMPLETE": "bash_complete",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split(" ")) - 1),
        }
        ran = process(env=env)
        return ran.stdout, ran.stderr

    for words, wanted in (
        ("status --group d", b"plain,delays\n"),
        ("check --group d", b"plain,delays\n"),
        (f"who delays {data[:4]}", b"plain," + data.encode() + b"\n"),
        (f"skip delays {data[:4]}", b"plain," + data.encode() + b":\n"),
        ("release-group delays --client-id w", b"plain,worker-1\n"),
    ):
        while completed(words) != (wanted, b""):  # a busy machine may need more than the short time-out
            pass
    found, said = completed("status --group d", "127.0.0.1:1")
    assert (found.strip(), said) == (b"", b""), "out of reach: not a word"


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_keeps_the_owner_and_how_it_ended(
    append: Append, kafka_bootstrap: str, log_topic: str, terminal: Callable[..., Terminal], columns: int
) -> None:
    epoch = append(ClaimingPartition("i1", "worker-1", "g", "t", 0, 100_000))
    append(ReleasingPartition("i1", "worker-1", "g", "t", 0, epoch, 41))
    reach = ("--bootstrap", kafka_bootstrap, "--topic", log_topic)
    opened = terminal("who", "g", "t", "0", *reach, columns=columns)
    shown = opened.finish().decode()
    assert opened.process.returncode == 0, shown
    (line,) = [line for line in shown.splitlines() if line.startswith("worker-1")]
    assert "released" in line
    assert "next offset 42" in " ".join(shown.split())
    assert len(line.rstrip()) <= columns


def test_a_picture_larger_than_the_screen_says_how_much_is_left_out(
    append: Append, kafka_bootstrap: str, log_topic: str, terminal: Callable[..., Terminal]
) -> None:
    for number in range(60):
        append(ClaimingPartition("i1", "worker-1", "g", "t", number, 100_000))
    append(ClaimingPartition("i2", "the-dead-one", "g", "t", 60, 100))
    reach = ("--bootstrap", kafka_bootstrap, "--topic", log_topic)
    opened = terminal("status", "--group", "g", "--watch", "--interval", "0.2", *reach)  # 40 lines
    opened.read_until(lambda shown: b"gone" in shown)
    shown = opened.read_until(lambda shown: b"\x1b[H" in shown.partition(b"gone")[2])
    opened.type(b"\x03")
    opened.finish()
    pictures = [picture for picture in shown.split(b"\x1b[H") if b" gone" in picture or b"31mgone" in picture]
    lines = pictures[0].decode().splitlines()
    assert any("more" in line and "…" in line for line in lines)
    assert any("1 group" in line for line in lines[:2]), "the head stays"
    (first,) = [number for number, line in enumerate(lines) if "the-dead-one" in line]
    assert "topic" in lines[first - 1], "what is wrong comes first"
