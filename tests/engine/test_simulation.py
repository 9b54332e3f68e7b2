"""Seeds of the small simulation. ``KAFKA_MARSHAL_SIM_SEEDS=100-2000`` runs those instead of every day's few."""

from __future__ import annotations

import os

import pytest

from tests.engine.simulation import Simulation

FIRST, _, LAST = os.environ.get("KAFKA_MARSHAL_SIM_SEEDS", "0-3").partition("-")


# A violation is one though a second try has none: CI's --reruns is not for these.
@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
def test_no_promise_is_broken(seed: int) -> None:
    Simulation(seed).run()
