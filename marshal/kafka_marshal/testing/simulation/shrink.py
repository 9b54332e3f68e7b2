"""Shrinks a failing scenario: fewer faults, clients and messages, a shorter story.

A step is kept if the smaller story still breaks the same promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.story import Result

#: The story is first cut at this multiple of the virtual time at which the promise broke.
AFTER = 1.05


def shrink(result: Result, run: Callable[[Scenario], Result], attempts: int = 150) -> Result:
    """The smallest story found within ``most`` runs that breaks the same promise; run: runs one."""
    if result.violation is None:
        raise ValueError("there is nothing to shrink: this run broke no promise")
    promise = result.violation.promise
    best = result
    left = attempts

    def still_breaks(scenario: Scenario) -> bool:
        nonlocal best, left
        if left <= 0 or scenario == best.scenario:
            return False
        left -= 1
        found = run(scenario)
        if found.violation is None or found.violation.promise != promise:
            return False
        best = found
        return True

    progress = True
    while progress and left > 0:
        progress = False
        for smaller in _steps:
            for scenario in smaller(best):
                if still_breaks(scenario):
                    progress = True
                    break  # the next step starts from this one
    return best


def _shorter(result: Result) -> Iterator[Scenario]:
    """End soon after the break, without the later faults."""
    scenario, violation = result.scenario, result.violation
    if violation is None or violation.promise == "liveness":
        lasting = max((fault.at + fault.intervals for fault in scenario.faults), default=0.0)
        yield from (replace(scenario, intervals=n) for n in (5, int(lasting) + 2) if n < scenario.intervals)
        return
    ended = violation.at_ms / scenario.heartbeat_interval_ms * AFTER
    kept = tuple(fault for fault in scenario.faults if fault.at <= ended)
    until = int(ended) + 1
    if until < scenario.intervals or scenario.recovers:
        yield replace(scenario, faults=kept, intervals=until, recovers=False)
    if len(kept) < len(scenario.faults):
        yield replace(scenario, faults=kept)


def _fewer_faults(result: Result) -> Iterator[Scenario]:
    """Halves, then quarters, then one by one."""
    scenario = result.scenario
    for kept in _without(scenario.faults):
        yield replace(scenario, faults=kept)


def _without(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    size = len(faults)
    while size >= 1:
        for start in range(0, len(faults), size):
            yield faults[:start] + faults[start + size :]
        size //= 2


def _fewer_clients(result: Result) -> Iterator[Scenario]:
    scenario = result.scenario
    for gone in scenario.clients[1:] if len(scenario.clients) > 1 else ():
        yield replace(
            scenario,
            clients=tuple(client for client in scenario.clients if client != gone),
            faults=tuple(fault for fault in scenario.faults if fault.client != gone.name),
        )


def _plainer(result: Result) -> Iterator[Scenario]:
    """Default clocks, policies and sizes."""
    scenario = result.scenario
    plain = tuple(Client(x.name, x.worker, claims_ahead=x.claims_ahead, reads=x.reads) for x in scenario.clients)
    yield replace(scenario, clients=plain)
    yield replace(scenario, records=0)
    for messages in (0.1, 1.0, 4.0, round(scenario.messages / 2, 1)):
        if messages < scenario.messages:
            yield replace(scenario, messages=messages)
    if scenario.other_partitions:
        alike = tuple(replace(client, reads="") for client in scenario.clients)
        yield replace(scenario, clients=alike, other_partitions=0)
        yield replace(scenario, clients=alike)
        yield replace(scenario, other_partitions=1)
    for partitions in (1, 2, 4):
        if partitions < scenario.data_partitions:
            yield replace(scenario, data_partitions=partitions)
    if scenario.coordination_partitions > 1:
        yield replace(scenario, coordination_partitions=1)


_steps: tuple[Callable[[Result], Iterator[Scenario]], ...] = (_shorter, _fewer_faults, _fewer_clients, _plainer)
