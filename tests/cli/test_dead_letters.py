"""`dead-letters` on a real Kafka: by reason, by key, letter by letter."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.cli import dead_letters
from kafka_marshal.client.dead_letters import headers_of
from tests.cli.harness import Command, Terminal, process
from tests.client.test_dead_letters import BY_KAFKA
from tests.raw_producer import produce_raw

Headers = list[tuple[str, bytes | None]]
Write = Callable[..., None]


class OrderError(Exception):
    pass


#: Message for a letter that names only its topic.
ODD = "this letter can't be read: it lacks __dlq.errors.partition, __dlq.errors.offset, __dlq.errors.group"


@pytest.fixture
def cluster(kafka_bootstrap: str) -> Iterator[KafkaCluster]:
    cluster = KafkaCluster(kafka_bootstrap, {})
    yield cluster
    cluster.close()


@pytest.fixture
def topic(topic_factory: Callable[..., str]) -> str:
    return topic_factory(2)


@pytest.fixture
def write(cluster: KafkaCluster, topic: str) -> Iterator[Write]:
    """A dead letter of the message at an offset of orders [3]; or any record with these headers."""
    producer = cluster.producer({})
    errors: list[Exception | None] = []

    def write_one(
        offset: int,
        error: Exception | None = None,
        key: bytes | None = b"k",
        value: bytes | None = b"v",
        group: str = "billing",
        headers: Headers | None = None,
    ) -> None:
        source: Any = MemoryMessage("orders", 3, offset, key, value, (1, 0), [("trace", b"\xff")])
        made = headers if headers is not None else headers_of(source, group, 7, 3, error or OrderError("no customer"))
        producer.send(topic, value, key, made, errors.append)
        assert producer.flush(15) == 0
        assert errors[-1] is None
        written = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 == written:
            pass  # letters of the same millisecond have no order

    yield write_one
    producer.close()


@pytest.fixture
def some(write: Write) -> None:
    """Five letters with two reasons and three keys, a copy, a record that is no letter, and a malformed one."""
    for offset in (1, 2, 3):
        write(offset)
    write(2)
    write(4, ValueError("bad date \x1b[31m"), b"\xfe\xff")
    write(5, ValueError("bad date \x1b[31m"), None, None)
    write(0, headers=[])
    write(0, headers=[("__dlq.errors.topic", b"orders")])


def test_by_reason(kafka: Command, some: None, topic: str) -> None:
    ran = kafka("dead-letters", topic)
    assert ran.status == 0
    assert [(row["letters"], row["reason"], row["example"]) for row in ran.rows] == [
        ("3", "OrderError: no customer", "orders:3:1"),
        ("2", "ValueError: bad date \\x1b[31m", "orders:3:4"),
        ("1", ODD, ran.rows[2]["example"]),
    ]
    assert ran.rows[2]["example"].startswith(f"{topic}:")
    for row in ran.rows:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", row["first"])
        assert row["first"] < row["last"] or row["letters"] == "1"
    assert f"1 record of {topic} is no dead letter" in ran.err


def test_by_reason_for_programs(kafka: Command, some: None, topic: str) -> None:
    ran = kafka("dead-letters", topic, "--json")
    assert ran.status == 0
    found = ran.json
    assert {
        name: found[name] for name in ("topic", "by", "letters", "repeats", "others", "unreadable", "not_in_rows")
    } == {
        "topic": topic,
        "by": "reason",
        "letters": 5,
        "repeats": 1,
        "others": 1,
        "unreadable": 1,
        "not_in_rows": 0,
    }
    first = found["rows"][0]
    assert abs(first.pop("first") - time.time() * 1000) < 60_000
    assert abs(first.pop("last") - time.time() * 1000) < 60_000
    assert first == {
        "error": "tests.cli.test_dead_letters.OrderError",
        "reason": "no customer",
        "letters": 3,
        "example": "orders:3:1",
    }


def test_by_key(kafka: Command, some: None, topic: str) -> None:
    ran = kafka("dead-letters", topic, "--by", "key")
    assert [(row["letters"], row["key"], row["last reason"]) for row in ran.rows] == [
        ("4", "k", ODD),
        ("1", "-", "ValueError: bad date \\x1b[31m"),
        ("1", "0xfeff", "ValueError: bad date \\x1b[31m"),
    ]
    rows = kafka("dead-letters", topic, "--by", "key", "--json").json["rows"]
    assert [(row["key"], row["key_base64"], row["letters"]) for row in rows] == [
        ("k", "aw==", 4),
        (None, None, 1),
        (None, "/v8=", 1),
    ]


def test_each_letter_in_the_order_of_time(kafka: Command, some: None, topic: str) -> None:
    ran = kafka("dead-letters", topic, "--by", "time")
    assert ran.status == 0
    assert [(row["message"], row["repeat"], row["key"], row["epoch"]) for row in ran.rows] == [
        ("orders:3:1", "no", "k", "7"),
        ("orders:3:2", "no", "k", "7"),
        ("orders:3:3", "no", "k", "7"),
        ("orders:3:2", "yes", "k", "7"),
        ("orders:3:4", "no", "0xfeff", "7"),
        ("orders:3:5", "no", "-", "7"),
        ("-", "no", "k", "-"),
    ]
    assert [(row["group"], row["tries"]) for row in ran.rows] == [("billing", "3")] * 6 + [("-", "-")]
    assert all(row["letter"].startswith(f"{topic}:") for row in ran.rows)
    last = kafka("dead-letters", topic, "--by", "time", "-n", "2")
    assert [row["message"] for row in last.rows] == ["orders:3:5", "-"]


def test_each_letter_for_programs(kafka: Command, some: None, topic: str) -> None:
    ran = kafka("dead-letters", topic, "--by", "time", "--json")
    found = [json.loads(line) for line in ran.lines]
    assert len(found) == 7
    assert [each["repeated"] for each in found] == [False, False, False, True, False, False, False]
    assert [each["unreadable"] for each in found] == [False] * 6 + [True]
    assert (found[6]["topic"], found[6]["offset"], found[6]["reason"]) == (None, None, ODD)
    letter = found[4]
    assert letter.pop("traceback") == "ValueError: bad date \x1b[31m"
    assert letter.pop("unreadable") is False
    for name in ("time", "letter_partition", "letter_offset"):
        assert isinstance(letter.pop(name), int)
    assert letter == {
        "topic": "orders",
        "topic_partition": 3,
        "offset": 4,
        "group": "billing",
        "delivery_count": 3,
        "error": "ValueError",
        "reason": "bad date \x1b[31m",
        "epoch": 7,
        "repeated": False,
        "key": None,
        "key_base64": "/v8=",
        "value": "v",
        "value_base64": "dg==",
        "headers": [{"name": "trace", "value": None, "value_base64": "/w=="}],
        "letter_topic": topic,
    }
    assert (found[5]["value"], found[5]["value_base64"]) == (None, None)


def test_a_letter_of_kafkas_share_group(kafka: Command, write: Write, topic: str) -> None:
    write(0, key=None, value=None, headers=BY_KAFKA)
    (row,) = kafka("dead-letters", topic).rows
    assert (row["reason"], row["example"]) == ("Offset delivery count exceeded the threshold.", "orders:3:17")
    (row,) = kafka("dead-letters", topic, "--by", "time").rows
    assert (row["group"], row["tries"], row["epoch"], row["key"]) == ("share", "5", "-", "-")


def test_of_one_group_and_since_a_moment(kafka: Command, write: Write, topic: str) -> None:
    write(1)
    write(2, group="audit")
    (row,) = kafka("dead-letters", topic, "--by", "time", "--group", "audit").rows
    assert row["message"] == "orders:3:2"
    ran = kafka("dead-letters", topic, "--group", "audti")
    assert (ran.status, ran.rows) == (0, [])
    assert f"no dead letter of group 'audti' in {topic}; did you mean 'audit'?" in ran.err
    assert len(kafka("dead-letters", topic, "--by", "time", "--since", "10m").rows) == 2
    assert kafka("dead-letters", topic, "--by", "time", "--since", "2100-01-01").rows == []
    assert kafka("dead-letters", topic, "--since", "soon").status == 2


def test_a_huge_reason_is_cut(kafka: Command, write: Write, topic: str) -> None:
    write(1, ValueError("x" * 3_000_000))
    (row,) = kafka("dead-letters", topic).rows
    assert row["reason"] == f"ValueError: {'x' * 999}…"


def test_more_reasons_than_there_is_room_for(
    kafka: Command, write: Write, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MOST_ROWS", 2)
    for offset in range(4):
        write(offset, ValueError(f"no order {offset}"))
    assert [(row["letters"], row["reason"]) for row in kafka("dead-letters", topic).rows] == [
        ("1", "ValueError: no order 1"),
        ("1", "ValueError: no order 0"),
        ("2", "(other reasons)"),
    ]
    assert kafka("dead-letters", topic, "--json").json["not_in_rows"] == 2


def test_a_topic_without_letters(kafka: Command, topic: str) -> None:
    ran = kafka("dead-letters", topic)
    assert (ran.status, ran.rows, ran.err) == (0, [], "")
    assert kafka("dead-letters", topic, "--json").json["letters"] == 0


def test_a_topic_that_is_not_there_or_can_not_be(kafka: Command, topic: str) -> None:
    ran = kafka("dead-letters", f"{topic}x")
    assert (ran.status, ran.out) == (1, "")
    assert f"there is no topic '{topic}x'; did you mean '{topic}'?" in ran.err
    ran = kafka("dead-letters", "a b")
    assert (ran.status, ran.out) == (2, "")
    assert "no topic can be called 'a b'" in ran.err
    assert kafka("dead-letters", topic, "-n", "3").status == 2


@pytest.mark.parametrize("by", ["reason", "key", "time"])
def test_it_fits_a_narrow_terminal(
    terminal: Callable[..., Terminal], kafka: Command, write: Write, some: None, topic: str, by: str
) -> None:
    write(9, ValueError("long words " * 90), b"a key as long as a uuid 0123456789", group="a-group-with-a-long-name")
    shown = terminal(*kafka.before, "dead-letters", topic, "--by", by, columns=80).finish().decode()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in shown.replace("\r", "").split("\n")]
    table = [line for line in lines if not line.startswith("warning:")]
    assert max(map(len, table)) <= 80, shown
    assert by == "key" or "OrderError" in shown
    assert shown.count("long words") < 15, "the first words of a reason are enough"
    text = " ".join(" ".join(lines).split())
    if by == "time":
        assert "repeat:" in text
        assert "1 record of" in text
    else:
        assert f"{topic}: 6 dead letters 1 repeat of these, not counted 1 that can't be read 1 other record, no" in text


def test_the_name_of_a_topic_is_completed(kafka: Command, topic: str, kafka_bootstrap: str) -> None:
    words = f"kafka-marshal --bootstrap {kafka_bootstrap} dead-letters {topic[:-2]}"
    env = {"COMP_WORDS": words, "COMP_CWORD": "4", "_KAFKA_MARSHAL_COMPLETE": "bash_complete"}
    done = process(env=env)
    assert f"plain,{topic}" in done.stdout.decode().splitlines()


def test_each_odd_letter_is_a_row_that_says_so(kafka: Command, write: Write, topic: str, kafka_bootstrap: str) -> None:
    """A malformed record does not hide the others."""
    good: list[tuple[bytes, bytes | None]] = [(name.encode(), value) for name, value in BY_KAFKA]
    odd: list[list[tuple[bytes, bytes | None]]] = [
        [("Größe".encode("latin-1"), b"1"), *good],
        [*good, (b"__dlq.errors.offset", b"seventeen")],
        [*good, (b"__dlq.errors.group", None)],
        [*good, (b"__dlq.errors.partition", "٣".encode()), (b"__dlq.errors.topic", None)],
        [(b"__dlq.", b""), (b"\xff", None)],
        [(b"__connect.errors.topic", b"orders"), (b"\xff", b"\xfe")],
        [
            *good,
            (b"__dlq.errors.delivery.count", b"-"),
            (b"__dlq.errors.epoch", None),
            (b"__dlq.errors.message", b"\xff"),
        ],
    ]
    produce_raw(kafka_bootstrap, topic, [(None, b"v", headers) for headers in odd])
    produce_raw(kafka_bootstrap, topic, [(None, None, good)], at_ms=2**62)
    produce_raw(kafka_bootstrap, topic, [(None, None, good)], at_ms=1_700_000_000_000_000_000)
    write(1)
    ran = kafka("dead-letters", topic, "--by", "time")
    assert ran.status == 0
    found = {
        row["letter"].rpartition(":")[2]: (row["message"], row["reason"]) for row in ran.rows if ":0:" in row["letter"]
    }
    lost = "this letter can't be read: "
    assert found["0"][0] == found["6"][0] == "orders:3:17"
    assert found["1"] == ("-", f"{lost}__dlq.errors.offset is no number but 'seventeen'")
    assert found["2"] == ("-", f"{lost}__dlq.errors.group is null")
    assert found["3"][1].startswith(f"{lost}__dlq.errors.topic is null; __dlq.errors.partition is no number but ")
    assert found["4"][1].startswith(f"{lost}it lacks __dlq.errors.topic, ")
    assert "5" not in found, "a letter of another program is counted"
    assert "1 record of" in ran.err
    for by in ("reason", "key"):
        assert kafka("dead-letters", topic, "--by", by).status == 0
        assert kafka("dead-letters", topic, "--by", by, "--json").json["unreadable"] == 4
    assert all(json.loads(line) for line in kafka("dead-letters", topic, "--by", "time", "--json").lines)


def test_where_each_reason_was_raised_first(kafka: Command, write: Write, topic: str) -> None:
    def fail() -> None:
        raise OrderError("no customer")

    with pytest.raises(OrderError) as raised:
        fail()
    write(1, raised.value)
    write(2, raised.value)
    ran = kafka("dead-letters", topic, "--traceback")
    assert ran.status == 0
    assert "in fail" in ran.out
    assert "in fail" in kafka("dead-letters", topic, "--traceback", "--json").json["rows"][0]["traceback"]
    assert kafka("dead-letters", topic, "--traceback", "--by", "key").status == 2
