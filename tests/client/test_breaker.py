"""An outage behind the handlers is no reason to set messages aside."""

from __future__ import annotations

from kafka_marshal.client.breaker import Breaker
from kafka_marshal.client.tries import Call
from tests.engine.lanes_bench import Bench, records


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


def test_the_next_run_is_not_slowed_down() -> None:
    bench = Bench()
    bench.lanes.pace(100.0)
    bench.lanes.close(bench.call)
    bench.lanes.open(Call())
    assert bench.lanes.next_at is None
