"""Much news of the log at once: the lock, which messages are handed out under, is not kept for all of it."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.interface import FaultKind, LogEntry, TailBatch, TailFault
from kafka_marshal.driver import AT_ONCE
from kafka_marshal.runtime import Threads
from tests.client.conftest import Scene, wait_until


def test_others_have_the_lock_between_slices_of_a_batch(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = scene.member()._driver
    applied: list[int] = []
    when_free: list[int] = []

    def note() -> None:
        with driver.condition:
            when_free.append(len(applied))

    def give_way(_: Threads) -> None:
        other = threading.Thread(target=note)
        other.start()
        other.join(10)

    monkeypatch.setattr(Threads, "give_way", give_way)
    driver.listeners.append(lambda cp, offset, outcome: applied.append(offset) if cp == 0 else None)
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    many = 10 * AT_ONCE
    with driver.condition:  # who has read the first of them waits here, and finds the others together
        for _ in range(many):
            producer.produce(scene.coordination, b"not one of ours", partition=0)
        producer.flush(20)
    wait_until(lambda: len(applied) >= many, what="reading all of it")
    assert applied == sorted(applied)
    steps = [late - early for early, late in pairwise(when_free)]
    assert AT_ONCE in steps, "nobody else got the lock in between"
    assert max(steps) <= many - AT_ONCE, steps


def test_slices_are_the_batch() -> None:
    entries: list[LogEntry] = [(offset, 1, b"") for offset in range(5)]
    fault = TailFault(FaultKind.UNREACHABLE, None, "gone")
    whole = TailBatch({0: entries, 3: entries[:2]}, {3: 9}, [fault])
    parts = whole.slices(2)
    assert [part.records for part in parts] == [
        {0: entries[:2]},
        {0: entries[2:4]},
        {0: entries[4:]},
        {3: entries[:2]},
    ]
    assert [(part.ends, list(part.faults)) for part in parts] == [({}, [])] * 3 + [({3: 9}, [fault])]
    assert TailBatch({0: entries}).slices(5) == [TailBatch({0: entries})]
    empty = TailBatch(ends={1: 4})
    assert empty.slices(5) == [empty]
