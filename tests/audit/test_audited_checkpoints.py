"""Checkpoints in the audit: what was handed over and what went back, and planted faults that it finds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.observe.words import why_rebalanced
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.observer import Observer
from rationalizer import Group, Outcome, World
from rationalizer.dump import DumpReader
from rationalizer.groups.history import Assignments
from rationalizer.history import End
from rationalizer.plane import Entry
from tests.audit.broken_groups import Meddler, each_piece
from tests.scripts.replica import Replica
from tests.scripts.runner import SCRIPTS, played

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
        ("rollback", KeepsProgress, Breach.CHECKPOINT),
        ("hand_over", HandsOverTooSoon, Breach.TWO_OWNERS_OF_A_KEY),
        ("hold_ends", CompletesAlone, Breach.CHECKPOINT),
    ],
)
def test_planted_faults_are_found(name: str, world: type[World], kind: Breach) -> None:
    assert replayed(name, world)[0].get(kind), replayed(name, world)[0]


# The audit and the history of owners follow groups that take checkpoints: here the logs of the rules' scripts.


LOGS = [
    (path.stem, number) for path in SCRIPTS["checkpoints"] for number in range(path.read_text("utf-8").count("\nlog "))
]


@cache
def logs(stem: str) -> list[tuple[int, int, list[Entry]]]:
    """Of a script: (CP, CPs, records) of each log."""
    replica = Replica()
    [path] = [path for path in SCRIPTS["checkpoints"] if path.stem == stem]
    played(path.read_text("utf-8"), replica.play)
    return replica.logs[1:]


@pytest.mark.parametrize(("stem", "number"), LOGS)
def test_no_violation_is_seen(stem: str, number: int) -> None:
    partition, partitions, log = logs(stem)[number]
    rows: dict[str, int] = {}
    observer = Observer(World(partition, partitions), lambda table, found: rows.update({table: len(found)}))
    observer.replay(log)
    assert observer.violations == {}


@pytest.mark.parametrize(("stem", "number"), LOGS)
def test_spans_are_those_of_the_state(stem: str, number: int) -> None:
    """At each place: who owns what, with which token, is what the spans say."""
    partition, partitions, log = logs(stem)[number]
    world, history = World(partition, partitions), Assignments("g", keep=1_000)
    for entry in log:
        history.see(world, world.apply(*entry))
        group = world.group("g")
        held = {(*key, s.lo, s.hi, s.client_id, s.epoch) for key, spans in history.now.items() for s in spans if s.held}
        assert held == set() if group is None else held == owned(group)


def owned(group: Group) -> set[tuple[str, int, int, int, str, int]]:
    """(topic, partition, lo, hi, client, token); neighbours of one owner and token are one."""
    found: list[tuple[str, int, int, int, str, int]] = []
    for each in group.assigned():
        for piece in each.pieces:
            lo, who = piece.lo, (group.members[piece.owner].client_id, piece.since)
            if found and found[-1][:2] == each[:2] and found[-1][3] + 1 == lo and found[-1][4:] == who:
                lo = found.pop()[2]
            found.append((each.topic, each.partition, lo, piece.hi, *who))
    return set(found)


def causes(stem: str, number: int) -> list[str]:
    partition, partitions, log = logs(stem)[number]
    world, history = World(partition, partitions), Assignments("g", keep=1_000)
    for entry in log:
        history.see(world, world.apply(*entry))
    return ["; ".join(why_rebalanced(each)) for each in history.rebalances]


def test_why_a_group_that_takes_checkpoints_was_rebalanced() -> None:
    found = [cause for stem, number in LOGS for cause in causes(stem, number)]
    assert "checkpoint 6 was complete" in found
    assert "a left; checkpoint 8 was complete" in found
    assert "admin put the group back to checkpoint 7" in found
    assert "b was silent for 1.0 s" in found


def test_going_back_ends_every_span() -> None:
    [(partition, partitions, log)] = logs("x08_rollback")
    world, history = World(partition, partitions), Assignments("g", keep=1_000)
    begun = [span for entry in log for span in history.see(world, world.apply(*entry))]
    assert [span.ended for span in begun if span.held and span.epoch == 5] == [End.RESET, End.RESET]
