"""`show`: one message by its offset, on a real Kafka, or the reason why it can't be shown."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kafka_marshal.admin import Admin
from kafka_marshal.errors import AdminError
from kafka_marshal.observe.payload import MOST_BYTES, short, shown
from tests.cli.harness import Command

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
