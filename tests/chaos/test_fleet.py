"""How a worker ended is read from its last lines and judged; and each fail point of a kind gets its turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kafka_marshal.testing.fail_points import CALL_STEPS, CallMoment, points_of, step_of
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    CommitRanges,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    Tick,
)
from tests.campaigns.chaos import POINTS, Doom, FailPoint
from tests.campaigns.chaos.fleet import Fleet, Place, _Dooms, _last_words, unexplained
from tests.campaigns.chaos.lines import Pen, read_lines
from tests.campaigns.chaos.worker import KINDS, Job
from tests.campaigns.soak import STEADY, Sample, Series, plot
from tests.client.conftest import wait_until

KIND = "at most once"
NAMES = points_of(KIND)
TAKEOVERS = [name for name in NAMES if "takeover" in name]


def test_where_a_worker_died(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert _last_words(path) == (None, 0.0)  # killed before its first line
    pen = Pen(path)
    assert _last_words(path) == (None, 0.0)
    pen.write("born")
    assert _last_words(path) == (None, 0.0)
    for _ in range(1_000):  # longer than the part that is read
        pen.write("sent", 0, "idle beat", "what")
    pen.write("sent", 0, "grant", "what")
    pen.write("die", "at least once 01: claim before append")
    pen.write("sent", 0, "release", "what")  # by another thread at the last moment
    beats = [at for what, at, *rest in read_lines(path) if rest[1:2] == ["idle beat"]]
    assert _last_words(path) == ("at least once 01: claim before append", beats[-1])
    assert [line[0] for line in read_lines(path)][-3:] == ["sent", "die", "sent"]
    with path.open("a") as file:
        file.write('["torn')
    assert _last_words(path) == ("at least once 01: claim before append", beats[-1])
    assert [line[0] for line in read_lines(path)][-3:] == ["sent", "die", "sent"]


@pytest.mark.parametrize(
    ("status", "sent", "why"),
    [
        (0, (), None),
        (3, (), None),
        (4, (), None),
        (-9, (9, 19), None),
        (-15, (15,), None),
        (1, (15,), "worker ended with status 1"),
        (-9, (15,), "worker died of signal 9 (Killed), which nobody had sent"),
        (-15, (19,), "worker died of signal 15 (Terminated), which nobody had sent"),
        (-6, (9, 15), "worker died of signal 6 (Aborted), which nobody had sent"),
        (-11, (9, 15), "worker died of signal 11 (Segmentation fault), which nobody had sent"),
    ],
)
def test_an_end_is_what_was_done_to_a_worker_or_a_violation(
    status: int, sent: tuple[int, ...], why: str | None
) -> None:
    assert unexplained(status, sent) == why


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Workers without a broker that the fleet must not kill."""
    jobs = [Job("127.0.0.1:9", "c", "g", "t", 1, "iterate", name, 500, "", 0) for name in "abc"]
    made = Fleet([Place(job.client_id, job, steady=True) for job in jobs], tmp_path, Random(1))
    yield made
    made.close()


def test_a_worker_that_dies_of_a_signal_that_was_not_sent_is_reported(fleet: Fleet) -> None:
    def are_alive(count: int) -> bool:
        fleet.turn()
        return len(fleet.alive()) == count

    a, b, c = fleet.places
    fleet.wait_until_ready(60)
    wait_until(partial(are_alive, 3), 180, "all have started")
    fleet.calm = fleet._ending = True  # they get no successors
    fleet.signal(a, signal.SIGKILL)
    fleet.signal(b, signal.SIGTERM)
    os.kill(c.pid, signal.SIGSEGV)
    wait_until(partial(are_alive, 0), 180, "all have ended")
    assert fleet.unexplained == ["c-0001: worker died of signal 11 (Segmentation fault), which nobody had sent"]
    assert (fleet.counts.kills, fleet.counts.others) == (1, {-15: 1, -11: 1})


def test_each_fail_point_has_its_turn_and_the_seed_says_when() -> None:
    def dooms() -> list[str]:
        made = _Dooms(KIND, Random(7))
        return [made.next({}, takeovers=True) for _ in range(2 * len(NAMES))]

    first = dooms()
    assert first == dooms()
    assert sorted(first[: len(NAMES)]) == sorted(first[len(NAMES) :]) == sorted(NAMES)
    assert first[: len(NAMES)] != first[len(NAMES) :]


def test_the_point_with_the_fewest_deaths_is_next() -> None:
    died = dict.fromkeys(NAMES, 5)
    died[NAMES[3]] = 3
    made = _Dooms(KIND, Random(7))
    assert {made.next(died, takeovers=True) for _ in range(10)} == {NAMES[3]}


def test_no_worker_is_killed_at_a_takeover_without_a_lease_to_take_over() -> None:
    died = {name: 5 for name in NAMES if name not in TAKEOVERS}
    made = _Dooms(KIND, Random(7))
    assert not {made.next(died, takeovers=False) for _ in range(100)} & set(TAKEOVERS)
    assert made.next(died, takeovers=True) in TAKEOVERS


def deaths(odds: float) -> Counter[str]:
    """Deaths of twenty minutes: one in five may take over, with these odds; three in five reach other points."""
    rng = Random(7)
    made, died = _Dooms(KIND, rng), Counter[str]()
    for _ in range(1_100):
        takeovers = rng.random() < 0.2
        name = made.next(died, takeovers=takeovers)
        died[name] += rng.random() < (0.6 if name not in TAKEOVERS else odds * takeovers)
    return died


