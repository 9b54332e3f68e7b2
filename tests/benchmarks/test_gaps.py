"""How long a partition paused at a worker, less the delays of broker and machine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.race.events.balance import Gaps
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


class Reporting:
    """Answers like a host of workers: which worker holds and has seen what."""

    def __init__(self, **workers: dict[str, Any]) -> None:
        self.workers = workers

    def report(self, *, seen: bool) -> dict[str, dict[str, Any]]:
        assert seen
        return self.workers


def test_where_a_group_moved_all_that_is_fed_no_gap_is_made_up() -> None:
    """A protocol that stops all members may reassign everything: the race ended there with a ValueError."""
    records = [(0, offset, 1 + offset / 50) for offset in range(100)]
    host = Reporting(a={"held": [0], "seen": records}, b={"held": [1], "seen": []})
    gaps = Gaps(cast("Any", host), cast("Any", Reporting(bystander={"seen": records})))
    found: dict[str, list[float]] = {}
    before = gaps.measure(found, "steady")
    assert found["longest gap, steady"] != []
    host.workers = {"a": {"held": [1], "seen": []}, "b": {"held": [0], "seen": []}}
    gaps.measure(found, "leave", before)
    of_leaving = {name: values for name, values in found.items() if name.endswith("leave")}
    assert of_leaving == {
        "longest gap, leave": [],
        "beyond a bystander's gap, leave": [],
        "added to the usual gap, leave": [],
        "moved, leave": [2],
    }


def test_a_single_record_is_a_gap_for_the_worker_and_no_comparison() -> None:
    one = {0: {7: 2.0}}
    assert longest_ms(one, [0], 1.0, 3.0) == pytest.approx(2000)
    assert beyond_ms(one, one, [0], began=1.0, until=3.0) == 0
