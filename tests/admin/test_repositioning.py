"""Moving positions despite faults of the log, the network or other admins (C11): nothing, everything, or named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kafka_marshal import AdminError, ConfigurationError, GroupPausedError
from kafka_marshal.admin import MovePlan, repositioning, session
from rationalizer import ClaimingPartition, CommitRanges, Record, ReleaseGroup, ReleasingPartition, Tick
from tests.admin.conftest import Group

#: Partition → progress before: plain, with islands, granted, and granted with more done after it and islands.
BEFORE: dict[int, tuple[int, int, list[tuple[int, int]]]] = {
    0: (9, -1, []),
    1: (9, -1, [(12, 14), (17, 17)]),
    2: (9, 9, []),
    3: (9, 5, [(20, 22)]),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter time-outs for what never arrives."""
    monkeypatch.setattr(repositioning, "STEP_TIMEOUT_S", 1.5)
    monkeypatch.setattr(repositioning, "SETTLE_TIMEOUT_S", 1.5)
    monkeypatch.setattr(session, "ANSWER_TIMEOUT_S", 1.5)


@pytest.fixture
def laid(group: Group) -> Group:
    """Four partitions of 30 messages, with every kind of progress."""
    group.fill(4, 30)
    group.lay(BEFORE)
    assert group.progress() == BEFORE
    return group


def is_move(record: Record, *partitions: int) -> bool:
    """A release that writes a position."""
    return isinstance(record, ReleasingPartition) and record.partition in partitions and record.last_offset is not None


def to_20(group: Group) -> dict[tuple[str, int], int]:
    return {(group.data, partition): 20 for partition in BEFORE}


MOVED: dict[int, tuple[int, int, list[tuple[int, int]]]] = dict.fromkeys(BEFORE, (19, -1, []))


def test_what_is_done_above_a_new_position_can_stay_done(laid: Group) -> None:
    targets = {(laid.data, 0): 5, (laid.data, 1): 11, (laid.data, 3): 21}
    with laid.admin().pause(laid.group) as pause:
        assert [m.kept for m in pause.reposition(targets, keep_done=True, dry_run=True)] == [
            (),
            ((12, 14), (17, 17)),
            (),
        ]
        moves = pause.reposition(targets, keep_done=True)
    assert [(m.partition, m.before, m.after, m.done_ahead) for m in moves] == [
        (0, 10, 5, 0),
        (1, 10, 11, 0),
        (3, 10, 23, 0),
    ]
    assert laid.progress() == {
        0: (4, -1, []),
        1: (10, -1, [(12, 14), (17, 17)]),
        2: BEFORE[2],
        3: (22, -1, []),  # 21 and 22 were done
    }
    assert held_by(laid) == {None}


