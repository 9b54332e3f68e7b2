"""Limits of checkpoints: the weight of older versions (X6), pieces of states (X5), and what a snapshot lists (S2)."""

from __future__ import annotations

import pytest

from rationalizer.groups.checkpoints import Checkpoints, Kept, Version, saved_nowhere
from rationalizer.limits import MAX_KEY_PIECES, MAX_OLD_WEIGHT
from rationalizer.progress import Progress
from rationalizer.wire.wellformed import PERIODIC, PINNED


def version(checkpoint: int, ranges: int) -> Version:
    progress = Progress()
    if ranges:
        progress.commit([(2 * number + 5, 2 * number + 5) for number in range(ranges)])
    return Version(checkpoint, None, progress, None)


def test_the_oldest_periodic_checkpoints_go_where_older_versions_weigh_too_much() -> None:
    checkpoints = Checkpoints(64, False)
    checkpoints.complete(Kept(1, 0, PINNED, {("t", 0): version(1, 0)}))
    each = version(2, 60_000).weight
    for number in range(2, 40):
        checkpoints.complete(Kept(number, 0, PERIODIC, {("t", 0): version(number, 60_000)}))
    fit = (MAX_OLD_WEIGHT - 4) // each
    assert [kept.id for kept in checkpoints.kept] == [1, *range(39 - fit, 40)]
    assert checkpoints.old_weight == 4 + fit * each
    assert checkpoints.size() == 2 * (fit + 2)


def test_what_is_dropped_or_undone_is_weighed_no_more() -> None:
    checkpoints = Checkpoints(64, False)
    for number in range(1, 6):
        kind = PINNED if number == 1 else PERIODIC
        checkpoints.complete(Kept(number, 0, kind, {("t", number % 2): version(number, number)}))
    for checkpoint in (3, 2):
        checkpoints.drop(checkpoint)
        assert checkpoints.old_weight == weight(checkpoints)
    assert checkpoints.go_back(1) == {("t", 0), ("t", 1)}
    assert (checkpoints.old_weight, weight(checkpoints)) == (0, 0)
    assert {key: found.checkpoint for key, found in checkpoints.seen.items()} == {("t", 1): 1}


def weight(checkpoints: Checkpoints) -> int:
    """Of all versions that the newest does not see, by counting."""
    seen = set(map(id, checkpoints.seen.values()))
    found = [each for several in checkpoints.all_versions().values() for each in several]
    return sum(each.weight for each in found if id(each) not in seen)


@pytest.mark.parametrize("more", [0, 1])
def test_states_have_room_for_no_more_pieces_than_done_through(more: int) -> None:
    states = saved_nowhere()
    for number in range((MAX_KEY_PIECES - 2) // 2):
        states.commit_key_range(4 * number + 1, 4 * number + 1, 7)
    assert states.piece_count == MAX_KEY_PIECES - 1
    if more:
        states.commit_key_range(2**60, 2**63 - 1, 7)
    assert states.has_room(2**59, 2**59, 9) == (states.piece_count + 2 <= MAX_KEY_PIECES)
    assert states.has_room(1, 1, 9)
