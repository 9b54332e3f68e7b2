"""Policies as pure functions: fair shares, few moves, nothing idle, no livelock. The board replaces engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_marshal.engine.policies import (
    Balanced,
    Cycle,
    Greedy,
    MaxClaims,
    PartitionView,
    Policy,
    ReleaseIfBehind,
    View,
    WholeTopic,
    Wishes,
)

# Policies without engines: holders as a table, time in steps, and the rules by which an engine asks a policy.


STEP = 50.0


@dataclass
class Player:
    """One member."""

    client_id: str
    policy: Policy
    topics: frozenset[str]
    let_go: dict[Key, float] = field(default_factory=dict)
    next_ask: dict[str, float] = field(default_factory=dict)


class Board:
    """The whole group: what a member sees, how often it may claim a held partition (one per topic and HI), that it
    avoids what it released for 2 · HI unless that was its surplus, and that claims are forgotten after 2 · HI or when
    their client releases something, as in placement.py and peers.py. Everything else is instant.
    """

    def __init__(self, keys: Iterable[Key], seed: int = 0) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.holder: dict[Key, str | None] = dict.fromkeys(sorted(keys))
        self.free_since: dict[Key, float] = dict.fromkeys(self.holder, 0.0)
        self.players: dict[str, Player] = {}
        self.asked: dict[Key, float] = {}
        self.waiting: dict[tuple[str, str], float] = {}
        #: Number of records that an engine would write: claims (granted or not) and releases.
        self.claims = 0
        self.releases = 0

    def join(self, client_id: str, policy: Policy | None = None, topics: Iterable[str] | None = None) -> None:
        wanted = frozenset(topics) if topics is not None else frozenset(topic for topic, _ in self.holder)
        self.players[client_id] = Player(client_id, policy or Balanced(), wanted)

    def leave(self, client_id: str) -> None:
        """Close: everything is released."""
        del self.players[client_id]
        for key in self.held(client_id):
            self._free(key)

    def die(self, client_id: str) -> None:
        """Crash: its leases become free after 2 · HI."""
        del self.players[client_id]
        for key in self.held(client_id):
            self.free_since[key] = self.now + 2 * HI

    def held(self, client_id: str) -> list[Key]:
        return [key for key, holder in self.holder.items() if holder == client_id]

    def counts(self) -> dict[str, int]:
        return {client: len(self.held(client)) for client in sorted(self.players)}

    def unowned(self) -> list[Key]:
        return [key for key, holder in self.holder.items() if holder not in self.players]

    def _free(self, key: Key) -> None:
        self.waiting = {wish: at for wish, at in self.waiting.items() if wish[0] != self.holder[key]}
        self.holder[key] = None
        self.free_since[key] = self.now
        self.releases += 1

    def is_open(self, key: Key) -> bool:
        holder = self.holder[key]
        return holder is None or (holder not in self.players and self.now >= self.free_since[key])

    def view(self, player: Player) -> View:
        partitions = {}
        for key, holder in self.holder.items():
            if key[0] in player.topics:
                free = self.is_open(key)
                partitions[key] = PartitionView(None if free else holder, self.free_since[key] if free else None)
        horizon = self.now - 2 * HI
        waiting: dict[str, frozenset[str]] = {}
        for (client, topic), at in self.waiting.items():
            if at >= horizon and topic in player.topics:
                waiting[client] = waiting.get(client, frozenset()) | {topic}
        asking = waiting.pop(player.client_id, None) is not None
        return View(
            client_id=player.client_id,
            heartbeat_interval_ms=int(HI),
            partitions=partitions,
            waiting=waiting,
            asking=asking,
            left_alone=frozenset(key for key, until in player.let_go.items() if until > self.now),
            asked_for=tuple(key for key, at in self.asked.items() if at >= horizon),
        )

    def turn(self, client_id: str) -> None:
        """One member decides and acts."""
        player = self.players[client_id]
        own = tuple(key for key in self.held(client_id) if key[0] in player.topics)
        view = self.view(player)
        wishes = player.policy.wishes(view, own, self.now)
        for key in wishes.release:
            assert key in own
            self._free(key)
            player.next_ask.clear()
            if key not in wishes.surplus:
                player.let_go[key] = self.now + 2 * HI
        claims = [key for key in wishes.claim if player.let_go.get(key, 0.0) <= self.now]
        for key in wishes.ask:
            if key not in own and player.let_go.get(key, 0.0) <= self.now >= player.next_ask.get(key[0], 0.0):
                player.next_ask[key[0]] = self.now + HI
                claims.append(key)
        for key in claims:
            assert key in view.partitions
            self.claims += 1
            if self.is_open(key):
                self.holder[key] = client_id
                self.asked.pop(key, None)
            elif self.holder[key] != client_id:
                self.asked.pop(key, None)
                self.asked[key] = self.now
                self.waiting[client_id, key[0]] = self.now

    def run(self, intervals: float) -> None:
        until = self.now + intervals * HI
        while self.now < until:
            self.now += STEP
            for client_id in self.rng.sample(sorted(self.players), len(self.players)):
                self.turn(client_id)

    def is_even(self) -> bool:
        low, high = divmod(len(self.holder), len(self.players))
        return not self.unowned() and all(low <= count <= low + bool(high) for count in self.counts().values())

    def time_until_even(self, limit: float) -> float:
        """HI until every member has its share; fails after limit."""
        began = self.now
        while not self.is_even():
            assert self.now - began <= limit * HI, f"not even within {limit} HI: {self.counts()}, {self.unowned()}"
            self.run(STEP / HI)
        return (self.now - began) / HI


Key = tuple[str, int]
HI = 1_000


def keys(*counts: int) -> list[Key]:
    """Partitions of topics t0, t1 … with these numbers of partitions."""
    return [(f"t{topic}", p) for topic, count in enumerate(counts) for p in range(count)]


def view_of(
    holders: dict[Key, str | None], *, me: str = "a", waiting: tuple[str, ...] = (), asked_for: tuple[Key, ...] = ()
) -> tuple[View, tuple[Key, ...]]:
    """A view, with free partitions free since 0, and the member's own part of it."""
    partitions = {k: PartitionView(holder, 0.0 if holder is None else None) for k, holder in sorted(holders.items())}
    own = tuple(k for k, holder in sorted(holders.items()) if holder == me)
    topics = frozenset(topic for topic, _ in holders)
    return View(me, HI, partitions, dict.fromkeys(waiting, topics), asked_for), own


