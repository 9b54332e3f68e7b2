"""Checkpoints in the audit: what was handed over and what went back, and planted faults that it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.pipeline.audit.invariants import Kind
from kafka_marshal.pipeline.audit.observer import Observer
from rationalizer import Group, Outcome, World
from rationalizer.dump import DumpReader
from tests.audit.broken_groups import Meddler, each_piece

EXAMPLES = Path(__file__).parents[1] / "rationalizer" / "examples"
NAMES = sorted(path.name.split(".")[0].removeprefix("checkpoint_") for path in EXAMPLES.glob("checkpoint_*.dump.jsonl"))


def replayed(name: str, world: type[World] = World, skip: int = 0) -> tuple[dict[str, int], dict[str, list[Any]]]:
    """Violations by kind, and the rows by table. skip: records before the audit begins, as behind a snapshot."""
    with (EXAMPLES / f"checkpoint_{name}.dump.jsonl").open("rb") as file:
        found = list(DumpReader(file))
        entries = [(each.offset, each.timestamp_ms, each.value) for each in found]
    rows: dict[str, list[Any]] = {}
    replica = world(0, 1)
    replica.apply_many(entries[:skip])
    observer = Observer(replica, lambda table, more: rows.setdefault(table, []).extend(more))
    observer.replay(entries[skip:])
    observer.finish()
    return observer.violations, rows


@pytest.mark.parametrize("name", NAMES)
def test_a_right_log_has_no_violations_wherever_the_audit_begins(name: str) -> None:
    for skip in range(20):
        assert replayed(name, skip=skip)[0] == {}, skip


def test_the_tables_say_what_was_handed_over_and_what_went_back() -> None:
    _, rows = replayed("rollback")
    assert [row[3] for row in rows["generations"]] == ["joined", "joined", "handed over", "rolled back"]
    assert {row[12] for row in rows["assignments"]} >= {"handed over", "put back"}
    done = [(row[2], row[3], row[8], row[9], row[10]) for row in rows["progress"]]
    assert (1, "w2", "done", 121, 130) in done, (
        "it counts when the checkpoint is complete, in the name that handed it in"
    )
    assert [each for each in done if each[2] == "rolled back"] == [
        (n, "admin", "rolled back", None, None) for n in (0, 1)
    ]
    _, rows = replayed("leave")
    assert rows["generations"][-1][3] == "left"


class KeepsProgress(Meddler):
    """Goes back with the pieces, and not with what is done (X8)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stable: dict[int, int] = {}

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        kept = {number: group.kept("flights", number) for number in (0, 1)}
        if outcome.type == "Rollback" and outcome.accepted:
            for number, each in kept.items():
                assert each is not None
                each.progress.through(self._stable[number])
        self._stable = {number: each.progress.stable for number, each in kept.items() if each is not None}
        return outcome


class HandsOverTooSoon(Meddler):
    """Gives a revoked piece to its target when the checkpoint begins (X6)."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.type == "BeginCheckpoint" and group.members:
            each_piece(
                group,
                lambda piece: (
                    piece if piece.revoked < 0 else piece._replace(owner=piece.target, since=offset, revoked=-1)
                ),
            )
        return outcome


class CompletesAlone(Meddler):
    """In a hold group, is complete without the others (X6)."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        checkpoints = group.checkpoints
        if outcome.type == "AnswerBarrier" and checkpoints is not None and checkpoints.barrier is not None:
            from rationalizer.groups.barriers import Closing, close

            close(group, Closing(True, frozenset()), self.log_time)
        return outcome


@pytest.mark.parametrize(
    ("name", "world", "kind"),
    [
        ("rollback", KeepsProgress, Kind.CHECKPOINT),
        ("hand_over", HandsOverTooSoon, Kind.TWO_OWNERS_OF_A_KEY),
        ("hold_ends", CompletesAlone, Kind.CHECKPOINT),
    ],
)
def test_planted_faults_are_found(name: str, world: type[World], kind: Kind) -> None:
    assert replayed(name, world)[0].get(kind), replayed(name, world)[0]
