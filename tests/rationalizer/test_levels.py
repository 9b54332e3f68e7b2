"""The table of levels: which release can follow a log, and what no test may take for granted."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from kafka_marshal.instance import knows_level, new_instance_id
from rationalizer.levels import LEVELS, SUPPORTED_LEVEL, added_above
from tests.test_house_rules import PYTHON_FILES, named, tree_of

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
