"""Hot keys (U14): a key above half of what one handler can do is named; others are not, however many there are."""

from __future__ import annotations

from collections import Counter
from random import Random
from threading import Event, Lock, Thread
from typing import Any

import pytest

from kafka_marshal.engine.work import lane
from kafka_marshal.engine.work.lane import COUNTERS, MOST_NOTED, WINDOW_MS, HotKeys, SpaceSaving
from tests.client.conftest import wait_until
from tests.engine.harness import FakeMessage
from tests.faults.stories import TOPIC, member, memory_cluster


def test_space_saving_finds_what_is_above_a_32nd_and_overstates_nothing() -> None:
    rng = Random(1)
    counts, true = SpaceSaving(), Counter[bytes]()
    for _ in range(20_000):
        key = b"hot" if rng.random() < 0.1 else b"k%d" % rng.randrange(5_000)
        counts.add(key, 2.0)
        true[key] += 2
    assert counts.total == 40_000
    assert len(counts._amounts) == COUNTERS
    largest = counts.largest()
    assert largest is not None and largest[0] == b"hot"
    assert 0.6 * true[b"hot"] < largest[1] <= true[b"hot"]


def of(load: float, others: float = 2.0) -> HotKeys:
    """A window in which a key keeps a handler busy for this part of the time, and others several."""
    hot, now = HotKeys(Lock()), 0.0
    while now <= WINDOW_MS:
        hot.note(("t", 0), b"a", 10 * load, now)
        for number in range(4):
            hot.note(("t", 0), b"%d" % ((now * 4 + number) % 400), 10 * others / 4, now)
        hot.note(("t", 0), None, 10.0, now)
        now += 10
    return hot


def test_u14_a_key_above_half_of_a_handler_is_named_with_its_part() -> None:
    (found,) = of(0.9).at(WINDOW_MS)
    assert (found.topic, found.partition, found.key) == ("t", 0, b"a")
    assert found.load == pytest.approx(0.9, abs=0.05)
    assert found.share == pytest.approx(0.9 / 2.9, abs=0.02)
    assert "key b'a' keeps a handler busy for 90% of the time" in str(found)


@pytest.mark.parametrize("load", [0.0, 0.45])
def test_a_key_below_half_is_not(load: float) -> None:
    assert of(load, others=16.0).at(WINDOW_MS) == ()


def test_a_process_that_was_stopped_names_no_key() -> None:
    hot = HotKeys(Lock())
    hot.note(("t", 0), b"a", 60_000.0, 60_000.0)
    hot.note(("t", 0), b"a", 1.0, 60_000.0 + WINDOW_MS)
    assert hot.at(60_000.0 + WINDOW_MS) == ()


def test_it_is_forgotten_when_it_is_over() -> None:
    hot = of(0.9)
    assert hot.at(4 * WINDOW_MS + 10) == ()
    for number in range(3 * MOST_NOTED):
        hot.note(("t", 0), b"a", 0.0, WINDOW_MS + 20)
        assert len(hot._noted) <= MOST_NOTED, number


def test_u14_health_and_metrics_name_the_hot_key_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "WINDOW_MS", 1_000.0)
    cluster = memory_cluster(partitions=1, messages=0)
    for number in range(4_000):
        cluster.broker.produce(TOPIC, 0, b"x", key=b"hot" if number % 2 else b"k%d" % (number % 200))
    with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        thread = Thread(target=consumer.run, args=(lambda message: Event().wait(0.002),))
        thread.start()
        (found,) = wait_until(lambda: marshal.health().hot_keys)
        (metrics,) = marshal.metrics().partitions
        consumer.stop()
        thread.join()
    assert (found.topic, found.partition, found.key) == (TOPIC, 0, b"hot")
    assert found.load > 0.5
    assert "b'hot'" in str(found)
    assert metrics.hot_key_share is not None and 0 < metrics.hot_key_share < 1
    assert not marshal.health().hot_keys, "the run has ended"


@pytest.mark.parametrize("way", ["loop", "poll", "batches", "at-most-once"])
def test_u14_a_plain_loop_counts_too(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Half of the messages have one key, and take longer: the loop is busy with it for most of the time."""
    monkeypatch.setattr(lane, "WINDOW_MS", 400.0)
    cluster = memory_cluster(partitions=1, messages=0)
    for number in range(4_000):
        cluster.broker.produce(TOPIC, 0, b"x", key=b"k%d" % (number % 200) if number % 4 == 0 else b"hot")
    options: dict[str, Any] = {"delivery": way} if way == "at-most-once" else {"batch_size": 50}
    with member(cluster) as marshal, marshal.consumer([TOPIC], **options) as consumer:

        def work() -> None:
            if way == "poll":
                while not marshal.stopping:
                    if (message := consumer.poll(1.0)) is not None:
                        Event().wait(0.001)
                        consumer.done(message)
            elif way == "batches":
                for batch in consumer.batches(max_messages=50):
                    Event().wait(0.05)
                    batch.done()
            else:
                for _ in consumer:
                    Event().wait(0.001)

        thread = Thread(target=work)
        thread.start()
        (found,) = wait_until(lambda: marshal.health().hot_keys)
        marshal.stop()
        thread.join()
    assert (found.topic, found.partition, found.key) == (TOPIC, 0, b"hot")
    assert found.load > 0.5


class Keyed(FakeMessage):
    def __init__(self, at: int, key: bytes) -> None:
        super().__init__((TOPIC, 0), at)
        self._key = key

    def key(self) -> bytes:  # type: ignore[override]
        return self._key


def test_of_a_long_run_neighbours_stand_for_all_and_the_place_moves() -> None:
    hot, now, first = HotKeys(Lock()), 0.0, 0
    while now <= WINDOW_MS:
        keys = [b"k%d" % (number % 40) for number in range(first, first + 1_000)]
        run = [Keyed(first + at, key) for at, key in enumerate(keys)]
        now += 100
        hot.note_run((TOPIC, 0), run, 100.0, now)
        first += 1_000
    assert hot.at(now) == (), "40 keys in turn: none is hot"
    slow = HotKeys(Lock())
    slow.note_run((TOPIC, 0), [Keyed(1, b"one")], 60_000.0, 60_000.0)
    assert slow.at(60_000.0) == (), "one message"
