"""Section 7b: the real world and the oracle conclude the same from the same log, record by record.

KAFKA_MARSHAL_THOROUGH=<factor> raises the number of logs.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import World, limits
from tests.rationalizer.group_sides import record_by_record, restored, same_bytes
from tests.rationalizer.oracle import OracleWorld, parse, shortest
from tests.rationalizer.oracle.compare import same_counts, same_outcome, same_state
from tests.rationalizer.oracle.holes import MOST_HOLES
from tests.rationalizer.oracle.shares import MOST_PARTS
from tests.rationalizer.sharers import SharingAuthor, write_sharing_log
from tests.rationalizer.small_limits import small_limits
from tests.rationalizer.strategies import TEST_TIMEOUT_S, by_draw, by_seed, effort, many

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

PLACES = ((0, 1), (0, 1), (1, 2), (5, 8))
LENGTH = 160


def side_by_side(seed: int) -> OracleWorld:
    """Outcomes and states after each record; sometimes the world is a restored snapshot."""
    place, source = PLACES[seed % len(PLACES)], Random(seed)
    author, real = SharingAuthor(by_seed(seed), OracleWorld(*place)), World(*place)
    for _ in range(LENGTH):
        entry = author.entry()
        wanted = author.world.apply(*entry)
        try:
            same_outcome(real.apply(*entry), wanted)
            same_bytes(real, author.world)
        except AssertionError as error:
            value = entry[2]
            shown = None if value is None or wanted.type is None else parse(value)
            error.add_note(f"seed {seed}, offset {entry[0]}, {wanted.type} {wanted.code}: {shown}")
            raise
        if source.random() < 0.1:
            real = restored(real)
    same_state(real, author.world)
    return author.world


@pytest.mark.parametrize("seed", range(many(24)))
def test_after_each_record(seed: int) -> None:
    side_by_side(seed)


@pytest.mark.parametrize("seed", range(1_000_000, 1_000_000 + many(16)))
def test_where_limits_are_met(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch, MAX_KEY_PIECES=7)
    side_by_side(seed)


def test_small_limits_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch, MAX_KEY_PIECES=7)
    met: set[str] = set()
    for seed in range(12):
        for outcome in write_sharing_log(by_seed(seed), 200)[1].outcomes:
            met |= {outcome.code, *(outcome.entries or ())}
    assert {"GROUP_FULL", "MAX_INDIVIDUAL_COMMIT_REACHED"} <= met


@pytest.mark.parametrize("seed", range(2_000_000, 2_000_000 + many(12)))
def test_holes_of_groups(seed: int) -> None:
    record_by_record(seed, LENGTH, takes=False)


@pytest.mark.parametrize("seed", range(3_000_000, 3_000_000 + many(6)))
def test_holes_of_groups_where_limits_are_met(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch, MAX_KEY_PIECES=7)
    record_by_record(seed, LENGTH, takes=False)


@pytest.mark.parametrize("seed", range(4_000_000, 4_000_000 + many(6)))
def test_in_one_go(seed: int) -> None:
    """`apply_many` of the whole log, and of its second half from a snapshot."""
    place = PLACES[seed % len(PLACES)]
    log, wanted = write_sharing_log(by_seed(seed), LENGTH, *place)
    whole, half = World(*place), World(*place)
    whole.apply_many(log)
    half.apply_many(log[: LENGTH // 2])
    half = restored(half)
    half.apply_many(log[LENGTH // 2 :])
    same_state(whole, wanted)
    same_state(half, wanted)
    same_counts(whole, wanted)


@given(data=st.data())
@effort(30)
def test_each_record_of_a_log(data: st.DataObject) -> None:
    """Short logs, which Hypothesis makes shorter where they differ."""
    log, wanted = write_sharing_log(by_draw(data.draw), data.draw(st.integers(5, 40), "length"))
    real, oracle = World(0, 1), OracleWorld(0, 1)
    for entry in log:
        same_outcome(real.apply(*entry), oracle.apply(*entry))
        same_bytes(real, oracle)
    same_state(real, wanted)


def test_the_limits_are_those_of_the_contract() -> None:
    assert limits.MAX_HOLES == MOST_HOLES == 10_000
    assert limits.MAX_KEY_PIECES == MOST_PARTS == 2_000


def test_holes_and_checkpoints_exclude_each_other() -> None:
    """H4, X4: in a log of both, whichever comes first."""
    real, wanted = World(0, 1), OracleWorld(0, 1)
    member = ""
    ids = ["i", "a", "g"]

    def append(kind: int, *fields: object) -> str:
        nonlocal member
        value = shortest([4 if kind != 33 else 1, kind, *ids, *fields])
        expected = wanted.apply(wanted.next_offset, 1_000, value)
        same_outcome(real.apply(expected_offset := wanted.next_offset - 1, 1_000, value), expected)
        same_bytes(real, wanted)
        assert expected_offset == wanted.next_offset - 1
        member = expected.member or member
        return expected.code

    def join() -> str:
        return append(16, "", 0, 30_000, "sticky", False, "", [["t", 1]])

    append(33, 4)
    append(21, {})
    assert append(23, 0, 1000, 1, False) == "OK"
    assert join() == "OK"
    assert append(29, member, 3, 4, "t", 0, [], [], [[5, 9, 1, "R"]]) == "WRONG_MODE"
    assert append(18, member, 3) == "OK"
    newest = wanted.groups["g"].checkpoints
    assert newest is not None
    assert append(27, newest.newest, 2) == "OK"
    assert join() == "OK"
    generation = wanted.groups["g"].generation
    assert append(29, member, generation, 99, "t", 0, [], [], [[5, 9, 1, "R"]]) == "OK"
    assert append(18, member, generation) == "OK"
    assert append(23, 0, 1000, 1, False) == "WRONG_MODE"
    assert append(29, "", 0, 99, "t", 0, [[5, 5]], [], []) == "OK"
    assert append(23, 0, 1000, 1, False) == "OK"
