"""The account of the checkpoints campaign finds planted faults."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rationalizer import key_hash
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.checkpoints.check import Account, Counts, Input, Lines, add, check

INPUTS = {0: [Input(offset, f"k{offset % 3}") for offset in range(30)]}

#: Offset in the log at which the second process took over, and of a loss or a rollback there.
TOOK_OVER = 50


#: All keys, the lower half of them (k0 and k2), and the upper half (k1).
ALL, LOWER, UPPER = (0, MAX_KEY_HASH), (0, MAX_KEY_HASH // 2), (MAX_KEY_HASH // 2 + 1, MAX_KEY_HASH)


def counts(offsets: Iterable[int], keys: tuple[int, int] = ALL) -> Counts:
    found: Counts = {}
    for offset in offsets:
        key = f"k{offset % 3}"
        if keys[0] <= key_hash(key.encode(), offset) <= keys[1]:
            add(found, key, offset)
    return found


def restored(
    epoch: int,
    why: str,
    position: int,
    state: Counts,
    rows: Counts | None = None,
    keys: tuple[int, int] = ALL,
    tokens: Iterable[tuple[int, int, int]] = (),
    through: Iterable[tuple[int, int, int]] = (),
    at: float = 1.0,
) -> list[Any]:
    states = [[*keys, epoch - 1]]
    of_keys = [[*keys, [*tokens]], [*through]]
    return ["restored", at, 0, epoch, why, epoch - 1, position, [], states, state, rows, *of_keys]


def handled(epoch: int, offsets: Iterable[int]) -> list[list[Any]]:
    return [["handled", 2.0, 0, epoch, offset] for offset in offsets]


def account(
    path: Path,
    first: list[list[Any]],
    second: list[list[Any]],
    *,
    went_back: bool | None = None,
    rollbacks: Iterable[int] = (),
    faulty: bool = True,
    spoilt: Iterable[tuple[int, int]] = (),
    last: Iterable[list[Any]] = (restored(90, "handed_over", 30, counts(range(30))),),
) -> Account:
    """Of two processes, and one that restores all at the end. went_back: None: if the second one says so."""
    if went_back is None:
        went_back = second[0][4] == "lost"
    files = []
    for name, lines, is_faulty in (("a", first, faulty), ("b", second, False), ("end", last, False)):
        file = path / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        files.append(Lines(file, is_faulty))
    back = {0: [(TOOK_OVER, *ALL)] if went_back else []}
    return check(INPUTS, files, back, [*rollbacks], hold=False, spoilt=[*spoilt])


FIRST = [
    restored(10, "joined", 0, {}),
    *handled(10, range(12)),
    ["cut", 3.0, 40, [0], False],
    ["saved", 3.1, 40, [0]],
    ["completed", 3.2, 40, 0.1],
    *handled(10, range(12, 15)),
]


def second(why: str, position: int, rows: Counts | None = None) -> list[list[Any]]:
    first, *rest = [
        restored(TOOK_OVER, why, position, counts(range(position)), rows),
        *handled(50, range(position, 30)),
    ]
    first[8] = [[*ALL, 40]]
    return [first, *rest]


def test_a_loss_repeats_what_came_after_the_cut(tmp_path: Path) -> None:
    found = account(tmp_path, FIRST, second("lost", 12, counts(range(12))))
    assert found.violations == []
    assert (found.repeated["lost"], found.losses[0][0], found.unexplained) == (3, 3, [])
    assert account(tmp_path, FIRST, second("lost", 12), faulty=False).unexplained != []


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
    assert promises(account(tmp_path, FIRST, second("lost", 12, counts(range(14))))) == {"sink"}


def test_a_piece_goes_back_to_its_newest_complete_cut_but_for_rollbacks(tmp_path: Path) -> None:
    older = second("lost", 6)
    older[0][8] = [[*ALL, 20]]
    assert promises(account(tmp_path, FIRST, older)) == {"cut"}
    assert promises(account(tmp_path, FIRST, older, rollbacks=[45])) == set()


def test_one_owner_under_one_token_cuts_once(tmp_path: Path) -> None:
    again = [restored(10, "lost", 12, counts(range(12)))]
    assert promises(account(tmp_path, FIRST, [*again, *second("lost", 12)])) == {"one owner"}
    assert promises(account(tmp_path, [*FIRST, ["cut", 5.0, 40, [0], False]], second("lost", 12))) == {"one cut"}
    assert promises(account(tmp_path, [*FIRST, ["torn", 5.0, 0, 10, 11, 3]], second("lost", 12))) == {"in flight"}


#: The first process hands the upper keys over at 50, and gets them back at 70, as the second one leaves.
LOWER_ALONE = [restored(10, "joined", 15, counts(range(15), LOWER), keys=LOWER, at=4.0), *handled(10, [15, 17, 18, 20])]
UPPER_ALONE = [restored(50, "handed_over", 15, counts(range(15), UPPER), keys=UPPER, at=4.0), *handled(50, [16, 19])]


def of_shares(path: Path, through: int = 20, upper: Iterable[list[Any]] = (), without: Iterable[int] = ()) -> Account:
    """through: what the log has as done of the lower keys in the end, of which the first process handled 20."""
    both = restored(70, "handed_over", min(through + 1, 20), counts({*range(through + 1), 19} - {*without}), at=5.0)
    both[11:] = [[*ALL, [(*LOWER, 10), (*UPPER, 70)]], [(*LOWER, through), (*UPPER, 19)]]
    rest = handled(70, [x for x in range(18, 30) if x > (19 if x % 3 == 1 else through)])
    return account(path, [*FIRST, *LOWER_ALONE, both, *rest], [*UPPER_ALONE, *upper])


def test_shares_are_followed_key_by_key(tmp_path: Path) -> None:
    found = of_shares(tmp_path)
    assert found.violations == []
    assert (found.restored, found.repeated.total()) == ({"share cut again": 2, "handed_over": 4}, 0)
    assert promises(of_shares(tmp_path, through=18)) == {"repeats"}
    assert promises(of_shares(tmp_path, without=[16])) == {"state"}
    assert promises(of_shares(tmp_path, upper=handled(50, [21]))) == {"one owner"}
    assert promises(of_shares(tmp_path, through=21)) == {"lost"}


def test_what_a_bad_release_did_is_counted_until_its_deploy_is_undone(tmp_path: Path) -> None:
    wrong = second("lost", 12, counts(range(12)))
    wrong[0][9] = counts(range(9))
    assert promises(account(tmp_path, FIRST, wrong)) == {"state"}
    found = account(tmp_path, FIRST, wrong, spoilt=[(45, 60)])
    assert (found.violations, found.spoilt, found.wrong) == ([], 1, 1)
    right, left = (["undone", 6.0, 0, 12, [[14, 14]], counts(offsets)] for offsets in ([*range(12), 14], range(13)))
    assert account(tmp_path, FIRST, [*second("lost", 12), right]).undone == 1
    assert promises(account(tmp_path, FIRST, [*second("lost", 12), left])) == {"undo"}
