"""Small scope of coordinated groups: every order of a few records, and a broken rule is found."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from rationalizer import Progress
from rationalizer.groups import commits, machine
from rationalizer.groups import group as group_module
from rationalizer.groups.assignors import Target
from rationalizer.groups.group import Group, Member
from rationalizer.groups.machine import NOTHING, Witness
from rationalizer.groups.pieces import NEVER, Piece, TopicPieces
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.small_scope import records as exhaustive
from tests.campaigns.small_scope.checkpoints import explore_checkpoints
from tests.campaigns.small_scope.groups import explore_groups
from tests.campaigns.small_scope.search import BrokenError

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.campaign  # half a minute of two processors
@pytest.mark.slow
def test_every_order_of_four_records_and_every_transition() -> None:
    explored = explore_groups(4, jobs=2)
    assert explored.missing() == []
    assert explored.states > 10_000
    assert explored.steps > 50_000


#: These take four records.
LATER = {("entry of CommitOffsets", "INDIVIDUAL_COMMIT_TOO_OLD"), ("entry of CommitOffsets", "OFFSET_REGRESSION")}


def test_every_order_of_three_records_and_nearly_every_transition() -> None:
    explored = [explore_groups(3, shared=shared) for shared in (False, True)]
    assert set.intersection(*(set(each.missing()) for each in explored)) == LATER
    assert all(each.states > 1_000 and each.steps > 5_000 for each in explored)


def test_the_command_searches_groups_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    # Two records can't reach every transition.
    assert exhaustive.main(["--groups", "--depth", "2", "--jobs", "1", "--json", str(path)]) == 1
    assert "CommitOffsets" in capsys.readouterr().out
    assert '"groups"' in path.read_text()


def test_the_command_searches_checkpoints_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exhaustive.main(["--checkpoints", "--depth", "1", "--jobs", "1"]) == 0
    assert "hold=True shared=True opened=True" in capsys.readouterr().out


def _on(where: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(where, name, value)


def _give(topic: TopicPieces, targets: list[Target], gone: AbstractSet[int], generation: int) -> None:
    """A rebalance without revocations."""
    topic.grow(len(targets))
    for partition, target in enumerate(targets):
        parts = ((0, MAX_KEY_HASH, target),) if isinstance(target, int) else target
        topic.put(partition, [Piece(lo, hi, slot, generation, slot, NEVER) for lo, hi, slot in parts])


def _no_one(group: Group, *_: object) -> Witness:
    return NOTHING


def _everybody_else(group: Group, sender: Member | None, *_: object) -> Witness:
    return Witness(None, frozenset(slot for slot in group.members if sender is None or slot != sender.slot), False)


def _witness(value: object) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for where in (machine,):
            patch.setattr(where, "witness_of", value)

    return plant


PLANTED: dict[str, tuple[Plant, str]] = {
    "nobody is ever overdue": (_witness(_no_one), "G8"),
    "everybody else is overdue": (_witness(_everybody_else), "G8"),
    "a beat does not count": (_on(Group, "beat", lambda self, member, log_time: None), "G8|G9"),
    "more is let go than was asked for": (
        _on(commits, "let_go", lambda topic, p, lo, hi, generation: topic.put(p, []) or []),
        "K4|G4|G14",
    ),
    "commits of anybody count": (_on(commits.Commits, "_refusal", lambda self, entry: None), "G14|G16"),
    "progress goes back": (_on(Progress, "through", lambda self, offset: self.reposition(offset)), "P2"),
    "what is revoked goes at once": (_on(group_module, "reconcile", _give), "G4|G5|G14|G16"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_that_is_broken_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, rule = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(BrokenError, match=rule):
        explore_groups(4)


@pytest.mark.parametrize("hold", [False, True])
def test_every_order_of_two_records_while_a_barrier_is_open(hold: bool) -> None:
    for shared in (False, True):
        assert explore_checkpoints(2, hold=hold, shared=shared, opened=True).states > 100
