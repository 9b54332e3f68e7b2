"""Garbage collection is off while a batch is fetched, and never longer."""

from __future__ import annotations

import gc
import os
import threading
from itertools import pairwise
from weakref import WeakSet

import pytest
from confluent_kafka import Producer

from kafka_marshal import Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.fetching import Then, collector_resting
from kafka_marshal.node import driver as driver_module
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.driver import AT_ONCE
from kafka_marshal.ports import FaultKind, LogEntry, TailBatch, TailFault
from kafka_marshal.runtime import MachineRuntime
from tests.client.conftest import Scene, wait_until


def test_it_rests_meanwhile() -> None:
    with collector_resting():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_error() -> None:
    with pytest.raises(OSError, match="broken"), collector_resting():
        raise OSError("broken")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_resting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def _enabled_in_a_child() -> bool:
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_meanwhile_leaves_the_child_with_a_collector() -> None:
    with collector_resting():
        assert _enabled_in_a_child()
        assert not gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_of_a_process_that_has_switched_it_off_stays_without() -> None:
    gc.disable()
    try:
        with collector_resting():
            assert not _enabled_in_a_child()
    finally:
        gc.enable()


def test_it_rests_while_a_backlog_is_fetched_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 messages in batches of 1,000: it is off while one is fetched, and on while one is handled."""
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 10)
    cluster.broker.create_topic("t", 1)
    for number in range(2_500):
        cluster.broker.produce("t", 0, str(number).encode())
    marshal = Marshal.on_cluster(cluster.connect("a"), group_id="g", client_id="a")
    with marshal, marshal.consumer(["t"], delivery="at-most-once", batch_size=1_000) as consumer:
        fetches: list[tuple[int, bool]] = []
        pump = consumer._fetcher.pump

        def noted(timeout_s: float, then: Then | None = None) -> int:
            rests = not gc.isenabled()
            came = pump(timeout_s, then)
            fetches.append((came, rests))
            return came

        monkeypatch.setattr(consumer._fetcher, "pump", noted)
        handled = 0
        for batch in consumer.batches(1_000):
            assert gc.isenabled()
            handled += len(batch)
            if handled == 2_500:
                break
    assert gc.isenabled()
    rested = [rests for came, rests in fetches if came]
    assert rested[1:]
    assert all(rested[1:])  # the first one ends a wait for any message
    cluster.close()


# Many records of the log at once: the lock under which messages are delivered is not held for all of them.


MANY = 10 * AT_ONCE


def _applied_when_free(scene: Scene, monkeypatch: pytest.MonkeyPatch, members: str) -> list[int]:
    """MANY records are read in one batch by the first member of this process: number of records that it applied
    between two releases of the lock."""
    monkeypatch.setattr(driver_module, "WATCHED", WeakSet())  # without those of other tests
    driver, *_ = [scene.member(name)._driver for name in members]
    applied: list[int] = []
    when_free: list[int] = []

    def note() -> None:
        with driver.condition:
            when_free.append(len(applied))

    def give_way(_: MachineRuntime) -> None:
        if threading.current_thread() is not driver._thread:
            return
        other = threading.Thread(target=note)
        other.start()
        other.join(10)

    monkeypatch.setattr(MachineRuntime, "give_way", give_way)
    driver.listeners.append(lambda cp, offset, outcome: applied.append(offset) if cp == 0 else None)
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    with driver.condition:  # the reader of the first record waits here, and then gets the others together
        for _ in range(MANY):
            producer.produce(scene.coordination, b"not one of ours", partition=0)
        producer.flush(20)
    wait_until(lambda: len(applied) >= MANY, what="reading all of it")
    assert applied == sorted(applied)
    return when_free


def test_members_of_one_process_have_the_lock_between_slices_of_a_batch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    when_free = _applied_when_free(scene, monkeypatch, "ab")
    steps = [late - early for early, late in pairwise(when_free)]
    assert AT_ONCE in steps, "nobody else got the lock in between"
    assert max(steps) <= MANY - AT_ONCE, steps


def test_a_member_alone_in_its_process_never_gives_way(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with hostile records on a busy machine: with a sleep after each slice, the member fell behind the log."""
    assert not _applied_when_free(scene, monkeypatch, "a")


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
