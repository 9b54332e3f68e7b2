"""A world as its callers see it: levels (E4), counting, and the caller's own mistakes. (The rules: tests/scripts.)"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh64

from kafka_marshal.instance import knows_level, new_instance_id
from rationalizer import (
    Heartbeat,
    SnapshotError,
    Tick,
    Upgrade,
    World,
    encode,
    key_hash,
    levels,
    route_group,
    route_lease,
)
from rationalizer.levels import LEVELS, SUPPORTED_LEVEL, added_above
from rationalizer.marker import count_of, marker, said_by, said_in
from rationalizer.routing import are_routed_to, key_range
from rationalizer.state import (
    BARRIER,
    CHECKPOINTS,
    DATED,
    GROUP,
    HOLE,
    LEASE,
    MEMBER,
    PARTITION,
    PAUSE,
    PROGRESS,
    SETTINGS,
    SHARE,
    VERSION,
    Derived,
    Part,
    StateField,
)
from rationalizer.wire import wellformed as ok
from tests.rationalizer.log import A1, A2, B1, CALLERS_MISTAKE, COMPILED, Log, held
from tests.test_house_rules import PYTHON_FILES, named, tree_of

TICK = encode(Tick(*A1, "g"))
TOP = 2**63 - 1
BEAT = encode(Heartbeat(*A1, "g", "t", 0, 0, 5))


# -- levels (E4) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_e4_the_world_stands_before_an_upgrade_that_it_can_not_follow(many: bool) -> None:
    log = held()
    before = log.world.snapshot()
    counts = dict(log.world.accepted), dict(log.world.rejected)
    records = [(1, 5000, encode(Upgrade(*A1, "g", 107))), (2, 6000, TICK), (3, 6000, encode(Upgrade(*A1, "g", 109)))]
    if many:
        log.world.apply_many(records)
        log.world.apply_many(records)
    else:
        outcomes = [log.world.apply(*record) for record in records]
        assert [(outcome.code, outcome.accepted, outcome.log_time) for outcome in outcomes] == [
            ("UPGRADE_REQUIRED", False, 1000)
        ] * 3
    assert log.world.required_level == 107
    assert (log.world.snapshot(), log.world.next_offset) == (before, 1)
    assert (log.world.accepted, log.world.rejected) == counts


# -- outcomes and counts ---------------------------------------------------------------------------------------


def test_counts_are_by_code_and_no_state() -> None:
    log = held()
    log.claim(B1)
    log.beat(A1, 5)
    log.beat(A1, 4)
    log.append(None)
    assert log.world.accepted == {"OK": 2, "OFFSET_REGRESSION": 1}
    assert log.world.rejected == {"HELD": 1, "MALFORMED": 1}
    restored = World.restore(log.world.snapshot(), 1)
    assert (restored.accepted, restored.rejected) == ({}, {})
    assert restored.digest() == log.world.digest()


def test_leases_and_pauses_are_sorted_by_their_names() -> None:
    log = Log()
    for group in ("z", "é", "a", "\U0001f600", "\uffff"):
        log.claim(A1, group=group, partition=10)
        log.claim(A1, group=group, partition=9)
        log.pause(A2, 10**6, group=group)
    names = [(lease.group_id.encode(), lease.topic.encode(), lease.partition) for lease in log.world.leases()]
    assert names == sorted(names)
    groups = [pause.group_id.encode() for pause in log.world.pauses()]
    assert groups == sorted(groups)


# -- the caller's own mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [TICK, BEAT, b"\xc1", None], ids=["tick", "beat", "malformed", "none"])
@pytest.mark.parametrize(
    ("offset", "stamp"),
    [(0, 5), (-1, 5), (TOP + 1, 5), (5.0, 5), ("5", 5), (None, 5), (5, TOP + 1), (5, 5.0), (5, None)],
    ids=repr,
)
def test_a_callers_mistake_raises_whatever_the_value(offset: Any, stamp: Any, value: bytes | None) -> None:
    log = held()
    before = log.world.snapshot()
    for apply in (
        lambda: log.world.apply(offset, stamp, value),
        lambda: log.world.apply_many([(offset, stamp, value)]),
    ):
        with pytest.raises(CALLERS_MISTAKE, match=None if COMPILED else "was not applied"):
            apply()
    assert (log.world.snapshot(), log.world.accepted, log.world.rejected) == (before, {"OK": 1}, {})


@pytest.mark.parametrize(
    "record",
    [
        (5, 5, "text"),
        (5, 5, bytearray(TICK)),
        (5, 5, bytearray(BEAT)),
        (5, 5, 7),
    ],
    ids=repr,
)
def test_a_value_is_bytes_or_none(record: Any) -> None:
    log = held()
    before = log.world.snapshot()
    with pytest.raises(CALLERS_MISTAKE, match=None if COMPILED else "was not applied"):
        log.world.apply(*record)
    with pytest.raises(CALLERS_MISTAKE, match=None if COMPILED else "was not applied"):
        log.world.apply_many([record])
    assert log.world.snapshot() == before
    assert log.world.rejected == {}


def test_offsets_may_have_gaps_and_reach_the_largest() -> None:
    world = World(0, 1)
    world.apply(7, 1, TICK)
    world.apply(TOP, TOP, TICK)
    assert (world.next_offset, world.log_time) == (TOP + 1, TOP)
    assert World.restore(world.snapshot(), 1).digest() == world.digest()
    with pytest.raises(ValueError, match="was not applied"):
        world.apply(TOP + 1, 1, TICK)


@pytest.mark.skipif(COMPILED, reason="the compiler takes a bool for an int, and refuses other types by itself")
@pytest.mark.parametrize(
    ("partition", "partitions"), [(-1, 1), (1, 1), (0, 0), (True, 2), (0, True), (0.0, 1), (0, 2**31), ("0", 1)]
)
def test_a_world_is_of_one_of_its_cps(partition: Any, partitions: Any) -> None:
    with pytest.raises(ValueError, match="must be an int"):
        World(partition, partitions)


def test_apply_many_that_meets_a_mistake_has_applied_what_came_before() -> None:
    log = held()
    beat = encode(Heartbeat(*A1, "g", "t", 0, 0, 5))
    with pytest.raises(ValueError, match="was not applied"):
        log.world.apply_many([(1, 1500, beat), (1, 1600, beat)])
    assert (log.world.next_offset, log.world.log_time, log.world.accepted) == (2, 1500, {"OK": 2})


def test_apply_many_takes_any_iterable_and_the_world_is_up_to_date_between_records() -> None:
    log = held()
    seen = []

    def records() -> Any:
        for offset in range(1, 4):
            seen.append((log.world.next_offset, log.world.log_time, log.lease.progress.stable))
            yield offset, 1000 + offset, encode(Heartbeat(*A1, "g", "t", 0, 0, 10 * offset))

    log.world.apply_many(records())
    assert seen == [(1, 1000, -1), (2, 1001, 10), (3, 1002, 20)]


# -- The table of levels: which release can follow a log, and what no test may take for granted -------------------


#: A level that no release will ever have, for tests of what is not supported.
NEVER = 99


def test_this_release_can_follow_each_level_of_its_table() -> None:
    """`upgrade` would name this release's own members as too old otherwise."""
    assert all(knows_level(new_instance_id(), level.number) for level in LEVELS)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: str(level.number))
