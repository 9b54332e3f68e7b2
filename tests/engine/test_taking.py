"""When a sharer takes a batch, and how large it is (U8): a function of state, times and a draw."""

from __future__ import annotations

from math import inf

import pytest

from kafka_marshal.engine.shares.taking import (
    LINGER_MS,
    LONE,
    WORTH_MS,
    Free,
    Speed,
    count,
    drawn_wait,
    worth_it_at,
)

#: One handler that takes 5 ms.
SPEED = Speed(rate=0.2, max_messages=500, batch_ms=250.0, answer_ms=5.0)
NEVER = -inf


def free(messages: int, sharers: int = 1, idle: int = 1, since: float = 1_000.0) -> Free:
    return Free(messages, since, sharers, idle)


def test_a_full_batch_is_a_quarter_of_a_second_s_work_or_max_messages() -> None:
    assert SPEED.full == 50
    assert Speed(1_000.0, 500, 250.0, 5.0).full == 500
    assert Speed(0.0001, 500, 250.0, 5.0).full == 1


def test_nothing_free_is_never_taken() -> None:
    assert worth_it_at(free(0), SPEED, NEVER) == inf


def test_a_full_batch_is_taken_at_once_even_right_after_another() -> None:
    assert worth_it_at(free(50), SPEED, 1_000.0) <= 1_000.0


def test_what_is_handled_in_50_ms_waits_for_the_last_take_alone() -> None:
    assert worth_it_at(free(10, 2), SPEED, NEVER) <= 1_000.0
    assert worth_it_at(free(10, 2), SPEED, 990.0) == 990.0 + WORTH_MS


def test_few_messages_linger_from_the_moment_when_the_oldest_was_free() -> None:
    assert worth_it_at(free(1, 2), SPEED, NEVER) == 1_000.0 + LINGER_MS


def test_a_lone_sharer_hardly_waits_but_for_what_comes_again() -> None:
    assert worth_it_at(free(1), SPEED, NEVER) == 1_000.0 + LINGER_MS * LONE
    assert worth_it_at(free(1), SPEED, 1_000.0) == 1_000.0 + WORTH_MS * LONE
    assert worth_it_at(free(1)._replace(is_again=True), SPEED, NEVER) == 1_000.0 + LINGER_MS


def test_a_take_is_enough_for_all_handlers() -> None:
    slow = Speed(rate=0.02, max_messages=500, batch_ms=250.0, answer_ms=5.0, handlers=16)
    assert (slow.full, count(free(1_000), slow)) == (5, 16)
    assert count(free(1_000), slow._replace(max_messages=7)) == 7


def test_with_as_many_batches_as_idle_sharers_nobody_waits() -> None:
    assert drawn_wait(free(16 * 10, 16, 16), SPEED, 1.0) == 0.0
    assert drawn_wait(free(1_000, 16, 16), SPEED, 1.0) == 0.0


def test_messages_that_one_take_gets_are_one_batch_however_many() -> None:
    assert drawn_wait(free(10, 16, 16), SPEED, 1.0) == drawn_wait(free(1, 16, 16), SPEED, 1.0) == 150.0


@pytest.mark.parametrize(("draw", "wait"), [(0.0, 0.0), (0.5, 75.0), (1.0, 150.0)])
def test_with_fewer_they_wait_for_a_time_that_each_draws(draw: float, wait: float) -> None:
    assert drawn_wait(free(1, 16, 16), SPEED, draw) == pytest.approx(wait)


def test_of_16_idle_sharers_and_one_message_one_or_two_take_within_an_answer() -> None:
    """The others see it in the log before their own waits end: the expectation, for draws evenly apart."""
    waits = [drawn_wait(free(1, 16, 16), SPEED, draw / 15) for draw in range(16)]
    assert sum(wait <= min(waits) + SPEED.answer_ms for wait in waits) <= 2


def test_a_batch_leaves_others_their_part() -> None:
    assert count(free(1_000, 16), SPEED) == 32
    assert count(free(1_000_000, 16), SPEED) == 50
    assert count(free(20, 16), SPEED) == 10, "what is handled in 50 ms is worth a record"
    assert count(free(1, 16), Speed(0.001, 500, 250.0, 5.0)) == 1
