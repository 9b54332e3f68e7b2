"""Fail points: which record is which step, and that a process dies at the right one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
from tests.campaigns.chaos import POINTS, Doom, Moment
from tests.campaigns.chaos.worker import KINDS

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
        assert [moment for s, moment in POINTS.values() if s == step] == list(Moment) * kinds
    for step in CALL_STEPS:
        assert [moment for s, moment in POINTS.values() if s == step] == list(CallMoment)


def test_death_comes_at_its_time_and_no_other() -> None:
    program = (
        "from tests.campaigns.chaos import Doom, Moment\n"
        "doom = Doom('claim', Moment.READ, 2, lambda: print('die', flush=True))\n"
        "for step in ('claim', 'grant'):\n"
        "    doom.at(step, Moment.READ)\n"
        "    doom.at(step, Moment.APPLIED)\n"
        "doom.at('claim')\n"
        "print('lives', flush=True)\n"
        "doom.at('claim', Moment.READ)\n"
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
    Doom("never").at("claim", Moment.BEFORE)