def test_what_is_hard_to_reach_is_reached_in_twenty_minutes() -> None:
    died = deaths(0.2)
    assert min(died[name] for name in NAMES) >= 5


def test_what_can_not_be_reached_at_all_takes_no_more_than_its_share() -> None:
    died = deaths(0.0)
    assert min(died[name] for name in NAMES if name not in TAKEOVERS) >= 10


# -- Fail points: which record is which step, and that a process dies at the right one ----------------------------


IDS = ("i", "c", "g")

STEPS: list[tuple[Record, str]] = [
    (ClaimingPartition(*IDS, "t", 0, 500), "claim"),
    (Heartbeat(*IDS, "t", 0, None, None), "takeover"),
    (ClaimingMessages(*IDS, "t", 0, 3, 10), "grant"),
    (ReleasingPartition(*IDS, "t", 0, 3, None), "release"),
    (Heartbeat(*IDS, "t", 0, 3, None), "idle beat"),
    (Heartbeat(*IDS, "t", 0, 3, 7), "beat"),
    (HeartbeatBatch(*IDS, (BeatEntry("t", 0, 3, None), BeatEntry("t", 1, 3, None))), "idle beat"),
    (HeartbeatBatch(*IDS, (BeatEntry("t", 0, 3, None), BeatEntry("t", 1, 3, 5))), "beat"),
    (CommitRanges(*IDS, "t", 0, 3, ((1, 2),)), "beat"),
    (CommitRanges(*IDS, "t", 0, 3, ((2**63 - 1, 2**63 - 1),)), "mark"),
    (CommitOffsets(*IDS, "m", 1, False, (CommitEntry("t", 0, ranges=((2**63 - 1, 2**63 - 1),)),)), "mark"),
    (CommitOffsets(*IDS, "m", 1, False, (CommitEntry("t", 0, through=3),)), "beat"),
    (Tick(*IDS), "other"),
]


@pytest.mark.parametrize(("record", "step"), STEPS, ids=lambda x: x if isinstance(x, str) else "")
def test_which_record_is_which_step(record: Record, step: str) -> None:
    assert step_of(record) == step


def test_every_point_has_its_own_number() -> None:
    for delivery in {*KINDS.values(), "transactions"}:
        names = points_of(delivery)
        assert [int(name[len(delivery) + 1 :].split(":")[0]) for name in names] == list(range(1, len(names) + 1))
        assert set(names) <= set(POINTS)
    for step, kinds in {"claim": 4, "grant": 2, "release": 4, "mark": 1}.items():
        assert [moment for s, moment in POINTS.values() if s == step] == list(FailPoint) * kinds
    for step in CALL_STEPS:
        assert [moment for s, moment in POINTS.values() if s == step] == list(CallMoment)


def test_death_comes_at_its_time_and_no_other() -> None:
    program = (
        "from tests.campaigns.chaos import Doom, FailPoint\n"
        "doom = Doom('claim', FailPoint.READ, 2, lambda: print('die', flush=True))\n"
        "for step in ('claim', 'grant'):\n"
        "    doom.at(step, FailPoint.READ)\n"
        "    doom.at(step, FailPoint.APPLIED)\n"
        "doom.at('claim')\n"
        "print('lives', flush=True)\n"
        "doom.at('claim', FailPoint.READ)\n"
        "print('not any more', flush=True)\n"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "marshal"), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.split("\n") == ["lives", "die", ""]
    assert done.returncode == -signal.SIGKILL


def test_who_has_no_doom_lives() -> None:
    Doom("never").at("claim", FailPoint.BEFORE)


# -- Growth is found: memory, file descriptors, threads, and workers that ended by themselves ---------------------


def series(**changes: float) -> Series:
    """Flat series, except the last worker: its figures grow by ``changes`` over the time."""
    found = Series()
    for name in STEADY:
        found.samples[name] = []
        for step in range(40):
            grown = {what: by * step / 40 if name == STEADY[-1] else 0.0 for what, by in changes.items()}
            rss_mb = (
                50.0 + (20 if step < 4 else 0) + grown.get("rss_mb", 0)
            )  # a decrease after the start does not matter
            descriptors, threads = 30 + int(grown.get("descriptors", 0)), 14 + int(grown.get("threads", 0))
            found.samples[name].append(Sample(2.0 * step, 7 + int(grown.get("pid", 0)), rss_mb, descriptors, threads))
    return found


def test_flat() -> None:
    assert series().problems() == []
    assert series(rss_mb=3, descriptors=2, threads=2).problems() == []


@pytest.mark.parametrize(
    ("what", "by", "said"),
    [
        ("rss_mb", 20.0, "MB of memory"),
        ("descriptors", 12.0, "file descriptors"),
        ("threads", 12.0, "threads"),
        ("pid", 2.0, "took turns"),
    ],
)
def test_not_flat(what: str, by: float, said: str) -> None:
    [problem] = series(**{what: by}).problems()
    assert said in problem
    assert problem.startswith(STEADY[-1])


def test_seen_too_rarely_to_judge() -> None:
    found = series()
    del found.samples[STEADY[0]]
    found.samples[STEADY[1]] = found.samples[STEADY[1]][:5]
    assert [problem.split(":")[0] for problem in found.problems()] == sorted(STEADY[:2])


def test_a_sample_of_this_process() -> None:
    sample = Sample.of(1.0, os.getpid())
    assert sample is not None
    assert sample.rss_mb > 10
    assert sample.descriptors >= 3
    assert sample.threads >= 1
    assert Sample.of(1.0, 2**22 + 1) is None


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(series(rss_mb=3), tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 1_000
