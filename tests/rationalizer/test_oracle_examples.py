"""The oracle alone: it must agree with the protocol's examples before it may judge.

`examples/` holds the dumps that come with the protocol, their outcomes and their states.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rationalizer import ClaimingPartition, ReleasingPartition, World, encode
from tests.rationalizer.oracle import NotMsgpackError, OracleWorld, SetProgress, parse, progress_from, shortest
from tests.rationalizer.oracle.assigning import Question, TopicPartition, targets_of, whole_partitions
from tests.rationalizer.oracle.compare import same_counts, same_outcome, same_state
from tests.rationalizer.oracle.dump import replay
from tests.rationalizer.oracle.keyed import KeyedProgress, commit_ranges
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.strategies import Entry

EXAMPLES = Path(__file__).parent / "examples"
OF_LEASES = ["digest", "earliest_claim_wins", "ranges_merge"]
OF_GROUPS = [
    "group_death",
    "group_fenced",
    "group_first_join",
    "group_forgotten",
    "group_hand_over",
    "group_late_join",
    "group_restart",
    "group_share_5_on_3",
    "group_wildcard",
]
OF_CHECKPOINTS = [
    "checkpoint_first",
    "checkpoint_hand_over",
    "checkpoint_hold_ends",
    "checkpoint_leave",
    "checkpoint_loss",
    "checkpoint_loss_hold",
    "checkpoint_periodic",
    "checkpoint_positions",
    "checkpoint_rollback",
    "checkpoint_shares",
]
OF_SHARING = [
    "sharing_at_most_once",
    "sharing_batches",
    "sharing_group",
    "sharing_keys",
    "sharing_modes",
    "sharing_parks",
    "sharing_positions",
    "sharing_silence",
]
OF_REDO = [
    "redo_batches",
    "redo_group",
    "redo_keys",
    "redo_range",
    "redo_seen",
    "redo_strategy",
    "redo_strategy_kept",
    "redo_upgrade",
]
NAMES = sorted([*OF_LEASES, *OF_GROUPS, *OF_CHECKPOINTS, *OF_SHARING, *OF_REDO])


def test_all_examples_are_here() -> None:
    assert sorted(path.name.split(".")[0] for path in EXAMPLES.glob("*.dump.jsonl")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_examples_byte_for_byte(name: str) -> None:
    outcomes, state, levels = replay((EXAMPLES / f"{name}.dump.jsonl").read_text().splitlines())
    printed = "".join(json.dumps(outcome) + "\n" for outcome in outcomes)
    assert printed == (EXAMPLES / f"{name}.outcomes.jsonl").read_text()
    assert levels == {}
    wanted = (EXAMPLES / f"{name}.state.json").read_text()
    assert json.dumps(state, sort_keys=True) == json.dumps(json.loads(wanted), sort_keys=True)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("93 01 d1 ff ff cf 00 00 00 00 00 00 00 07", [1, -1, 7]),
        ("91 d9 02 c3 a9", ["é"]),
        ("dc 00 02 c0 c3", [None, True]),
        ("91 82 a1 61 01 a1 61 02", [{"a": 2}]),
        ("91" * 7 + "90", [[[[[[[[]]]]]]]]),
        ("91" * 8 + "90", None),
        ("91" * 7 + "80", [[[[[[[{}]]]]]]]),
        ("91 81 c0 01", None),
        ("91 81 01 01", None),
        ("91 ca 3f 80 00 00", None),
        ("91 c4 00", None),
        ("91 d4 00 00", None),
        ("91 c1", None),
        ("91 a3 ed a0 80", None),
        ("91 a2 c0 af", None),
        ("90 c0", None),
        ("dd ff ff ff ff", None),
        ("a1 61", None),
        ("80", None),
        ("", None),
    ],
)
def test_parser_by_hand(text: str, tree: list[object] | None) -> None:
    value = bytes.fromhex(text)
    if tree is not None:
        assert parse(value) == tree
        return
    with pytest.raises(NotMsgpackError):
        parse(value)


def test_shortest_forms() -> None:
    edges = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1]
    edges += [-1, -32, -33, -128, -129, -(2**15), -(2**15) - 1, -(2**31), -(2**31) - 1, -(2**63)]
    tree = [*edges, "x" * 31, "x" * 32, "x" * 255, "x" * 256, [0] * 15, [0] * 16, {"a": None}, True, False]
    assert parse(shortest(tree)) == tree
    lengths = [1, 1, 2, 2, 3, 3, 5, 5, 9, 9, 9, 1, 1, 2, 2, 3, 3, 5, 5, 9, 9]
    assert [len(shortest(edge)) for edge in edges] == lengths
    assert [len(shortest(item)) for item in tree[len(edges) :]] == [32, 34, 257, 259, 16, 19, 4, 1, 1]


def test_progress_as_in_p3_and_p6() -> None:
    first = progress_from([("raised", 42), ("committed", [(45, 47)]), ("committed", [(43, 44)])])
    assert (first.stable, first.ranges) == (47, ())
    second = progress_from([("committed", [(45, 47), (50, 50)]), ("committed", [(48, 49)])])
    assert (second.stable, second.ranges) == (-1, ((45, 50),))
    third = progress_from(
        [("raised", 40), ("committed", [(43, 45), (48, 49)]), ("committed", [(41, 42), (46, 47), (50, 50)])]
    )
    assert (third.stable, third.ranges) == (50, ())


def test_progress_by_sets_as_in_p8() -> None:
    progress = SetProgress([10, 11], 100)
    progress.raise_range(0, 10, 7)
    progress.commit([(8, 9), (20, 21)])
    assert (progress.stable, progress.ranges) == (-1, [(8, 9), (20, 21)])
    assert (progress.done_through(10), progress.done_through(11)) == (9, -1)
    progress.raise_range(11, 2**63 - 1, 8)
    assert (progress.stable, progress.ranges, progress.done_through(11)) == (9, [(20, 21)], 9)


# The oracle's reading of G17, K1, K2 and of key ranges (P8), alone: the examples, and another naive reading.


CEILING = 40
EDGES = [0, 1, 5, 2**40, 2**62 - 1, 2**62, LARGEST_HASH]


def shown(targets: dict[TopicPartition, list[Any]]) -> dict[str, list[int]]:
    """K3's way to write them: slots in the order of their parts."""
    return {f"{topic}p{number}": [slot for _, _, slot in parts] for (topic, number), parts in targets.items()}