def held_by(client_id: str, *counts: int) -> dict[Key, str | None]:
    return dict.fromkeys(keys(*counts), client_id)


# -- Greedy, MaxClaims --------------------------------------------------------------------------------------------


def test_greedy_claims_all_that_is_free_and_never_releases() -> None:
    view, own = view_of({("t", 0): "a", ("t", 1): None, ("t", 2): "b", ("t", 3): None}, waiting=("c",))
    wishes = Greedy().wishes(view, own, 0.0)
    assert sorted(wishes.claim) == [("t", 1), ("t", 3)]
    assert (wishes.release, wishes.ask) == ((), ())


def test_newcomers_reach_for_different_partitions_first() -> None:
    """So that few claims collide: each client has its own fixed order."""
    orders = []
    for me in ("a", "b", "c", "d"):
        view, own = view_of(dict.fromkeys(keys(8)), me=me)
        orders.append(Greedy().wishes(view, own, 0.0).claim)
        assert Greedy().wishes(view, own, 0.0).claim == orders[-1]
    assert len({order[0] for order in orders}) > 1


def test_max_claims_is_a_limit_on_what_is_held_not_on_one_round() -> None:
    view, own = view_of({**held_by("a", 2), ("t0", 2): None, ("t0", 3): None, ("t0", 4): None})
    assert len(MaxClaims(4).wishes(view, own, 0.0).claim) == 2
    assert MaxClaims(2).wishes(view, own, 0.0).claim == ()


