"""The account of the checkpoints campaign finds planted faults."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.checkpoints.check import Account, Counts, Input, Lines, add, check

INPUTS = {0: [Input(offset, f"k{offset % 3}") for offset in range(30)]}

#: Offset in the log at which the second process took over, and of a loss or a rollback there.
TOOK_OVER = 50


def counts(offsets: Iterable[int]) -> Counts:
    found: Counts = {}
    for offset in offsets:
        add(found, f"k{offset % 3}", offset)
    return found


def restored(epoch: int, why: str, position: int, state: Counts, rows: Counts | None = None) -> list[Any]:
    return ["restored", 1.0, 0, epoch, why, epoch - 1, position, [], [epoch - 1], state, rows]


def handled(epoch: int, offsets: Iterable[int]) -> list[list[Any]]:
    return [["handled", 2.0, 0, epoch, offset] for offset in offsets]


def account(
    path: Path,
    first: list[list[Any]],
    second: list[list[Any]],
    *,
    went_back: bool = False,
    rollbacks: Iterable[int] = (),
    faulty: bool = True,
) -> Account:
    """Of two processes, and one that restores all at the end."""
    last = [restored(90, "handed_over", 30, counts(range(30)))]
    files = []
    for name, lines, is_faulty in (("a", first, faulty), ("b", second, False), ("end", last, False)):
        file = path / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        files.append(Lines(file, is_faulty))
    return check(INPUTS, files, {0: [TOOK_OVER] if went_back else []}, [*rollbacks], hold=False)


FIRST = [
    restored(10, "joined", 0, {}),
    *handled(10, range(12)),
    ["cut", 3.0, 40, [0], False],
    ["saved", 3.1, 40, [0]],
    ["completed", 3.2, 40],
    *handled(10, range(12, 15)),
]


def second(why: str, position: int, rows: Counts | None = None) -> list[list[Any]]:
    first, *rest = [
        restored(TOOK_OVER, why, position, counts(range(position)), rows),
        *handled(50, range(position, 30)),
    ]
    first[8] = [40]
    return [first, *rest]


def test_a_loss_repeats_what_came_after_the_cut(tmp_path: Path) -> None:
    found = account(tmp_path, FIRST, second("lost", 12, counts(range(12))), went_back=True)
    assert found.violations == []
    assert (found.repeated["lost"], found.losses[0][0], found.unexplained) == (3, 3, [])
    assert account(tmp_path, FIRST, second("lost", 12), went_back=True, faulty=False).unexplained != []


def promises(found: Account) -> set[str]:
    return {each.promise for each in found.violations}


@pytest.mark.parametrize("why", ["handed_over", "joined"])
def test_what_is_handed_over_comes_again_only_if_its_state_was_not_saved(tmp_path: Path, why: str) -> None:
    assert promises(account(tmp_path, FIRST, second(why, 15))) == set()
    assert promises(account(tmp_path, FIRST, second(why, 12))) == {"repeats"}
    failed = [*FIRST, ["cut", 4.0, 45, [0], True], ["store error", 4.1, 45, [0]]]
    assert promises(account(tmp_path, failed, second(why, 12))) == set()


def test_what_no_worker_handled_is_lost(tmp_path: Path) -> None:
    assert promises(account(tmp_path, FIRST, second("lost", 17))) == {"lost"}
    assert promises(account(tmp_path, FIRST, second("lost", 12)[:5])) == {"lost"}


def test_a_state_has_each_message_once(tmp_path: Path) -> None:
    assert promises(account(tmp_path, [*FIRST, *handled(10, [3])], second("lost", 12))) == {"twice"}
    doubled = second("lost", 12)
    doubled[0][9] = counts([*range(12), 4])
    assert promises(account(tmp_path, FIRST, doubled)) == {"state"}
    other = second("lost", 12)
    other[0][9] = counts([*range(11), 14])  # as many, but not the same
    assert promises(account(tmp_path, FIRST, other)) == {"state"}


def test_a_sink_has_what_the_group_counts_as_done(tmp_path: Path) -> None:
    assert promises(account(tmp_path, FIRST, second("lost", 12, counts(range(14))), went_back=True)) == {"sink"}


def test_a_piece_goes_back_to_its_newest_complete_cut_but_for_rollbacks(tmp_path: Path) -> None:
    older = second("lost", 6)
    older[0][8] = [20]
    assert promises(account(tmp_path, FIRST, older, went_back=True)) == {"cut"}
    assert promises(account(tmp_path, FIRST, older, went_back=True, rollbacks=[45])) == set()


def test_one_owner_under_one_token_cuts_once(tmp_path: Path) -> None:
    again = [restored(10, "lost", 12, counts(range(12)))]
    assert promises(account(tmp_path, FIRST, [*again, *second("lost", 12)])) == {"one owner"}
    assert promises(account(tmp_path, [*FIRST, ["cut", 5.0, 40, [0], False]], second("lost", 12))) == {"one cut"}
    assert promises(account(tmp_path, [*FIRST, ["torn", 5.0, 0, 10, 11, 3]], second("lost", 12))) == {"in flight"}
