"""docs/security.md is correct: the tests that it names exist, and its figures are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rationalizer import limits
from tests.security.rights import PAGE

TESTS = Path(__file__).parents[1]
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tests_that_it_names_are_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    there = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 10
    assert named - there == set()
    files = set(re.findall(r"`tests/([\w/]+\.py)`", TEXT))
    assert len(files) == 3
    assert [name for name in files if not (TESTS / name).exists()] == []


@pytest.mark.parametrize(
    "said",
    [
        f"at most {limits.MAX_VALUE_BYTES:,} bytes",
        f"Ids have at most {limits.MAX_ID_BYTES} bytes, topics {limits.MAX_TOPIC_BYTES}",
        f"at most {limits.MAX_MEMBERS:,} members",
        f"{limits.MAX_GROUP_PARTITIONS:,} subscribed partitions",
        f"{limits.MAX_INTERVALS:,} intervals",
        f"up to {limits.MAX_SNAPSHOT_PARTS:,} parts of {limits.MAX_PART_BYTES:,} bytes",
        f"every {limits.SNAPSHOT_INTERVAL:,} records",
    ],
)
def test_its_limits_are_those_of_the_code(said: str) -> None:
    assert said in " ".join(TEXT.split())


def test_containers_nest_as_deep_as_it_says() -> None:
    assert limits.MAX_DEPTH == 8
    assert "eight containers deep" in " ".join(TEXT.split())