def test_max_claims_counts_what_is_being_released() -> None:
    """It is held until messages in flight are done: a claim in its place would exceed the limit meanwhile."""
    view, own = view_of({**held_by("a", 3), ("t0", 3): None, ("t0", 4): None})
    leaving = replace(view, letting_go=frozenset({own[0]}))
    assert MaxClaims(3).wishes(leaving, own[1:], 0.0).claim == ()
    assert len(MaxClaims(4).wishes(leaving, own[1:], 0.0).claim) == 1
    swap = Wishes(claim=(("t0", 3),), release=own[:1])
    assert MaxClaims(3).refine(swap, view, own, 0.0) == replace(swap, claim=()), "first the one, then the other"
    assert MaxClaims(4).refine(swap, view, own, 0.0) == swap


def test_max_claims_does_not_spend_its_room_on_what_is_left_alone() -> None:
    view, own = view_of(dict.fromkeys(keys(4)))
    first, second, *_ = Greedy().wishes(view, own, 0.0).claim
    assert MaxClaims(1).wishes(replace(view, left_alone=frozenset({first})), own, 0.0).claim == (second,)


def test_max_claims_releases_what_is_too_much() -> None:
    view, own = view_of(held_by("a", 5))
    wishes = (Greedy() & MaxClaims(3)).wishes(view, own, 0.0)
    assert len(wishes.release) == 2
    assert wishes.claim == ()


def test_max_claims_at_its_limit_does_not_ask() -> None:
    """A claim that it could not use would move partitions for nothing."""
    view, own = view_of({**held_by("b", 6), ("t0", 0): "a"})
    assert (Balanced()).wishes(view, own, 0.0).ask
    assert (Balanced() & MaxClaims(1)).wishes(view, own, 0.0).ask == ()


def test_max_claims_leaves_room_for_what_it_claims_before_it_asks() -> None:
    """A claim on a held partition may be granted, too: with one for the last place it would exceed the limit."""
    view, own = view_of({**held_by("b", 6), ("t0", 0): "a", ("t0", 6): None, ("t0", 7): None})
    asking = Wishes(claim=(("t0", 6),), ask=(("t0", 1),))
    assert MaxClaims(2).refine(asking, view, own, 0.0) == Wishes(claim=(("t0", 6),))
    assert MaxClaims(3).refine(asking, view, own, 0.0) == asking


def test_max_claims_refuses_a_limit_that_can_hold_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MaxClaims(0)


# -- Balanced: examples -------------------------------------------------------------------------------------------


def test_balanced_alone_claims_everything() -> None:
    view, own = view_of(dict.fromkeys(keys(5)))
    assert sorted(Balanced().wishes(view, own, 0.0).claim) == keys(5)


def test_balanced_below_its_share_asks_the_richest() -> None:
    view, own = view_of({**{("t", p): "b" for p in range(5)}, **{("u", p): "c" for p in range(2)}})
    wishes = Balanced().wishes(view, own, 0.0)
    assert wishes.claim == ()
    assert {key[0] for key in wishes.ask} == {"t"}


def test_balanced_claims_what_is_free_before_it_asks() -> None:
    view, own = view_of({**held_by("b", 4), ("t0", 0): None, ("t0", 1): None})
    wishes = Balanced().wishes(view, own, 0.0)
    assert len(wishes.claim) == 2
    assert wishes.ask == ()


def test_balanced_releases_as_many_as_are_missing_and_claimed_ones_first() -> None:
    view, own = view_of(held_by("a", 7), waiting=("b",), asked_for=(("t0", 3),))
    release = Balanced().wishes(view, own, 0.0).release
    assert len(release) == 3
    assert release[0] == ("t0", 3)


def test_balanced_never_drops_below_its_share() -> None:
    view, own = view_of({**held_by("b", 6), ("t0", 0): "a", ("t0", 1): "a", ("t0", 2): "a"}, waiting=("c", "d"))
    assert len(Balanced().wishes(view, own, 0.0).release) == 1  # of 6 among 4: the largest holder keeps 2


