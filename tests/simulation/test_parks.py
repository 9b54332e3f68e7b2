"""Stories of a worker that sets messages aside: what the log calls done was handled, or it is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import Retry
from kafka_marshal.adapters.message import Message
from kafka_marshal.engine.work.open_messages import OpenMessages
from kafka_marshal.testing.simulation import Job, Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report

pytestmark = pytest.mark.flaky(reruns=0)


class NeverWorksError(Exception):
    """What a bad message raises."""


def sets_aside(job: Job) -> None:
    """Every seventh message always fails."""

    def handle(message: Message) -> None:
        if (message.offset() or 0) % 7 == 3:
            job.fail(message)
            raise NeverWorksError
        job.handle(message)

    with job.marshal() as marshal:
        consumer = (
            marshal.consumer([job.topic])
            if job.strategy is None
            else marshal.group_consumer(
                [job.topic], strategy=job.strategy, session_timeout_ms=job.session_timeout_ms, allow_key_share=True
            )
        )
        consumer.run(handle, concurrency=4, order="none", retry=Retry(2, (0.01, 0.02)), park=True)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("seeds", [1, pytest.param(200, marks=pytest.mark.campaign)])
def test_what_is_passed_was_handled_or_is_open(seeds: int, groups: bool) -> None:
    report, intervals = Report(), 24 if seeds == 1 else 88
    for seed in range(seeds):
        story = Scenario.from_seed(seed, worker=True, intervals=intervals, coordinated=groups, parks=True)
        report.add(simulate_one(story, sets_aside))
    report.raise_for_violation()


def _passes_a_park_before_it_is_accepted(patch: pytest.MonkeyPatch) -> None:
    park = OpenMessages.park

    def planted(self: OpenMessages, offset: int, covers_from: int, *rest: Any) -> None:
        park(self, offset, covers_from, *rest)
        self._holder.open_in_log(covers_from, offset)

    patch.setattr(OpenMessages, "park", planted)


PLANTED = [_passes_a_park_before_it_is_accepted]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert simulate(sets_aside, seeds=6, small=False, parks=True).broken
