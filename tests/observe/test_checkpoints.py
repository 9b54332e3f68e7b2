"""What a log shows of checkpoints: who began and answered them, what was handed over, what went back and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.cli.log import Filter, LogLines
from kafka_marshal.observe.checkpoint_history import CheckpointHistory, CompleteCheckpoint, Ended, Happened, WentBack
from kafka_marshal.observe.checkpoints import (
    BarrierRow,
    CheckpointsRow,
    UnsavedRow,
    checkpoints_row,
    cuts_now,
    is_initial,
    oldest_cut,
    waits_for,
)
from kafka_marshal.observe.ownership import PieceOwnership, ended_text
from kafka_marshal.observe.problems import problems_of
from kafka_marshal.observe.rows import GroupRow, LeaseRow
from kafka_marshal.observe.stuck import with_checkpoints
from rationalizer import LeaveGroup, Record, World, encode
from rationalizer.dump import DumpReader
from rationalizer.groups.history import Assignments
from rationalizer.wire.wellformed import REACHED, REFUSED
from tests.fleet import Fleet, cut, started

EXAMPLES = Path(__file__).parents[1] / "rationalizer" / "examples"

GROUP = "g"


def records(name: str) -> list[tuple[int, int, bytes | None]]:
    with (EXAMPLES / f"checkpoint_{name}.dump.jsonl").open("rb") as file:
        found = list(DumpReader(file))
        return [(each.offset, each.timestamp_ms, each.value) for each in found]


def happened(name: str, *, skip: int = 0) -> Iterator[tuple[int, Happened]]:
    """(offset, event); the history begins after the first `skip` records."""
    world = World(0, 1)
    entries = records(name)
    world.apply_many(entries[:skip])
    history = CheckpointHistory(GROUP)
    history.begin(world)
    for entry in entries[skip:]:
        outcome = world.apply(*entry)
        for each in history.see(world, outcome) if outcome.of_group else ():
            yield entry[0], each


@pytest.mark.parametrize("skip", [0, 8])
def test_a_hand_over_and_a_leave(skip: int) -> None:
    found = dict(happened("hand_over", skip=skip))
    second = found[11]
    assert isinstance(second, CompleteCheckpoint)
    assert (second.checkpoint, second.members, second.owners, second.slowest) == (9, 2, 2, "w2")
    assert (second.partitions, second.handed_over, second.missing, second.left) == (2, 1, (), ())
    (left,) = [each for offset, each in happened("leave", skip=skip) if offset == 10]
    assert isinstance(left, CompleteCheckpoint)
    assert (left.left, left.handed_over) == (("w2",), 1)


def test_a_lost_member_and_what_it_undoes() -> None:
    taken, back = (each for offset, each in happened("loss") if offset == 11)
    assert isinstance(taken, CompleteCheckpoint)
    assert [(cut.partition, cut.client, cut.cut, cut.why) for cut in taken.missing] == [(1, "w2", 6, "not answered")]
    assert isinstance(back, WentBack)
    assert (back.why, back.client, back.checkpoint, back.pieces) == ("lost", "w2", 8, 1)
    assert back.undone_ms == 3_130, "since it got the piece at 7"
    ended, back = (each for offset, each in happened("loss_hold") if offset == 10)
    assert ended == Ended(8, ended.log_time, "lost", "w2")
    assert isinstance(back, WentBack)
    assert (back.checkpoint, back.pieces) == (6, 2), "in a hold group all go back"


def test_barriers_that_end_and_what_a_client_sets_back() -> None:
    ended = [each for _, each in happened("hold_ends") if isinstance(each, Ended)]
    assert [(each.barrier, each.why, each.client) for each in ended] == [(8, "refused", "w2"), (11, "over", "w2")]
    back = [each for _, each in happened("positions") if isinstance(each, WentBack)]
    assert [(each.offset, each.why, each.client, each.checkpoint) for each in back] == [
        (15, "positions", "admin", 15),
        (17, "rollback", "admin", 8),
    ]


def test_cuts_of_the_newest_and_of_older_ones() -> None:
    world = World(0, 1)
    world.apply_many(records("loss"))
    group = world.group(GROUP)
    assert group is not None
    assert group.checkpoints is not None
    assert [(cut.partition, cut.cut, cut.client) for cut in cuts_now(group)] == [(0, 8, "w1"), (1, 6, "w1")]
    oldest = oldest_cut(group, group.checkpoints.newest)
    assert oldest is not None
    assert (oldest.partition, oldest.cut) == (1, 6)
    first = group.checkpoints.kept[0].id
    assert (is_initial(group, first), is_initial(group, 8), oldest_cut(group, first)) == (True, False, None)
    assert waits_for(group) == []
    row = checkpoints_row(group, world.log_time + 500)
    assert row is not None
    assert (row.newest, row.age_ms) == (8, 510)


def test_who_says_how_it_came_to_its_owner() -> None:
    def spans(name: str, partition: int) -> list[tuple[str, str]]:
        owned = PieceOwnership((GROUP, "flights", partition), 0, 1)
        owned.assignments = Assignments(GROUP)
        owned.take(records(name))
        owned.end()
        return [(each.client_id, ended_text(each)) for each in owned.spans if each.held]

    assert spans("leave", 1) == [
        ("w1", "released, next offset 112; then w2"),
        ("w2", "it left, next offset 141; then w1"),
        ("w1", ""),
    ]
    assert spans("rollback", 0)[0] == ("w1", "its group went back to a checkpoint")


def test_the_log_says_it_in_words() -> None:
    lines = LogLines(1, Filter(None, None, False), {})
    told = {each.offset: f"{each.what} ({each.why})" for each in lines.read(0, records("leave"))}
    assert told[8] == "begins a checkpoint after 6: for a hand-over, waits for 1.0 s at most (waits for w1, w2)"
    assert told[9] == "hands in for checkpoint 8: flights/1=140; leaves (waits for w1)"
    assert told[10] == (
        "hands in for checkpoint 8: nothing new (checkpoint 8 is complete after 0.0 s, 2 of 2 members; hands over 1 "
        "piece; w2 left; generation 10, 1 member)"
    )


# -- check -------------------------------------------------------------------------------------------------------


def piece(cut: int, waiting_ms: int | None, *, as_of_ms: int = 0, still_ms: int = 100_000) -> LeaseRow:
    """A piece with 7 messages waiting."""
    return LeaseRow(
        *("g", "flights", 3),
        cp=0,
        client="w2",
        instance="h/1/0.1.0/x",
        epoch=5,
        heartbeat_interval_ms=3_000,
        silence_ms=0,
        stable=1_233,
        log_start=0,
        log_end=1_241,
        idle_ms=still_ms,
        held_ms=still_ms,
        waiting_ms=waiting_ms,
        kind="coordinated",
        cut=cut,
        as_of_ms=as_of_ms,
    )


#: Complete 95, 65, 35 and 5 seconds ago.
KEPT = CheckpointsRow(16, False, 400, 5_000, ((100, 910_000), (200, 940_000), (300, 970_000), (400, 1_000_000)))


def kinds(row: LeaseRow, checkpoints: CheckpointsRow = KEPT, most_ms: int | None = None) -> list[str]:
    group = GroupRow("g", [row], kind="coordinated", checkpoints=checkpoints)
    return [problem.kind for problem in problems_of(group, max_cut_ms=most_ms) if problem.kind != "hung"]


def test_a_cut_is_old_if_messages_wait_and_three_checkpoints_went_by() -> None:
    assert kinds(piece(100, 66_000)) == ["old_cut"]
    assert kinds(piece(0, 66_000)) == ["old_cut"], "never handed in"
    assert kinds(piece(200, 66_000)) == [], "it is in the third newest"
    assert kinds(piece(100, 60_000)) == [], "its messages came later than the third newest"
    assert kinds(piece(100, None)) == [], "nothing waits"
    assert kinds(piece(300, 66_000), most_ms=30_000) == ["old_cut"]
    assert kinds(piece(300, 20_000), most_ms=30_000) == []
    few = CheckpointsRow(1, False, 400, 5_000, KEPT.kept[-1:])
    assert kinds(piece(100, 66_000), few) == []
    (problem,) = (
        each for each in problems_of(GroupRow("g", [piece(100, 66_000)], checkpoints=KEPT)) if each.kind == "old_cut"
    )
    assert "w2 has not handed it in since checkpoint 100, for over 1 min 6 s" in problem.text
    assert "kafka-marshal show flights:3:1234" in problem.text


def test_a_worker_hangs_only_if_a_checkpoint_was_complete_without_progress() -> None:
    def is_hung(waiting_ms: int, still_ms: int) -> bool:
        group = GroupRow("g", [piece(400, waiting_ms, still_ms=still_ms)], kind="coordinated", checkpoints=KEPT)
        return any(member.is_hung for member in group.members)

    # What the view measures is as of the newest checkpoint: these spans are less its age.
    assert not is_hung(waiting_ms=0, still_ms=0)
    assert is_hung(waiting_ms=10_000, still_ms=10_000)
    assert KEPT.as_of_ms == 5_000
    idle = CheckpointsRow(16, False, 400, 86_400_000, KEPT.kept)
    assert idle.as_of_ms == 90_000, "where nothing is done no checkpoint is begun"


def test_where_all_have_to_take_part_no_member_is_blamed() -> None:
    row = piece(400, 60_000)
    for hold in (False, True):
        checkpoints = CheckpointsRow(16, hold, 400, 5_000, KEPT.kept)
        found = problems_of(GroupRow("g", [row], kind="coordinated", checkpoints=checkpoints), max_cut_ms=1_000)
        assert [each.kind for each in found] == ["hung", "old_cut"]
        assert [("beats, but no progress" in found[0].text, "see w2's log" in found[1].text)] == [(not hold, not hold)]
        for each in found if hold else ():
            assert "kafka-marshal checkpoints g says which" in each.text
        (member,) = GroupRow("g", [row], kind="coordinated", checkpoints=checkpoints).members
        assert (member.is_still, member.is_hung) == (True, not hold)
    still = replace(row, stuck="no progress for 50 s with messages waiting: see w2's log")
    assert (
        with_checkpoints(still, checkpoints).stuck
        == "no progress for 50 s: it moves with a checkpoint of all members; see check"
    )
    unread = replace(row, stuck="offset 5 can't be read: it is harmed")
    assert with_checkpoints(unread, checkpoints) == unread


def test_a_piece_that_was_never_handed_in_is_the_oldest() -> None:
    world = World(0, 1)

    def append(record: Record, cp: int) -> int:
        world.apply(world.next_offset, 1_000, encode(record))
        return world.next_offset - 1

    fleet = Fleet(GROUP, 1, append)
    fleet.upgrade(3)
    fleet.configure()
    first = fleet.begin("w1", 0)
    generation = fleet.join("w1", {"t": 2})
    fleet.commit("w1", generation, *started("t", 0, 1))
    group = world.group(GROUP)
    assert group is not None
    assert oldest_cut(group, first) is None
    newest = fleet.begin("w1", first)
    fleet.answer("w1", generation, newest, cut("t", 0, 5))
    oldest = oldest_cut(group, newest)
    assert oldest is not None
    assert (oldest.partition, oldest.cut, oldest.client) == (1, None, "w1")


# -- a store that refuses ----------------------------------------------------------------------------------------


def refusing(*refused: str) -> tuple[World, CheckpointHistory, list[int]]:
    """w1 and w2, and checkpoints of which each lacks these: "w1 w2" both refuse."""
    world, history, ids = World(0, 1), CheckpointHistory(GROUP), []

    def append(record: Record, cp: int) -> int:
        outcome = world.apply(world.next_offset, 1_000 * world.next_offset, encode(record))
        history.see(world, outcome)
        return world.next_offset - 1

    fleet = Fleet(GROUP, 1, append)
    fleet.upgrade(3)
    fleet.configure()
    newest = fleet.begin("w1", 0)
    fleet.join("w1", {"t": 2}, session=100_000)
    generation = fleet.join("w2", {"t": 2}, session=100_000)
    fleet.commit("w1", generation, *started("t", 0, 1))
    newest = fleet.begin("w1", newest, keep=0)
    generation = fleet.answer("w1", generation, newest, cut("t", 0, 5), cut("t", 1, 5))  # hands one over
    for who in refused:
        ids.append(fleet.begin("w1", newest))
        for client in ("w1", "w2"):
            fleet.answer(client, generation, ids[-1], answer=REFUSED if client in who else REACHED)
        if ids[-1] in [kept.id for kept in _kept(world)]:
            newest = ids[-1]
    return world, history, ids


def _kept(world: World) -> Sequence[Any]:
    group = world.group(GROUP)
    assert group is not None
    assert group.checkpoints is not None
    return group.checkpoints.kept


def test_who_could_save_nothing_is_known_until_it_saves_or_goes() -> None:
    def unsaved(*refused: str) -> list[tuple[str, int, int]]:
        _, history, ids = refusing(*refused)
        return [(each.client, each.count, ids.index(each.checkpoint)) for each in history.unsaved.values()]

    assert unsaved("w1") == [("w1", 1, 0)]
    assert unsaved("w1", "w1 w2", "w1") == [("w1", 3, 2)]
    assert unsaved("w1 w2", "w2", "") == []
    world, history, _ = refusing("w1 w2")
    group = world.group(GROUP)
    assert group is not None
    gone = group.clients["w1"]
    leave = LeaveGroup(gone.instance_id, "w1", GROUP, gone.member_id, group.generation)
    history.see(world, world.apply(world.next_offset, 10**5, encode(leave)))
    assert [each.client for each in history.unsaved.values()] == ["w2"]


def test_a_store_that_hangs_is_a_problem_after_half_of_the_time() -> None:
    """Its members have not answered, so no record says that they could not save."""
    found = {}
    for open_ms in (30_000, 30_001):
        hangs = replace(KEPT, barrier=BarrierRow(450, 970_000, 60_000, False, open_ms, ("w2",)))
        group = GroupRow("g", [piece(400, 66_000), replace(piece(400, 0), client="w1")], checkpoints=hangs)
        found[open_ms] = [each for each in problems_of(group) if each.kind == "unsaved"]
    assert found[30_000] == []
    (problem,) = found[30_001]
    assert problem.text.startswith("checkpoint 450 has waited for 1 member (w2) for 30 s, of at most 1 min: ")
    assert "the store of states refuses or hangs" in problem.text
    assert [each.client for each in problem.partitions] == ["w2"]
    answered = replace(KEPT, barrier=BarrierRow(450, 970_000, 60_000, False, 40_000, ()))
    assert "unsaved" not in kinds(piece(400, None), answered)


def test_a_store_that_refuses_is_one_problem_and_comes_first() -> None:
    def row(client: str, partition: int) -> LeaseRow:
        still = "no progress for 50 s with messages waiting: see w2's log"
        found = replace(piece(100, 66_000), client=client, instance=f"{client}/1", partition=partition, stuck=still)
        return replace(found, held_back="held back at offset 1234 for 50 s by key c472")

    rows = [row("w1", 0), row("w1", 1), row("w2", 2), row("w2", 3)]
    both = tuple(UnsavedRow(client, f"{client}/1", 60_000, 412) for client in ("w1", "w2"))
    for hold in (False, True):
        refuses = replace(KEPT, hold=hold, unsaved=both)
        group = GroupRow("g", [with_checkpoints(each, refuses) for each in rows], checkpoints=refuses)
        first, *others = problems_of(group)
        assert (first.kind, first.amount, len(first.partitions)) == ("unsaved", 2, 4)
        assert first.text.startswith("checkpoint 412 was not saved by 2 members (w1, w2), for over 1 min 6 s: ")
        assert ("the store of states refuses or hangs" in first.text) is not hold
        assert [each.kind for each in others] == (["stuck_key"] * 4 if hold else [])
        assert not any(member.is_hung for member in group.members)
        assert ["its state is not saved; see check" in each.stuck for each in group.leases] == [not hold] * 4
    # One of both refuses: what is said of the other stays.
    refuses = replace(KEPT, unsaved=both[:1])
    group = GroupRow("g", [with_checkpoints(each, refuses) for each in rows], checkpoints=refuses)
    found = problems_of(group)
    assert [(each.kind, len(each.partitions)) for each in found] == [("unsaved", 2), ("hung", 2), ("old_cut", 2)]
    assert all("w2" in each.text for each in found[1:])


def test_pieces_of_one_member_that_were_not_handed_in_are_one_problem() -> None:
    rows = [replace(piece(100, 66_000), partition=partition, held_back="held back") for partition in range(12)]
    found = [each for each in problems_of(GroupRow("g", rows, checkpoints=KEPT)) if each.kind != "hung"]
    assert [(each.kind, each.amount) for each in found] == [("old_cut", 12)], "and no advice to evict"
    assert found[0].text.startswith("flights 0-11: w2 has not handed them in since checkpoint 100, for over 1 min 6 s")