def test_balanced_releases_nothing_while_enough_is_free() -> None:
    """Of 5 for two, the newcomer finds 2 free; of 6, one more must be released."""
    view, own = view_of({**held_by("a", 3), ("t0", 8): None, ("t0", 9): None}, waiting=("b",))
    assert Balanced().wishes(view, own, HI).release == ()
    view, own = view_of({**held_by("a", 4), ("t0", 8): None, ("t0", 9): None}, waiting=("b",))
    assert len(Balanced().wishes(view, own, HI).release) == 1


def test_balanced_releases_only_what_waiting_members_have_claimed() -> None:
    """They may not subscribe to the rest, which would be idle and come back, again and again."""
    view, own = view_of({**dict.fromkeys(keys(3, 3)[3:], "a"), **dict.fromkeys(keys(3), "c")}, waiting=("b",))
    view = replace(view, waiting={"b": frozenset({"t0"})})
    assert Balanced().wishes(view, own, 0.0).release == ()
    giver = replace(view, client_id="c")
    assert len(Balanced().wishes(giver, tuple(keys(3)), 0.0).release) == 1


def test_balanced_takes_what_lies_idle_although_it_has_its_share() -> None:
    """The member entitled to it may be unable to take it (a limit, another subscription, dead)."""
    view, own = view_of({("t", 0): "a", ("t", 1): "a", ("t", 2): None, ("t", 3): "b"})
    assert Balanced().wishes(view, own, HI).claim == ()
    assert Balanced().wishes(view, own, HI + 1).claim == (("t", 2),)


def test_balanced_keeps_what_it_took_although_another_claimed_second() -> None:
    """The second claimant lacks nothing but seems to wait (seeds 80 and 382 of stories with two topics)."""
    view, own = view_of({("t", 0): "a", ("t", 1): "a", ("t", 2): None, ("t", 3): "b"})
    wishes = Balanced().wishes(view, own, HI + 1)
    assert wishes.idle == {("t", 2)} == set(wishes.claim)
    view, own = view_of(held_by("a", 4), waiting=("b",))
    assert len(Balanced().wishes(view, own, 0.0).release) == 2
    kept = replace(view, taken_up=frozenset(own[:1]))
    assert len(Balanced().wishes(kept, own, 0.0).release) == 1
    assert own[0] not in Balanced().wishes(kept, own, 0.0).release
    assert Balanced().wishes(replace(view, taken_up=frozenset(own[:2])), own, 0.0).release == ()


def test_more_members_than_partitions_those_without_wait_quietly() -> None:
    """Two hold one each; a third does not claim until one is gone."""
    view, own = view_of({("t", 0): "b", ("t", 1): "c"})
    assert Balanced().wishes(view, own, 0.0) == Wishes()
    view, own = view_of({("t", 0): "b", ("t", 1): None})
    assert Balanced().wishes(view, own, 0.0).claim == (("t", 1),)


def claims_of(holders: dict[Key, str | None], *members: str, asked: tuple[str, ...] = ()) -> dict[str, tuple[Key, ...]]:
    """Each member's claims, if all know of each other."""
    found = {}
    for me in members:
        view, own = view_of(holders, me=me, waiting=tuple(client for client in asked if client != me))
        found[me] = Balanced().wishes(replace(view, asking=me in asked), own, 0.0).claim
    return found


def test_balanced_deals_out_what_is_free_so_that_no_two_claims_collide() -> None:
    holders: dict[Key, str | None] = dict.fromkeys(keys(31))
    dealt = claims_of(holders, "a", "b", "c", asked=("a", "b", "c"))
    assert sorted(key for part in dealt.values() for key in part) == keys(31), "all of it, and nothing twice"
    assert [len(part) for part in dealt.values()] == [11, 10, 10]


def test_balanced_what_was_claimed_meanwhile_changes_no_other_share() -> None:
    """The log shows some claims before others: the rest is assigned as before."""
    holders: dict[Key, str | None] = dict.fromkeys(keys(30))
    before = claims_of(holders, "a", "b", "c", asked=("a", "b", "c"))
    holders.update(dict.fromkeys(before["a"][:4], "a"))
    holders.update(dict.fromkeys(before["c"][-5:], "c"))
    after = claims_of(holders, "a", "b", "c", asked=("a", "b", "c"))
    assert set(after["b"]) == set(before["b"])
    assert set(after["a"]) == set(before["a"][4:])
    assert set(after["c"]) == set(before["c"][:-5])


