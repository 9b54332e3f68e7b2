"""The oracle's reading of checkpoints, alone: what it must reach and keep to before it judges."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.rationalizer.checkpoint_cells import end_of
from tests.rationalizer.group_author import GroupAuthor
from tests.rationalizer.oracle import OracleOutcome, OracleWorld, is_state
from tests.rationalizer.oracle.assigning import TopicPartition
from tests.rationalizer.oracle.checkpoints import Checkpoints, Version
from tests.rationalizer.oracle.groups import Group
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.strategies import LARGEST, TEST_TIMEOUT_S, by_seed, many

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

#: (CP, CPs) of the logs, in turn.
PLACES = ((0, 1), (0, 1), (1, 2), (2, 4))
LENGTH = 200
#: Key hashes between which nothing is cut but by mistake, and offsets that logs reach.
SAMPLES = (0, 1, LARGEST // 5, LARGEST // 3, LARGEST // 2, LARGEST // 2 + 1, LARGEST)
OFFSETS = range(-1, 60)


def begun(seed: int) -> GroupAuthor:
    """The author of a log whose groups take checkpoints."""
    return GroupAuthor(by_seed(seed), OracleWorld(*PLACES[seed % 4]), takes=True)


# What every state keeps to: "Why this is right", in samples of keys and offsets.


def done(progress: KeyedProgress, sample: int) -> set[int]:
    """The offsets that are done for this key."""
    [through] = [offset for low, high, offset in progress.through if low <= sample <= high]
    inside = {offset for offset in OFFSETS if offset <= through}
    return inside | {offset for first, last in progress.ranges for offset in OFFSETS if first <= offset <= last}


def state_of(version: Version, sample: int) -> int:
    """The id under which the state of this key was saved."""
    [found] = [state for low, high, state in version.states if low <= sample <= high]
    return found


def checkpoints_hold_together(group: Group) -> None:
    """X1, X2, X3, X10: what is kept, and what each checkpoint sees."""
    known = group.checkpoints
    assert known is not None
    assert [kept.id for kept in known.kept] == sorted({kept.id for kept in known.kept})
    assert all(kept.kind != 0 for kept in known.kept[:-1])
    assert all(one.log_time <= other.log_time for one, other in pairwise(known.kept))
    for place, versions in known.versions.items():
        assert versions
        for one, other in pairwise(known.kept):  # "along the checkpoints kept progress only grows"
            before, after = known.as_seen(place, one.id).progress, known.as_seen(place, other.id).progress
            assert all(done(before, sample) <= done(after, sample) for sample in SAMPLES)
        for version in versions:
            seen = any(known.seen(place, kept.id) == version for kept in known.kept)
            assert seen or (known.barrier is not None and version.checkpoint == known.barrier.id > known.newest)
    if known.barrier is not None:  # X6: else it would have been closed
        owners = {piece.owner for piece in group.all_pieces()}
        assert owners - set(known.barrier.answers)
        assert set(known.barrier.answers) <= {member.slot for member in group.members}


def moved_as_the_rules_say(was: Group, now: Group, outcome: OracleOutcome) -> None:
    """Nothing moves in between; state fits position; a rollback changes no progress but takes it back."""
    before, after = was.checkpoints, now.checkpoints
    assert before is not None
    if after is None:  # X9, end
        assert now.progress == was.progress
        return
    places = {*was.progress, *now.progress}
    if after.newest == before.newest:
        for place in places:
            started = outcome.type == "CommitOffsets" and place in after.initial and place not in was.progress
            assert started or was.progress.get(place) == now.progress.get(place)
    elif end_of(was, now) == "complete":
        assert before.barrier is not None
        for place in places:
            a_cut_counts(before, after, place, before.barrier.id)
    elif outcome.type == "Rollback":
        for place in places:
            assert after.as_seen(place, after.newest).progress == before.as_seen(place, after.newest).progress


def a_cut_counts(before: Checkpoints, after: Checkpoints, place: TopicPartition, barrier: int) -> None:
    """A key whose state is named by this barrier has its own cut's progress; another keeps what it had."""
    old, new = before.as_seen(place, before.newest), after.as_seen(place, barrier)
    cut = [sample for sample in SAMPLES if state_of(new, sample) == barrier]
    touched = any(state == barrier for _, _, state in new.states)
    for sample in SAMPLES:
        assert done(old.progress, sample) <= done(new.progress, sample)
        if sample not in cut:
            assert state_of(new, sample) == state_of(old, sample)
            assert touched or old.progress == new.progress


def handed_over_only_if_cut(was: Group, now: Group) -> None:
    """A key leaves a member that stays only if that named all of its piece in the barrier that is now complete."""
    assert was.checkpoints is not None
    before = {member.slot: member.member_id for member in was.members}
    after = {member.slot: member.member_id for member in now.members}
    for place, pieces in was.pieces.items():
        for piece in pieces:
            stays = before[piece.owner] == after.get(piece.owner)
            for sample in (piece.low, piece.high):
                owner = [p for p in now.pieces.get(place, ()) if p.low <= sample <= p.high]
                if not stays or (owner and (owner[0].owner, owner[0].since) == (piece.owner, piece.since)):
                    continue
                assert now.generation > was.generation
                if end_of(was, now) == "complete":
                    assert now.checkpoints is not None
                    assert was.checkpoints.barrier is not None
                    barrier = was.checkpoints.barrier
                    assert state_of(now.checkpoints.as_seen(place, barrier.id), sample) == barrier.id
                else:  # a reset: everything is its target's, under a new token
                    assert all(p.since == now.generation for parts in now.pieces.values() for p in parts)


@pytest.mark.parametrize("seed", range(many(16)))
def test_what_every_state_of_checkpoints_keeps_to(seed: int) -> None:
    author = begun(seed)
    world = author.world
    for _ in range(LENGTH):
        before = dict(world.groups)
        outcome = world.apply(*author.entry())
        for name, now in world.groups.items():
            was = before.get(name)
            if now.checkpoints is not None:
                checkpoints_hold_together(now)
            if was is not None and was.checkpoints is not None and was != now:
                assert outcome.accepted
                moved_as_the_rules_say(was, now, outcome)
                if now.checkpoints is not None:
                    handed_over_only_if_cut(was, now)
    assert is_state(world.snapshot(), world.partitions)
