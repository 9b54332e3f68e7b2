"""The oracle alone: it must agree with the protocol's examples before it may judge.

`examples/` holds the dumps that come with the protocol, their outcomes and their states.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rationalizer.oracle import NotMsgpackError, SetProgress, parse, progress_from, shortest
from tests.rationalizer.oracle.dump import replay

EXAMPLES = Path(__file__).parent / "examples"
OF_LEASES = ["digest", "earliest_claim_wins", "ranges_merge"]
OF_GROUPS = [
    "group_death",
    "group_fenced",
    "group_first_join",
    "group_forgotten",
    "group_hand_over",
    "group_late_join",
    "group_restart",
    "group_share_5_on_3",
    "group_wildcard",
]
OF_CHECKPOINTS = [
    "checkpoint_first",
    "checkpoint_hand_over",
    "checkpoint_hold_ends",
    "checkpoint_leave",
    "checkpoint_loss",
    "checkpoint_loss_hold",
    "checkpoint_periodic",
    "checkpoint_positions",
    "checkpoint_rollback",
    "checkpoint_shares",
]
OF_SHARING = [
    "sharing_at_most_once",
    "sharing_batches",
    "sharing_group",
    "sharing_keys",
    "sharing_modes",
    "sharing_parks",
    "sharing_positions",
    "sharing_silence",
]
NAMES = sorted([*OF_LEASES, *OF_GROUPS, *OF_CHECKPOINTS, *OF_SHARING])


def test_all_examples_are_here() -> None:
    assert sorted(path.name.split(".")[0] for path in EXAMPLES.glob("*.dump.jsonl")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_examples_byte_for_byte(name: str) -> None:
    outcomes, state, levels = replay((EXAMPLES / f"{name}.dump.jsonl").read_text().splitlines())
    printed = "".join(json.dumps(outcome) + "\n" for outcome in outcomes)
    assert printed == (EXAMPLES / f"{name}.outcomes.jsonl").read_text()
    assert levels == {}
    wanted = (EXAMPLES / f"{name}.state.json").read_text()
    assert json.dumps(state, sort_keys=True) == json.dumps(json.loads(wanted), sort_keys=True)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("93 01 d1 ff ff cf 00 00 00 00 00 00 00 07", [1, -1, 7]),
        ("91 d9 02 c3 a9", ["é"]),
        ("dc 00 02 c0 c3", [None, True]),
        ("91 82 a1 61 01 a1 61 02", [{"a": 2}]),
        ("91" * 7 + "90", [[[[[[[[]]]]]]]]),
        ("91" * 8 + "90", None),
        ("91" * 7 + "80", [[[[[[[{}]]]]]]]),
        ("91 81 c0 01", None),
        ("91 81 01 01", None),
        ("91 ca 3f 80 00 00", None),
        ("91 c4 00", None),
        ("91 d4 00 00", None),
        ("91 c1", None),
        ("91 a3 ed a0 80", None),
        ("91 a2 c0 af", None),
        ("90 c0", None),
        ("dd ff ff ff ff", None),
        ("a1 61", None),
        ("80", None),
        ("", None),
    ],
)
def test_parser_by_hand(text: str, tree: list[object] | None) -> None:
    value = bytes.fromhex(text)
    if tree is not None:
        assert parse(value) == tree
        return
    with pytest.raises(NotMsgpackError):
        parse(value)


def test_shortest_forms() -> None:
    edges = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1]
    edges += [-1, -32, -33, -128, -129, -(2**15), -(2**15) - 1, -(2**31), -(2**31) - 1, -(2**63)]
    tree = [*edges, "x" * 31, "x" * 32, "x" * 255, "x" * 256, [0] * 15, [0] * 16, {"a": None}, True, False]
    assert parse(shortest(tree)) == tree
    lengths = [1, 1, 2, 2, 3, 3, 5, 5, 9, 9, 9, 1, 1, 2, 2, 3, 3, 5, 5, 9, 9]
    assert [len(shortest(edge)) for edge in edges] == lengths
    assert [len(shortest(item)) for item in tree[len(edges) :]] == [32, 34, 257, 259, 16, 19, 4, 1, 1]


def test_progress_as_in_p3_and_p6() -> None:
    first = progress_from([("raised", 42), ("committed", [(45, 47)]), ("committed", [(43, 44)])])
    assert (first.stable, first.ranges) == (47, ())
    second = progress_from([("committed", [(45, 47), (50, 50)]), ("committed", [(48, 49)])])
    assert (second.stable, second.ranges) == (-1, ((45, 50),))
    third = progress_from(
        [("raised", 40), ("committed", [(43, 45), (48, 49)]), ("committed", [(41, 42), (46, 47), (50, 50)])]
    )
    assert (third.stable, third.ranges) == (50, ())


def test_progress_by_sets_as_in_p8() -> None:
    progress = SetProgress([10, 11], 100)
    progress.raise_range(0, 10, 7)
    progress.commit([(8, 9), (20, 21)])
    assert (progress.stable, progress.ranges) == (-1, [(8, 9), (20, 21)])
    assert (progress.done_through(10), progress.done_through(11)) == (9, -1)
    progress.raise_range(11, 2**63 - 1, 8)
    assert (progress.stable, progress.ranges, progress.done_through(11)) == (9, [(20, 21)], 9)
