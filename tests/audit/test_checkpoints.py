"""The audit and the history of owners follow groups that take checkpoints: here the logs of the rules' scripts."""

from __future__ import annotations

from functools import cache

import pytest

from kafka_marshal.observe.words import why_rebalanced
from kafka_marshal.pipeline.audit.observer import Observer
from rationalizer import Group, World
from rationalizer.groups.history import Assignments
from rationalizer.history import End
from rationalizer.plane import Entry
from tests.scripts.replica import Replica
from tests.scripts.runner import SCRIPTS, played

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