def test_balanced_serves_first_members_that_claimed() -> None:
    """A member below its share may not want more (a limit, another subscription); one that claims does."""
    holders: dict[Key, str | None] = {**held_by("big", 4), ("t1", 0): "a", **dict.fromkeys(keys(0, 4)[1:])}
    dealt = claims_of(holders, "a", "b", asked=("b",))
    assert (len(dealt["a"]), len(dealt["b"])) == (1, 2)
    dealt = claims_of(holders, "a", "b", asked=("a", "b"))
    assert (len(dealt["a"]), len(dealt["b"])) == (2, 1)


def test_balanced_releases_nothing_for_claims_that_may_be_refused() -> None:
    """Of 10 for two, we hold 5 and have claimed 3 more: if they are rejected, we have no more than our share."""
    view, own = view_of(held_by("a", 10), waiting=("b",))
    view = replace(view, pending=frozenset(keys(10)[5:]))
    assert Balanced().wishes(view, own, 0.0).release == ()
    view = replace(view, pending=frozenset(keys(10)[7:]))
    release = Balanced().wishes(view, own, 0.0).release
    assert len(release) == 2
    assert not set(release) & view.pending


def test_balanced_marks_what_it_releases_as_surplus() -> None:
    view, own = view_of(held_by("a", 6), waiting=("b",))
    wishes = Balanced().wishes(view, own, 0.0)
    assert wishes.surplus == set(wishes.release)
    assert len(wishes.surplus) == 3


def test_balanced_asks_for_one_of_each_topic_and_no_more_than_it_lacks() -> None:
    """Claims name the topics; holders compute how many are missing."""
    view, own = view_of({**dict.fromkeys(keys(3, 3, 3), "b"), ("t3", 0): "c"})
    asked = Balanced().wishes(view, own, 0.0).ask
    assert sorted(topic for topic, _ in asked) == ["t0", "t1", "t2"]
    view, own = view_of({**dict.fromkeys(keys(3, 3, 1), "b"), **{("u", p): "a" for p in range(2)}})
    assert len(Balanced().wishes(view, own, 0.0).ask) == 2
    view = replace(view, left_alone=frozenset([("t0", 0), ("t0", 1), ("t0", 2), ("t1", 0)]))
    assert ("t0", 0) not in Balanced().wishes(view, own, 0.0).ask
    assert ("t1", 1) in Balanced().wishes(view, own, 0.0).ask


def test_balanced_what_lies_idle_is_up_to_one_member_at_first() -> None:
    """Five members that have their share don't all claim it at the same moment."""
    holders: dict[Key, str | None] = {(f"t{n}", p): f"c{n}" for n in range(5) for p in range(4)}
    holders.update({("z", p): None for p in range(4)})
    claims: Counter[Key] = Counter()
    late: Counter[Key] = Counter()
    for n in range(5):
        view, own = view_of(holders, me=f"c{n}", waiting=("dead",))
        assert Balanced().wishes(view, own, HI).claim == ()
        claims.update(Balanced().wishes(view, own, HI + 1).claim)
        late.update(Balanced().wishes(view, own, 1.5 * HI + 1).claim)
    assert claims == {("z", p): 1 for p in range(4)}
    assert late == {("z", p): 5 for p in range(4)}


# -- ReleaseIfBehind ----------------------------------------------------------------------------------------------


def behind(*cycles: Cycle, policy: Policy | None = None) -> tuple[Key, ...]:
    view = View("a", HI, {("t", 0): PartitionView("a", None, cycles)})
    return (policy or ReleaseIfBehind(max_lag=100, cycles=3)).wishes(view, (("t", 0),), 0.0).release


