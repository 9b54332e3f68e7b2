"""The fold of who owned what: how spans begin and end."""

from __future__ import annotations

import pytest

from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    ClaimingShare,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    SettlingMessages,
    Upgrade,
    World,
    encode,
)
from rationalizer.history import BEFORE, End, Owners, Span
from rationalizer.levels import SUPPORTED_LEVEL

A, NEWER, B, OPERATOR = ("1", "a", "g"), ("2", "a", "g"), ("3", "b", "g"), ("9", "operator", "g")
KEY = ("g", "t", 0)
HI = 1_000


class Story:
    """One CP, and what the fold makes of it."""

    def __init__(self) -> None:
        self.world = World(0, 1)
        self.owners = Owners()
        self.spans: list[Span] = []

    def add(self, at: int, record: Record) -> None:
        outcome = self.world.apply(self.world.next_offset, at, encode(record))
        self.owners.overhear(outcome)
        for key in self.owners.touched(outcome):
            begun = self.owners.see(key, self.world, outcome)
            if begun is not None:
                self.spans.append(begun)


def claim(who: tuple[str, str, str]) -> Record:
    return ClaimingPartition(*who, "t", 0, HI)


def test_each_way_to_end() -> None:
    story = Story()
    story.add(100, claim(A))
    story.add(200, HeartbeatBatch(*A, (BeatEntry("t", 0, 0, 4), BeatEntry("t", 1, 0, 4))))  # the second is refused
    story.add(300, ReleasingPartition(*A, "t", 0, 0, 7))
    story.add(400, claim(A))
    story.add(500, Heartbeat(*NEWER, "t", 0, None, None))
    story.add(600, claim(B))  # refused: held
    story.add(2_501, claim(B))
    story.add(9_000, ForgetGroup("9", "admin", "g"))
    found = [(each.held, each.client_id, each.epoch, each.since, each.until, each.ended) for each in story.spans]
    assert found == [
        (True, "a", 0, 100, 300, End.RELEASED),
        (False, "a", 0, 300, 400, End.CLAIMED),
        (True, "a", 3, 400, 500, End.RESTARTED),
        (True, "a", 4, 500, 2_501, End.REPLACED),
        (True, "b", 6, 2_501, 9_000, End.FORGOTTEN),
    ]
    assert [(each.since_offset, each.until_offset) for each in story.spans] == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    first, _, _, replaced, _ = story.spans
    assert (first.last_beat, first.stable, first.wordless) == (200, 7, False)
    assert (replaced.last_beat, replaced.ended_by) == (500, "b")
    assert story.owners.now == {}


def test_batches_of_a_shared_lease_begin_no_span_each() -> None:
    story = Story()
    story.add(100, Upgrade("9", "admin", "g", SUPPORTED_LEVEL))
    story.add(200, ClaimingShare(*A, "t", 0, HI))
    for number in range(10):
        story.add(300 + number, SettlingMessages(*A, "t", 0, 1, 2 + number, take=(5, 99, False)))
    assert [(each.held, each.since) for each in story.spans] == [(False, 200)]


def test_c20_the_operator_who_evicts_is_named() -> None:
    story = Story()
    story.add(100, claim(A))
    story.add(200, ReleasingPartition(*OPERATOR, "t", 0, 0, None))
    story.add(300, ReleasingPartition(*A, "t", 0, 0, None))
    assert (story.spans[0].ended, story.spans[0].ended_by) == (End.EVICTED, "operator")


@pytest.mark.parametrize(
    ("said", "release"),
    [
        (ReleasingPartition(*OPERATOR, "t", 0, 7, None), ReleasingPartition(*A, "t", 0, 0, None)),
        (ReleasingPartition(*NEWER, "t", 0, 0, None), ReleasingPartition(*A, "t", 0, 0, None)),
        (ReleasingPartition(*OPERATOR, "t", 0, 0, None), ReleasingPartition(*A, "t", 0, 0, 3)),
        (Heartbeat(*OPERATOR, "t", 0, 0, 3), ReleasingPartition(*A, "t", 0, 0, None)),
    ],
    ids=["of another epoch", "a request to hand over (C19)", "its own release, with an offset", "no release"],
)
def test_what_is_no_eviction(said: Record, release: Record) -> None:
    story = Story()
    story.add(100, claim(A))
    story.add(200, said)
    story.add(300, release)
    assert (story.spans[0].ended, story.spans[0].ended_by) == (End.RELEASED, "")


def test_a_release_may_say_nothing_of_offsets() -> None:
    story = Story()
    story.add(100, claim(A))
    story.add(200, ReleasingPartition(*A, "t", 0, 0, None))
    assert story.spans[0].wordless
    assert not story.owners.now[KEY].held


def test_a_replay_that_begins_with_a_state_does_not_know_since_when() -> None:
    before, story = Story(), Story()
    before.add(100, claim(A))
    story.world = World.restore(before.world.snapshot(), 1)
    story.owners.begin(story.world)
    story.add(200, ReleasingPartition(*A, "t", 0, 0, None))
    story.owners.begin(story.world)
    free = story.owners.now[KEY]
    assert (free.held, free.client_id, free.since, free.since_offset) == (False, "", BEFORE, 2)
    story.add(300, claim(B))
    assert (free.ended, free.ended_by, free.until) == (End.CLAIMED, "b", 300)


def test_what_is_rejected_touches_nothing() -> None:
    story = Story()
    story.add(100, Heartbeat(*A, "t", 0, 0, None))
    assert story.spans == []
    assert story.owners == Owners()
