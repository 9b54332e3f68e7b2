"""Who owned which keys of a coordinated group, and its rebalances, from its log."""

from __future__ import annotations

import random

import pytest

from rationalizer import (
    CommitEntry,
    ForgetGroup,
    LeaveGroup,
    Record,
    ReleaseGroup,
    SettleOffsets,
    Tick,
    World,
    encode,
)
from rationalizer.groups.group import done_in
from rationalizer.groups.history import Assignments, Rebalance
from rationalizer.history import BEFORE, End, Span
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from tests.fleet import Fleet, let_go, started

HALF = MAX_KEY_HASH // 2


class Story:
    """One CP at level 2, with the fold beside it; `now` is the log time of what comes next."""

    def __init__(self, **options: str) -> None:
        self.world = World(0, 1)
        self.fold = Assignments("g")
        self.now = 0
        self.spans: list[Span] = []
        self.fleet = Fleet("g", 1, self.append, **options)
        self.fleet.upgrade()

    def append(self, record: Record, cp: int) -> int:
        offset = self.world.next_offset
        outcome = self.world.apply(offset, self.now, encode(record))
        self.spans += self.fold.see(self.world, outcome)
        self.check()
        return offset

    def check(self) -> None:
        """What it holds is what the group says, and for any key the spans follow each other."""
        group = self.world.group("g")
        for (topic, partition), spans in self.fold.now.items():
            assert [span.lo for span in spans] == [0, *(span.hi + 1 for span in spans[:-1])]
            assert spans[-1].hi == MAX_KEY_HASH
            assert group is not None
            pieces = group.pieces.get(topic)
            owned = {
                key: group.members[piece.owner].client_id
                for piece in (() if pieces is None else pieces[partition])
                for key in (piece.lo, piece.hi)
            }
            said = {key: span.client_id for span in spans for key in owned if span.lo <= key <= span.hi}
            assert said == owned

    def told(self, partition: int = 0) -> list[tuple[str, int, int | None, End]]:
        found = sorted(
            (span for span in self.spans if span.key[1:] == ("t", partition)), key=lambda s: (s.since_offset, s.lo)
        )
        return [(span.client_id, span.since, span.until, span.ended) for span in found]


def test_a_piece_that_is_handed_over_has_two_owners_one_after_the_other() -> None:
    story = Story()
    story.now = 1_000
    story.fleet.join("a", {"t": 2})
    story.now = 2_000
    second = story.fleet.join("b", {"t": 2})
    assert story.told(1) == [("a", 1_000, None, End.OPEN)], "it is revoked, and still a's"
    story.now = 2_500
    story.fleet.commit("a", second, *started("t", 0, 1), let_go("t", 1, 41))
    assert story.told(1) == [("a", 1_000, 2_500, End.RELEASED), ("b", 2_500, None, End.OPEN)]
    assert story.told(0) == [("a", 1_000, None, End.OPEN)]
    first, second_rebalance = story.fold.rebalances
    assert (first.joined, first.members, len(first.moved)) == (["a"], 1, 2)
    assert (second_rebalance.joined, second_rebalance.members) == (["b"], 2)
    (moved,) = second_rebalance.moved
    assert moved.before is not None
    assert (moved.before.client_id, moved.after.client_id, moved.before.stable) == ("a", "b", 41)
    assert moved.vacant_ms == 0


def test_the_dead_are_named_with_their_silence_and_their_pieces_with_the_time_no_one_had_them() -> None:
    story = Story()
    story.fleet.join("a", {"t": 2})
    generation = story.fleet.join("b", {"t": 2})
    story.fleet.commit("a", generation, let_go("t", 1))
    story.now = 9_000
    story.fleet.beat("a", generation)
    story.now = 12_000
    story.fleet.beat("a", generation)
    last = story.fold.rebalances[-1]
    assert last.silent == [("b", 12_000)]
    (moved,) = last.moved
    assert moved.before is not None
    assert (moved.before.client_id, moved.before.ended, moved.vacant_ms) == ("b", End.REPLACED, 12_000)