def test_release_if_behind_after_so_many_unhealthy_cycles_in_a_row() -> None:
    slow, fine = Cycle(lag=500, speed=10.0, growth=20.0), Cycle(lag=500, speed=20.0, growth=10.0)
    assert behind(slow, slow) == ()
    assert behind(slow, slow, slow) == (("t", 0),)
    assert behind(slow, slow, fine) == ()
    assert behind(slow, fine, slow, slow) == ()
    assert behind(fine, slow, slow, slow) == (("t", 0),)


def test_equal_speeds_are_healthy() -> None:
    """B18: a lag that does not grow does not count as behind, however large."""
    assert behind(*[Cycle(lag=10**6, speed=50.0, growth=50.0)] * 3) == ()


def test_a_small_lag_is_healthy_unless_it_will_be_large_within_two_cycles() -> None:
    assert behind(*[Cycle(lag=50, speed=10.0, growth=20.0)] * 3) == ()  # 50 + 2 · 10 = 70
    assert behind(*[Cycle(lag=50, speed=10.0, growth=40.0)] * 3) == (("t", 0),)  # 50 + 2 · 30 = 110


def test_speeds_are_per_second_whatever_the_interval() -> None:
    """B18: two cycles of 10 s at 10 messages a second make 200 messages."""
    view = View("a", 10_000, {("t", 0): PartitionView("a", None, (Cycle(0, 10.0, 20.0),) * 3)})
    assert ReleaseIfBehind(max_lag=199, cycles=3).wishes(view, (("t", 0),), 0.0).release
    assert not ReleaseIfBehind(max_lag=200, cycles=3).wishes(view, (("t", 0),), 0.0).release


def test_standing_still_counts() -> None:
    """B18: a speed of 0 counts as a speed, and offset 0 as an offset."""
    assert behind(*[Cycle(lag=200, speed=0.0, growth=1.0)] * 3) == (("t", 0),)


# -- WholeTopic ---------------------------------------------------------------------------------------------------


def test_whole_topic_claims_the_key_first_and_then_the_rest() -> None:
    holders: dict[Key, str | None] = dict.fromkeys(keys(3))
    view, own = view_of(holders)
    assert WholeTopic().wishes(view, own, 0.0).claim == (("t0", 0),)
    view, own = view_of({**holders, ("t0", 0): "a"})
    assert sorted(WholeTopic().wishes(view, own, 0.0).claim) == [("t0", 1), ("t0", 2)]


def test_whole_topic_without_the_key_lets_the_rest_go() -> None:
    view, own = view_of({("t", 0): "b", ("t", 1): "a", ("t", 2): "a"})
    assert WholeTopic().wishes(view, own, 0.0).release == (("t", 1), ("t", 2))


def test_balanced_whole_topics_are_shared_out_by_topic() -> None:
    """Three topics of 8, 1 and 1 partitions and two members: the holder of the large one is not above its share."""
    holders: dict[Key, str | None] = {**dict.fromkeys(keys(8), "a"), ("t1", 0): "b", ("t2", 0): "b"}
    policy = Balanced() & WholeTopic()
    for me, other in (("a", "b"), ("b", "a")):
        view, own = view_of(holders, me=me, waiting=(other,))
        assert policy.wishes(view, own, 0.0).release == ()


# -- Balanced on the board ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data())
def test_balanced_reaches_even_shares_from_any_start_and_then_rests(data: st.DataObject) -> None:
    partitions, members = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 9))
    board = Board(keys(partitions), data.draw(st.integers(0, 1000)))
    for number in range(members):
        board.join(f"c{number}")
    for key in board.holder:
        board.holder[key] = data.draw(st.sampled_from([None, *board.players, "dead"]))
        if board.holder[key] == "dead":
            board.free_since[key] = data.draw(st.floats(0, 2 * HI))
    board.time_until_even(limit=5)
    board.run(3)
    records = board.claims + board.releases
    board.run(10)
    assert board.is_even()
    assert board.claims + board.releases == records, "members that have their share leave each other in peace"


