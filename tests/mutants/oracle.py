"""The oracle as a judge: computes each record's outcome by the rules of tests/rationalizer/oracle."""

from __future__ import annotations

from kafka_marshal.testing.simulation import Scenario
from rationalizer import Outcome, World
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.oracle.compare import OUTCOME_FIELDS, outcome_fields

#: The whole state is compared once per this many records of a CP; otherwise outcomes and the digest's length.
WHOLE_EVERY = 20


def difference(real: Outcome, wanted: object) -> str:
    """How the outcome of one record differs from the oracle's; "" if it does not."""
    found, due = outcome_fields(real), {name: getattr(wanted, name) for name in OUTCOME_FIELDS}
    apart = [
        f"{name} is {found[name]}, the oracle has {due[name]}" for name in OUTCOME_FIELDS if found[name] != due[name]
    ]
    return "; ".join(apart)


def state_difference(real: World, wanted: OracleWorld) -> str:
    """Whether the canonical states differ (S1)."""
    return "" if real.snapshot() == wanted.snapshot() else "the state differs from the oracle's"


class OracleJudge:
    """Judges one story."""

    def __init__(self, scenario: Scenario) -> None:
        cps = scenario.coordination_partitions
        self._worlds = {cp: OracleWorld(cp, cps) for cp in range(cps)}

    def judge(self, cp: int, offset: int, timestamp_ms: int, value: bytes, outcome: Outcome, world: World) -> str:
        """What is wrong."""
        oracle = self._worlds[cp]
        wanted = oracle.apply(offset, timestamp_ms, value)
        return difference(outcome, wanted) or ("" if offset % WHOLE_EVERY else state_difference(world, oracle))
