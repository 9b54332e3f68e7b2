"""`dead-letters` on a real Kafka: by reason, by key, letter by letter."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.admin import Admin
from kafka_marshal.cli import dead_letters
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.errors import AdminError
from kafka_marshal.observe.payload import MOST_BYTES, short, shown
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


# -- `show`: one message by its offset, on a real Kafka, or the reason why it can't be shown ----------------------


EVIL = "\x1b]0;pwned\x07\u202e"


@pytest.fixture
def reach(command: Command, kafka_bootstrap: str) -> Command:
    command.before = ("--bootstrap", kafka_bootstrap)
    return command


def test_a_message_as_people_and_programs_see_it(
    reach: Command, kafka_bootstrap: str, topic_factory: Callable[..., str]
) -> None:
    topic = topic_factory(2)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    value = json.dumps({"name": "Zoë", "evil": EVIL, "n": [1, 2.5]}).encode()
    producer.produce(
        topic, value, b"key\x1b[31m", 1, timestamp=1_700_000_000_123, headers=[("trace", b"\xff\x00"), (EVIL, None)]
    )
    producer.produce(topic, None, None, 1)
    producer.produce(topic, bytes(range(40)), "Schlüssel", 1)
    producer.produce(topic, None, b"gone", 1)
    assert producer.flush(30) == 0
    ran = reach("show", f"{topic}:1:0")
    assert ran.status == 0, ran.err
    assert ran.lines[0] == f"{topic} [1] offset 0"
    assert ran.lines[1].startswith("time     2023-11-14T22:13:20.123+00:00 (by the producer's clock), ")
    assert ran.lines[2:6] == [
        "key      0x6b65791b5b33316d",
        "headers  trace = 0xff00",
        "         \\x1b]0;pwned\\x07\\u202e = null",
        f"value    {len(value)} bytes, as JSON",
    ]
    assert '  "name": "Zoë",' in ran.lines
    assert '  "evil": "\\u001b]0;pwned\\u0007\\u202e",' in ran.lines
    assert all(line.isprintable() for line in ran.lines)
    assert reach("show", f"{topic}:1:0", "--as", "hex", "--max-bytes", 3).lines[-2:] == [
        "00000000  7b 22 6e" + " " * 41 + '{"n',
        f"… {len(value) - 3} more bytes (--max-bytes {len(value)} shows all)",
    ]
    assert "value    null" in reach("show", f"{topic}:1:1").lines, "a message without a key is no tombstone"
    assert "null (a tombstone, where the topic is compacted" in reach("show", f"{topic}:1:3").out
    third = reach("show", f"{topic}:1:2")
    assert 'key      "Schlüssel"' in third.lines
    assert third.lines[-1].startswith("00000020  20 21 22 23 24 25 26 27  ")
    found = reach("show", f"{topic}:1:0", "--json").json
    assert found["value"] == value.decode()
    assert found["value_bytes"] == len(value)
    assert found["headers"][0] == {"name": "trace", "value": None, "value_base64": "/wA="}
    assert (found["timestamp"], found["timestamp_type"], found["committed"]) == (1_700_000_000_123, "create", True)
    cut = reach("show", f"{topic}:1:0", "--json", "--max-bytes", 2).json
    assert (cut["value"], cut["truncated"], found["truncated"]) == (value[:2].decode(), True, False)


def test_what_is_not_there_says_why_and_what_is_next(
    reach: Command, kafka_bootstrap: str, topic_factory: Callable[..., str]
) -> None:
    topic = topic_factory(1)
    assert "it is empty" in reach("show", f"{topic}:0:0").err
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(30)
    for is_good in (True, False, True):
        producer.begin_transaction()
        producer.produce(topic, b"good" if is_good else b"bad", partition=0)
        assert producer.flush(30) == 0
        (producer.commit_transaction if is_good else producer.abort_transaction)(30)
    # 0 good, 1 its marker, 2 bad, 3 its marker, 4 good, 5 its marker
    marker = reach("show", f"{topic}:0:1")
    assert marker.status == 1
    assert "no message at offset 1" in marker.err
    assert "The next message is at 4." in marker.err
    aborted = reach("show", f"{topic}:0:2")
    assert aborted.status == 0
    assert aborted.lines[-1] == "bad"
    assert "a transaction that was aborted" in aborted.err
    assert "None follows up to its end, 6." in reach("show", f"{topic}:0:5").err
    above = reach("show", f"{topic}:0:6")
    assert (above.status, "not in the log yet: it ends at 6" in above.err) == (1, True)
    cutter = AdminClient({"bootstrap.servers": kafka_bootstrap})
    cutter.delete_records([TopicPartition(topic, 0, 4)])[TopicPartition(topic, 0)].result(30)
    assert "it begins at 4" in reach("show", f"{topic}:0:2").err
    assert "has no partition 7: it has 1" in reach("show", f"{topic}:7:0").err
    unknown = reach("show", f"{topic}x:0:0")
    assert (unknown.status, f"did you mean '{topic}'" in unknown.err) == (1, True)
    admin = Admin(kafka_bootstrap)
    assert admin.message(topic, 0, 4).value == b"good"
    with pytest.raises(AdminError, match="begins at 4"):
        admin.message(topic, 0, 0)


@pytest.mark.parametrize("place", ["t", "t:1", "t:1:x", "t:x:1", "t:1:-1", "a b:0:0", "t:1:1:1"])
def test_what_names_no_message_is_refused(command: Command, place: str) -> None:
    ran = command("--bootstrap", "127.0.0.1:1", "show", place)
    assert ran.status == 2


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (b"plain", "text"),
        (b"", "text"),
        (b'{"a": 1, "a": 2}', "text"),  # one of them would be dropped
        (b'{"a": 0.1000000000000000055511151231257827}', "text"),  # it would be another number
        (b'{"a": 1e400}', "text"),
        (b'{"a": NaN}', "text"),
        (b"[" * 5_000, "text"),
        (b'{"a": 1.50}', "JSON"),
        (b'{"a": 123456789012345678901234567890}', "JSON"),
        (b"\xff\xfe", "hex"),
        (b"a\x00b", "hex"),
        ("ü".encode() * MOST_BYTES, "text"),
        (b"a" + "ü".encode() * MOST_BYTES, "text"),  # a character is cut
        (b"a" * MOST_BYTES + b"\xff" * 10, "text"),
        (b"a" * (MOST_BYTES - 9) + b"\xff" * 100, "hex"),
    ],
)
def test_a_value_is_shown_in_the_form_that_loses_nothing(value: bytes, form: str) -> None:
    found = shown(value, "auto", MOST_BYTES)
    assert found.form == form
    assert found.size == len(value)
    assert found.cut == max(0, len(value) - MOST_BYTES)


def test_keys_and_headers_stay_short() -> None:
    assert short(None) == "null"
    assert short(b"") == '""'
    assert short(b"x" * 500).endswith('" … (100 more bytes)')
    assert short(b'quo"te') == '"quo\\"te"'