def test_a_release_before_the_first_can_not(level: object) -> None:
    assert isinstance(level, type(LEVELS[0]))
    first = ".".join(map(str, level.first_release))
    assert knows_level(f"host/1/{first}/x", level.number)
    assert not any(knows_level(f"host/1/{other}/x", level.number) for other in ("", "rc"))
    assert not knows_level(f"host/1/0.0.{9**9}/x", 2)


def test_a_level_that_is_not_in_the_table_is_known_by_no_release() -> None:
    assert not knows_level(new_instance_id(), SUPPORTED_LEVEL + 1)
    assert not knows_level("not a run's name", 1)


def test_what_the_levels_above_one_add_is_said_in_words() -> None:
    assert added_above(1).startswith("coordinated groups")
    assert added_above(SUPPORTED_LEVEL) == ""


def levels_written_out() -> Iterator[tuple[str, int]]:
    """Places of `Upgrade(…, 3)` in tests, with the level."""
    for path in PYTHON_FILES:
        if named(path).startswith("tests/") and "Upgrade(" in path.read_text(encoding="utf-8"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Upgrade" and node.args:
                    last = node.args[-1]
                    if isinstance(last, ast.Constant) and isinstance(last.value, int):
                        yield f"{named(path)}:{node.lineno}", last.value


def test_no_test_takes_the_highest_level_for_granted() -> None:
    """The next level is SUPPORTED_LEVEL + 1; one that never will be is 99 or more."""
    found = list(levels_written_out())
    assert len(found) > 10
    assert [where for where, level in found if SUPPORTED_LEVEL < level < NEVER] == []


# -- The marker of L2: written and read in one place --------------------------------------------------------------


def test_what_is_written_is_read() -> None:
    assert said_by(marker("i", 8)) == said_in(encode(marker("i", 8))) == "8"
    assert count_of(encode(marker("i", 8))) == 8


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"no record",
        encode(Tick("i", "c", "partitions")),
        encode(Tick("i", "c", "a partitions=8")),
        encode(Heartbeat("i", "c", "partitions=8", "t", 0, 0, None)),
    ],
)
def test_what_is_no_marker_says_nothing(value: bytes | None) -> None:
    assert said_in(value) is None
    assert count_of(value) is None


