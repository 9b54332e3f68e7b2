"""The checker of the transactions campaign finds planted faults: each promise broken once, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.campaigns.transactions.check import Input, Output, Partition, Read, check

#: A log with holes, as transactions leave them; the handler of 7 always fails.
INPUTS = [Input(0), Input(1), Input(3), Input(4), Input(7, fails=True), Input(8), Input(9)]
GOOD = [0, 1, 3, 4, 8, 9]


def judge(
    offsets: Sequence[int], *, restarts: Sequence[int] = (), letters: Sequence[int] = (7,), second: Sequence[int] = ()
) -> list[str]:
    ordered = [Output(0, offset) for offset in offsets]
    others = [Output(0, offset) for offset in second or offsets]
    read = Read({0: ordered}, others, [Output(0, offset) for offset in letters])
    return [each.promise for each in check({0: Partition(INPUTS, restarts)}, read)]


def test_each_once_and_in_order() -> None:
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("offsets", "promises"),
    [
        ([0, 1, 1, 3, 4, 8, 9], ["twice"]),
        ([0, 1, 3, 4, 3, 4, 8, 9], ["twice", "twice"]),
        ([0, 1, 4, 8, 9], ["lost"]),
        ([1, 3, 4, 8, 9], ["lost"]),
        ([0, 1, 3, 4, 8], ["lost"]),
        ([], ["lost"]),
        ([0, 1, 4, 3, 8, 9], ["out of order"]),
        ([1, 0, 3, 4, 8, 9], ["out of order"]),
        ([0, 1, 2, 3, 4, 8, 9], ["an output of no input"]),
    ],
)
def test_a_planted_fault_is_found(offsets: list[int], promises: list[str]) -> None:
    assert [x for x in judge(offsets) if x != "dead letter"] == promises


def test_what_a_failed_try_leaves_is_found() -> None:
    outputs = [Output(0, 0), Output(0, 1, counts=False), *[Output(0, x) for x in GOOD[1:]]]
    found = check({0: Partition(INPUTS)}, Read({0: outputs}, outputs, [Output(0, 7)]))
    assert [each.promise for each in found] == ["a failed try left an output"]


def test_the_second_output_is_of_the_same_transactions() -> None:
    assert judge(GOOD, second=[9, 8, 4, 3, 1, 0]) == []
    assert judge(GOOD, second=[0, 1, 3, 4, 8]) == ["not atomic"]
    assert judge(GOOD, second=[0, 0, 1, 3, 4, 8, 9]) == ["not atomic"]


@pytest.mark.parametrize("letters", [[], [7, 7], [7, 8]])
def test_a_dead_letter_too_many_or_too_few_is_found(letters: list[int]) -> None:
    assert judge(GOOD, letters=letters) == ["dead letter"]


@pytest.mark.parametrize(
    ("offsets", "restarts", "letters"),
    [
        ([0, 1, 3, 1, 3, 4, 8, 9], [1], [7]),  # backwards
        ([0, 1, 3, 1, 3, 4, 8, 9], [2, 1], [7]),  # one before it left no output
        ([0, 1, 3, 4, 3, 4, 8, 9], [2], [7]),  # to a hole
        ([0, 1, 3, 4, 3, 4, 8, 9], [2], [7, 7]),  # the dead letter before it was written, or not
        ([0, 1, 3, 4, 8, 1, 3, 4, 8, 9], [1], [7, 7]),
        ([0, 8, 9], [5], [7]),  # forwards
        ([0, 1], [10], []),  # beyond all
        ([0, 1, 3, 4, 8, 9, 0, 1, 3, 4, 8, 9, 0, 1, 3, 4, 8, 9], [0, 0], [7, 7, 7]),
    ],
)
def test_a_reposition_is_no_fault(offsets: list[int], restarts: list[int], letters: list[int]) -> None:
    assert judge(offsets, restarts=restarts, letters=letters) == []


@pytest.mark.parametrize(
    ("offsets", "restarts", "letters", "promise"),
    [
        ([0, 1, 3, 1, 3, 1, 3, 4, 8, 9], [1], [7], "twice"),  # one jump, and another that was not ordered
        ([0, 1, 3, 3, 4, 8, 9], [1], [7], "twice"),  # elsewhere
        ([0, 1, 3, 1, 4, 8, 9], [1], [7], "lost"),
        ([0, 1, 3, 4, 8, 1, 3, 4, 8, 9], [1], [7], "dead letter"),
        ([0, 1, 3, 4, 8, 1, 3, 4, 8, 9], [1], [7, 7, 7], "dead letter"),
        ([0, 1, 3, 0, 1, 3, 4, 8, 9, 1, 3, 4, 8, 9], [1, 0], [7, 7], "twice"),  # in another order
    ],
)
def test_a_reposition_excuses_nothing_else(
    offsets: list[int], restarts: list[int], letters: list[int], promise: str
) -> None:
    assert promise in judge(offsets, restarts=restarts, letters=letters)
