"""The oracle's reading of coordinated groups, alone: what it must reach and keep to before it judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.rationalizer.checkpoint_cells import checkpoint_cells_met, meeting, wanted_of_checkpoints
from tests.rationalizer.group_author import GroupAuthor
from tests.rationalizer.group_cells import Cell, cells_met, wanted
from tests.rationalizer.group_stories import SLOW, STORIES, told
from tests.rationalizer.group_values import EDGES, level_of
from tests.rationalizer.oracle import OracleWorld, is_state, judge, shortest
from tests.rationalizer.oracle.assigning import TopicPartition
from tests.rationalizer.oracle.groups import Group, rebalance
from tests.rationalizer.oracle.layout import home_of_group
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.strategies import TEST_TIMEOUT_S, Entry, by_seed, many

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

#: (CP, CPs) of the logs, in turn.
PLACES = ((0, 1), (0, 1), (1, 2), (2, 4))
#: This number is enough for all cells. The first ones met all when they were chosen, each of them some that are rare.
MOST_LOGS = 310
FIRST_LOGS = (168, 67, 93, 22, 19, 97, 181, 23, 304, 88, 86, 198, 14, 194, 222, 15, 17, 128)
LENGTH = 200


def begun(seed: int) -> GroupAuthor:
    return GroupAuthor(by_seed(seed), OracleWorld(*PLACES[seed % 4]))


@pytest.mark.slow
def test_every_record_in_every_state() -> None:
    """Chance, with fixed seeds, reaches every code of every cell of the tables of sections 5 and 7."""
    met: Counter[Cell] = Counter()
    due = wanted() | wanted_of_checkpoints()
    for seed in dict.fromkeys((*FIRST_LOGS, *range(MOST_LOGS))):
        author = begun(seed)
        for _ in range(LENGTH):
            entry = author.entry()
            found = meeting(author.world, entry)
            met.update(cells_met(author.world, entry))
            met.update(checkpoint_cells_met(found, author.world))
        if due <= set(met):
            break
    assert sorted(due - set(met)) == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STORIES])
def test_what_stands_at_a_limit(name: str) -> None:
    (_, codes), world = told(name)
    assert [outcome.code for outcome in world.outcomes][-len(codes) :] == codes


@pytest.mark.slow
def test_every_bound_of_every_field() -> None:
    home = next(cp for cp in range(4) if home_of_group("g", 4) == cp)
    for kind, fields, fits in EDGES:
        level = level_of(kind)
        value = shortest([level, kind, "1", "a", "g", *fields])
        judged = judge(value, level, home, 4)
        assert judged.code == (None if fits else "MALFORMED"), (kind, str(fields)[:200])
        if len(value) < 10_000:
            elsewhere = judge(value, level, (home + 1) % 4, 4)
            assert elsewhere.code == ("MALFORMED" if not fits else None if kind == 21 else "WRONG_PARTITION")
            assert judge(value, level - 1, home, 4).code == "UNSUPPORTED_VERSION"
            older = shortest([1, kind, "1", "a", "g", *fields])
            assert judge(older, level - 1, home, 4).code == "UNKNOWN_TYPE"
            assert replace(judge(older, level, home, 4), version=judged.version) == judged


def owner_tokens(group: Group, samples: list[int]) -> Iterator[tuple[tuple[str, int, int], int, int]]:
    """(topic, partition, key hash), owner and since, for a few hashes."""
    for (topic, number), pieces in group.pieces.items():
        for sample in samples:
            for piece in pieces:
                if piece.low <= sample <= piece.high:
                    yield (topic, number, sample), piece.owner, piece.since


SAMPLES = [0, 1, LARGEST_HASH // 5, LARGEST_HASH // 3, LARGEST_HASH // 2, LARGEST_HASH // 2 + 1, LARGEST_HASH]


def holds_together(group: Group) -> None:
    """G3, G4, K4, G7, G12: what every state of a group keeps to."""
    slots = [member.slot for member in group.members]
    assert slots == sorted(set(slots))
    assert len({member.client for member in group.members}) == len(slots)
    assert (group.strategy is None) == (not slots)
    assert set(group.topics) == {topic for member in group.members for topic in member.topics}
    for topic, count in group.topics.items():
        for number in range(count):
            pieces = group.pieces[topic, number]
            assert [piece.low for piece in pieces] == [0, *(piece.high + 1 for piece in pieces[:-1])]
            assert pieces[-1].high == LARGEST_HASH
    for (topic, number), pieces in group.pieces.items():
        for piece, following in zip(pieces, (*pieces[1:], None), strict=True):
            assert piece.owner in slots
            assert piece.since <= group.generation
            assert (piece.revoked is None) == (piece.owner == piece.target)
            assert following is None or piece.high < following.low
            assert following is None or piece.high + 1 < following.low or piece[2:] != following[2:]
            subscribed = group.subscribers(topic) if number < group.topics.get(topic, 0) else []
            assert piece.target in subscribed if subscribed else piece.target is None


def targets_as_a_rebalance_would_have_them(group: Group) -> None:
    """G16, G17: a rebalance that nothing has caused moves no target (it may cut the letting-go short, no more)."""
    again = rebalance(group, group.generation + 1)
    for place in {*group.pieces, *again.pieces}:
        for sample in SAMPLES:
            assert target_of(group, place, sample) == target_of(again, place, sample)


def target_of(group: Group, place: TopicPartition, sample: int) -> int | None:
    found = [piece.target for piece in group.pieces.get(place, ()) if piece.low <= sample <= piece.high]
    return found[0] if found else None


@pytest.mark.parametrize("seed", range(many(24)))
def test_what_every_state_keeps_to(seed: int) -> None:
    """G4, G5, K4, P2: one owner a key, a `since` that grows, a stable that only imports and rollbacks move back."""
    author = begun(seed)
    world = author.world
    last_owner: dict[tuple[str, str, int, int], tuple[int, int]] = {}
    for _ in range(LENGTH):
        before = {name: group.progress for name, group in world.groups.items()}
        outcome = world.apply(*author.entry())
        for name, group in world.groups.items():
            holds_together(group)
            targets_as_a_rebalance_would_have_them(group)
            for place, progress in before.get(name, {}).items():
                imported = outcome.type == "Rollback" or "REPOSITIONED" in (outcome.entries or ())
                assert imported or group.progress[place].stable >= progress.stable
            for key, owner, since in owner_tokens(group, SAMPLES):
                known, token = last_owner.get((name, *key), (owner, since))
                assert since >= token
                assert owner == known or since > token
                last_owner[name, *key] = (owner, since)
    state = world.snapshot()
    assert is_state(state, world.partitions)


def test_version_1_means_the_same() -> None:
    """Section 5: from level 2 on the versions 1 and 2 of a record have one meaning."""
    for seed in range(4):
        author = begun(seed)
        log: list[Entry] = []
        for _ in range(LENGTH):
            log.append(author.entry())
            author.world.apply(*log[-1])
        other = OracleWorld(author.world.partition, author.world.partitions)
        for offset, stamp, value in log:
            if other.level >= 2 and value and value[1:2] == b"\x02":
                value = value[:1] + b"\x01" + value[2:]
            other.apply(offset, stamp, value)
        assert other.digest() == author.world.digest()


def test_the_same_log_for_the_same_seed() -> None:
    def values(seed: int) -> list[Entry]:
        author, log = begun(seed), []
        for _ in range(60):
            log.append(author.entry())
            author.world.apply(*log[-1])
        return log

    assert values(3) == values(3)
    assert values(3) != values(7)
