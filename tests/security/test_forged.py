"""What a client with WRITE on the coordination topic can and can't do, as documented in docs/security.md.

Readers don't learn from the broker which client wrote a record: ids and epochs in it are the writer's claims.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import shlex
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from kafka_marshal import ClientReplacedError, Consumer, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.admin import Admin
from kafka_marshal.errors import StaleEpochError, UpgradeRequiredError
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin
from kafka_marshal.observe.problems import problems_of
from kafka_marshal.observe.rows import GroupRow
from kafka_marshal.secret import visible
from kafka_marshal.sinks import SqliteSink
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    Heartbeat,
    JoinGroup,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Upgrade,
    World,
    encode,
    limits,
    route_group,
    route_lease,
)
from tests.cli.harness import Command, Terminal
from tests.client.conftest import wait_until
from tests.security.rights import PAGE
from tests.snapshots.conftest import HI, Story
from tests.stored_snapshot import encode_snapshot
from tests.test_house_rules import MODULES, named, tree_of

MESSAGES = 20
INTERVAL_MS = 600


class Victim:
    """A coordination topic of one partition, a data topic, and its workers."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap = bootstrap
        self.topic, self.data = f"__{name}", name
        self._cluster = KafkaCluster(bootstrap)
        create_topic(self._cluster, self.topic, 1, 20)
        self._cluster.create_topic(self.data, 1, 1, {}, 20)
        self._producer = Producer({"bootstrap.servers": bootstrap})
        for number in range(MESSAGES):
            self._producer.produce(self.data, b"%d" % number)
        assert self._producer.flush(20) == 0

    def forge(self, record: Record) -> None:
        """Append a record as any client with WRITE can."""
        self._producer.produce(self.topic, encode(record), b"", 0)
        assert self._producer.flush(20) == 0

    def member(self, client_id: str = "a") -> Marshal:
        return Marshal(
            self.bootstrap, group_id="g", client_id=client_id, topic=self.topic, heartbeat_interval=INTERVAL_MS / 1000
        )

    def holder(self, marshal: Marshal) -> tuple[str, int]:
        """Instance and epoch of the partition's holder, which are public."""
        lease = marshal.world.lease(self.data, 0)
        assert lease is not None and lease.instance_id is not None
        return lease.instance_id, lease.epoch

    def close(self) -> None:
        self._cluster.close()
        Probe(self.bootstrap).delete_topics([self.topic, f"{self.topic}_snapshots", self.data])


@pytest.fixture
def victim(kafka_bootstrap: str) -> Iterator[Victim]:
    name = f"forged-{uuid.uuid4().hex[:8]}"
    with closing(Victim(kafka_bootstrap, name)) as made:
        yield made


def offsets(consumer: Consumer, most: int = MESSAGES, timeout: float = 5.0, done: bool = False) -> list[int]:
    messages = consumer.consume(most, timeout=timeout)
    for message in messages if done else ():
        consumer.done(message)
    return [message.offset() or 0 for message in messages]