def asked(strategy: str, partitions: int, members: int, shared: bool = True, **more: Any) -> dict[str, list[int]]:
    """One topic "t", all members subscribe, and all opted in by default."""
    everybody = range(1, members + 1)
    fields = {"opted_in": everybody, "shared": ["t"] if shared else (), **more}
    return shown(targets_of(Question(strategy, {"t": everybody}, {"t": partitions}, **fields)))


@pytest.mark.parametrize("strategy", ["roundrobin", "sticky"])
def test_k3_five_on_three(strategy: str) -> None:
    assert asked(strategy, 3, 5) == {"tp0": [1, 4], "tp1": [2, 5], "tp2": [3]}


def test_k3_range() -> None:
    assert asked("range", 3, 5) == {"tp0": [1, 2], "tp1": [3, 4], "tp2": [5]}
    assert asked("range", 2, 5) == {"tp0": [1, 2, 3], "tp1": [4, 5]}


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "sticky"])
def test_k3_not_allowed(strategy: str) -> None:
    assert asked(strategy, 3, 5, shared=False) == {"tp0": [1], "tp1": [2], "tp2": [3]}


def test_k3_some_did_not_opt_in() -> None:
    found = asked("roundrobin", 4, 7, opted_in=[1, 3, 4, 5, 7])
    assert found == {"tp3": [2], "tp0": [1, 5], "tp1": [3, 7], "tp2": [4]}


def test_k3_unequal_subscriptions() -> None:
    subscribers = {"t0": [1, 2, 3], "t1": [2, 3], "t2": [3]}
    counts = {"t0": 1, "t1": 2, "t2": 3}
    by_roundrobin = shown(targets_of(Question("roundrobin", subscribers, counts)))
    assert by_roundrobin == {"t0p0": [1], "t1p0": [2], "t1p1": [3], "t2p0": [3], "t2p1": [3], "t2p2": [3]}
    by_sticky = shown(targets_of(Question("sticky", subscribers, counts)))
    assert by_sticky == {"t0p0": [1], "t1p0": [2], "t1p1": [2], "t2p0": [3], "t2p1": [3], "t2p2": [3]}


def test_k3_sticky_moves_81() -> None:
    first = targets_of(Question("sticky", {"t": range(10)}, {"t": 900}))
    before = {place: slot for place, [(_, _, slot)] in first.items()}
    second = targets_of(Question("sticky", {"t": range(11)}, {"t": 900}, targets=before))
    assert Counter(slot for [(_, _, slot)] in second.values()) == {**dict.fromkeys(range(1, 10), 82), 0: 81, 10: 81}
    assert sum(second[place] != first[place] for place in first) == 81


@pytest.mark.parametrize(
    ("n", "m", "u", "w"),
    [(4, 7, 2, 1), (4, 7, 0, 0), (1, 5, 2, 0), (10, 30, 1, 1), (3, 6, 1, 1), (3, 6, 2, 1), (5, 10, 3, 2), (2, 9, 6, 1)],
)
def test_k1_whole_partitions(n: int, m: int, u: int, w: int) -> None:
    assert whole_partitions(n, m, u) == w


def some_question(source: random.Random, before: dict[TopicPartition, list[Any]]) -> Question:
    slots = sorted(source.sample(range(12), source.randint(1, 9)))
    topics = source.sample(["a", "b", "é", "z"], source.randint(1, 3))
    subscribers = {topic: sorted(source.sample(slots, source.randint(1, len(slots)))) for topic in topics}
    counts = {topic: source.randint(0, 7) for topic in topics}
    whole = {place: parts[0][2] for place, parts in before.items() if len(parts) == 1}
    return Question(
        source.choice(("range", "roundrobin", "sticky", "sticky")),
        subscribers,
        counts,
        opted_in=[slot for slot in slots if source.random() < 0.8],
        shared=[topic for topic in topics if source.random() < 0.7],
        targets=whole,
        owners={place: slot for place, slot in whole.items() if source.random() < 0.8},
        any_targets={place: {slot for _, _, slot in parts} for place, parts in before.items()},
    )


