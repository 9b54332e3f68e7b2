"""How long a partition stood still at a worker, less what the broker and the machine did."""

from __future__ import annotations

import pytest

from benchmarks.race.gaps import beyond_ms, first_seen, longest_ms

USUAL = {0: {offset: 1 + offset / 50 for offset in range(100)}}


def worker(*, late: float = 0.0, since: int = 0, until: int = 100) -> dict[int, dict[int, float]]:
    """Sees it a millisecond after the bystander, later from offset ``since`` on, and nothing from ``until`` on."""
    return {0: {x: at + 0.001 + late * (x >= since) for x, at in USUAL[0].items() if x < until}}


def test_a_worker_that_sees_what_the_bystander_sees_stood_still_for_nothing() -> None:
    assert beyond_ms(worker(), USUAL, [0], began=1.0, until=4.0) == pytest.approx(0, abs=0.01)
    assert longest_ms(worker(), [0], 1.0, 4.0) == pytest.approx(20)


def test_where_both_wait_it_is_the_broker() -> None:
    broker_away = {0: {x: at + (0.3 if x >= 50 else 0) for x, at in USUAL[0].items()}}
    seen = {0: {x: at + 0.001 for x, at in broker_away[0].items()}}
    assert longest_ms(seen, [0], 1.0, 4.0) == pytest.approx(320)
    assert beyond_ms(seen, broker_away, [0], began=1.0, until=4.0) == pytest.approx(0, abs=0.01)


def test_where_only_the_worker_waits_it_is_ours() -> None:
    assert beyond_ms(worker(late=0.12, since=50), USUAL, [0], began=1.0, until=4.0) == pytest.approx(120, abs=0.01)


def test_a_gap_that_runs_counts() -> None:
    stopped = worker(until=50)
    assert beyond_ms(stopped, USUAL, [0], began=1.0, until=3.5) == pytest.approx(
        1000 * (3.5 - stopped[0][49] - 0.02), abs=0.01
    )


def test_a_partition_of_which_nothing_came_stood_still_all_the_time() -> None:
    assert longest_ms({}, [0], 1.0, 3.0) == pytest.approx(2000)
    assert beyond_ms({}, USUAL, [0], began=1.0, until=3.0) == pytest.approx(2000)


def test_what_a_group_repeats_counts_once() -> None:
    assert first_seen([(0, 5, 1.0), (0, 6, 1.1), (0, 5, 2.0), (3, 5, 2.0)]) == {0: {5: 1.0, 6: 1.1}, 3: {5: 2.0}}