@pytest.mark.broker
def test_a_release_in_the_holders_name_takes_its_lease_and_an_old_epoch_writes_nothing_more(
    victim: Victim, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    sink = SqliteSink(tmp_path / "rows.db")
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert offsets(consumer, 1) == [0]
        instance_id, epoch = victim.holder(marshal)
        with sink.transaction("g", [(victim.data, 0, epoch, 0)]):
            pass
        with caplog.at_level(logging.WARNING, "kafka_marshal"):
            victim.forge(ReleasingPartition(instance_id, "a", "g", victim.data, 0, epoch, None))
            wait_until(lambda: "an operator took it away" in caplog.text, what="the holder says so")
        with victim.member("b") as other, other.consumer([victim.data]) as theirs:
            assert offsets(theirs, 1) == [0], "what was in hand comes again"
            _, newer = victim.holder(other)
            assert newer > epoch
            with sink.transaction("g", [(victim.data, 0, newer, 0)]):
                pass
            with pytest.raises(StaleEpochError), sink.transaction("g", [(victim.data, 0, epoch, 0)]):
                pass


@pytest.mark.broker
def test_progress_in_the_holders_name_makes_its_successor_skip_and_an_operator_goes_back(victim: Victim) -> None:
    """By the log it is done. No data is lost: positions can be moved back."""
    first = victim.member()
    consumer = first.consumer([victim.data])
    assert offsets(consumer, 1) == [0]
    instance_id, epoch = victim.holder(first)
    victim.forge(Heartbeat(instance_id, "a", "g", victim.data, 0, epoch, 14))
    wait_until(lambda: (lease := first.world.lease(victim.data, 0)) is not None and lease.stable == 14)
    first.close()
    with victim.member("b") as other, other.consumer([victim.data]) as theirs:
        assert offsets(theirs, 1) == [15], "0 to 14 count as done"
    with Admin(victim.bootstrap, topic=victim.topic) as admin, admin.pause("g") as pause:
        pause.reposition({(victim.data, 0): 1})
    with victim.member("c") as third, third.consumer([victim.data]) as theirs:
        assert offsets(theirs, 1) == [1]


@pytest.mark.broker
def test_progress_is_never_taken_back_and_an_epoch_never_chosen(victim: Victim) -> None:
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert len(offsets(consumer, 10, done=True)) == 10
        wait_until(lambda: (lease := marshal.world.lease(victim.data, 0)) is not None and lease.stable == 9)
        instance_id, epoch = victim.holder(marshal)
        victim.forge(Heartbeat(instance_id, "a", "g", victim.data, 0, epoch, 3))
        victim.forge(Heartbeat(instance_id, "a", "g", victim.data, 0, epoch + 1, 15))
        victim.forge(ClaimingPartition("f", "forger", "g", victim.data, 0, 600_000))
        assert offsets(consumer, MESSAGES - 10) == list(range(10, MESSAGES))
        lease = marshal.world.lease(victim.data, 0)
        assert lease is not None
        assert (lease.client_id, lease.epoch, lease.stable) == ("a", epoch, 9)


@pytest.mark.broker
def test_a_takeover_in_a_clients_name_ends_that_process(victim: Victim) -> None:
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert offsets(consumer, 1) == [0]
        victim.forge(Heartbeat("forged", "a", "g", victim.data, 0, None, None))
        with pytest.raises(ClientReplacedError, match="forged"):
            while True:
                offsets(consumer, timeout=1.0)


@pytest.mark.broker
def test_a_pause_stops_a_group_until_it_is_ended_in_that_name(victim: Victim) -> None:
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert len(offsets(consumer, done=True)) == MESSAGES
        victim.forge(ReleaseGroup("f", "forger", "g", 2**62))
        wait_until(lambda: (lease := marshal.world.lease(victim.data, 0)) is not None and lease.client_id is None)
        with Admin(victim.bootstrap, topic=victim.topic, client_id="forger") as admin:
            admin.resume("g")
        wait_until(lambda: (lease := marshal.world.lease(victim.data, 0)) is not None and lease.client_id == "a")


@pytest.mark.broker
def test_a_claim_keeps_a_partition_from_everybody_until_it_is_evicted(victim: Victim) -> None:
    victim.forge(ClaimingPartition("f", "forger", "g", victim.data, 0, 600_000))
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert offsets(consumer, timeout=1.0) == []
        assert (lease := marshal.world.lease(victim.data, 0)) is not None and lease.client_id == "forger"
        with Admin(victim.bootstrap, topic=victim.topic) as admin:
            admin.evict("g", victim.data, 0, force=True)
        assert offsets(consumer, 1) == [0]


@pytest.mark.broker
def test_an_upgrade_to_an_unknown_level_ends_all_work_on_one_coordination_topic_and_on_no_other(
    victim: Victim, kafka_bootstrap: str
) -> None:
    with (
        closing(Victim(kafka_bootstrap, f"{victim.data}-other")) as neighbour,
        neighbour.member() as apart,
        apart.consumer([victim.data]) as theirs,
        victim.member() as marshal,
        marshal.consumer([victim.data]) as consumer,
    ):
        assert offsets(consumer, 1) == [0]
        victim.forge(Upgrade("f", "forger", "x", 2**31 - 1))
        with pytest.raises(UpgradeRequiredError, match="2147483647"):
            while True:
                offsets(consumer, timeout=1.0)
        assert not marshal.health().ok
        assert len(offsets(theirs)) == MESSAGES, "a group of that name, on a coordination topic of its own"


def test_two_consistent_forged_snapshots_deceive_a_start_but_not_a_replay(story: Story) -> None:
    """S3 detects a forged snapshot by the next one. Two consistent forgeries are detected only by a replay."""
    lying = World(0, 1)

    def follow(forged: Record | None = None) -> None:
        log = story.broker.log("__marshal", 0)
        assert log is not None
        for message in log.messages[lying.next_offset :]:
            is_last = message.offset() == story.end - 1
            value = encode(forged) if is_last and forged is not None else message.value()
            lying.apply(message.offset(), message.timestamp()[1], value)
        story.store(*encode_snapshot(lying))

    story.beat(30)
    follow(ClaimingPartition("9", "liar", "g", "t", 7, HI))
    story.beat(10)
    follow()
    assert story.replica().worlds[0].lease("g", "t", 7) is not None, "it holds what never was"
    checked = story.replica(Begin.CHECK)
    assert checked.worlds[0].snapshot() == story.truth.snapshot()
    assert len(checked.starts[0].differences) == 2, "prune and audit name both"


# Names from the log are shown without effect on a terminal, a page, a log, or a shell they are pasted into.


#: E2 allows all but control characters in an id: this one affects a shell, a browser, rich, printf and a reader.
NASTY = "\u202e\u200b\u2028\u00a0'\"`$(reboot);<script>alert(1)</script>[red]{0}%s\\"
#: Must never reach a terminal unescaped.
UNSEEN = ("\u202e", "\u200b", "\u2028", "\u00a0", "\x1b]", "\x07", "\x9b")

GROUP, CLIENT, INSTANCE = f"g{NASTY}", f"c{NASTY}", f"i{NASTY}"
TEAM = f"team{NASTY}"
WHO = (INSTANCE, CLIENT, GROUP)


class Hostile(NamedTuple):
    """A coordination topic with records that E2 allows, and others."""

    bootstrap: str
    topic: str


@pytest.fixture
def hostile(coordination_topic: Any, topic_factory: Callable[..., str]) -> Iterator[Hostile]:
    bootstrap, topic = coordination_topic.bootstrap, coordination_topic.name
    data = topic_factory(1)
    producer = Producer({"bootstrap.servers": bootstrap})
    cps = len(producer.list_topics(topic).topics[topic].partitions)

    def append(record: Record | bytes, cp: int) -> None:
        producer.produce(topic, record if isinstance(record, bytes) else encode(record), b"", cp)

    lease = route_lease(data, 0, cps)
    append(ClaimingPartition(*WHO, data, 0, 60_000), lease)
    append(ClaimingPartition(f"2{INSTANCE}", f"2{CLIENT}", GROUP, data, 0, 60_000), lease)
    append(ClaimingPartition(*WHO, f"no{NASTY}", 0, 60_000), route_lease(f"no{NASTY}", 0, cps))
    append(Heartbeat(*WHO, data, 0, 2**40, 10**9), lease)
    append(b"\x1b]0;pwned\x07", lease)
    append(b"\x96\x01\x02\xa9\x1b]0;p\x07\x9b1m\xa1c\xa1g\xa1t", lease)
    append(ReleaseGroup(INSTANCE, CLIENT, f"paused{NASTY}", 2**60), lease)
    home = route_group(TEAM, cps)
    for cp in range(cps):
        append(ConfigureGroup(INSTANCE, CLIENT, TEAM, ()), cp)
    append(JoinGroup(INSTANCE, CLIENT, TEAM, "", 0, 60_000, "sticky", False, "", ((data, 1),)), home)
    entry = CommitEntry(data, 0, through=1, metadata=f"\x1b]0;m\x07{NASTY}")
    append(CommitOffsets(INSTANCE, CLIENT, TEAM, f"{TEAM}-x", 0, False, (entry,)), home)
    assert producer.flush(10) == 0
    yield Hostile(bootstrap, topic)


OFTEN = [
    ("status", "--members"),
    ("check",),
    ("group", TEAM),
    ("log",),
    ("evict", GROUP, f"no{NASTY}", "0", "--dry-run"),
    ("evict", TEAM, "--member", CLIENT, "--dry-run"),
    ("export-group", TEAM, "--dry-run"),
]
#: Other commands, which print with the same functions.
SELDOM = [
    ("status",),
    ("status", "--group", GROUP),
    ("lag",),
    ("groups",),
    ("group", GROUP),
    ("log", "--group", TEAM),
    ("who", GROUP, f"no{NASTY}", "0"),
    ("drain", GROUP, f"nobody{NASTY}"),
    ("release-group", GROUP, "--to", "earliest", "--dry-run"),
    ("release-group", f"paused{NASTY}", "--expires", "1s", "--yes"),
    ("forget-group", f"nobody{NASTY}", "--yes"),
    ("convert-group", GROUP, "--to", "coordinated", "--dry-run"),
    ("import-group", TEAM, "--dry-run"),
    ("skip", GROUP, f"no{NASTY}:0", "--dry-run"),
    ("upgrade", "--dry-run"),
    ("prune", "--dry-run"),
]


@pytest.mark.parametrize("commands", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.campaign)], ids=["often", "seldom"])
def test_commands_show_names_and_do_nothing_else(
    hostile: Hostile, command: Command, commands: list[tuple[str, ...]]
) -> None:
    reach = ("--bootstrap", hostile.bootstrap, "--topic", hostile.topic, "--timeout", "5")
    for args in commands:
        ran = command(*args, *reach)
        assert ran.status in (0, 1, 2), (args, ran.err)
        assert "report it" not in ran.err, (args, ran.err)
        shown = ran.out + ran.err
        assert [each for each in UNSEEN if each in shown] == [], args
        if args[0] not in ("group", "log", "evict"):
            continue
        as_json = command(*args, "--json", *reach)
        assert [each for each in UNSEEN if each in as_json.out + as_json.err] == [], args
        for line in as_json.out.splitlines() if args[0] == "log" else [as_json.out] * bool(as_json.out.strip()):
            json.loads(line)


