"""Done messages that are handled again (R9): what workers of each mode see, on a Kafka in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import Attempt, Batches, Group, Keys, Marshal
from kafka_marshal.engine.redone import RedoneMessages
from kafka_marshal.observe.words import what
from kafka_marshal.testing import MemoryKafka
from rationalizer import SettleOffsets, SettlingMessages, World, decode
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from tests.admin.test_open_messages import CPS, DATA, MESSAGES, Place
from tests.admin.test_open_messages import GROUP as PLACE_GROUP

GROUP, TOPIC = "billing", "orders"

MODES: dict[str, dict[str, Any]] = {
    "claims": {},
    "claims at most once": {"delivery": "at-most-once"},
    "keys": {"mode": Keys({(TOPIC, 0): [(0, MAX_KEY_HASH // 2)]})},
    "batches": {"mode": Batches()},
    "batches at most once": {"mode": Batches(), "delivery": "at-most-once"},
    "group": {"mode": Group()},
}
OTHER_KEYS = {"mode": Keys({(TOPIC, 0): [(MAX_KEY_HASH // 2 + 1, MAX_KEY_HASH)]})}
KEYS = ("ann", "bob", "cid", "dan")


class Seen:
    """What workers have handled: (offset, tries, whether it is redone)."""

    def __init__(self, kafka: MemoryKafka, mode: str, act: Callable[[Any], object] = lambda message: None) -> None:
        self.kafka = kafka
        self.options = MODES[mode]
        self.act = act
        self.seen: list[tuple[int, int, bool]] = []
        self.counts: list[int] = []
        kafka.create_topic(TOPIC)
        for number in range(20):
            kafka.produce(TOPIC, b"%d" % number, key=KEYS[number % 4])
        self.workers = [kafka.start(self.work, f"a-{mode}", self.options)]
        if mode == "keys":
            self.workers.append(kafka.start(self.work, "b-keys", OTHER_KEYS))

    def work(self, bootstrap_servers: str, client_id: str, options: dict[str, Any]) -> None:
        with (
            Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id) as marshal,
            marshal.consumer(*([] if "keys" in client_id else [[TOPIC]]), **options) as consumer,
        ):
            if "delivery" not in options:
                consumer.run(self.handle)
                return
            for batch in consumer.batches():
                self.counts.append(getattr(batch, "delivery_count", 1))
                self.seen += [(message.offset(), 1, False) for message in batch]
                batch.done()

    def handle(self, message: Any) -> None:
        attempt = Attempt.current()
        self.act(message)
        self.seen.append((message.offset(), attempt.number, attempt.is_redone))

    def wait(self) -> None:
        self.kafka.wait_until_done(TOPIC, GROUP, 30)

    def redo(self, *spans: tuple[int, int]) -> Any:
        plan = self.kafka.admin.plan_redo(GROUP, dict.fromkeys([(TOPIC, 0)], spans[0]))
        return self.kafka.admin.redo(plan)


@pytest.mark.parametrize("mode", [each for each in MODES if "once" not in each])
def test_r9_a_redone_message_is_a_first_try_that_says_so(
    memory_marshal: MemoryKafka, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kafka_marshal")
    seen = Seen(memory_marshal, mode)
    seen.wait()
    assert sorted(seen.seen) == [(offset, 1, False) for offset in range(20)]
    seen.seen.clear()
    assert seen.redo((4, 9)).opened == 6
    memory_marshal.wait_until(lambda: len(seen.seen) == 6)
    seen.wait()
    assert sorted(seen.seen) == [(offset, 1, True) for offset in range(4, 10)]
    lines = {each.message for each in caplog.records if "opened again by an operator" in each.message}
    assert len(lines) == len([each for each in lines if each.startswith("orders [0]: 6 done messages, from")]) == 1
    seen.seen.clear()
    memory_marshal.produce(TOPIC, b"new", key="ann")
    seen.wait()
    assert seen.seen == [(20, 1, False)]


@pytest.mark.parametrize("mode", ["claims at most once", "batches at most once"])
def test_r9_at_most_once_a_redone_message_is_delivered_once_more(memory_marshal: MemoryKafka, mode: str) -> None:
    seen = Seen(memory_marshal, mode)
    memory_marshal.wait_until(lambda: len(seen.seen) == 20)
    memory_marshal.wait_until_done(TOPIC, GROUP, 30)
    seen.seen.clear()
    done = seen.redo((4, 9))
    assert (done.opened, dict(done.left)) == (6, {})
    memory_marshal.wait_until(lambda: len(seen.seen) == 6, 20, f"{sorted(seen.seen)}")
    seen.wait()
    memory_marshal.produce(TOPIC, b"new", key="ann")
    memory_marshal.wait_until(lambda: len(seen.seen) == 7, 20)
    assert sorted(offset for offset, _, _ in seen.seen) == [4, 5, 6, 7, 8, 9, 20]
    assert set(seen.counts) == {1}


@pytest.mark.parametrize("mode", ["claims", "group"])
def test_r9_it_comes_alone_of_its_key_after_what_is_in_hand_of_it(memory_marshal: MemoryKafka, mode: str) -> None:
    gate, begun = threading.Event(), threading.Event()
    inside: list[bytes | None] = []
    together: list[bytes | None] = []

    def act(message: Any) -> None:
        if message.key() in inside:
            together.append(message.key())
        inside.append(message.key())
        if message.value() == b"hold":
            begun.set()
            assert gate.wait(30)
        inside.remove(message.key())

    seen = Seen(memory_marshal, mode, act)
    seen.wait()
    seen.seen.clear()
    memory_marshal.produce(TOPIC, b"hold", key="ann")
    assert begun.wait(30)
    seen.redo((4, 7))
    memory_marshal.wait_until(lambda: len(seen.seen) == 3)
    assert sorted(offset for offset, _, _ in seen.seen) == [5, 6, 7], "others wait for nothing"
    gate.set()
    memory_marshal.wait_until(lambda: len(seen.seen) == 5)
    seen.wait()
    assert [offset for offset, _, _ in seen.seen][3:] == [20, 4], "after what was in hand of its key"
    assert together == []


def test_r9_after_a_start_from_the_log_nothing_says_so(memory_marshal: MemoryKafka) -> None:
    seen = Seen(memory_marshal, "claims")
    seen.wait()
    seen.workers[0].stop()
    seen.seen.clear()
    seen.redo((4, 5))
    memory_marshal.start(seen.work, "b", {})
    memory_marshal.wait_until(lambda: len(seen.seen) == 2)
    assert sorted(seen.seen) == [(4, 1, False), (5, 1, False)]


@pytest.mark.parametrize("kind", ["claimed", "coordinated"])
def test_r9_it_ends_with_a_try_of_an_owner_with_a_settlement_and_with_a_redrive_as_of_level_4(kind: Any) -> None:
    place = Place(kind)

    def again(*offsets: int) -> list[bool]:
        world, redone = World(place.cp, CPS), RedoneMessages(PLACE_GROUP)
        log = place.cluster.broker.log("__marshal", place.cp)
        assert log is not None
        for message in log.messages:
            outcome = world.apply(message.offset(), message.timestamp()[1], message.value())
            if outcome.is_a(SettlingMessages, SettleOffsets):
                redone.applied(outcome)
        return [redone.has((DATA, 0), offset) for offset in offsets]

    place.admin.redrive(PLACE_GROUP, "all")
    assert again(*range(MESSAGES)) == [False] * MESSAGES
    place.admin.redo(place.admin.plan_redo(PLACE_GROUP, {(DATA, 0): (13, 17)}))
    assert again(*range(12, 19)) == [False, *[True] * 5, False]
    place.settle(opened=((14, 14, place.hash_of(14), 1),), done=((15, 15),))
    place.park({16: "ValueError"})
    assert again(*range(12, 19)) == [False, True, False, False, False, True, False]
    place.admin.redrive(PLACE_GROUP, "all")
    assert again(16) == [False]


def test_r10_a_redo_is_counted_and_named_as_such(memory_marshal: MemoryKafka) -> None:
    seen = Seen(memory_marshal, "claims")
    seen.wait()
    seen.redo((4, 9))
    seen.wait()
    (driver,) = seen.workers[0]._runtime.drivers
    tally = driver.upkeep.tally
    assert (tally.redone, tally.settled) == (6, {"parked": 0, "redriven": 0, "discarded": 0})
    with memory_marshal._broker.changed:
        logs = memory_marshal._broker.existing["__marshal"].partitions
        values = [message.value() for log in logs for message in log.messages]
    texts = [what(decode(value, SUPPORTED_LEVEL), value, 0) for value in values[1:] if b"orders" in (value or b"")]
    assert "as an operator, of orders/0: opens again 4-9" in texts
