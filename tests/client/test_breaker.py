"""An outage behind the handlers is no reason to set messages aside."""

from __future__ import annotations

import threading
from typing import Any

from kafka_marshal import Retry
from kafka_marshal.client.breaker import FAILING, Breaker
from kafka_marshal.client.tries import Call
from kafka_marshal.engine.work.behind import HANGS_MS
from tests.client.conftest import wait_until
from tests.engine.lanes_bench import Bench, records
from tests.faults.stories import TOPIC, member, memory_cluster


def test_it_opens_while_more_than_half_of_the_last_hundred_tries_failed() -> None:
    breaker = Breaker()
    assert [breaker.note(True) for _ in range(51)] == [False] * 50 + [True]
    assert (breaker.is_open, breaker.in_a_row) == (True, 51)
    assert [breaker.note(False) for _ in range(50)] == [False] * 49 + [True] or breaker.is_open
    while breaker.is_open:
        breaker.note(False)
    assert breaker.in_a_row == 0
    assert sum(breaker._last) == 50


def test_one_message_that_fails_among_others_opens_nothing() -> None:
    breaker = Breaker()
    assert not any(breaker.note(number % 2 == 0) for number in range(1_000))


def test_while_it_is_open_one_try_begins_at_a_time_and_none_before_its_back_off() -> None:
    bench = Bench()
    one = bench.assignment()
    a, b, c = bench.spread(one, records("abc"))
    bench.lanes.pace(100.0)
    assert [bench.begin(lane, 99.0) for lane in (a, b)] == [None, None]
    assert bench.lanes.reopened(99.0) == []
    assert bench.lanes.reopened(100.0) == [a]
    assert bench.begin(a, 100.0) == 0
    assert bench.begin(c, 100.0) is None
    assert bench.lanes.reopened(100.0) == []
    assert not bench.done(one, a)
    assert bench.lanes.reopened(100.0) == [b]
    bench.lanes.pace(None)
    assert bench.begin(b, 100.0) == 1
    assert bench.lanes.reopened(100.0) == [c]


def test_while_it_is_open_a_handler_that_hangs_holds_the_others_up_for_ten_seconds() -> None:
    bench = Bench()
    a, b = bench.spread(bench.assignment(), records("ab"))
    bench.lanes.pace(100.0)
    assert bench.begin(a, 100.0) == 0
    assert bench.begin(b, 100.0) is None
    assert bench.lanes.reopened(99.0 + HANGS_MS) == []
    assert bench.lanes.reopened(100.0 + HANGS_MS) == [b]
    assert bench.begin(b, 100.0 + HANGS_MS) == 1


def test_a_message_that_stops_all_others_is_set_aside_though_nothing_succeeds() -> None:
    """With an order, what waits behind it can't show that nothing is away; in an outage that costs next to nothing."""
    breaker = Breaker()
    parks = []
    for number in range(1_000):
        breaker.note(True)
        if breaker.is_open and breaker.probes():
            parks.append(number + 1)
    assert parks == [51, 91, 171, *range(271, 1_001, 100)]
    assert breaker.note(False)
    assert not breaker.is_open


def test_an_outage_that_flickers_closes_nothing() -> None:
    breaker = Breaker()
    for _ in range(60):
        breaker.note(True)
    for number in range(400):
        breaker.note(number % 4 > 0)
        assert breaker.is_open
        assert not breaker.probes() or number == 0


def test_the_next_run_is_not_slowed_down() -> None:
    bench = Bench()
    bench.lanes.pace(100.0)
    bench.lanes.close(bench.call)
    bench.lanes.open(Call())
    assert bench.lanes.next_at is None


def test_health_and_metrics_say_so_until_it_closes() -> None:
    """The log shows nothing of it, so this is where it is seen."""
    cluster, is_mended = memory_cluster(1, 400), threading.Event()

    def handle(message: Any) -> None:
        if not is_mended.is_set():
            raise ValueError("what it needs is away")

    with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        options: dict[str, Any] = {"retry": Retry(3, (0.001, 0.01)), "park": True, "order": "none"}
        running = threading.Thread(target=consumer.run, args=(handle,), kwargs=options)
        assert marshal.metrics().runs_failing == 0
        running.start()
        wait_until(lambda: FAILING in marshal.health().problems)
        assert not marshal.health().ok
        assert marshal.metrics().runs_failing == 1
        is_mended.set()
        wait_until(lambda: marshal.health().ok)
        assert marshal.metrics().runs_failing == 0
        consumer.stop()
        running.join()
