"""Every cell of the group plane's table of transitions, against the machine, in each situation that it stands for."""

from __future__ import annotations

import pytest

from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.wire.records import KINDS
from tests.rationalizer.samples import other_records
from tests.scripts.records import words_of
from tests.scripts.replica import Replica
from tests.tables.groups import (
    CHECKPOINT_TRANSITIONS,
    COLUMNS,
    MOVES,
    SETTLE_TRANSITIONS,
    TRANSITIONS,
    Effect,
    Ending,
    Transition,
    Who,
)

LOG = f"log a1=a/1 a2=a/2 b1=b/1 c1=c/1 admin=admin/1 level={SUPPORTED_LEVEL}"
A, B = "a1 joins flights:2 pattern=^f", "b1 joins flights:2 pattern=^f"
#: a1 is overdue, b1 is not.
LATE = [A, f"{B} session=9000", "b1 ticks at=+1001"]
#: What comes before the record, by column. a1 is a sender that is a member, c1 one that is not.
SITUATIONS = {
    "unknown": ([], ["a1 ticks"], ["c1 joins flights:2 strategy=dice"]),
    "ready": (["admin configures"], [A, "a1 leaves"], ["admin configures", A, B, "b1 leaves", "a1 leaves"]),
    "stranger": ([A], [A, B], [A, B, "a1 lets go flights:1"], LATE),
    "member": ([A], [A, B], [A, B, "a1 lets go flights:1"], [A, "a1 ticks at=+1001"], LATE),
}
#: All members are overdue, so that a record that removes them finds none.
ALL_OVERDUE = [A, B, "c1 ticks at=+1001"]
PAUSE = "admin pauses until=+9000"

OF_STRANGERS = {
    "JoinGroup, ": "c1 joins flights:2",
    "JoinGroup, id": "c1 joins flights:2 member=g-0",
    "GroupHeartbeat": "c1 beats member=g-0 generation=0",
    "LeaveGroup": "c1 leaves member=g-0 generation=0",
    "TopicsChanged": "c1 sees flights:3 member=g-0",
    "CommitOffsets, id": "c1 commits offsets flights:0>5 member=g-0 generation=0",
    "CommitOffsets, pausing": "admin sets flights:0>5",
    "CommitOffsets, ": "c1 sets flights:0>5",
    "ConfigureGroup": "c1 configures max_individual_commits=9",
    "ReleaseGroup": PAUSE,
    "ForgetGroup, pausing": "admin forgets",
    "ForgetGroup": "c1 forgets",
    "Heartbeat": "c1 beats flights:0",
    "ClaimingPartition": "c1 claims flights:0",
    "ReleasingPartition": "c1 releases flights:0",
    "ClaimingMessages": "c1 claims messages flights:0 to=5",
    "HeartbeatBatch": "c1 beats batch flights:0",
    "CommitRanges": "c1 commits flights:0 0-5",
    "ClaimingShare": "c1 shares flights:0",
    "SettlingMessages": "c1 settles flights:0 done=5",
    "Tick": "c1 ticks",
    "Upgrade": "c1 upgrades level=2",
}
for each in other_records(("1", "c", "g")):
    OF_STRANGERS[type(each).__name__] = f"c1 {words_of(each, lambda key: 0, 0)}"
#: Cells with several outcomes.
OTHERS = {
    ("CommitOffsets, pausing", "PARTIAL", None): "admin sets flights:0[1-5]",
    ("ConfigureGroup", "OK", Effect.CHANGED_TARGETS): "c1 configures accept_individual_commit=no",
    ("ConfigureGroup", "UNKNOWN_PARTITIONING_STRATEGY", None): "c1 configures strategy=mine",
}
OF_MEMBERS = {
    ("JoinGroup, ", "ALREADY_MEMBER", Effect.BEAT): A,
    ("JoinGroup, ", "OK", Effect.JOINED_AGAIN): f"{A} session=900",
    ("JoinGroup, ", "OK", Effect.REPLACED): "a2 joins flights:2 pattern=^f",
    ("JoinGroup, ", "REPLACED", Effect.NOTHING): "a2 joins flights:2 seen=0",
    ("JoinGroup, id", "ALREADY_MEMBER", Effect.BEAT): "a1 joins again flights:2 pattern=^f",
    ("JoinGroup, id", "OK", Effect.JOINED_AGAIN): "a1 joins again flights:3 pattern=^f",
    ("GroupHeartbeat", "OK", Effect.BEAT): "a1 beats",
    ("GroupHeartbeat", "ILLEGAL_GENERATION", Effect.BEAT): "a1 beats generation=0",
    ("GroupHeartbeat", "ILLEGAL_GENERATION", Effect.NOTHING): "a1 beats generation=999",
    ("LeaveGroup", "OK", Effect.LEFT): "a1 leaves generation=0",
    ("LeaveGroup", "ILLEGAL_GENERATION", Effect.NOTHING): "a1 leaves generation=999",
    ("TopicsChanged", "OK", Effect.BEAT): "a1 sees flights:2",
    ("TopicsChanged", "OK", Effect.NEW_TOPICS): "a1 sees flights:3",
    ("CommitOffsets, id", "OK", Effect.COMMITTED): "a1 commits offsets flights:0>5",
    ("CommitOffsets, id", "PARTIAL", Effect.COMMITTED): "a1 commits offsets flights:7>5",
    ("CommitOffsets, id", "ILLEGAL_GENERATION", Effect.NOTHING): "a1 commits offsets flights:0>5 generation=999",
}


def key(row: Transition) -> str:
    of_members = row.record in ("JoinGroup", "CommitOffsets")
    who = {Who.WITHOUT_ID: ", ", Who.WITH_ID: ", id", Who.PAUSING: ", pausing"}.get(row.who, "")
    assert not of_members or who
    return row.record + who


def command(row: Transition, column: str, ending: Ending) -> str:
    if column == "member":
        return OF_MEMBERS[key(row), ending.code, ending.effect]
    for code, effect in ((ending.code, ending.effect), (ending.code, None)):
        if (key(row), code, effect) in OTHERS:
            return OTHERS[key(row), code, effect]
    return OF_STRANGERS[key(row)]


CELLS = [(row, column, ending) for row in TRANSITIONS for column in COLUMNS for ending in getattr(row, column)]


@pytest.mark.parametrize(
    ("row", "column", "ending"),
    CELLS,
    ids=[f"{key(row)}-{column}-{ending.code}-{ending.effect.value}" for row, column, ending in CELLS],
)
def test_the_machine_does_what_the_cell_says(row: Transition, column: str, ending: Ending) -> None:
    situations = list(SITUATIONS[column])
    if column == "ready" and (key(row) in ("JoinGroup, ", "ForgetGroup, pausing") or row.who is Who.PAUSING):
        situations.append(ALL_OVERDUE)
    for before in situations:
        replica = Replica()
        for line in (LOG, *before, *([PAUSE] if row.who is Who.PAUSING else [])):
            list(replica.play(line))
        replica.group_cells.clear()
        printed = list(replica.play(command(row, column, ending)))
        assert replica.group_cells == {(row, column, ending)}, (before, printed)


def test_every_record_type_has_its_row() -> None:
    rows = {row.record for row in TRANSITIONS} | {row.record for row in CHECKPOINT_TRANSITIONS}
    rows |= {row.record for row in SETTLE_TRANSITIONS}
    assert rows == {kind.name for kind in KINDS.values()}


def test_no_cell_and_no_move_is_named_twice() -> None:
    assert len(CELLS) == len(set(CELLS))
    assert len(MOVES) == len({(move.before, move.after) for move in MOVES})
