"""Values of any shape: the real world and the oracle answer alike, and neither ever raises (E2, E3, E6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import World, decode
from tests.rationalizer.oracle import NotMsgpackError, OracleWorld, judge, parse, shortest
from tests.rationalizer.oracle.compare import same_after, same_counts, same_outcome, same_state
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, FORBIDDEN, Pairs, Raw, nested, spell
from tests.rationalizer.strategies import LARGEST, TEST_TIMEOUT_S, Entry, by_draw, effort, record

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

HOLDER = ("a", "1")
CLAIM = record(2, HOLDER, "g", "t", 0, 1000)
# One good record of each type, for the holder of ("g", "t", 0) at epoch 0.
GOOD: dict[str, list[Any]] = {
    "Heartbeat": [1, 1, "1", "a", "g", "t", 0, 0, 5],
    "Heartbeat, takeover": [1, 1, "2", "a", "g", "t", 0, None, None],
    "ClaimingPartition": [1, 2, "1", "a", "g", "t", 1, 100],
    "ReleasingPartition": [1, 3, "1", "a", "g", "t", 0, 0, -1],
    "ClaimingMessages": [1, 4, "1", "a", "g", "t", 0, 0, 7],
    "ReleaseGroup": [1, 5, "1", "admin", "g2", 5000],
    "HeartbeatBatch": [1, 6, "1", "a", "g", [["t", 0, 0, 3], ["t", 1, 9, None]]],
    "CommitRanges": [1, 7, "1", "a", "g", "t", 0, 0, [[5, 9], [7, 12], [LARGEST, LARGEST]]],
    "ForgetGroup": [1, 8, "1", "a", "g3"],
    "Tick": [1, 32, "1", "a", "g"],
    "Upgrade": [1, 33, "1", "a", "g", 1],
    "unknown type": [1, 99, "1", "a", "g", {"k": [[1]]}],
    "newer version": [2, 1, "1", "a", "g", "t", 0, 0, 5, {"k": 1}],
}


def pair_of_worlds() -> tuple[World, OracleWorld]:
    """Both worlds, the only CP, where a1 holds ("g", "t", 0) at epoch 0."""
    real, wanted = World(0, 1), OracleWorld(0, 1)
    same_outcome(real.apply(0, 1000, CLAIM), wanted.apply(0, 1000, CLAIM))
    return real, wanted


def same_on(values: list[bytes | None]) -> OracleWorld:
    """Both worlds on these values, one after another, behind the claim; then everything is compared.

    Gives the oracle's world, a fresh one after an Upgrade that stopped the first.
    """
    real, wanted = pair_of_worlds()
    for value in values:
        entry = (wanted.next_offset, wanted.log_time + 1, value)
        expected = wanted.apply(*entry)
        same_outcome(real.apply(*entry), expected)
        if expected.stopped:  # by an Upgrade: nothing more can happen in these two
            same_state(real, wanted)
            real, wanted = pair_of_worlds()
    same_state(real, wanted)
    same_counts(real, wanted)
    return wanted


def paths(tree: object) -> Iterator[tuple[int, ...]]:
    """The way to every node of a tree of arrays; the tree itself is the empty path."""
    yield ()
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from ((index, *rest) for rest in paths(item))


def replaced(tree: Any, path: tuple[int, ...], item: Any) -> Any:
    """A copy of `tree` with `item` at `path`."""
    if not path:
        return item
    copy = list(tree)
    copy[path[0]] = replaced(copy[path[0]], path[1:], item)
    return copy


@pytest.mark.parametrize("name", GOOD)
def test_every_odd_value_in_every_place(name: str) -> None:
    tree = GOOD[name]
    values = [spell(replaced(tree, path, odd)) for path in paths(tree) for odd in EVERYTHING_ODD]
    for start in range(0, len(values), 100):  # short logs keep the oracle quick and the failure near
        same_on([*values[start : start + 100], spell(tree)])


@pytest.mark.parametrize("name", GOOD)
def test_fields_missing_and_added(name: str) -> None:
    tree = GOOD[name]
    cut = [tree[:length] for length in range(len(tree))]
    longer = [[*tree, odd] for odd in EVERYTHING_ODD]
    doubled = [tree[:index] + tree[index : index + 1] * 2 + tree[index + 1 :] for index in range(len(tree))]
    gone = [tree[:index] + tree[index + 1 :] for index in range(len(tree))]
    nested_parts = [
        replaced(tree, path[:-1], part)
        for path in paths(tree)
        if len(path) > 2
        for whole in [_at(tree, path[:-1])]
        for part in ([*whole, None], whole[:-1])
    ]
    for trees in (cut, longer, doubled, gone, nested_parts):
        same_on([spell(one) for one in trees])


def _at(tree: Any, path: tuple[int, ...]) -> Any:
    return _at(tree[path[0]], path[1:]) if path else tree


@pytest.mark.parametrize("name", GOOD)
def test_cut_anywhere_and_extended(name: str) -> None:
    value = spell(GOOD[name])
    same_on([value[:length] for length in range(len(value))])
    same_on([value + tail for tail in (b"\x00", b"\xc0", b"\xc1", value, b"\x90")])


@pytest.mark.parametrize("name", GOOD)
def test_every_single_bit_flipped(name: str) -> None:
    value = spell(GOOD[name])
    flipped = [
        value[:index] + bytes([value[index] ^ 1 << bit]) + value[index + 1 :]
        for index in range(len(value))
        for bit in range(8)
    ]
    for start in range(0, len(flipped), 100):
        same_on([*flipped[start : start + 100], value])


@pytest.mark.parametrize("inner", [None, 1, "x", [], {}], ids=repr)
@pytest.mark.parametrize("as_map", [False, True])
def test_depth_of_nesting(inner: object, as_map: bool) -> None:
    """Eight deep is allowed, the record itself being the first; an unknown type shows which check failed."""
    values = [spell([1, 99, "1", "a", "g", nested(depth, inner, as_map)]) for depth in range(1, 12)]
    wanted = same_on([*values])
    deepest = 7 - isinstance(inner, (list, dict))
    codes = [outcome.code for outcome in wanted.outcomes[1:]]
    assert codes == ["UNKNOWN_TYPE"] * deepest + ["MALFORMED"] * (11 - deepest)


def test_the_longest_value() -> None:
    head = [1, 99, "1", "a", "g"]
    room = 1_048_576 - len(spell([*head, "x" * 65536])) + 65536
    wanted = same_on([spell([*head, "x" * length]) for length in (room - 1, room, room + 1)])
    assert [outcome.code for outcome in wanted.outcomes[1:]] == ["UNKNOWN_TYPE"] * 2 + ["MALFORMED"]


def test_large_batches_and_commits() -> None:
    commit = [1, 7, "1", "a", "g", "t", 0, 0]
    pairs = [[2 * index, 2 * index] for index in range(10_001)]
    batch = [1, 6, "1", "a", "g", [["u", 0, 0, None]] * 150_000]
    wanted = same_on([spell([*commit, pairs]), spell([*commit, pairs[1:]]), spell([*commit, []]), spell(batch)])
    codes = [outcome.code for outcome in wanted.outcomes[1:]]
    assert codes == ["MALFORMED", "OK", "MALFORMED", "PARTIAL"]


def test_level_2_types_mean_nothing_yet() -> None:
    """Types 9–31 and 34 on are noise at level 1, with any fields (E6)."""
    values = [spell([1, kind, "1", "a", "g", *fields]) for kind in range(-40, 300) for fields in ([], ["t", 0])]
    same_on([*values])


@given(name=st.sampled_from(sorted(GOOD)), data=st.data())
@effort(150)
def test_any_forms_mean_the_same(name: str, data: st.DataObject) -> None:
    """E2: the oracle, told the shortest forms, agrees with the real world, told any others."""
    canonical = spell(GOOD[name])
    value = spell(GOOD[name], by_draw(data.draw))
    real, wanted = pair_of_worlds()
    same_outcome(real.apply(1, 1001, value), wanted.apply(1, 1001, canonical))
    same_state(real, wanted)
    assert judge(value, 1, 0, 1) == judge(canonical, 1, 0, 1)
    if wanted.outcomes[-1].type is not None:
        assert decode(value) == decode(canonical)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=6),
    st.sampled_from(EVERYTHING_ODD),
    st.sampled_from(FORBIDDEN),
    st.binary(max_size=4).map(Raw),
)


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(max_size=2), inner)
    return st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.lists(st.tuples(keys, inner), max_size=3).map(lambda pairs: Pairs(tuple(pairs))),
    )


trees = st.recursive(scalars, _deeper, max_leaves=12)
heads = st.tuples(
    st.sampled_from((1, 1, 1, 1, 0, 2, True)),
    st.one_of(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 32, 33, 16, 99)), st.integers(-3, 40)),
    st.sampled_from(("1", "1", "2", "", "\x9f")),
    st.sampled_from(("a", "a", "b")),
    st.sampled_from(("g", "g", "h", "\n")),
)


@given(tree=trees, data=st.data())
@effort(200)
def test_any_tree(tree: object, data: st.DataObject) -> None:
    same_on([spell(tree, by_draw(data.draw)), shortest([1, 32, "1", "a", "g"])])


@given(head=heads, fields=st.lists(trees, max_size=5), data=st.data())
@effort(200)
def test_any_tree_behind_a_good_head(head: tuple[Any, ...], fields: list[Any], data: st.DataObject) -> None:
    same_on([spell([*head, *fields], by_draw(data.draw)), spell([*head[:5], *fields])])


@given(values=st.lists(st.one_of(st.none(), st.binary(max_size=60)), max_size=10))
@effort(200)
def test_any_bytes(values: list[bytes | None]) -> None:
    same_on([*values])


@st.composite
def mangled(draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """A good record with some damage: replaced nodes, flipped bits, pieces cut out, put in or spliced."""
    tree = GOOD[draw(st.sampled_from(sorted(GOOD)))]
    for _ in range(draw(st.integers(0, 2))):
        tree = replaced(tree, draw(st.sampled_from(sorted(paths(tree)))), draw(scalars))
    value = spell(tree, by_draw(draw))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(value)))
        to = min(len(value), at + draw(st.integers(0, 4)))
        piece = draw(st.one_of(st.binary(max_size=4), st.just(value[at : at + 8]), st.just(CLAIM)))
        value = value[:at] + piece + value[to:]
    return value


@given(values=st.lists(mangled(), min_size=1, max_size=8))
@effort(250)
def test_damaged_records(values: list[bytes]) -> None:
    same_on([*values])


@given(values=st.lists(mangled(), min_size=1, max_size=8), stamps=st.lists(st.integers(-(2**63), 2**63 - 1)))
@effort(100)
def test_damaged_records_at_any_time(values: list[bytes], stamps: list[int]) -> None:
    """T1: rejected records move log time as well, and no time stamp is refused."""
    values = [value for value in values if judge(value, 1, 0, 1).type != "Upgrade"]
    log: list[Entry] = [
        (index + 1, stamp, value) for index, (stamp, value) in enumerate(zip(stamps, values, strict=False))
    ]
    same_after(log, *pair_of_worlds())


def test_oracle_parser_agrees_with_itself() -> None:
    """Every forbidden piece is refused by the oracle too, alone and inside; else it would prove nothing."""
    for piece in FORBIDDEN:
        with pytest.raises(NotMsgpackError):
            parse(spell([piece]))
