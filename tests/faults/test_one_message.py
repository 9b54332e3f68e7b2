"""What one message of an idle loop passes: the lock and the engine twice, and nothing that it does not use."""

from __future__ import annotations

import sys
import threading
from threading import Timer
from typing import Any

import pytest

from kafka_marshal.engine.engine import Engine
from kafka_marshal.node.engine_lock import LockUse
from tests.faults.stories import TOPIC, member, memory_cluster

#: Messages; each comes when the loop waits, so a wait's slice may end once for one of them, and not for most.
MESSAGES = 9


def test_a_message_of_an_idle_loop_takes_the_lock_twice_and_enters_the_engine_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks, takes, counts = [0], [0], list[tuple[int, int]]()
    enter, take = LockUse.__enter__, Engine.take

    def entered(use: LockUse) -> Engine:
        locks[0] += 1
        return enter(use)

    def taken(engine: Engine, consumer: Any, function: Any, *of: Any) -> Any:
        takes[0] += consumer is not None
        return take(engine, consumer, function, *of)

    cluster = memory_cluster(1, 1)
    with member(cluster, hi=60_000) as marshal, marshal.consumer([TOPIC]) as consumer:
        monkeypatch.setattr(LockUse, "__enter__", entered)
        monkeypatch.setattr(Engine, "take", taken)
        for _ in consumer:
            counts.append((locks[0], takes[0]))
            locks[0] = takes[0] = 0
            if len(counts) == MESSAGES:
                break
            Timer(0.05, cluster.broker.produce, (TOPIC, 0, b"x")).start()
    assert sorted(counts)[len(counts) // 2] == (2, 2)


def test_a_message_of_a_loop_passes_no_feature_that_the_loop_does_not_use() -> None:
    passed: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            passed.add(frame.f_code.co_filename.rpartition("kafka_marshal/")[2])

    cluster = memory_cluster(1, 1)
    threading.setprofile(note)  # for threads of the library, which begin later
    sys.setprofile(note)
    try:
        with member(cluster, hi=60_000) as marshal, marshal.consumer([TOPIC]) as consumer:
            for number, _ in enumerate(consumer):
                if number == 2:
                    break
                passed.clear()
                cluster.broker.produce(TOPIC, 0, b"x")
            seen = set(passed)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert "client/fetching.py" in seen
    unused = {"client/shared_reads.py", "engine/work/in_lanes.py", "engine/work/lanes.py", "engine/work/ranges.py"}
    assert seen & unused == set()
