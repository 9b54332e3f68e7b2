"""Much news of the log at once: the lock, which messages are handed out under, is not kept for all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from weakref import WeakSet

import pytest
from confluent_kafka import Producer

from kafka_marshal import driver as driver_module
from kafka_marshal.adapters.interface import FaultKind, LogEntry, TailBatch, TailFault
from kafka_marshal.driver import AT_ONCE, Driver
from kafka_marshal.runtime import THREADS, Threads
from tests.client.conftest import Scene, wait_until

MANY = 10 * AT_ONCE


def _read_many(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    turn_ms: float,
    on_record: Callable[[Driver, list[int]], None],
    give_way: Callable[[tuple[Driver, list[int]]], None],
) -> None:
    """A member, alone in its process, reads MANY records together; both are called with it and what it has applied."""
    monkeypatch.setattr(THREADS, "turn_ms", turn_ms)
    monkeypatch.setattr(driver_module, "_drivers", WeakSet())  # not those of other tests
    driver = scene.member()._driver
    applied: list[int] = []

    def hear(cp: int, offset: int, _: object) -> None:
        if cp == 0:
            applied.append(offset)
            on_record(driver, applied)

    driver.listeners.append(hear)
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    with driver.condition:  # who has read the first of them waits here, and finds the others together
        monkeypatch.setattr(Threads, "give_way", lambda _: give_way((driver, applied)))
        for _ in range(MANY):
            producer.produce(scene.coordination, b"not one of ours", partition=0)
        producer.flush(20)
    wait_until(lambda: len(applied) >= MANY, what="reading all of it")
    assert applied == sorted(applied)


def _applied_when_free(scene: Scene, monkeypatch: pytest.MonkeyPatch, turn_ms: float) -> list[int]:
    """How many were applied each time that others had the lock."""
    when_free: list[int] = []

    def note(member: tuple[Driver, list[int]]) -> None:
        def take() -> None:
            with member[0].condition:
                when_free.append(len(member[1]))

        other = threading.Thread(target=take)
        other.start()
        other.join(10)

    _read_many(scene, monkeypatch, turn_ms, lambda driver, applied: None, note)
    return when_free


def test_others_have_the_lock_between_slices_of_a_batch(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    when_free = _applied_when_free(scene, monkeypatch, turn_ms=0.0)
    steps = [late - early for early, late in pairwise(when_free)]
    assert AT_ONCE in steps, "nobody else got the lock in between"
    assert max(steps) <= MANY - AT_ONCE, steps


def test_nobody_gives_way_before_it_is_others_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by hostile records on a busy machine: a sleep after each slice, and the member fell behind the log."""
    assert not _applied_when_free(scene, monkeypatch, turn_ms=1e9)


def test_who_waits_for_the_lock_has_it_after_the_slice(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[threading.Thread] = []
    when_free: list[int] = []

    def come(driver: Driver, applied: list[int]) -> None:
        def take() -> None:
            with driver.condition:
                when_free.append(len(applied))

        if not others:
            others.append(threading.Thread(target=take))
            others[0].start()
            wait_until(lambda: driver.condition.wanted, what="somebody waiting for the lock")

    _read_many(scene, monkeypatch, 1e9, come, lambda _: others[0].join(10))
    assert when_free == [AT_ONCE]


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
