"""Sharers with the faults of a seed: one owner for each message, none lost; and planted bugs, which that finds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kafka_marshal.engine.effects import Effect, StartFetch
from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.consumer import BatchRun, SharedAssignment
from kafka_marshal.engine.shares.desk import Desk, Shelf
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.run import offset_of
from rationalizer import SettlingMessages, World
from rationalizer.holes import Hole
from tests.engine.harness import Member
from tests.engine.sharers import (
    TOPIC,
    Books,
    BrokenError,
    Sharer,
    Story,
    begins_what_it_gave_back,
    passes_a_settle_before_it_is_accepted,
    shared_net,
)

#: Seeds and virtual time of the short form.
SEEDS, MS = range(2), 2_000.0


def told(seed: int, ms: float = MS) -> None:
    Story(seed).run(ms)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_message_has_one_owner_and_none_is_lost(seed: int) -> None:
    told(seed)


def test_without_faults_each_message_is_begun_once() -> None:
    story = Story(7, faults=False)
    story.run(1_000.0)
    assert set(story.books.begun.values()) == {1}


def test_what_a_member_gave_back_and_got_again_is_of_the_new_batch() -> None:
    """The old batch has messages in flight all the time; its end takes nothing of the new one."""
    net = shared_net(end=10)
    member = net.member("a")
    consumer = member.consumer(TOPIC, sharing=SharingOptions())
    taken: list[Run] = []

    def next_run(most: int) -> Run:
        def takes() -> bool:
            member.fetch(50)
            taken.extend(filter(None, [member.take(most)]))
            return bool(taken)

        net.run_until(takes)
        return taken.pop()

    old = next_run(4)
    share = consumer.assignments[TOPIC, 0]
    assert isinstance(share, SharedAssignment)
    desk = share.desk
    [old_token] = desk.given
    desk.give_back_rest()
    share.report(member.clock())
    member.settle()
    net.run_until(lambda: (member.fetch(50), len(desk.given) == 2)[1])
    first = next_run(2)
    assert isinstance(first, BatchRun)
    assert first.token > old_token
    member.engine.take(consumer.number, consumer.delivery.done_run, old, member.clock())
    net.run_until(lambda: old_token not in desk.given)
    assert [message.offset() for run in (first, next_run(10)) for message in run.messages] == [4, 5, 6, 7, 8, 9]


def test_messages_that_are_redriven_are_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one take; but the reader need not go to the end and back for each."""
    net, books, end = shared_net(end=100), Books(), 100
    sharer = Sharer(net, books, "w", Random(1), 1.0)
    world = World(0, 1)

    def holes() -> list[Hole]:
        world.apply_many((offset, *net.logs[0][offset]) for offset in range(world.next_offset, len(net.logs[0])))
        lease = world.lease("g", TOPIC, 0)
        return [] if lease is None else [hole for hole in lease.progress.open if hole.is_parked]

    def works_until(condition: Callable[[], bool]) -> None:
        while not condition():
            net.tick()
            sharer.turn()

    sharer.parks = 1.0
    works_until(lambda: len(holes()) == end)
    sharer.parks = 0.0
    opened = tuple((offset, offset, None, 0) for offset in range(0, end, 2))
    net.write(SettlingMessages("op-1", "op", "g", TOPIC, 0, None, world.next_offset, (), opened), 0)
    starts: list[Effect] = []
    carry_out = Member.carry_out

    def counted(self: Member, what: Effect) -> None:
        starts.append(what)
        carry_out(self, what)

    monkeypatch.setattr(Member, "carry_out", counted)
    works_until(lambda: len(books.handled) == end / 2)
    assert sum(isinstance(each, StartFetch) for each in starts) <= 2


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_seeds(seed: int) -> None:
    told(seed, 8_000.0)


def _trusts_its_share_for_ever(patch: pytest.MonkeyPatch) -> None:
    """No T4: messages are handed out though nothing has proven the share lately."""
    patch.setattr(SharedAssignment, "is_open", lambda self, now: self.stage == "active" and self.lease.held)


def _reports_what_was_only_read(patch: pytest.MonkeyPatch) -> None:
    """A batch counts as done when it is read."""
    fill = Desk._fill

    def planted(self: Desk, given: Any) -> None:
        fill(self, given)
        self._done(given.first, given.last)

    patch.setattr(Desk, "_fill", planted)


def _forgets_the_tail_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """What was read ahead is dropped one offset too far, and counts as never delivered."""
    trim = Shelf.trim

    def planted(self: Shelf, below: int) -> None:
        trim(self, below)
        if self.messages and offset_of(self.messages[0]) % 7 == 0:
            self.messages.popleft()

    patch.setattr(Shelf, "trim", planted)


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    begins_what_it_gave_back,
    _trusts_its_share_for_ever,
    passes_a_settle_before_it_is_accepted,
    _reports_what_was_only_read,
    _forgets_the_tail_of_a_batch,
]


@pytest.mark.campaign
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(BrokenError):
        for seed in range(40):
            told(seed, 8_000.0)