def test_h4_a_member_that_only_settles_messages_finds_the_dead_too() -> None:
    story = Story()
    story.fleet.upgrade(SHARING_LEVEL)
    story.fleet.join("a", {"t": 2})
    generation = story.fleet.join("b", {"t": 2})
    story.fleet.commit("a", generation, let_go("t", 1))
    story.now = 9_000
    story.fleet.beat("a", generation)
    story.now = 12_000
    instance, client, group, member_id = story.fleet.ids("a")
    settle = SettleOffsets(
        instance, client, group, member_id, generation, story.world.next_offset, "t", 0, done=((0, 0),)
    )
    offset = story.append(settle, 0)
    last = story.fold.rebalances[-1]
    assert (last.generation, last.silent) == (offset, [("b", 12_000)])
    assert story.told(1)[-1] == ("a", 12_000, None, End.OPEN)


def test_who_leaves_who_restarts_and_who_changes() -> None:
    story = Story()
    story.fleet.join("a", {"t": 1})
    story.now = 500
    story.fleet.join("a", {"t": 1}, instance="a/2/0.1.0/y")
    assert story.fold.rebalances[-1].restarted == ["a"]
    assert story.told() == [("a", 0, 500, End.RESTARTED), ("a", 500, None, End.OPEN)]
    assert story.fold.rebalances[-1].moved[0].vacant_ms == 500
    generation = story.fleet.join("a", {"t": 1}, instance="a/2/0.1.0/y", session=5_000)
    assert story.fold.rebalances[-1].changed == ["a"]
    story.now = 900
    story.fleet.members["a"] = ("a/2/0.1.0/y", next(iter(story.world.groups())).clients["a"].member_id)
    story.fleet.leave("a", generation)
    assert (story.fold.rebalances[-1].left, story.fold.rebalances[-1].members) == (["a"], 0)
    assert story.told()[-2:] == [("a", 500, 900, End.LEFT), ("", 900, None, End.OPEN)]
    story.now = 3_000
    story.fleet.join("b", {"t": 1})
    assert story.fold.rebalances[-1].moved[0].vacant_ms == 2_100, "since a left"


def test_c20_the_operator_who_evicts_a_member_is_named() -> None:
    story = Story()
    story.fleet.join("a", {"t": 1})
    generation = story.fleet.join("b", {"t": 1})
    _, _, _, member_id = story.fleet.ids("a")
    story.now = 700
    story.append(LeaveGroup("9", "operator", "g", member_id, generation), 0)
    assert story.fold.rebalances[-1].joined == ["b"], "that changes nothing"
    story.fleet.leave("a", generation)
    last = story.fold.rebalances[-1]
    assert (last.evicted, last.left) == ([("a", "operator")], [])
    assert story.told()[0] == ("a", 0, 700, End.EVICTED)
    story.append(LeaveGroup("9", "b", "g", story.fleet.ids("b")[3], last.generation), 0)  # a request (G20)
    story.fleet.leave("b", last.generation)
    assert (story.fold.rebalances[-1].evicted, story.fold.rebalances[-1].left) == ([], ["b"])


def test_a_shared_partition_falls_into_spans_by_key() -> None:
    story = Story(strategy="roundrobin")
    story.fleet.configure(accept_range_fetch=("t",))
    story.now = 1_000
    story.fleet.join("a", {"t": 1}, share=True)
    story.now = 2_000
    generation = story.fleet.join("b", {"t": 1}, share=True)
    story.now = 3_000
    story.fleet.commit("a", generation, *started("t", 0))
    story.fleet.commit("a", generation, let_go("t", 0, 9, lo=HALF + 1, hi=MAX_KEY_HASH))
    now = [(span.client_id, span.lo, span.hi, span.since) for span in story.fold.now["t", 0]]
    assert now == [("a", 0, HALF, 1_000), ("b", HALF + 1, MAX_KEY_HASH, 3_000)]
    assert story.told() == [
        ("a", 1_000, None, End.OPEN),
        ("a", 1_000, 3_000, End.RELEASED),
        ("b", 3_000, None, End.OPEN),
    ]


def test_what_is_done_of_some_keys() -> None:
    story = Story()
    generation = story.fleet.join("a", {"t": 1})
    for lo, hi, through in ((0, 9, 5), (10, 19, 8), (20, MAX_KEY_HASH, 2)):
        story.fleet.commit("a", generation, CommitEntry("t", 0, lo, hi, through=through))
    group = story.world.group("g")
    assert group is not None
    places = [(0, 9), (10, 19), (5, 15), (15, 25), (20, MAX_KEY_HASH), (0, MAX_KEY_HASH)]
    assert [done_in(group, "t", 0, lo, hi) for lo, hi in places] == [5, 8, 5, 2, 2, 2]
    assert done_in(group, "t", 1, 0, 9) == -1


