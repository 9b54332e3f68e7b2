"""The account of rows that are written again: each promise broken once, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.admin import RedoPlan
from kafka_marshal.admin.redo import RedoPartition, RedoSpan, _Written
from tests.campaigns.account import Place
from tests.campaigns.frame import Life
from tests.campaigns.redos.account import Asked, Redo, RedosAccount, places_of

#: Messages 0 … 3 of one partition; the time of each is its offset, and its key, too. 1 and 2 were redone at 10.
TIMES = {(0, at): at for at in range(4)}
LINES = [line for at in range(4) for line in (f"b run 0 {at} {at}", f"h run 0 {at} {at}.5")]
AGAIN = ["b run 0 1 11", "h run 0 1 11.5", "b run 0 2 12", "h run 0 2 12.5"]
ROWS = {(0, 0): 1, (0, 1): 2, (0, 2): 2, (0, 3): 1}
OPENED = {(0, 1): 1, (0, 2): 1}
ASKED = Asked(frozenset({0}), (1, 3))


def made(folder: Path, asked: Asked = ASKED, *, answered: bool = True) -> Redo:
    """A redo of 1 and 2, which its file has."""
    spans = (RedoSpan(1, 1, 7), RedoSpan(2, 2, 8))
    plan = RedoPlan("group", "log", 0, (RedoPartition("topic", 0, spans, 2),))
    plan.records = [_Written("topic", 0, 1, spans, 2 if answered else None)]
    plan.write(folder / "plan.json")
    return Redo(folder / "plan.json", asked, places_of(plan), 2, 10.0, [])


def account_of(folder: Path, lines: list[str]) -> RedosAccount:
    life = Life("w", folder / "w.txt")
    life.out.write_text("".join(f"{line}\n" for line in lines))
    account = RedosAccount(lambda _, offset: b"%d" % offset)
    account.read(life)
    return account


def rows_but(**changes: int) -> dict[Place, int]:
    rows = ROWS | {(0, int(at[1:])): times for at, times in changes.items()}
    return {place: times for place, times in rows.items() if times}


@pytest.mark.parametrize(
    ("lines", "rows", "opened", "asked", "said"),
    [
        (AGAIN, ROWS, OPENED, {}, []),
        (AGAIN, rows_but(_1=1), OPENED, {}, ["(0, 1) was written 1 times, not 2: 2 times handled, in plan"]),
        (AGAIN, rows_but(_1=3), OPENED, {}, ["(0, 1) was written 3 times, not 2"]),
        (AGAIN, rows_but(_3=2), OPENED, {}, ["(0, 3) was written 2 times, not 1"]),
        (AGAIN, rows_but(_3=0), OPENED, {}, ["(0, 3) was written 0 times, not 1"]),
        (AGAIN, rows_but(_4=1), OPENED, {}, ["(0, 4) was written 1 times, not 0"]),
        (AGAIN[:2], ROWS, OPENED, {}, ["(0, 2) was opened again at 10.000, and not handled since"]),
        ([*AGAIN[:3], "x run 0 2 13"], ROWS, OPENED, {}, ["not handled since"]),
        (AGAIN, ROWS, {**OPENED, (0, 3): 1}, {}, ["the log opened (0, 3) 1 times, not 0 to 0"]),
        (AGAIN, ROWS, {**OPENED, (0, 2): 2}, {}, ["the log opened (0, 2) 2 times, not 1 to 1"]),
        (AGAIN, ROWS, {(0, 1): 1}, {}, ["the log opened (0, 2) 0 times, not 1 to 1"]),
        (AGAIN, ROWS, OPENED, {"numbers": (1, 2)}, ["names [(0, 2)], too", "found 2, and 1 are there"]),
        (AGAIN, ROWS, OPENED, {"numbers": (1, 4)}, ["found 2, and 3 are there"]),
        (AGAIN, ROWS, OPENED, {"numbers": (1, 4), "by_time": True}, []),
        (AGAIN, ROWS, OPENED, {"numbers": (1, 4), "keys": frozenset({b"1", b"2"})}, []),
        (AGAIN, ROWS, OPENED, {"keys": frozenset({b"1"})}, ["names [(0, 2)], too", "found 2, and 1 are there"]),
        (AGAIN, ROWS, OPENED, {"partitions": frozenset({1})}, ["names [(0, 1), (0, 2)], too", "found 2, and 0"]),
    ],
)
def test_an_account_of_rows_sees(
    tmp_path: Path,
    lines: list[str],
    rows: Mapping[Place, int],
    opened: Mapping[Place, int],
    asked: dict[str, Any],
    said: list[str],
) -> None:
    account = account_of(tmp_path, [*LINES, *lines])
    account.redos.append(made(tmp_path, ASKED._replace(**asked)))
    account.finished(account.redos[0])
    found = list(account.in_the_end({0: 4}, rows, opened, TIMES))
    assert len(found) == len(said), found
    assert all(words in each for words, each in zip(said, found, strict=True)), found


@pytest.mark.parametrize(
    ("rows", "taken_back", "answered", "said"),
    [
        (rows_but(_2=1), {(0, 2)}, True, []),
        (rows_but(), {(0, 2)}, True, []),
        (rows_but(_1=1, _2=1), {(0, 2)}, True, ["(0, 1) was opened, and not taken back by the undo"]),
        (rows_but(_1=1, _2=1), {(0, 2)}, False, []),
        (rows_but(_1=1, _2=1), None, True, []),
        (rows_but(_1=3, _2=1), {(0, 2)}, True, ["(0, 1) was written 2 times more"]),
        (rows_but(_1=0, _2=1), {(0, 2)}, True, ["(0, 1) was written -1 times more"]),
    ],
)
def test_what_an_undo_leaves(
    tmp_path: Path, rows: Mapping[Place, int], taken_back: set[Place] | None, answered: bool, said: list[str]
) -> None:
    account, redo = account_of(tmp_path, [*LINES, *AGAIN]), made(tmp_path, answered=answered)
    redo.is_to_be_undone, redo.taken_back = True, taken_back
    account.redos.append(redo)
    found = list(account.undone(redo, rows, stale_too=False))
    assert len(found) == len(said), found
    assert all(words in each for words, each in zip(said, found, strict=True)), found
    # From then on the rows stay as they were.
    assert not [each for each in account.in_the_end({0: 4}, rows, OPENED, TIMES) if "row" in each]
    assert [each for each in account.in_the_end({0: 4}, {**rows, (0, 1): 7}, OPENED, TIMES) if "7 times" in each]


def test_what_was_never_opened_is_not_written_again(tmp_path: Path) -> None:
    account, redo = account_of(tmp_path, LINES), made(tmp_path)
    plan = redo.plan
    plan.records = []
    plan.write(redo.file)
    redo.is_to_be_undone = True
    found = list(account.undone(redo, rows_but(_2=1), stale_too=False))
    assert found == ["(0, 1) was not opened, and its row was written again"]
    account.more.clear()
    assert list(account.undone(redo, rows_but(_2=1), stale_too=True)) == []
