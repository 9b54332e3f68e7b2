"""Progress of explicit runs may be marked at once or one by one, with the same result."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from kafka_marshal.engine.work.run import Run, offset_of
from kafka_marshal.engine.work.tracker import Tracker
from kafka_marshal.ports import Message
from tests.engine.harness import FakeMessage


@dataclass(frozen=True)
class Lease:
    at_most_once: bool = False


def handed_out(offsets: list[int], size: int) -> tuple[Tracker[Lease], list[FakeMessage]]:
    """A tracker of runs of ``size`` messages each, spread over lanes."""
    tracker: Tracker[Lease] = Tracker(-1, [])
    messages = [FakeMessage(("t", 0), offset) for offset in offsets]
    covers_from = 0
    for first in range(0, len(messages), size):
        run = Run(Lease(), list(messages[first : first + size]), covers_from, False, 0.0)
        run.into_lanes()
        tracker.hand_out(run)
        covers_from = run.last + 1
    return tracker, messages


def known(tracker: Tracker[Lease]) -> object:
    left = [
        offset_of(message)
        for run in tracker.runs.values()
        for message, is_done in zip(run.messages, run.marks, strict=True)
        if not is_done
    ]
    return tracker.done.stable, tracker.done.ranges, tracker.in_hand, sorted(left)


@pytest.mark.parametrize("seed", range(50))
def test_at_once_or_one_by_one(seed: int) -> None:
    """In any order, with gaps without messages, and some twice."""
    rng = Random(seed)
    offsets = sorted(rng.sample(range(200), 120))
    size = rng.choice([1, 7, 50, 120])
    (one, ones), (many, manies) = handed_out(offsets, size), handed_out(offsets, size)
    order = rng.sample(range(len(offsets)), len(offsets))
    order += order[:5]
    while order:
        part, order = order[: (n := rng.randint(1, 60))], order[n:]
        refused = [message.offset() for index in part for message in one.mark([ones[index]])]
        assert [message.offset() for message in many.mark([manies[index] for index in part])] == refused
        assert known(many) == known(one)
    assert known(many) == (offsets[-1], [], 0, [])
    assert many.runs == {}


def test_one_message_keeps_no_others() -> None:
    tracker, messages = handed_out(list(range(1000)), 1000)
    tracker.mark(messages[1:])
    assert [len(run.messages) for run in tracker.runs.values()] == [1]
    assert tracker.mark([messages[5]]) == [messages[5]]
    assert tracker.mark([messages[0]]) == []
    assert tracker.done.stable == 999


def test_what_comes_back_after_many_are_done_covers_what_is_not() -> None:
    """A run whose done messages were dropped is split like any other."""
    tracker, messages = handed_out(list(range(10)), 10)
    tracker.mark([messages[index] for index in (1, 2, 4, 6, 8, 9)])
    [run] = tracker.runs.values()
    back = tracker.split(run, [messages[3], messages[5]])
    assert [[m.offset() for m in part] for part, _ in back] == [[3, 5]]
    assert tracker.in_hand == 2
    tracker.mark([messages[0], messages[7]])
    assert (tracker.done.stable, tracker.done.ranges) == (2, [(4, 4), (6, 9)])


def test_h1_an_open_message_between_those_of_a_run_is_done_in_one_call_with_them() -> None:
    """It is a run by itself, whose offset lies within the other run."""
    tracker: Tracker[Lease] = Tracker(-1, [])
    messages: list[Message] = [FakeMessage(("t", 0), offset) for offset in range(4)]
    around = Run(Lease(), [*messages[:2], messages[3]], 0, False, 0.0)
    opened = Run(Lease(), messages[2:3], 2, False, 0.0)
    opened.is_open = True
    for run in (around, opened):
        run.into_lanes()
        tracker.hand_out(run)
    assert tracker.mark(messages) == []
    assert not tracker.runs
    assert tracker.done.stable == 3
