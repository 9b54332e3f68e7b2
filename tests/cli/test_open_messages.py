"""`open-messages`, `redrive`, `discard` and `park` on a real Kafka."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kafka_marshal import Marshal, Message, Retry
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.admin.open_messages import OpenMessage
from kafka_marshal.cli.open_messages import _next
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.testing.fail_points import CallMoment, FailPoint
from rationalizer import ClaimingPartition, Heartbeat, SettlingMessages, key_hash
from tests.cli.harness import Command, Terminal
from tests.cli.test_kafka import A, Append, append, cluster
from tests.client.conftest import wait_until

__all__ = ["append", "cluster"]  # fixtures

PAGE = Path(__file__).parents[2] / "docs" / "open-messages.md"

FIELDS = [
    "group",
    "topic",
    "partition",
    "offset",
    "key_hash",
    "delivery_count",
    "state",
    "reason",
    "since",
    "time",
    "client",
    "key",
    "key_base64",
    "gone",
    "unread",
]


@pytest.fixture
def orders(topic_factory: Callable[..., str], kafka_bootstrap: str) -> str:
    """A topic of one partition with ten messages; every other key is Zoë."""
    topic = topic_factory(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(10):
        producer.produce(topic, b"\x1b[31m %d" % number, "Zoë" if number % 2 else None, 0)
    assert producer.flush(30) == 0
    return topic


@pytest.fixture
def parked(append: Append, orders: str) -> Append:
    """1, 3 and 6 of it are set aside, 8 waits for its next try, all else is done."""
    epoch = append(ClaimingPartition(*A, orders, 0, 60_000))
    named = [(at, key_hash("Zoë".encode() if at % 2 else None, at)) for at in (1, 3, 6, 8)]
    aside = tuple((*each, 5, "KeyError" if each[0] == 3 else "ValueError") for each in named[:3])
    waiting = ((8, *named[3], 2),)
    append(SettlingMessages(*A, orders, 0, epoch, 2**40, open=waiting, parked=aside))
    append(Heartbeat(*A, orders, 0, epoch, 9))
    return append


def test_each_state_has_its_remedy() -> None:
    """What waits for its next try can't be redriven, and what is set aside can't be parked."""
    names = {"client": "w", "key": b"k", "key_hash": 1, "delivery_count": 2, "since": 5, "unread": "", "group": "g"}
    fields: dict[str, Any] = {each.name: names.get(each.name) for each in dataclasses.fields(OpenMessage)}
    fields |= {"topic": "orders", "partition": 0}
    waiting = OpenMessage(**{**fields, "offset": 3, "state": "waiting"})
    parked = OpenMessage(**{**fields, "offset": 7, "state": "parked", "reason": "Bad"})
    options = SimpleNamespace(reach=lambda: "")
    look = "Look into one: kafka-marshal show orders:0:"
    park = "Set it aside, so that its key continues: kafka-marshal park g orders:0:3"
    again = "Try it again: kafka-marshal redrive g orders:0:7"
    for found, lines in (
        ([waiting], [f"{look}3", park]),
        ([parked], [f"{look}7", again]),
        ([waiting, parked], [f"{look}3", again, park]),
        (
            [dataclasses.replace(parked, unread="position lost: …")],
            ["Count it as done: kafka-marshal discard g orders:0:7"],
        ),
    ):
        assert _next(cast("Any", options), "g", found).split("\n") == lines


def test_a_poison_message_is_found_and_redriven(
    kafka: Command, parked: Append, orders: str, terminal: Callable[..., Terminal], cluster: KafkaCluster
) -> None:
    ran = kafka("open-messages", "g")
    assert ran.status == 0, ran.err
    rows = [[row[name] for name in ("offset", "key", "deliveries", "state", "reason", "by")] for row in ran.rows]
    assert rows == [
        ["1", "Zoë", "5", "parked", "ValueError", "a"],
        ["3", "Zoë", "5", "parked", "KeyError", "a"],
        ["6", "-", "5", "parked", "ValueError", "a"],
        ["8", "-", "2", "waiting", "-", "a"],
    ]
    assert ran.rows[0]["message"] == "\\x1b[31m 1"
    found = [json.loads(line) for line in kafka("open-messages", "g", f"{orders}:0", "--parked", "--json").lines]
    assert [list(each) for each in found] == [FIELDS] * 3
    assert (found[0]["state"], found[0]["key"], found[2]["key_hash"]) == ("parked", "Zoë", key_hash(None, 6))
    shown = terminal(*kafka.before, "open-messages", "g").finish().decode()
    assert "g: 3 set aside (2 ValueError, 1 KeyError), 1 waiting for the next try" in shown
    assert f"kafka-marshal redrive g {orders}:0:1" in shown

    ran = kafka("check", "--group", "g", "--max-parked", "2", "--json")
    assert (ran.status, "parked" in {each["kind"] for each in ran.json["problems"]}) == (1, True)
    ran = kafka("group", "g")
    assert "open messages: 3 set aside (2 ValueError, 1 KeyError), 1 waiting for the next try." in ran.out + ran.err

    (found,) = kafka("who", f"{orders}:0", "--key", "Zoë", "--json").json["groups"]
    assert (found["group"], found["owners"][0]["client"], found["done_through"]) == ("g", "a", 9)
    assert [(each["offset"], each["reason"]) for each in found["open"]] == [(1, "ValueError"), (3, "KeyError")]
    assert kafka("who", f"{orders}:0", "--key", "Zoë", "--group", "h").status == 1
    (row,) = kafka("who", "g", orders, 0, "--key", "0x5a").rows
    assert (row["owner"], row["done to"], row["open"]) == ("a", "9", "-")

    planned = kafka("redrive", "g", "--reason", "ValueError", "--dry-run")
    assert planned.lines == ["would be done: 2 messages of group g are redriven."]
    ran = kafka("redrive", "g", f"{orders}:0:3", f"{orders}:0:4", "--json")
    assert ran.status == 1
    why = "it was done before: everything up to offset 9 is, but for what is open"
    assert ran.json == {
        "group": "g",
        "done": True,
        "messages": [{"topic": orders, "partition": 0, "offset": 3}],
        "gone": [],
        "left": [{"topic": orders, "partition": 0, "offset": 4, "why": why}],
    }
    cluster.delete_records({(orders, 0): 3}, 10)
    assert kafka("open-messages", "g", "--parked").rows[0]["state"] == "gone"
    ran = kafka("redrive", "g", "--all", "--rate", "50")
    assert (ran.status, ran.lines) == (
        0,
        [
            "1 message is not in the topic any more (retention), and can't be delivered: done now. " + f"{orders}:0:1",
            "1 message of group g is redriven.",
        ],
    )
    assert [row["offset"] for row in kafka("open-messages", "g").rows] == ["3", "6", "8"]
    ran = kafka("redrive", "g", "--all")
    assert (ran.status, ran.out) == (0, "0 messages of group g are redriven.\n")
    assert "warning: group g has set none aside." in ran.err


def test_a_message_is_set_aside_and_discarded(
    kafka: Command, parked: Append, orders: str, terminal: Callable[..., Terminal]
) -> None:
    ran = kafka("park", "g", f"{orders}:0:8", f"{orders}:0:1")
    assert (ran.status, ran.lines) == (
        1,
        [
            f"{orders}:0:1 is left as it is: it is set aside already (ValueError).",
            "1 message of group g is set aside.",
        ],
    )
    ran = kafka("discard", "g", "--reason", "OPERATOR")
    assert (ran.status, "Say --yes." in ran.err) == (2, True)
    ran = kafka("discard", "g", "--reason", "Operator", "--yes")
    assert (ran.status, ran.out) == (0, "0 messages of group g count as done.\n")
    assert "set aside in group g: ValueError (2), KeyError (1), OPERATOR (1)." in ran.err
    asking = terminal(*kafka.before, "discard", "g", f"{orders}:0:8")
    asking.read_until(lambda found: b"Discard 1 message of group g? No worker gets it again." in found)
    asking.type(b"n\n")
    assert b"Nothing was changed." in asking.finish()
    assert kafka("discard", "g", "--all", "--yes").lines == ["4 messages of group g count as done."]
    assert kafka("open-messages", "g").rows == []
    assert kafka("open-messages", "h").status == 1
    log = [row for row in kafka("log", "--group", "g", "--json").lines if "SettlingMessages" in row]
    assert json.loads(log[-1])["what"] == f"as an operator, of {orders}/0: discards 1, 3, 6, 8"


def test_the_recipe_of_the_page(
    kafka: Command, append: Append, orders: str, kafka_bootstrap: str, log_topic: str, terminal: Callable[..., Terminal]
) -> None:
    """A worker meets poison messages, and each command of the page is run as it stands there."""
    section = PAGE.read_text(encoding="utf-8").split("## A poison message at 3 a.m.")[1].split("\n## ")[0]
    commands = re.findall(
        r"(?:^\$ |`)kafka-marshal ((?:open-messages|show|redrive|discard) [^`\n]*)", section, re.MULTILINE
    )
    shown, looked, redriven, discarded = (
        each.replace("orders-service", "g").replace("orders:0:148", f"{orders}:0:3").split() for each in commands[:4]
    )
    mended = threading.Event()
    handled: list[int | None] = []

    def handle(message: Message) -> None:
        if message.offset() in (3, 5) and not (mended.is_set() and message.offset() == 3):
            raise ValueError("no such customer")
        handled.append(message.offset())

    with Marshal(kafka_bootstrap, group_id="g", topic=log_topic, heartbeat_interval=0.5) as marshal:
        retry = Retry(attempts=2, backoff=(0.01, 0.02))
        with marshal.consumer([orders]) as consumer:
            worker = threading.Thread(target=consumer.run, args=(handle,), kwargs={"retry": retry, "park": True})
            worker.start()
            try:
                wait_until(lambda: len(handled) == 8)
                wait_until(lambda: len(kafka(*shown, "--parked").rows) == 2)
                assert kafka(*looked).lines[0] == f"{orders} [0] offset 3"
                mended.set()
                assert kafka(*redriven).lines == ["2 messages of group g are redriven."]
                wait_until(lambda: 3 in handled)
                wait_until(lambda: [row["offset"] for row in kafka(*shown, "--parked").rows] == ["5"])
                discarded[-1] = f"{orders}:0:5"
                assert kafka(*discarded, "--yes").lines == ["1 message of group g counts as done."]
                assert kafka(*shown).rows == []
                assert sorted(map(str, handled)) == [str(at) for at in range(10) if at != 5]
            finally:
                consumer.stop()
                worker.join(30)


def test_dead_letters_are_redriven_in_transactions(
    kafka: Command, append: Append, topic_factory: Callable[..., str], kafka_bootstrap: str
) -> None:
    dead, retry = topic_factory(1), topic_factory(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for offset in (1, 2, 2):
        source: Any = MemoryMessage("orders", 3, offset, b"k", b"v%d" % offset, (1, 0), None)
        headers: Any = headers_of(source, "g", 7, 3, ValueError("no"))
        producer.produce(dead, source.value(), source.key(), headers=headers)
    producer.produce(dead, b"no letter")
    assert producer.flush(30) == 0
    ran = kafka("redrive", "g", "--from", dead, "--to", retry, "--json")
    assert ran.status == 0, ran.err
    numbers = {"redriven": 2, "repeats": 1, "passed_over": 0, "others": 1}
    assert ran.json == {"group": "g", "done": True, "from": dead, "to": retry, "as": "g.redrive", **numbers}
    assert kafka("show", f"{retry}:0:1", "--json").json["value"] == "v2"
    ran = kafka("redrive", "g", "--from", dead, "--to", retry)
    assert ran.lines == [f"0 dead letters are produced into {retry}, as group g.redrive."]


@pytest.mark.parametrize(
    "args",
    [
        ["redrive", "g"],
        ["redrive", "g", "--all", "orders:0:1"],
        ["discard", "g", "--all", "--reason", "x"],
        ["park", "g"],
        ["park", "g", "orders:0"],
        ["open-messages", "g", "orders"],
        ["redrive", "g", "--all", "--rate", "0"],
        ["redrive", "g", "--from", "dead"],
        ["who", "g"],
        ["who", "orders", "--key", "x"],
        ["redrive", "g", "--from", "dead", "--to", "retry", "--all"],
    ],
)
def test_wrong_use(command: Command, args: list[str]) -> None:
    assert command("--bootstrap", "127.0.0.1:1", *args).status == 2


def test_a_move_names_the_messages_that_stay_set_aside(kafka: Command, parked: Append, orders: str) -> None:
    """For sink.rewind(parked=…), as with --json."""
    shown = kafka("release-group", "g", "--partition", f"{orders}:0=7", "--dry-run")
    assert f"stay set aside of {orders} [0]: 1, 3, 6" in shown.lines, shown.out + shown.err


# `redrive` killed with -9 between any two records, on a real Kafka: the next run continues; none twice, none lost.


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
@pytest.mark.parametrize("moment", list(FailPoint))
def test_redrive_is_continued(
    kafka: Command,
    append: Append,
    topic_factory: Callable[..., str],
    kafka_bootstrap: str,
    moment: FailPoint,
    times: int,
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
    least = BATCH * (times - (moment in (FailPoint.BEFORE, FailPoint.APPENDED)))
    # The broker may have had it before the kill; and the log may show a record before its acknowledgement is served.
    more = {FailPoint.APPENDED: {least + BATCH}, FailPoint.ACKNOWLEDGED: set(range(least, MESSAGES + 1, BATCH))}
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


CALLS: list[tuple[str, FailPoint | CallMoment, int]] = [
    ("commit", CallMoment.BEFORE, 2),
    ("commit", CallMoment.RETURNED, 2),
    ("release", FailPoint.BEFORE, 1),
    ("send", CallMoment.BEFORE, 2),
    ("send", CallMoment.RETURNED, 2),
    ("init", CallMoment.BEFORE, 1),
    ("init", CallMoment.RETURNED, 1),
    ("begin", CallMoment.RETURNED, 2),
    ("claim", FailPoint.READ, 1),
    ("beat", FailPoint.BEFORE, 1),
    ("release", FailPoint.ACKNOWLEDGED, 1),
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