def test_k4_and_what_every_strategy_owes() -> None:
    """Every partition is covered once, by subscribers; sharing members have opted in; sticky leaves no gap of two."""
    source = random.Random(1)
    before: dict[TopicPartition, list[Any]] = {}
    for _ in range(1500):
        question = some_question(source, before)
        found = targets_of(question)
        assert set(found) == {(topic, number) for topic, count in question.counts.items() for number in range(count)}
        for (topic, _), parts in found.items():
            assert [low for low, _, _ in parts] == [0, *(high + 1 for _, high, _ in parts[:-1])]
            assert parts[-1][1] == LARGEST_HASH
            assert {slot for _, _, slot in parts} <= set(question.subscribers[topic])
            assert len(parts) == 1 or {slot for _, _, slot in parts} <= set(question.opted_in)
        if question.strategy == "sticky" and not question.shared:
            held = Counter(parts[0][2] for parts in found.values())
            for (topic, _), parts in found.items():
                assert all(held[parts[0][2]] - held[other] < 2 for other in question.subscribers[topic])
        again = Question(question.strategy, question.subscribers, question.counts, question.opted_in, question.shared)
        if source.random() < 0.7:
            before = found
        if question.strategy != "sticky":
            assert targets_of(again) == found


def test_key_ranges_against_sets_of_offsets() -> None:
    """P2, P8, P10: intervals and pieces here, plain sets there."""
    source = random.Random(2)
    for _ in range(1500):
        samples = [edge for edge in EDGES for edge in (edge, max(0, edge - 1))]
        sets, keyed = SetProgress(samples, CEILING), KeyedProgress()
        for _ in range(source.randint(1, 9)):
            first = source.randrange(CEILING - 1)
            if source.random() < 0.5:
                low, high = sorted(source.choices(EDGES, k=2))
                sets.raise_range(low, high, first)
                keyed = keyed.raised(low, high, first)
            else:
                spans = [(first, min(CEILING - 1, first + source.randrange(6)))]
                sets.commit(spans)
                keyed = keyed.committed(spans)
            assert keyed.stable == sets.stable
            assert list(keyed.ranges) == sets.ranges
            for low, high, offset in keyed.through:
                inside = [sample for sample in sets.samples if low <= sample <= high]
                assert {sets.done_through(sample) for sample in inside} == {offset}
            assert all(one[2] != other[2] for one, other in zip(keyed.through, keyed.through[1:], strict=False))


def test_the_order_of_a_commits_checks() -> None:
    """K8: not allowed, out of order, too old, duplicate, too many."""
    before = KeyedProgress().raised(0, LARGEST_HASH, 10).committed([(20, 29)])
    for ranges, in_order, most, code in (
        ([[30, 30]], True, 1, "OUT_OF_ORDER"),
        ([[20, 21]], True, 0, "OUT_OF_ORDER"),
        ([[3, 4]], True, 0, "INDIVIDUAL_COMMIT_TOO_OLD"),
        ([[11, 19]], True, 1, "OK"),
        ([[3, 4], [21, 22]], False, 0, "DUPLICATE_COMMIT"),
        ([[40, 40]], False, 1, "MAX_INDIVIDUAL_COMMIT_REACHED"),
        ([[30, 30]], False, 0, "OK"),  # more than the maximum, but no more than before
        ([[40, 40]], False, 2, "OK"),
    ):
        assert commit_ranges(before, ranges, True, in_order, most)[0] == code, ranges
        assert commit_ranges(before, ranges, False, in_order, most) == ("INDIVIDUAL_COMMIT_NOT_ALLOWED", before)


# -- Differences between the real world and the oracle that were found once, each at its smallest -----------------


CLAIM = encode(ClaimingPartition("1", "a", "g", "t", 0, 1000))


def all_agree(values: list[bytes]) -> None:
    """apply, apply_many and the oracle, on one log."""
    log: list[Entry] = [(offset, 1000 + offset, value) for offset, value in enumerate(values)]
    one_by_one, at_once, wanted = World(0, 1), World(0, 1), OracleWorld(0, 1)
    for entry in log:
        same_outcome(one_by_one.apply(*entry), wanted.apply(*entry))
    at_once.apply_many(log)
    for world in (one_by_one, at_once):
        same_state(world, wanted)
        same_counts(world, wanted)


def test_nil_is_no_holder() -> None:
    """A heartbeat with nil for both ids is malformed, even if the lease is free (E2, apply_many)."""
    release = encode(ReleasingPartition("1", "a", "g", "t", 0, 0, None))
    all_agree([CLAIM, release, shortest([1, 1, None, None, "g", "t", 0, 0, 5])])


def test_a_lease_without_ranges_is_restored() -> None:
    world = World(0, 1)
    world.apply(0, 1000, CLAIM)
    assert World.restore(world.snapshot(), 1).digest() == world.digest()
