"""The account of campaigns whose workers handle message by message: each promise broken once, by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.campaigns.account import Account
from tests.campaigns.frame import Life
from tests.campaigns.parks.account import ParksAccount, Written
from tests.campaigns.process import POISON

#: Of one worker: message 0 fails once, then it is handled, and 1 of the same key after it. Time is the last figure.
GOOD = ["b run 0 0 1", "f run 0 0 2", "b run 0 0 3", "h run 0 0 4", "b run 0 1 5", "h run 0 1 6"]


def lives(folder: Path, *workers: Iterable[str]) -> list[Life]:
    found = []
    for number, lines in enumerate(workers):
        found.append(Life(f"w{number}", folder / f"w{number}.txt"))
        found[-1].out.write_text("".join(f"{line}\n" for line in lines))
    return found


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([GOOD], []),
        ([GOOD[:4]], ["1 lost"]),
        ([GOOD[:5]], ["1 lost"]),
        ([[*GOOD[:3], GOOD[4], GOOD[5], "h run 0 0 7"]], ["in two hands", "began"]),
        ([GOOD, ["b run 0 1 7", "h run 0 1 8"]], ["1 handled again"]),
        ([GOOD, ["b run 0 1 5.5", "x run 0 1 8"]], ["in two hands"]),
        ([GOOD, ["b run 0 1 5.5"]], ["in two hands"]),
        ([["b run 0 1 1", "h run 0 1 2", "b run 0 0 3", "h run 0 0 4"]], ["began"]),
        ([[*GOOD[:4], "b run 0 1 5", "x run 0 1 6"], ["b run 0 1 7", "h run 0 1 8"]], []),
        ([[*GOOD, "e ValueError: a bug"]], ["a bug"]),
        ([[*GOOD, "e KafkaUnavailableError: away"]], []),
    ],
)
def test_an_account_sees(tmp_path: Path, workers: list[list[str]], said: list[str]) -> None:
    account = Account(lambda partition, offset: 0)
    for life in lives(tmp_path, *workers):
        account.read(life)
    found = list(account.violations({0: 2}, (), is_once=True))
    assert len(found) == len(said), found
    assert all(words in each for words, each in zip(said, found, strict=True)), found


@pytest.mark.parametrize(("one", "other", "is_one_hand"), [("keys", "keys", True), ("keys", "run", False)])
def test_keys_are_in_different_hands(tmp_path: Path, one: str, other: str, is_one_hand: bool) -> None:
    account = Account(lambda partition, offset: offset)
    for life in lives(tmp_path, [f"b {one} 0 0 1", f"h {one} 0 0 9"], [f"b {other} 0 1 2", f"h {other} 0 1 3"]):
        account.read(life)
    assert (list(account.violations({0: 2}, (), is_once=True)) == []) is is_one_hand


KILLS = [["b run 0 0 1", "n"] for _ in range(5)]


@pytest.mark.parametrize(
    ("parked", "said"),
    [
        ({(0, 0): "CRASHED"}, []),
        ({}, ["can't be handled, and is not set aside", "is done by the log"]),
        ({(0, 0): "ValueError"}, ["kills its process, and is set aside as ValueError"]),
        ({(0, 0): "CRASHED", (0, 1): "ValueError"}, ["can be handled", "was handled"]),
        ({(0, 0): "CRASHED", (0, 1): "CRASHED"}, ["can be handled", "kills no process", "was handled"]),
    ],
)
def test_what_is_set_aside(tmp_path: Path, parked: dict[tuple[int, int], str], said: list[str]) -> None:
    account = ParksAccount(lambda partition, offset: Written(b"%d" % offset, POISON if offset == 0 else b"x"))
    account.read_again(lives(tmp_path, *KILLS, ["b run 0 1 5", "h run 0 1 6"]))
    found = list(account.parks({(0, 0), (0, 1)}, parked))
    assert len(found) == len(said), found
    assert all(words in each for words, each in zip(said, found, strict=True)), found
    assert account.poisoned == 5