def test_a_topic_whose_last_reader_died_had_no_one_since_its_last_beat() -> None:
    story = Story()
    story.fleet.join("a", {"u": 1})
    generation = story.fleet.join("b", {"t": 1})
    for story.now in (9_000, 12_000):
        story.fleet.beat("a", generation)
    assert story.told() == [("b", 0, 12_000, End.REPLACED), ("", 12_000, None, End.OPEN)]
    story.now = 15_000
    story.fleet.join("c", {"t": 1})
    (moved,) = story.fold.rebalances[-1].moved
    assert (moved.after.client_id, moved.vacant_ms) == ("c", 15_000)


def test_a_forgotten_group_has_no_owners() -> None:
    story = Story()
    generation = story.fleet.join("a", {"t": 1})
    story.append(ReleaseGroup("x", "admin", "g", 50_000), 0)
    story.fleet.leave("a", generation)
    story.append(ForgetGroup("x", "admin", "g"), 0)
    assert story.world.group("g") is None
    assert [ended for *_, ended in story.told()] == [End.LEFT, End.FORGOTTEN]
    assert story.fold.now == {}


def test_what_was_so_before_the_log_begins() -> None:
    story = Story()
    generation = story.fleet.join("a", {"t": 1})
    fold = Assignments("g")
    fold.begin(World.restore(story.world.snapshot(), 1))
    (span,) = fold.now["t", 0]
    assert (span.client_id, span.since, span.epoch) == ("a", BEFORE, generation)
    story.fold = fold
    story.now = 20_000
    story.fleet.join("b", {"t": 1})
    assert fold.rebalances[-1].silent == [("a", 20_000)], "its last beat is known"
    assert fold.rebalances[-1].moved[0].vacant_ms == 20_000


def test_how_long_no_one_had_it_before_the_log_begins_is_not_known() -> None:
    story = Story()
    generation = story.fleet.join("a", {"t": 1})
    story.fleet.commit("a", generation, *started("t", 0))
    story.fleet.leave("a", generation)
    story.fold = Assignments("g")
    story.fold.begin(World.restore(story.world.snapshot(), 1))
    story.now = 20_000
    story.fleet.join("b", {"t": 1})
    (moved,) = story.fold.rebalances[-1].moved
    assert (moved.after.client_id, moved.vacant_ms) == ("b", None)


@pytest.mark.parametrize("strategy", ["sticky", "range"])
@pytest.mark.parametrize("seed", range(20))
def test_at_random_it_says_what_the_group_says(seed: int, strategy: str) -> None:
    """`Story.check` after each record; and of any key each span ends where the next one begins."""
    draw = random.Random(seed)
    story = Story(strategy=strategy)
    story.fleet.configure(accept_range_fetch=("t",))
    for _ in range(120):
        story.now += draw.choice((10, 500, 4_000))
        group = story.world.group("g")
        assert group is not None
        client = draw.choice("abcde")
        match draw.randrange(6):
            case 0:
                story.fleet.join(client, {"t": draw.choice((1, 2, 3)), "u": 2}, share=draw.random() < 0.8)
            case 1 if client in group.clients:
                story.fleet.leave(client, group.generation)
            case 2 if client in group.clients:
                story.fleet.beat(client, group.generation)
            case 3:
                story.append(Tick("x", "x", "x"), 0)
            case _ if (member := group.clients.get(client)) is not None and member.member_id:
                story.fleet.members[client] = member.instance_id, member.member_id
                story.fleet.commit(client, group.generation, *owned(story, member.slot))
            case _:
                pass
    by_partition: dict[tuple[str, int], list[Span]] = {}
    for span in story.spans:
        by_partition.setdefault((span.key[1], span.partition), []).append(span)
    for spans in by_partition.values():
        for key in {span.lo for span in spans}:
            line = sorted((s for s in spans if s.lo <= key <= s.hi), key=lambda s: (s.since_offset, s.until is None))
            assert [s.until_offset for s in line[:-1]] == [s.since_offset for s in line[1:]]
            assert line[-1].until_offset is None
    assert any(isinstance(each, Rebalance) for each in story.fold.rebalances)


def owned(story: Story, slot: int) -> list[CommitEntry]:
    group = story.world.group("g")
    assert group is not None
    return [
        let_go(topic, partition, lo=piece.lo, hi=piece.hi)
        for topic, pieces in group.pieces.items()
        for partition, piece in pieces.owned_by(slot)
    ] or started("t", 0)