@settings(max_examples=30)
@given(st.data())
def test_balanced_moves_no_more_than_needed_among_those_it_knows(data: st.DataObject) -> None:
    """All members hold something, so all count: exactly what is above a share moves."""
    members = data.draw(st.integers(1, 9))
    counts = data.draw(st.lists(st.integers(1, 8), min_size=members, max_size=members))
    board = Board(keys(sum(counts)), data.draw(st.integers(0, 1000)))
    holders = [f"c{number}" for number, count in enumerate(counts) for _ in range(count)]
    for key, holder in zip(board.holder, holders, strict=True):
        board.holder[key] = holder
    for number in range(members):
        board.join(f"c{number}")
    board.time_until_even(limit=5)
    board.run(3)
    assert board.releases == needed(counts)


def needed(counts: list[int]) -> int:
    base, larger = divmod(sum(counts), len(counts))
    shares = [base + 1] * larger + [base] * (len(counts) - larger)
    return sum(max(0, held - share) for held, share in zip(sorted(counts, reverse=True), shares, strict=True))


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 1000))
def test_a_newcomer_moves_exactly_its_share(partitions: int, members: int, seed: int) -> None:
    board = Board(keys(partitions), seed)
    for number in range(members):
        board.join(f"c{number}")
    board.time_until_even(limit=5)
    board.run(5)
    before = board.releases
    board.join("newcomer")
    board.time_until_even(limit=5)
    board.run(5)
    assert board.releases - before == partitions // (members + 1)


@settings(max_examples=25)
@given(st.data())
def test_joins_leaves_and_deaths_at_any_time_end_in_even_shares(data: st.DataObject) -> None:
    board = Board(keys(data.draw(st.integers(1, 20))), data.draw(st.integers(0, 1000)))
    board.join("stays")
    for number in range(data.draw(st.integers(0, 12))):
        what = data.draw(st.sampled_from(["join", "join", "leave", "die"]))
        others = [client for client in board.players if client != "stays"]
        if what == "join" or not others:
            board.join(f"c{number}")
        elif what == "leave":
            board.leave(data.draw(st.sampled_from(others)))
        else:
            board.die(data.draw(st.sampled_from(others)))
        board.run(data.draw(st.sampled_from([0, 0.05, 0.3, 1, 2.5])))
    board.time_until_even(limit=8)
    board.run(3)
    records = board.claims + board.releases
    board.run(10)
    assert board.is_even()
    assert board.claims + board.releases == records


def test_a_dead_client_that_asked_keeps_nothing_idle() -> None:
    """It is counted until its claims expire; leases released for it are claimed back."""
    board = Board(keys(6))
    board.join("a")
    board.run(1)
    board.join("b")
    board.turn("b")
    board.die("b")
    board.run(0.2)
    assert board.unowned(), "let go for b"
    board.run(3)
    assert board.counts() == {"a": 6}


def test_what_another_subscription_can_not_take_goes_to_a_member_below_its_share() -> None:
    """b releases something for claiming members. a, which can't take it, was to get it; b took it back, for ever."""
    board = Board(keys(3, 1, 1, 2), 13)
    board.join("b")
    board.join("a", Balanced(), ["t0"])
    board.join("greedy", Greedy(), ["t0"])
    board.join("c")
    for key in board.holder:
        board.holder[key] = "greedy" if key[0] == "t0" else "b"
    board.run(10)
    assert board.counts() == {"a": 0, "b": 2, "c": 2, "greedy": 3}
    releases = board.releases
    for _ in range(20):
        board.run(0.5)
        assert not board.unowned()
    assert board.releases == releases, "a livelock"


# -- mixtures -----------------------------------------------------------------------------------------------------

ANY = [Balanced(), Greedy(), MaxClaims(3), Balanced() & MaxClaims(2), ReleaseIfBehind(), Balanced() & ReleaseIfBehind()]


