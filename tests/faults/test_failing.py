"""The proofs of failing.py, each within its time."""

from __future__ import annotations

import pytest

from tests.faults.crew import WITHIN_S
from tests.faults.failing import PROOFS, heard
from tests.interrupts import run_within

pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.parametrize("name", PROOFS)
def test_what_fails_around_a_consumer_costs_nothing(name: str) -> None:
    proof = PROOFS[name]
    with heard(*proof.says):
        run_within(WITHIN_S, proof.run, name)
