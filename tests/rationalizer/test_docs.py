"""PROTOCOL.md says what the tables say, and the tables are whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rationalizer import codes, docs
from rationalizer.groups import transitions as of_groups
from rationalizer.leases.transitions import TRANSITIONS
from rationalizer.wire.records import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")


def test_the_page_holds_the_tables_as_the_code_has_them() -> None:
    assert docs.replaced(PAGE) == PAGE, "run: python -m rationalizer.docs < PROTOCOL.md > new && mv new PROTOCOL.md"


def test_the_command_writes_the_page() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "rationalizer.docs"], input=PAGE.encode(), capture_output=True, check=True, cwd=ROOT
    )
    assert run.stdout.decode("utf-8") == PAGE


def test_a_page_without_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="lacks"):
        docs.replaced("# No markers\n")


def test_every_outcome_is_a_row_and_every_row_an_outcome() -> None:
    constants = {
        value for name, value in vars(codes).items() if name.isupper() and isinstance(value, str) and name == value
    }
    assert constants - {codes.UPGRADE_REQUIRED} == {row.code for row in codes.TABLE}
    assert len(codes.TABLE) == len({row.code for row in codes.TABLE})


def test_the_codes_of_accepted_records() -> None:
    assert {
        "OK",
        "ALREADY_HELD",
        "OFFSET_REGRESSION",
        "REPOSITIONED",
        "DUPLICATE_COMMIT",
        "ALREADY_MEMBER",
    } == codes.ACCEPTED


def test_every_rule_that_a_table_cites_stands_on_the_page() -> None:
    cited = " ".join([row.rules for row in codes.TABLE] + [row.rule for row in TRANSITIONS])
    cited += " ".join([row.rule for row in of_groups.TRANSITIONS] + [move.rule for move in of_groups.MOVES])
    for rule in set(re.findall(r"\b[A-Z]\d+\b", cited)):
        assert f"- **{rule}** " in PAGE


def test_the_kinds_are_those_of_levels_1_and_2() -> None:
    of_level = {level: sorted(n for n, kind in KINDS.items() if kind.level == level) for level in (1, 2)}
    assert of_level == {1: [1, 2, 3, 4, 5, 6, 7, 8, 32, 33], 2: [16, 17, 18, 19, 20, 21]}
    assert all(f"| {number} | {kind.name} |" in PAGE for number, kind in KINDS.items())


def test_every_clarification_has_a_test() -> None:
    here = Path(__file__).parent
    files = [
        here / "test_clarifications.py",
        here / "test_snapshot_log.py",
        *sorted((ROOT / "tests/snapshots").glob("*.py")),
        ROOT / "tests/engine/test_at_most_once.py",
        ROOT / "tests/engine/test_positions.py",
        ROOT / "tests/engine/test_topic_mark.py",
        ROOT / "tests/client/test_topic_watch.py",
        ROOT / "tests/client/test_ends.py",
        ROOT / "tests/faults/test_threads.py",
        ROOT / "tests/contract/test_addresses.py",
        *sorted((ROOT / "tests/shapes").glob("*.py")),
    ]
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    scripts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests/scripts").glob("*.txt"))
    numbers = re.findall(r"^- \*\*Q(\d+)\*\*", PAGE, re.MULTILINE)
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    for number in numbers:
        found = re.search(rf"def test_q{number}_", tests) or re.search(rf"\bQ{number}\b", scripts)
        assert found, f"Q{number} has no test"