def test_a_terminal_gets_no_sequence_of_theirs(hostile: Hostile, terminal: Callable[..., Terminal]) -> None:
    reach = ("--bootstrap", hostile.bootstrap, "--topic", hostile.topic)
    shown = terminal("log", *reach, columns=200).finish().decode(errors="replace")
    assert "[red]{0}%s" in shown.replace("\r\n", "")
    assert [each for each in UNSEEN if each in shown] == []


def test_a_suggested_command_can_be_pasted() -> None:
    """A group's name that contains a command stays one word."""
    group = GroupRow("x; touch y", [], [], 0, [], "coordinated", state="READY")
    texts = [problem.text for problem in problems_of(group)]
    for text in texts:
        for suggested in re.findall(r"kafka-marshal \S+ (.*)", text):
            assert shlex.split(suggested)[0] == "x; touch y"


#: Calls that return shell words.
QUOTING = {"quote", "shlex.quote", "topic_option", "options.reach"}
#: Fixed words; and a topic that is being read, so that Kafka has checked its name.
SAFE = {"other", "to", "where", "topic"}
SUGGESTED = re.compile(r"kafka-marshal (?:[a-z]+-?)+ (?:[^.;:()]*)$")


def unquoted(node: ast.JoinedStr) -> Iterator[str]:
    """Names in a suggested command that would be several words to a shell if they contained a blank."""
    said = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            said += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            value = part.value
            is_quoted = isinstance(value, ast.Call) and ast.unparse(value.func) in QUOTING
            if SUGGESTED.search(said) and not is_quoted and ast.unparse(value) not in SAFE and not said.endswith(":"):
                yield f"{said[-60:]}{{{ast.unparse(value)}}}"
            said += "X"


