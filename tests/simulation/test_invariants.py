"""What is no break of a promise, though it looks like one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafka_marshal.engine.plane import Loss
from kafka_marshal.testing.simulation import Scenario, simulate_one
from kafka_marshal.testing.simulation.member_invariants import MemberInvariants

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.parametrize("coordinated", [True, False])
def test_one_handler_costs_a_member_of_a_coordinated_group_all_its_pieces(coordinated: bool) -> None:
    broken: list[str] = []
    clock, story = SimpleNamespace(now=0.0), Scenario.from_seed(0, lanes=True, coordinated=coordinated)
    seen = MemberInvariants(story, cast("Any", clock), lambda promise, message: broken.append(message))
    process = cast("Any", SimpleNamespace(name="c0#1", host=SimpleNamespace(in_lanes=True), heartbeat_interval_ms=200))
    seen.lost(process, ("events", 1), Loss.FENCED)
    clock.now = 10.0
    seen.lost(process, ("events", 0), Loss.HANDLER_TIMEOUT)
    seen.lost(process, ("events", 1), Loss.HANDLER_TIMEOUT)
    assert len(broken) == (0 if coordinated else 1)


def test_log_time_that_runs_ahead_before_anything_is_proven_is_no_doubt() -> None:
    """The acknowledgement of a join is lost; the next beat's log time is that after the clock was set."""
    story = Scenario.from_seed(3167, checkpoints=True)
    assert simulate_one(replace(story, intervals=42, recovers=False, records=0)).violation is None
