"""The race runs and judges correctly. Its figures are not checked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import share_race
from benchmarks.race.contestants import BROKERS, CLASSIC, KIP848_FAST, MARSHAL, Contestant
from benchmarks.race.events.balance import Gaps
from benchmarks.race.events.base import Aim, Event
from benchmarks.race.gaps import beyond_ms, first_seen, longest_ms
from benchmarks.race.profile import hottest, show
from benchmarks.race.results import Found, closing_line, earlier, p95, table, to_json
from kafka_marshal.testing.select_broker import RunningKafka

ROOT = Path(__file__).parents[2]


class Sprint(Event):
    """An event that needs no broker."""

    name = "sprint"
    title = "from here to there"
    units = {"time": "ms"}  # noqa: RUF012

    def __init__(self) -> None:
        aims = [
            Aim("time", MARSHAL.name, CLASSIC.name, 0.5),
            Aim("time", MARSHAL.name, "", 25.0),
            Aim("time", MARSHAL.name, CLASSIC.name, 0.5, at_least=True),
            Aim("time", MARSHAL.name, "nobody", 1.0),
        ]
        super().__init__((MARSHAL, CLASSIC), aims, {"distance": "short"})


@pytest.fixture
def found() -> Found:
    found = Found(Sprint())
    for ours, theirs in ((40.0, 100.0), (30.0, 90.0), (500.0, 100.0)):
        found.add(MARSHAL, {"time": [ours]})
        found.add(CLASSIC, {"time": [theirs]})
    return found


def test_medians_are_compared_and_losses_are_reported(found: Found) -> None:
    assert [(round(x.value, 3), x.met) for x in found.judged()] == [(0.4, True), (40.0, False), (0.4, False)]
    lines = table(found).splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("  met", "  MISSED"))] == ["met", "MISSED", "MISSED"]


def test_what_gave_no_figure_is_reported(found: Found) -> None:
    found.failures.append((CLASSIC.name, "it fell"))
    assert f"FAILED {CLASSIC.name}: it fell" in table(found)
    [event] = json.loads(to_json([found], {}))["events"]
    assert event["failures"] == [{"contestant": CLASSIC.name, "why": "it fell"}]
    assert event["metrics"]["time"][MARSHAL.name]["samples"] == [40.0, 30.0, 500.0]


def test_what_an_earlier_run_left_in_a_file_stays_as_it_was(found: Found, tmp_path: Path) -> None:
    found.measured = {"commit": "abc", "rounds": 3}
    found.event.conditions = {"distance": "as it was then"}
    found.failures.append((CLASSIC.name, "it fell"))
    target = tmp_path / "race.json"
    assert earlier(str(target), {"sprint": Sprint}) == {}
    target.write_text(to_json([found], {}), encoding="utf-8")
    kept = earlier(str(target), {"sprint": Sprint})["sprint"]
    assert (kept.samples, kept.failures, kept.measured) == (found.samples, found.failures, found.measured)
    assert to_json([kept], {}) == to_json([found], {})
    assert "commit abc, rounds 3" in "".join(table(kept)).replace("measured: ", "")
    assert kept.event.conditions == found.event.conditions
    target.write_text('{"benchmark": "claim"}', encoding="utf-8")
    with pytest.raises(ValueError, match="the file is as it was"):
        earlier(str(target), {"sprint": Sprint})


def test_the_last_line_names_missed_targets_and_contestants_without_a_figure(found: Found) -> None:
    assert closing_line([found]) == (
        f"race: 1 events, 1 of 3 aims met, missed: sprint: {MARSHAL.name}, time 40; "
        f"sprint: {MARSHAL.name}, time 0.4; 0 rounds without a figure"
    )
    found.failures += [(CLASSIC.name, "it fell"), ("nobody", "it fell")]
    assert found.without_figure == ["nobody"]
    assert closing_line([found]).endswith("; 2 rounds without a figure, none at all of nobody")


def test_p95() -> None:
    assert p95([7.0]) == 7.0
    assert p95([float(n) for n in range(101)]) == pytest.approx(95.0)


def test_every_contestant_says_with_which_settings_it_runs() -> None:
    assert "heartbeat.interval.ms=2000" in CLASSIC.settings
    assert "group.initial.rebalance.delay.ms=0" in CLASSIC.settings
    assert "group.consumer.heartbeat.interval.ms=100" in KIP848_FAST.settings
    assert "group.share" not in KIP848_FAST.settings
    assert Contestant("bare", MARSHAL.side, "delay 0").settings == "defaults"
    assert {CLASSIC.broker, KIP848_FAST.broker} <= set(BROKERS)


def test_stacks_are_counted_once_a_function_and_waiting_threads_not_at_all() -> None:
    stacks = ["a (x.py:1);b (x.py:2);a (x.py:3) 5", "a (x.py:1);b (x.py:9) 3", " 100", "<frozen importlib> (y:1) 7"]
    own, below, total = hottest(stacks)
    assert total == 8
    assert own == {"a (x.py": 5, "b (x.py": 3}
    assert below == {"a (x.py": 8, "b (x.py": 8}
    assert "8 samples" in show("scene", stacks)


@pytest.mark.campaign
@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_race(tmp_path: Path) -> None:
    """One small round of two events: every contestant finishes."""
    target = tmp_path / "race.json"
    names = ("kafka-marshal", "kafka-marshal, group", "classic, delay 0, heartbeat 0.1 s")
    command = [sys.executable, "-m", "benchmarks.race", "--quick", "--only", "start,handover", "--json", str(target)]
    run = subprocess.run(
        [*command, "--plot", str(tmp_path / "race.png")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    events = {event["name"]: event for event in json.loads(target.read_text())["events"]}
    assert [event["failures"] for event in events.values()] == [[], []]
    assert set(events["start"]["metrics"]["start"]) == {*names[:2], "kafka-marshal, reclaim"}
    assert set(events["handover"]["metrics"]["handover"]) == set(names)
    assert all(x["median"] > 0 for event in events.values() for x in next(iter(event["metrics"].values())).values())
    assert (tmp_path / "race.png").stat().st_size > 10_000


# -- The race with a share group, our side of it ------------------------------------------------------------------


@pytest.mark.slow
def test_waits_and_redelivery_are_measured(kafka_broker: RunningKafka) -> None:
    ground = share_race.Ground(kafka_broker.bootstrap_servers, 0.5)
    middle, late = share_race.at_light_load(ground, 2, "ours")
    assert 0 < middle <= late
    assert share_race.after_a_kill(ground, "ours", watchdog=True) > 0


# -- How long a partition paused at a worker, less the delays of broker and machine -------------------------------


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
