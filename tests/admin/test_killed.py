"""Admins killed with -9 at every step: one with the same client_id finishes, or any admin ends the pause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kafka_marshal import GroupPausedError
from tests.admin.conftest import HI, Group, wait_until

PARTITIONS, MESSAGES, TARGET = 3, 12, 4

AGAIN = Counter({(p, o): 1 for p in range(PARTITIONS) for o in range(TARGET, MESSAGES)})

#: (record before which it dies, CPs in which the group is paused then, partitions that have moved)
STEPS = [("pause 2", 1, 0), ("claim 1", 3, 0), ("claim 3", 3, 0), ("move 1", 3, 0), ("move 2", 3, 1), ("end 1", 3, 3)]


def start_killed(group: Group, step: str, sent: str, expires_in: float = 60) -> subprocess.Popen[str]:
    arguments = {
        "bootstrap": group.bootstrap,
        "coordination": group.coordination,
        "group": group.group,
        "client_id": "ops",
        "hi": HI,
        "topic": group.data,
        "positions": [(partition, TARGET) for partition in range(PARTITIONS)],
        "before": step,
        "signal": sent,
        "expires_in": expires_in,
    }
    script = str(Path(__file__).with_name("killed_admin.py"))
    return subprocess.Popen([sys.executable, script, json.dumps(arguments)], stderr=subprocess.PIPE, text=True)


def kill_at(group: Group, step: str) -> None:
    with start_killed(group, step, "SIGKILL") as process:
        process.communicate(timeout=180)
        assert process.returncode == -9


def moved(group: Group) -> int:
    """Number of partitions at their target; no member works on the others."""
    stable = [x.stable for x in group.admin().progress(group.group) if x.topic == group.data]
    assert set(stable) <= {TARGET - 1, MESSAGES - 1}
    return stable.count(TARGET - 1)


@pytest.fixture
def working(group: Group) -> Group:
    group.fill(PARTITIONS, MESSAGES)
    for name in ("a", "b"):
        group.start(name)
    group.at_rest(group.everything())
    return group


@pytest.mark.parametrize(("step", "paused", "positions"), STEPS, ids=[step[0].replace(" ", "-") for step in STEPS])
def test_the_next_run_with_its_client_id_finishes(working: Group, step: str, paused: int, positions: int) -> None:
    kill_at(working, step)
    assert [x.client_id for x in working.admin().pauses(working.group)] == ["ops"] * paused
    if paused == PARTITIONS:
        assert moved(working) == positions
    with pytest.raises(GroupPausedError, match="'ops'"):
        working.admin("another").pause(working.group).start()
    with working.admin("ops").pause(working.group) as pause:
        pause.wait_released(10)
        # Leases of the dead admin need not go stale first.
        assert "ops" not in {lease.client_id for lease in working.admin().progress(working.group)}
        targets = {(working.data, partition): TARGET for partition in range(PARTITIONS)}
        assert sorted(move.after for move in pause.reposition(targets)) == [TARGET] * PARTITIONS
        assert moved(working) == PARTITIONS
    working.at_rest(working.everything() + AGAIN)
    assert all(member.is_alive() and not member.errors for member in working.threads)


@pytest.mark.parametrize(("step", "positions"), [("claim 2", 0), ("move 2", 1)], ids=["claim-2", "move-2"])
def test_anybody_can_end_its_pause_and_it_holds_nothing_any_more(working: Group, step: str, positions: int) -> None:
    kill_at(working, step)
    assert moved(working) == positions
    assert len(working.admin().resume(working.group)) == 3
    assert working.admin().pauses(working.group) == []
    assert "ops" not in {lease.client_id for lease in working.admin().progress(working.group)}
    wait_until(lambda: set(working.stable().values()) == {MESSAGES - 1})
    # Moved partitions were read again from there on; the others were not.
    extra = working.seen() - working.everything()
    assert sum(extra.values()) == positions * (MESSAGES - TARGET)
    assert all(offset >= TARGET and count == 1 for (_, offset), count in extra.items())


def test_an_admin_that_slept_through_its_pause_moves_nothing(working: Group) -> None:
    """SIGSTOP right before the first position is written; members resume; then it continues."""
    with start_killed(working, "move 1", "SIGSTOP", expires_in=1.0) as process:
        wait_until(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
        working.publish(working.data, PARTITIONS, 3)
        working.messages += 3
        working.at_rest(working.everything())
        process.send_signal(signal.SIGCONT)
        _, complaint = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "AdminError: moving failed in its last step" in complaint
    assert set(working.stable().values()) == {working.messages - 1}
    assert working.seen() == working.everything()
