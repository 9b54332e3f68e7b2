"""Declarations of the state: what a later level adds is not there below it, and costs nothing where it is not used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rationalizer import SnapshotError, levels
from rationalizer.levels import LEVELS
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
    Field,
    Part,
    Shown,
)
from rationalizer.wire import wellformed as ok

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
        Field("topic", ok.TOPIC),
        Shown("age", lambda thing, log_time: log_time),
        Field("partition", ok.PARTITION, key="topic_partition"),
        Field("flag", FLAG, default=False),
        Field("count", COUNT, default=0, json=lambda count, _: [count]),
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


def test_what_is_written_is_read(part: Part) -> None:
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
        Part("lease", Field("flag", FLAG), Field("topic", ok.TOPIC))
