"""Garbage collection is off while a batch is fetched, and never longer."""

from __future__ import annotations

import gc
import os

import pytest

from kafka_marshal import Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.fetching import Then, collector_resting
from kafka_marshal.node.coordination_topic import create_topic


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