def is_format_of_names(node: ast.Call) -> bool:
    """Whether a log line's format contains a name, which may contain a %s."""
    is_log = isinstance(node.func, ast.Name | ast.Attribute) and ast.unparse(node.func).rpartition(".")[2] == "log"
    return is_log and len(node.args) > 3 and isinstance(node.args[2], ast.JoinedStr)


def test_names_in_suggested_commands_are_quoted_and_none_is_a_format() -> None:
    found = []
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                found += [f"{named(path)}:{node.lineno}: {each}" for each in unquoted(node)]
            elif isinstance(node, ast.Call) and is_format_of_names(node):
                found.append(f"{named(path)}:{node.lineno}: the format of a log line")
    assert found == [], "\n".join(found)


def test_a_log_line_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log(logging.WARNING, "x", "%s took %s from %r: %s, %d", CLIENT, GROUP, INSTANCE, ValueError("a\nb\x1b[2J"), 3)
    log(logging.WARNING, "x", f"{CLIENT} took it")
    one, other = (record.getMessage() for record in caplog.records)
    assert one.isprintable() and other.isprintable()
    assert one.endswith("a\\nb\\x1b[2J, 3")
    assert other == f"{visible(CLIENT)} took it"


# -- docs/security.md is correct: the tests that it names exist, and its figures are the code's -------------------


TESTS = Path(__file__).parents[1]
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tests_that_it_names_are_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    there = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 10
    assert named - there == set()
    files = set(re.findall(r"`tests/([\w/]+\.py)`", TEXT))
    assert len(files) == 3
    assert [name for name in files if not (TESTS / name).exists()] == []


@pytest.mark.parametrize(
    "said",
    [
        f"at most {limits.MAX_VALUE_BYTES:,} bytes",
        f"Ids have at most {limits.MAX_ID_BYTES} bytes, topics {limits.MAX_TOPIC_BYTES}",
        f"at most {limits.MAX_MEMBERS:,} members",
        f"{limits.MAX_GROUP_PARTITIONS:,} subscribed partitions",
        f"{limits.MAX_INTERVALS:,} intervals",
        f"up to {limits.MAX_SNAPSHOT_PARTS:,} parts of {limits.MAX_PART_BYTES:,} bytes",
        f"every {limits.SNAPSHOT_INTERVAL:,} records",
    ],
)
def test_its_limits_are_those_of_the_code(said: str) -> None:
    assert said in " ".join(TEXT.split())


def test_containers_nest_as_deep_as_it_says() -> None:
    assert limits.MAX_DEPTH == 8
    assert "eight containers deep" in " ".join(TEXT.split())
