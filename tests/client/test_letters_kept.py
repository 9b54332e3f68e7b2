"""Dead letters of ``consumer.run`` on a real Kafka: they equal the record in Kafka even if handlers change messages."""

from __future__ import annotations

import json
import threading
from operator import methodcaller
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition

from kafka_marshal import Admin, Attempt, Retry
from kafka_marshal.adapters.message import UNREADABLE, headers_of, mend
from tests.client.conftest import wait_until
from tests.client.running import HOW, Crew, done_of
from tests.raw_producer import produce_raw

LATIN = "Größe".encode("latin-1")
SHOWN = "Gr\\xf6\\xdfe"


@pytest.mark.broker
@pytest.mark.parametrize("how", HOW)
def test_letters_and_retries_have_what_is_in_kafka(crew: Crew, how: str) -> None:
    topic, dead = crew.new_topic(1), crew.new_topic(1)
    odd = [(b"ok", b"1"), (LATIN, b"2"), (b"null", None), (b"\xff", b"3")]
    records = [(b"k%d" % (number % 3), b'{"i": %d}' % number, [(b"h", b"1")]) for number in range(12)]
    produce_raw(crew.bootstrap, topic, [*records, (b"k0", b'{"i": 12}', odd), (None, None, [])])
    failing, seen, lock = {3, 7, 12, 13}, [], threading.Lock()

    def change(message: Any) -> None:
        with lock:
            seen.append((message.offset(), Attempt.current().number, message.key(), message.value(), message.headers()))
        message.set_value(json.loads(message.value() or b"0"))
        message.set_key("another")
        (message.headers() or []).append(("more", b""))
        if message.offset() == 7:
            message.set_headers({"h": 5})
        if message.offset() == 13:  # it has none
            message.set_headers([(None, b"1")])
        message.set_topic("another")
        if message.offset() in failing:
            raise ValueError(message.offset())

    async def change_in_a_task(message: Any) -> None:
        change(message)

    marshal, consumer = crew.consumer("a", topic)
    options: dict[str, Any] = {"retry": Retry(attempts=2, backoff=(0.01, 0.02)), "dead_letters": dead}
    handle = change if how == "threads" else change_in_a_task
    running = threading.Thread(target=lambda: consumer.run(handle, concurrency=4, **options))
    running.start()
    wait_until(lambda: marshal.world.lease(topic, 0) and done_of(marshal, topic) == (13, ()))
    marshal.stop()
    running.join(20)
    with Admin(crew.bootstrap, topic=crew.coordination).dead_letters(dead) as found:
        letters = {x.offset: x for x in found}
    assert {x.offset: (x.key, x.value) for x in letters.values()} == {
        3: (b"k0", b'{"i": 3}'),
        7: (b"k1", b'{"i": 7}'),
        12: (b"k0", b'{"i": 12}'),
        13: (None, None),
    }
    assert letters[3].headers == letters[7].headers == (("h", b"1"),)
    assert letters[12].headers == (("ok", b"1"), (SHOWN, b"2"), ("null", None), (UNREADABLE, b"3"))
    assert letters[13].headers == ()
    traces = [x.traceback or "" for x in letters.values()]
    assert all("in change" in text and "client/workers.py" not in text for text in traces)
    by_try = [sorted((x[0], *x[2:]) for x in seen if x[1] == number and x[0] in failing) for number in (1, 2)]
    assert by_try[0] == by_try[1], "the second try sees what the first has seen"
    assert [x[0] for x in seen if x[2] == b"k0" and x[1] == 1] == [0, 3, 6, 9, 12], "the order of the key"


@pytest.mark.broker
def test_headers_that_were_read_before_crash_nothing(crew: Crew) -> None:
    topic = crew.new_topic(1)
    produce_raw(crew.bootstrap, topic, [(b"k", b"v", [(LATIN, b"1"), (b"ok", b"2")])] * 2)
    consumer = KafkaConsumer({"bootstrap.servers": crew.bootstrap, "group.id": "any"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    first, second = consumer.consume(2, 20)
    consumer.close()
    assert headers_of(first) == first.headers() == [(SHOWN, b"1"), ("ok", b"2")]
    with pytest.raises((SystemError, UnicodeDecodeError)):
        methodcaller("headers")(second)
    mend(second)
    assert second.headers() == [(UNREADABLE, b"1"), ("ok", b"2")]
