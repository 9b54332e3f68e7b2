"""docs/protocol says what the tables say, and the tables are whole; each rule is in the contents, with its scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rationalizer import codes
from rationalizer.levels import LEVELS
from rationalizer.wire.records import KINDS
from tests.rationalizer.chapters import CHAPTERS, PROTOCOL
from tests.tables import groups as of_groups
from tests.tables import pages
from tests.tables.leases import TRANSITIONS

ROOT = Path(__file__).parents[2]
SCRIPTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "scripts").rglob("*.txt")}


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_the_page_holds_the_tables_as_the_code_has_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.replaced(text) == text, "run: make tables"


def test_each_part_has_one_place() -> None:
    assert sorted(pages.parts_of(PROTOCOL)) == sorted(pages.parts())


def test_each_table_with_types_or_codes_is_written_by_the_command() -> None:
    """What is typed by hand, beside the code, becomes wrong: "Types 22-27 stay unknown" once did."""
    by_hand = re.sub(r"<!-- tables: (?!end).*?<!-- tables: end -->", "", PROTOCOL, flags=re.DOTALL)
    names = "|".join([*(kind.name for kind in KINDS.values()), *(row.code for row in codes.TABLE if row.code != "OK")])
    assert re.findall(rf"^\|.*\b(?:{names})\b.*$", by_hand, re.MULTILINE) == []
    assert re.findall(r"(?i)types? [\d–, ]+ (?:stay|are|is) unknown", by_hand) == []


def test_the_command_writes_the_page() -> None:
    old = PROTOCOL.replace("| 33 | Upgrade |", "| 34 | Upgrade |").encode()
    run = subprocess.run(
        [sys.executable, "-m", "tests.tables.pages"], input=old, capture_output=True, check=True, cwd=ROOT
    )
    assert run.stdout.decode("utf-8") == PROTOCOL


def test_a_part_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(KeyError, match="recrods"):
        pages.replaced("<!-- tables: recrods -->\n<!-- tables: end -->")


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
        "ALREADY_ANSWERED",
        "NOTHING_TO_TAKE",
    } == codes.ACCEPTED


def test_every_rule_that_a_table_cites_stands_on_the_page() -> None:
    cited = " ".join([row.rules for row in codes.TABLE] + [row.rule for row in TRANSITIONS])
    cited += " ".join([row.rule for row in of_groups.TRANSITIONS] + [move.rule for move in of_groups.MOVES])
    for rule in set(re.findall(r"\b[A-Z]\d+\b", cited)):
        assert f"- **{rule}** " in PROTOCOL


def test_the_contents_list_each_rule_once() -> None:
    index = next(page for page in CHAPTERS if page.stem == "index").read_text(encoding="utf-8")
    table = "".join(line for line in index.splitlines() if line.startswith("| ["))
    listed = re.findall(r"\[([A-Z]\d+)\]\(([\w-]+\.md)#([a-z]\d+)\)", table)
    rules = [
        (rule, page.name, anchor)
        for page in CHAPTERS
        for rule, anchor in re.findall(
            r'^- \*\*([A-Z]\d+)\*\* <a id="(\w+)"></a>\S', page.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(rules) > 130
    assert sorted(listed) == sorted(rules)
    assert len(re.findall(r"^- \*\*[A-Z]\d+\*\* ", PROTOCOL, re.MULTILINE)) == len(rules)


def test_each_rule_links_its_scripts() -> None:
    for path in SCRIPTS:
        if found := re.match(r"([a-z])(\d\d)_", path.name):
            rule = f"{found[1].upper()}{int(found[2])}"
            [text] = re.findall(rf"^- \*\*{rule}\*\* .*?(?=^- \*\*|^#|\Z)", PROTOCOL, re.MULTILINE | re.DOTALL)
            assert f"[{path.stem}](../../{path.relative_to(ROOT)})" in text, f"{rule}: {path.name}"


def test_each_example_is_a_part_of_a_script() -> None:
    blocks = [
        re.sub(r"^ {4}", "", text, flags=re.MULTILINE) for text in re.findall(r"```\n(.*?)```", PROTOCOL, re.DOTALL)
    ]
    examples = [text.rstrip(" ") for text in blocks if "----\n" in text]
    assert len(examples) > 5
    assert [text for text in examples if not any(text.strip() in script for script in SCRIPTS.values())] == []


def test_the_kinds_of_levels_that_were_released_stay_as_they_are() -> None:
    of_level = {level: sorted(n for n, kind in KINDS.items() if kind.level == level) for level in (1, 2)}
    assert of_level == {1: [1, 2, 3, 4, 5, 6, 7, 8, 32, 33], 2: [16, 17, 18, 19, 20, 21]}


def test_each_level_lists_the_record_types_that_there_are() -> None:
    assert sorted(name for level in LEVELS for name in level.records) == sorted(kind.name for kind in KINDS.values())
    assert [level.number for level in LEVELS] == list(range(1, len(LEVELS) + 1))


def test_every_clarification_has_a_test() -> None:
    here = Path(__file__).parent
    files = [
        here / "test_clarifications.py",
        here / "test_snapshot.py",
        *sorted((ROOT / "tests/snapshots").glob("*.py")),
        ROOT / "tests/engine/test_at_most_once.py",
        ROOT / "tests/engine/test_positions.py",
        ROOT / "tests/engine/test_topic_mark.py",
        ROOT / "tests/client/test_topic_lookup.py",
        ROOT / "tests/client/test_ends.py",
        ROOT / "tests/faults/test_threads.py",
        ROOT / "tests/contract/test_reach.py",
        *sorted((ROOT / "tests/shapes").glob("*.py")),
    ]
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    scripts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests/scripts").glob("*.txt"))
    numbers = re.findall(r"^- \*\*Q(\d+)\*\*", PROTOCOL, re.MULTILINE)
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    for number in numbers:
        found = re.search(rf"def test_q{number}_", tests) or re.search(rf"\bQ{number}\b", scripts)
        assert found, f"Q{number} has no test"
