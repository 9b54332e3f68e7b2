"""Runs of real clients on virtual time, under every fault, are recorded and fed in again."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_marshal.instance import release
from kafka_marshal.node.driver import RECORD
from kafka_marshal.testing.simulation import Scenario, simulate_one
from tests.engine.replay import Replay, read_lines

pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize(
    ("seed", "coordinated", "lanes"),
    [(8, False, False), (1, False, False), (2, True, False), (35, True, True), (0, False, True)],
    ids=["by hand", "all ways", "groups", "groups in lanes", "lanes"],
)
def test_each_recorded_run_is_the_same_when_it_is_fed_in_again(
    seed: int, coordinated: bool, lanes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario.from_seed(seed, intervals=20, coordinated=coordinated, lanes=lanes)
    plain = simulate_one(scenario)
    monkeypatch.setenv(RECORD, str(tmp_path / "run"))
    recorded = simulate_one(scenario)
    assert recorded.history_digest == plain.history_digest, "who is recorded works as ever"
    files = sorted(tmp_path.iterdir())
    replays = [Replay(read_lines(path.read_bytes(), release())) for path in files]
    for replay in replays:
        replay.run()
    assert len(replays) > 3
    assert sum(replay.inputs for replay in replays) > 1_000
    assert sum(replay.effects for replay in replays) > 200
    assert sum(replay.states for replay in replays) > 10