@pytest.mark.parametrize("text", ["", "x", "-1", "٨", "8 "])
def test_a_marker_that_says_no_number_is_one_all_the_same(text: str) -> None:
    """A replica refuses it: it says another count than there is."""
    value = encode(Tick("i", "c", f"partitions={text}"))
    assert said_in(value) == text
    assert count_of(value) is None


# -- Where records belong (L3), and key hashes (P7) ---------------------------------------------------------------


def test_l3_a_lease_hashes_topic_nul_and_the_partition_in_ascii() -> None:
    assert route_lease("flights", 12, 8) == xxh64(b"flights\x0012").intdigest() % 8
    assert route_lease("é", 0, 5) == xxh64(b"\xc3\xa9\x000").intdigest() % 5
    assert {route_lease("t", p, 8) for p in range(100)} == set(range(8))


@given(st.dictionaries(st.text(min_size=1), st.sets(st.integers(0, 2**31 - 1), max_size=3)), st.integers(1, 4))
@example({"%d %s 100%": {0}, "%%": {1}}, 2)
def test_l3_entries_belong_where_each_of_their_leases_does(named: dict[str, set[int]], partitions: int) -> None:
    names = [(topic, number) for topic, numbers in named.items() for number in numbers]
    entries = [(*name, 0, None) for name in names] * 2
    routed = {route_lease(*name, partitions) for name in names}
    for cp in range(partitions):
        assert are_routed_to(cp, entries, partitions) == (routed <= {cp})


def test_l3_a_group_hashes_its_own_name() -> None:
    assert route_group("é", 7) == xxh64(b"\xc3\xa9").intdigest() % 7


def test_p7_keys_and_offsets_hash_into_63_bits() -> None:
    assert key_hash(b"N14228", 5) == xxh64(b"N14228").intdigest() >> 1
    assert key_hash(None, 5) == xxh64(b"\0\0\0\0\0\0\0\5").intdigest() >> 1
    assert key_hash(b"", 5) == xxh64(b"").intdigest() >> 1
    assert all(0 <= key_hash(None, offset) < 2**63 for offset in range(1000))


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 1000])
def test_p7_the_parts_cover_the_space_without_overlap(parts: int) -> None:
    ranges = [key_range(part, parts) for part in range(parts)]
    assert (ranges[0][0], ranges[-1][1]) == (0, 2**63 - 1)
    assert all(left[1] + 1 == right[0] for left, right in pairwise(ranges))


