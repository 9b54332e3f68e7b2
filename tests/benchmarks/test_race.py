"""The race runs and judges correctly. Its figures are not checked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.race.contestants import BROKERS, CLASSIC, KIP848_FAST, MARSHAL, Contestant
from benchmarks.race.events.base import Aim, Event
from benchmarks.race.profile import hottest, show
from benchmarks.race.results import Found, closing_line, earlier, p95, table, to_json

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
