"""Fixed stories of redo: operators open done messages all the time, and their records come again, late."""

from __future__ import annotations

from typing import Any

from kafka_marshal.testing.simulation import Client, Fault, Scenario


def written(seed: int, *faults: Fault, every: float = 0.5, **more: Any) -> Scenario:
    """Two members, and operators who redo all the time."""
    redoes = [Fault(round(3.0 + every * n, 2), "redoes", "", 1.0) for n in range(int(11 / every))]
    options: dict[str, Any] = {"data_partitions": 1, "messages": 6.0, **more}
    return Scenario(
        seed=seed,
        clients=(Client("c0", "poll"), Client("c1", "poll")),
        faults=tuple(sorted([*faults, *redoes], key=lambda each: each.at)),
        heartbeat_interval_ms=300,
        intervals=16,
        redoes=True,
        **options,
    )


def positions_are_set(seed: int) -> Scenario:
    """And an admin sets positions while records of operators are on their way."""
    pauses = [Fault(4.0 + 1.2 * n, "pause", "", 0.4, 0.6) for n in range(9)]
    return written(seed, *pauses, every=1.0, data_partitions=8, messages=30.0)


def handlers_are_slow(seed: int) -> Scenario:
    """What is redone twice is open still."""
    return written(seed, every=1.5, data_partitions=3, messages=2.0, handling_ms=150.0)


def answers_come_late(seed: int) -> Scenario:
    """At most once, on a slow network: what is to be granted is opened once more meanwhile, or the lease is over."""
    slow = [Fault(2.0, "slow network", f"c{n}", 14.0, 0.2) for n in range(2)]
    ends = [Fault(4.0 + n, "stop", f"c{n % 2}", 2.5) for n in range(9)]
    return written(seed, *slow, *ends, every=0.25, delivery="at-most-once")


REDO_STORIES: tuple[Scenario, ...] = (
    Scenario.from_seed(0, intervals=16, redoes=True),
    Scenario.from_seed(1, intervals=20, coordinated=True, lanes=True, redoes=True),
    written(0),
    positions_are_set(1),
    handlers_are_slow(12),
    answers_come_late(1),
)