@settings(max_examples=30)
@given(st.data())
def test_mixtures_and_different_subscriptions_leave_nothing_unowned(data: st.DataObject) -> None:
    """As long as a member without a limit subscribes to all."""
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    board = Board(keys(*counts), data.draw(st.integers(0, 1000)))
    topics = [f"t{number}" for number in range(len(counts))]
    board.join("all", data.draw(st.sampled_from([Balanced(), Greedy(), ReleaseIfBehind()])))
    for number in range(data.draw(st.integers(0, 6))):
        wanted = data.draw(st.lists(st.sampled_from(topics), min_size=1, unique=True))
        board.join(f"c{number}", data.draw(st.sampled_from(ANY)), wanted)
        board.run(data.draw(st.sampled_from([0, 0.1, 1, 3])))
    others = [client for client in board.players if client != "all"]
    for client in data.draw(st.lists(st.sampled_from(others), unique=True, max_size=3)) if others else []:
        (board.die if data.draw(st.booleans()) else board.leave)(client)
        board.run(data.draw(st.sampled_from([0, 0.3, 2])))
    board.run(30)
    releases = board.releases
    for _ in range(20):
        board.run(0.5)
        assert board.unowned() == []
    assert board.releases == releases, "a livelock"


@settings(max_examples=30)
@given(st.data())
def test_whole_topics_stay_whole_and_owned(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    board = Board(keys(*counts), data.draw(st.integers(0, 1000)))
    policy: Policy = data.draw(st.sampled_from([WholeTopic(), Balanced() & WholeTopic()]))
    board.join("stays", policy)
    for number in range(data.draw(st.integers(0, 4))):
        board.join(f"c{number}", policy)
        board.run(data.draw(st.sampled_from([0, 0.1, 2])))
    if len(board.players) > 1 and data.draw(st.booleans()):
        board.die("c0")
    board.run(20)
    releases = board.releases
    for _ in range(10):
        board.run(0.5)
        assert board.unowned() == []
        for topic in range(len(counts)):
            assert len({board.holder[key] for key in board.holder if key[0] == f"t{topic}"}) == 1
    assert board.releases == releases, "a livelock"
    if policy != WholeTopic():
        topics = [sum(1 for key in board.held(client) if key[1] == 0) for client in board.players]
        assert max(topics) - min(topics) <= 1


def test_what_one_member_can_not_keep_up_with_goes_to_another() -> None:
    """Others take idle partitions after HI; the member that gave them up avoids them for longer than that."""

    class BehindOnOne(ReleaseIfBehind):
        def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
            return Wishes(wishes.claim, tuple(key for key in own if key == ("t0", 0)), wishes.ask)

    board = Board(keys(4))
    board.join("a")
    board.run(0.1)
    board.join("b")
    board.run(3)
    slow, other = (board.players[c] for c in (("a", "b") if ("t0", 0) in board.held("a") else ("b", "a")))
    slow.policy = Balanced() & BehindOnOne()
    board.run(1.5)
    assert board.holder["t0", 0] == other.client_id
    board.run(20)
    assert board.holder["t0", 0] == other.client_id
    assert board.is_even(), "it got another one for it"


def test_policies_combine_from_left_to_right() -> None:
    view, own = view_of(dict.fromkeys(keys(4, 4)))
    assert len((Balanced() & MaxClaims(3)).wishes(view, own, 0.0).claim) == 3
    assert len((Balanced() & MaxClaims(3) & MaxClaims(2)).wishes(view, own, 0.0).claim) == 2
    assert len((Balanced() & (MaxClaims(3) & MaxClaims(2))).wishes(view, own, 0.0).claim) == 2
    both = (Balanced() & WholeTopic() & MaxClaims(1)).wishes(view, own, 0.0)
    assert len(both.claim) == 1
    assert both.claim[0][1] == 0


def test_a_policy_of_one_s_own() -> None:
    class Evens(Policy):
        def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
            return Wishes(claim=tuple(k for k, p in view.partitions.items() if p.holder is None and k[1] % 2 == 0))

    board = Board(keys(5))
    board.join("evens", Evens())
    board.join("rest")
    board.run(5)
    assert board.unowned() == []
    assert set(board.held("evens")) <= {("t0", 0), ("t0", 2), ("t0", 4)}