# Declarations of the state: what a later level adds is not there below it, and costs nothing where it is not used.


PARTS = (LEASE, PAUSE, GROUP, SETTINGS, MEMBER, PARTITION, PROGRESS, VERSION, DATED, BARRIER, CHECKPOINTS, SHARE, HOLE)
FLAG, COUNT = ok.BOOLEAN, ok.OFFSET
LATER = 7


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    """A lease of two fields, and two that a later level added."""
    monkeypatch.setitem(levels._BY_STATE, "lease.flag", LATER)
    monkeypatch.setitem(levels._BY_STATE, "lease.count", LATER)
    return Part(
        "lease",
        StateField("topic", ok.TOPIC),
        Derived("age", lambda thing, log_time: log_time),
        StateField("partition", ok.PARTITION, key="topic_partition"),
        StateField("flag", FLAG, default=False),
        StateField("count", COUNT, default=0, json=lambda count, _: [count]),
    )


def thing(flag: bool = False, count: int = 0) -> SimpleNamespace:
    return SimpleNamespace(topic="t", partition=3, flag=flag, count=count)


def test_each_part_is_one_of_the_table_of_levels() -> None:
    names = [name for level in LEVELS for name in level.state if "." not in name]
    assert sorted(part.name for part in PARTS) == sorted(names)
    fields = {f"{part.name}.{field.name}" for part in PARTS for field, _ in part.later}
    assert {name for level in LEVELS for name in level.state if "." in name} == fields


@pytest.mark.parametrize("level", [1, LATER - 1])
def test_below_its_level_a_field_is_not_written(part: Part, level: int) -> None:
    assert list(part.row(thing(True, 5), level)) == ["t", 3]
    assert [list(row) for row in part.rows([thing(True, 5)], level)] == [["t", 3]]


def test_from_its_level_on_what_it_added_is_written_unless_all_has_its_default(part: Part) -> None:
    assert list(part.row(thing(), LATER)) == ["t", 3]
    assert list(part.row(thing(True), LATER)) == ["t", 3, True, 0]
    assert list(part.row(thing(count=5), LATER + 1)) == ["t", 3, False, 5]
    assert list(map(list, part.rows([thing(), thing(True)], LATER))) == [["t", 3], ["t", 3, True, 0]]


def test_json_shows_it_where_it_has_another_value_than_its_default(part: Part) -> None:
    assert part.shown(thing(), 9) == {"topic": "t", "age": 9, "topic_partition": 3}
    assert part.shown(thing(count=5), 9) == {"topic": "t", "age": 9, "topic_partition": 3, "flag": False, "count": [5]}
    assert list(part.added(thing(True))) == [("flag", True)]


def test_what_is_written_of_a_state_is_read(part: Part) -> None:
    for each in (thing(), thing(True), thing(count=5), thing(True, 5)):
        found = SimpleNamespace(topic="t", partition=3)
        part.restore_added(found, part.read(tuple(part.row(each, LATER)), LATER, "lease"))
        assert found == each


@pytest.mark.parametrize(
    ("row", "level", "why"),
    [
        (("t",), LATER, "has not its 2 parts"),
        (("t", 3, True), LATER - 1, "has not its 2 parts"),
        (("t", 3, True, 5, 5), LATER, "has not its 2 parts"),
        (["t", 3], LATER, "has not its 2 parts"),
        (("t", -1), LATER, "partition of a lease must be an int"),
        (("t", 3, 1), LATER, "flag of a lease must be a boolean"),
        (("t", 3, True, -1), LATER, "count of a lease must be an int"),
    ],
)
def test_what_no_level_has_is_refused(part: Part, row: object, level: int, why: str) -> None:
    with pytest.raises(SnapshotError, match=why):
        part.read(row, level, "lease")


def test_what_a_later_level_adds_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(levels._BY_STATE, "lease.flag", LATER)
    with pytest.raises(AssertionError, match="comes last"):
        Part("lease", StateField("flag", FLAG), StateField("topic", ok.TOPIC))