def test_an_undo_puts_back_what_was_and_keeps_what_has_been_done_since(laid: Group, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    targets = {(laid.data, 0): 25, (laid.data, 1): 0, (laid.data, 3): 25}
    with laid.admin().pause(laid.group) as pause:
        MovePlan.of(laid.group, laid.coordination, pause.reposition(targets, dry_run=True)).write(path)
        pause.reposition(targets)
    laid.lay({0: (26, -1, []), 1: (4, -1, [(11, 11)])})  # progress of members since
    plan = MovePlan.read(path)
    assert [(m.after, m.kept) for m in laid.admin().plan(laid.group, plan)] == [
        (10, ((25, 26),)),
        (10, ((11, 14), (17, 17))),
        (10, ((20, 22),)),
    ]
    with laid.admin().pause(laid.group) as pause:
        pause.undo(plan)
    assert laid.progress() == {
        0: (9, -1, [(25, 26)]),
        1: (9, -1, [(11, 14), (17, 17)]),
        2: BEFORE[2],
        3: (9, -1, [(20, 22)]),
    }
    with pytest.raises(ConfigurationError, match="this plan is of group"):
        laid.admin().plan("other", plan)


def test_a_move_whose_kept_work_does_not_show_is_put_back_whole(laid: Group) -> None:
    """The position has already been replaced by then."""
    lost: list[Record] = []

    def rule(_cp: int, record: Record) -> bool:
        if isinstance(record, CommitRanges) and not lost:
            lost.append(record)
            return False
        return True

    with (
        laid.faulty_admin(rule).pause(laid.group) as pause,
        pytest.raises(AdminError, match="Every position is as it was before"),
    ):
        pause.reposition({(laid.data, 0): 5, (laid.data, 1): 11}, keep_done=True)
    assert lost
    assert laid.progress() == BEFORE


def held_by(group: Group) -> set[str | None]:
    return {lease.client_id for world in group.worlds().values() for lease in world.leases()}


def test_a_move_replaces_all_kinds_of_progress_and_a_second_one_changes_nothing(laid: Group) -> None:
    with laid.admin().pause(laid.group) as pause:
        moves = pause.reposition(to_20(laid))
        assert [(m.partition, m.before, m.after, m.done_ahead) for m in moves] == [
            (0, 10, 20, 0),
            (1, 10, 20, 0),
            (2, 10, 20, 0),
            (3, 10, 20, 3),
        ]
        assert laid.progress() == MOVED
        assert [m.before for m in pause.reposition(to_20(laid))] == [20] * 4
    assert laid.progress() == MOVED
    assert held_by(laid) == {None}


def test_a_dry_run_appends_nothing_and_a_plan_needs_no_pause(laid: Group) -> None:
    admin = laid.admin()
    with admin.pause(laid.group) as pause:
        before = {cp: world.snapshot() for cp, world in laid.worlds().items()}
        moves = pause.reposition(to_20(laid), dry_run=True)
        assert {cp: world.snapshot() for cp, world in laid.worlds().items()} == before
    before = {cp: world.snapshot() for cp, world in laid.worlds().items()}
    assert admin.plan(laid.group, to_20(laid)) == moves
    assert {cp: world.snapshot() for cp, world in laid.worlds().items()} == before
    assert laid.progress() == BEFORE
    assert str(moves[1]) == f"{laid.data} [1]: 10 → 20"


def test_a_claim_that_does_not_come_leaves_everything_as_it_was(laid: Group) -> None:
    def rule(_cp: int, record: Record) -> bool:
        return not (isinstance(record, ClaimingPartition) and record.partition == 2)

    with laid.faulty_admin(rule).pause(laid.group) as pause:
        with pytest.raises(AdminError, match=r"no position was moved: .*\[2\]: no answer") as caught:
            pause.reposition(to_20(laid))
        assert caught.value.moved == caught.value.unknown == ()
    assert laid.progress() == BEFORE
    assert held_by(laid) == {None}


def test_a_position_that_can_not_be_written_puts_the_others_back_in_full(laid: Group) -> None:
    with laid.faulty_admin(lambda _cp, record: not is_move(record, 2)).pause(laid.group) as pause:
        with pytest.raises(AdminError, match="Every position is as it was before") as caught:
            pause.reposition(to_20(laid))
        assert caught.value.moved == caught.value.unknown == ()
        assert laid.progress() == BEFORE
    assert laid.progress() == BEFORE
    assert held_by(laid) == {None}


def test_what_can_not_be_put_back_is_named_and_done_again_finishes_it(laid: Group) -> None:
    """Another admin ends the pause in the middle of the last step."""
    settling = threading.Event()

    def rule(_cp: int, record: Record) -> bool:
        if isinstance(record, ReleasingPartition) and record.last_offset is None:
            settling.set()  # partitions that did not move
            thread.join(10)  # when it continues, the pause is over
        return not is_move(record, 1, 2)

    def end_it() -> None:
        assert settling.wait(10)
        ended.extend(laid.admin().resume(laid.group))

    ended: list[object] = []
    thread = threading.Thread(target=end_it)
    thread.start()
    pause = laid.faulty_admin(rule, "first").pause(laid.group)
    with pytest.raises(AdminError, match=r"Moved, and not put back \(the pause .* was ended") as caught, pause:
        pause.reposition(to_20(laid))
    thread.join(10)
    assert len(ended) == 3
    moved = {partition for _, partition in caught.value.moved}
    assert moved == {0, 3}
    assert caught.value.unknown == ()
    assert laid.progress() == {p: MOVED[p] if p in moved else BEFORE[p] for p in BEFORE}
    with laid.admin("first").pause(laid.group) as again:
        again.reposition(to_20(laid))
    assert laid.progress() == MOVED


def test_a_move_without_the_pause_is_no_move(laid: Group) -> None:
    """The pause ends right before positions are written, and no member claims: moves forward would look successful."""
    over = threading.Event()

    def rule(_cp: int, record: Record) -> bool:
        if is_move(record, *BEFORE) and not over.is_set():
            over.set()
            laid.append(*((cp, ReleaseGroup("another run", "first", laid.group, 0)) for cp in range(3)))
        return True

    with laid.faulty_admin(rule, "first").pause(laid.group) as pause:
        with pytest.raises(AdminError, match=r"Moved, and not put back .*\[3\]: 10 → 23") as caught:
            pause.reposition(to_20(laid))
        assert {partition for _, partition in caught.value.moved} == set(BEFORE)
    # Progress was raised, as by any release, and not replaced: offsets done beyond it stay done.
    assert laid.progress() == {0: (19, -1, []), 1: (19, -1, []), 2: (19, 9, []), 3: (22, 5, [])}


def test_what_the_log_has_not_said_is_named(laid: Group) -> None:
    """Records of one partition are lost once positions are written."""
    writing = threading.Event()

    def rule(_cp: int, record: Record) -> bool:
        if is_move(record, 2):
            writing.set()
        return not (writing.is_set() and isinstance(record, ReleasingPartition) and record.partition == 2)

    with laid.faulty_admin(rule).pause(laid.group) as pause:
        with pytest.raises(AdminError, match=r"the log has not said: .*\[2\]: 10 → 20") as caught:
            pause.reposition(to_20(laid))
        assert caught.value.unknown == ((laid.data, 2),)
        assert caught.value.moved == ()
    assert laid.progress() == BEFORE


@pytest.mark.parametrize("step", ["claims", "moves"])
def test_ctrl_c_puts_everything_back(laid: Group, step: str) -> None:
    pressed = threading.Event()

    def rule(_cp: int, record: Record) -> bool:
        claims = isinstance(record, ClaimingPartition) and record.partition == 2
        if not pressed.is_set() and (claims if step == "claims" else is_move(record, 2)):
            pressed.set()
            raise KeyboardInterrupt
        return True

    with laid.faulty_admin(rule).pause(laid.group) as pause:
        with pytest.raises(KeyboardInterrupt):
            pause.reposition(to_20(laid))
        assert laid.progress() == BEFORE
        assert pause.reposition(to_20(laid))[0].after == 20
    assert laid.progress() == MOVED
    assert held_by(laid) == {None}


def test_a_pause_that_can_not_be_begun_everywhere_is_ended_again(group: Group) -> None:
    group.fill(1, 0)

    def rule(cp: int, record: Record) -> bool:
        return not (isinstance(record, ReleaseGroup) and record.msg_expire_time and cp == 2)

    with pytest.raises(
        AdminError, match=r"could not be paused: partition\(s\) \[2\].*not paused by this admin anywhere"
    ):
        group.faulty_admin(rule).pause(group.group).start()
    assert group.admin().pauses(group.group) == []


def test_a_pause_begins_with_one_partition_that_decides_between_two_admins(group: Group) -> None:
    group.fill(1, 0)
    paused: list[int] = []

    def rule(cp: int, record: Record) -> bool:
        if isinstance(record, ReleaseGroup) and record.msg_expire_time:
            paused.append(cp)
            return False
        return True

    with pytest.raises(AdminError, match=r"partition\(s\) \[0\] .* did not show the pause"):
        group.faulty_admin(rule).pause(group.group).start()
    assert set(paused) == {0}


def test_a_pause_that_can_not_be_ended_says_until_when_it_lasts_and_how_to_end_it(group: Group) -> None:
    group.fill(1, 0)

    def rule(cp: int, record: Record) -> bool:
        return not (isinstance(record, ReleaseGroup) and not record.msg_expire_time and cp == 1)

    says = r"may still be in force in partition\(s\) \[1\].*within 60 s.*--resume --client-id ops"
    pause = group.faulty_admin(rule, "ops").pause(group.group, expires_in=60)
    with pytest.raises(AdminError, match=says), pause:
        pass
    assert [x.partition for x in group.admin().pauses(group.group)] == [1]
    # A later admin does not disturb members in the free partitions.
    sent: list[Record] = []

    def listen(_cp: int, record: Record) -> bool:
        sent.append(record)
        return True

    with pytest.raises(GroupPausedError, match="paused by 'ops'"):
        group.faulty_admin(listen).pause(group.group).start()
    assert {type(record) for record in sent} == {Tick}
    with pytest.raises(RuntimeError) as caught, group.faulty_admin(rule, "ops").pause(group.group, expires_in=60):
        raise RuntimeError("mine")
    assert "may still be in force" in caught.value.__notes__[0]
    assert [x.partition for x in group.admin().resume(group.group)] == [1]
    assert group.admin().pauses(group.group) == []
