"""Pausing a group while it works: members stop and resume without a restart (C10, C11)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal import Admin, AdminError, ClaimedLease, ConfigurationError, GroupPausedError, Move, Pause
from kafka_marshal.admin.positions import moves_to, resolve
from kafka_marshal.admin.repositioning import _add, _Done, _Mover
from kafka_marshal.admin.session import progress_in
from kafka_marshal.types import Target
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    World,
    encode,
)
from tests.admin.conftest import HI, Group, wait_until

#: An interval beside which what a busy machine adds is nothing: what is released at once is not called slow.
CALM = 3_000


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_positions_move_while_members_run_without_a_restart(group: Group, delivery: str) -> None:
    topic = group.fill(partitions=4, messages=60)
    members = [group.start(name, delivery=delivery, batch_size=20, hi=CALM) for name in ("a", "b", "c")]
    group.at_rest(group.everything())
    before = {lease.partition: lease.epoch for lease in group.admin().progress(group.group)}
    with group.admin().pause(group.group) as pause:
        assert pause.wait_released(10) == []
        moves = pause.reposition({(topic, 0): 10, (topic, 1): "earliest", (topic, 2): "latest"})
        assert [(m.partition, m.before, m.after) for m in moves] == [(0, 60, 10), (1, 60, 0), (2, 60, 60)]
    again = Counter({(0, offset): 1 for offset in range(10, 60)}) + Counter({(1, offset): 1 for offset in range(60)})
    group.at_rest(group.everything() + again)
    after = {lease.partition: lease.epoch for lease in group.admin().progress(group.group)}
    assert all(before[move.partition] < (move.epoch or 0) < after[move.partition] for move in moves)
    assert all(member.is_alive() and not member.errors and not member.lost for member in members)
    assert group.admin().pauses(group.group) == []


def test_positions_move_forward_in_the_middle_of_work(group: Group) -> None:
    topic = group.fill(partitions=2, messages=40)
    member = group.start("a", hold={(0, 5), (1, 5)}, auto_done=True, hi=CALM)
    assert member.holding.wait(10)
    held = member.seen[-1]
    with group.admin().pause(group.group) as pause:
        wait_until(member.knows_of_pause)
        member.let_go.set()
        assert pause.wait_released(10) == []
        before = {m.partition: m.before for m in pause.reposition({(topic, 0): 30, (topic, 1): 30}, dry_run=True)}
        # Its message in flight was finished and released with its offset.
        assert before[held[0]] == 6
        pause.reposition({(topic, 0): 30, (topic, 1): 30})
    wait_until(lambda: set(group.stable().values()) == {39})
    seen = group.seen()
    assert max(seen.values()) == 1
    assert {offset for partition, offset in seen if partition == held[0]} == {*range(6), *range(30, 40)}
    assert {(p, o) for p in (0, 1) for o in range(30, 40)} <= set(seen)


def test_a_moment_becomes_the_first_message_at_or_after_it(group: Group) -> None:
    topic = group.fill(1, 20, **{"message.timestamp.type": "LogAppendTime"})
    group.publish(topic, 1, 1)
    reader = group.cluster.data_reader("look", {})
    reader.assign({(topic, 0): 20})
    messages, _ = reader.read(1, 10)
    reader.close()
    stamp_ms = messages[0].timestamp()[1]  # type: ignore[attr-defined]
    admin = group.admin()
    moment = datetime.fromtimestamp(stamp_ms / 1000, UTC)
    assert admin.plan(group.group, {(topic, 0): moment})[0].after in range(21)
    assert admin.plan(group.group, {(topic, 0): datetime(2000, 1, 1, tzinfo=UTC)})[0].after == 0
    assert admin.plan(group.group, {(topic, 0): datetime(2100, 1, 1, tzinfo=UTC)})[0].after == 21


def test_members_are_idle_during_the_pause_and_come_back_by_themselves(group: Group) -> None:
    topic = group.fill(2, 10)
    members = [group.start("a"), group.start("b")]
    group.at_rest(group.everything())
    with group.admin().pause(group.group) as pause:
        pause.wait_released(10)
        group.publish(topic, 2, 10)
        with pytest.raises(GroupPausedError) as caught:
            members[0].marshal.claim(topic, 0, timeout=0.2)
        assert caught.value.client_id == pause.client_id
        assert group.seen() == group.everything()
    group.messages = 20
    group.at_rest(group.everything())


def test_work_in_flight_for_longer_than_two_intervals_is_named_and_repeated(group: Group) -> None:
    group.fill(2, 30)
    member = group.start("a", hold={(0, 7), (1, 7)})
    assert member.holding.wait(10)
    held = member.seen[-1]
    done = [place for place in member.seen if place != held]
    with group.admin().pause(group.group) as pause:
        left = pause.wait_released(10)
        assert [(x.topic, x.partition, x.client_id) for x in left] == [(group.data, held[0], "a")]
        assert left[0].state in ("slow", "late", "stale")  # by how long its last heartbeat was on its way
        # Earlier work was reported although a message is still in flight.
        assert left[0].stable == 6
        member.let_go.set()
    group.at_rest(group.everything() + Counter([held]))
    assert all(group.seen()[place] == 1 for place in done)
    assert [(x.partition) for x in member.lost] == [held[0]]


def test_at_most_once_nothing_is_repeated_however_long_it_is_in_flight(group: Group) -> None:
    group.fill(1, 40)
    member = group.start("a", hold={(0, 5)}, delivery="at-most-once", batch_size=10)
    assert member.holding.wait(10)
    with group.admin().pause(group.group) as pause:
        # The batch was granted: by the log it is done, whatever its handler does.
        assert [(x.partition, x.stable) for x in pause.wait_released(10)] == [(0, 9)]
        member.let_go.set()
    wait_until(lambda: group.stable() == {0: 39})
    assert max(group.seen().values()) == 1
    assert set(group.seen()) == {(0, offset) for offset in (*range(6), *range(10, 40))}


def test_waiting_has_an_end_that_names_working_members(group: Group) -> None:
    group.fill(1, 10)
    # With a long interval, so that a member which waits for one after the pause fails here.
    member = group.start("a", hold={(0, 3)}, hi=60_000)
    assert member.holding.wait(10)
    with group.admin().pause(group.group) as pause:
        with pytest.raises(AdminError, match=r"\[0\] by 'a' \((fresh|unknown).*Nothing was moved") as caught:
            pause.wait_released(0.3)
        assert caught.value.in_hand == ((group.data, 0),)
        with pytest.raises(AdminError, match=r"still at work.*Nothing was changed"):
            pause.reposition({(group.data, 0): "earliest"})
        # One can wait for other partitions alone.
        assert pause.wait_released(0.3, [(group.data, 5)]) == []
        member.let_go.set()
        assert pause.wait_released(10) == []
    wait_until(lambda: group.seen() == group.everything(), 30)  # no heartbeat, hence no stable, for another 20 s


def test_a_worker_killed_during_the_pause_is_not_waited_for_longer_than_its_lease(
    group: Group, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topic = group.fill(1, 200)
    worker = group.worker("dead", topic, tmp_path_factory.mktemp("worker"), pause_s=0.3)
    wait_until(lambda: len(worker.offsets()) >= 3)
    with group.admin().pause(group.group) as pause:
        worker.kill()
        left = pause.wait_released(10)
        if left:  # else it was released before the kill
            assert [x.client_id for x in left] == ["dead"]
            assert left[0].state in ("stale", "slow")  # or it was released right before
        assert pause.reposition({(topic, 0): 150})[0].after == 150
    heir = group.start("heir")
    wait_until(lambda: len(heir.seen) == 50)
    assert heir.seen == [(0, offset) for offset in range(150, 200)]


def test_stale_holders_can_be_waited_for_until_they_hand_in(group: Group) -> None:
    group.fill(1, 5)
    lease = group.member("by-hand").claim(group.data, 0)
    with group.admin().pause(group.group) as pause:
        # Only its user can release a lease held by hand: it goes stale.
        left = pause.wait_released(10)
        assert [x.state for x in left] == ["stale"]
        with pytest.raises(AdminError, match="have not let go"):
            pause.wait_released(0.2, handed_in=True)
        group.admin().evict(group.group, group.data, 0)
        pause.wait_released(5, handed_in=True)
    assert not lease.valid


def test_the_second_admin_is_refused_by_name(group: Group) -> None:
    group.fill(1, 0)
    with group.admin("first").pause(group.group):
        with pytest.raises(GroupPausedError, match="paused by 'first'") as caught, group.admin().pause(group.group):
            pytest.fail("two admins at once")
        assert caught.value.client_id == "first"
        assert {x.client_id for x in group.admin().pauses(group.group)} == {"first"}
    assert group.admin().pauses(group.group) == []


def test_of_two_admins_at_once_one_wins_and_one_is_refused(group: Group) -> None:
    group.fill(1, 0)
    barrier = threading.Barrier(2)
    inside: list[str] = []
    refused: list[str] = []

    def run(client_id: str) -> None:
        pause = group.admin(client_id).pause(group.group)
        barrier.wait(10)
        try:
            pause.start()
        except GroupPausedError as error:
            refused.append(error.client_id)
        else:
            inside.append(client_id)
            wait_until(lambda: refused)
            pause.resume()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(inside) == 1
    assert refused == inside
    assert group.admin().pauses(group.group) == []


def test_a_pause_that_runs_out_is_noticed_and_nothing_is_moved(group: Group) -> None:
    topic = group.fill(1, 10)
    group.start("a")
    group.at_rest(group.everything())
    with group.admin().pause(group.group, expires_in=0.5) as pause:
        pause.wait_released(5)
        wait_until(lambda: pause.seconds_left == 0)
        with pytest.raises(AdminError, match=r"has run out.*Nothing more was changed"):
            pause.reposition({(topic, 0): "earliest"})
        # The member resumes although the block has not ended.
        group.publish(topic, 1, 5)
        group.messages = 15
        group.at_rest(group.everything())
        with pytest.raises(AdminError, match="has run out"):
            pause.wait_released(5)


def test_a_pause_that_runs_out_is_noticed_by_the_clock_where_the_log_is_silent(group: Group) -> None:
    topic = group.fill(1, 10)
    with group.admin().pause(group.group, expires_in=0.3) as pause:
        wait_until(lambda: pause.seconds_left == 0)
        assert len(group.admin().pauses(group.group)) == 3  # log time does not advance
        for call in (lambda: pause.reposition({(topic, 0): 5}), lambda: pause.wait_released(5)):
            with pytest.raises(AdminError, match="has run out"):
                call()
    assert group.admin().progress(group.group) == []


def test_a_pause_is_never_mended_by_extending_it_too_late(group: Group) -> None:
    """Between its end and a later ReleaseGroup members may have worked: that is another pause."""
    group.fill(1, 10)
    member = group.start("a", hold={(0, 3)}, hi=10_000)
    assert member.holding.wait(10)
    with group.admin().pause(group.group, expires_in=2.0) as pause:
        pause.check()
        while pause.seconds_left > 0:  # as if this process had been stopped right after its last check
            time.sleep(0.05)
        with pytest.raises(AdminError, match=r"ran out in partition\(s\) \[0.*Pause again"):
            pause.extend_if_short()
        member.let_go.set()
    # It resumes at once although it had released: here it does not leave the partition to others for an HI.
    wait_until(lambda: group.seen() == group.everything(), 12)


def test_a_pause_is_extended_for_as_long_as_it_is_waited_in(group: Group) -> None:
    topic = group.fill(1, 10)
    member = group.start("a", hold={(0, 3)}, hi=1_000)
    assert member.holding.wait(10)
    with group.admin().pause(group.group, expires_in=0.6) as pause:
        left = pause.wait_released(10)  # which takes 2·HI, more than three times as long as the pause
        assert [x.key for x in left] == [(topic, 0)]
        assert pause.seconds_left > 0.2
        pause.reposition({(topic, 0): 8})
        member.let_go.set()
    wait_until(lambda: group.stable() == {0: 9})
    assert member.seen == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 8), (0, 9)]


def test_an_exception_in_the_block_lets_the_group_continue(group: Group) -> None:
    group.fill(1, 10)
    group.start("a")
    group.at_rest(group.everything())
    with pytest.raises(RuntimeError, match="mine"), group.admin().pause(group.group):
        raise RuntimeError("mine")
    assert group.admin().pauses(group.group) == []
    group.publish(group.data, 1, 5)
    group.messages = 15
    group.at_rest(group.everything())


def test_a_pause_is_used_once_and_only_while_it_lasts(group: Group) -> None:
    pause = group.admin().pause(group.group)
    with pytest.raises(ConfigurationError, match="not in force"):
        pause.wait_released(0)
    with pause:
        assert pause.wait_released(0) == []
        assert 290 < pause.seconds_left <= 300
    assert pause.seconds_left == 0
    pause.resume()
    with pytest.raises(ConfigurationError, match="used once"):
        pause.start()
    with pytest.raises(ConfigurationError, match="not in force"):
        pause.reposition({})


@pytest.mark.parametrize("expires_in", [0, -1, float("nan"), float("inf")])
def test_a_pause_must_have_a_length(expires_in: float) -> None:
    with pytest.raises(ConfigurationError, match="expires_in"):
        Admin("localhost:1").pause("g", expires_in)


def test_a_name_no_member_could_have_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Admin("localhost:1").pause("")
    with pytest.raises(ConfigurationError):
        Admin("localhost:1", client_id="x" * 256)


def test_a_consumers_client_id_must_not_pause(group: Group) -> None:
    group.fill(1, 3)
    worker = group.start("worker-1")
    group.at_rest(group.everything())
    with pytest.raises(ConfigurationError, match=r"'worker-1' is a consumer's.*claims .*/0 "):
        group.admin("worker-1").pause(group.group).start()
    worker.end()
    with pytest.raises(ConfigurationError, match="worker-1"):
        group.admin("worker-1").pause(group.group).start()
    assert group.admin().pauses(group.group) == []


def test_a_client_id_that_only_ever_paused_may_pause_again(group: Group) -> None:
    topic = group.fill(1, 3)
    for target in ("latest", "earliest"):
        with group.admin("ops").pause(group.group) as pause:
            pause.reposition({(topic, 0): target})
    assert group.stable() == {0: None}


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
def test_a_member_under_the_admins_client_id_is_noticed_in_time(
    group: Group, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = group.fill(1, 3)
    twins: list[ClaimedLease] = []
    claim = _Mover.claim

    def comes_in() -> None:
        twins.append(group.member("ops", heartbeat_interval=10.0).claim(topic, 0))

    def late(mover: _Mover) -> None:
        comes_in()
        claim(mover)

    with group.admin("ops").pause(group.group) as pause:
        if comes == "before":
            comes_in()
        else:
            monkeypatch.setattr(_Mover, "claim", late)
        with pytest.raises(AdminError, match=r"acts as client_id 'ops'.*Nothing more was changed"):
            pause.reposition({(topic, 0): 2})
        assert twins[0].valid


def test_log_time_moves_so_that_a_silent_holder_goes_stale_without_traffic(group: Group) -> None:
    group.fill(1, 3)
    holder = group.member("silent", heartbeat_interval=0.3)
    holder.claim(group.data, 0)
    holder.terminate()  # it sends neither heartbeats nor ticks any more
    with group.admin().pause(group.group) as pause:
        assert [x.state for x in pause.wait_released(5)] == ["stale"]


def test_members_wait_no_longer_than_they_must(group: Group) -> None:
    """An empty group is released at once, whatever the HI."""
    with group.admin(heartbeat_interval=(HI * 100) / 1000).pause(group.group) as pause:
        assert isinstance(pause, Pause)
        assert pause.wait_released(0) == []
        assert pause.in_hand() == []
        assert pause.signs_of_life == {}


# -- Targets as users write them become offsets; and restoring any progress, on the core alone --------------------


Key = tuple[str, int]


class Logs:
    """A cluster of two partitions: the first has offsets 10 to 19, one per second; the second is empty."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def watermarks(self, partitions: Iterable[Key], timeout_s: float) -> dict[Key, tuple[int, int]]:
        marks = {("t", 0): (10, 20), ("t", 1): (0, 0)}
        return {key: marks[key] for key in partitions if key in marks}

    def offsets_for_time(self, partitions: Iterable[Key], timestamp_ms: int, timeout_s: float) -> dict[Key, int]:
        self.asked.append(timestamp_ms)
        return {key: min(20, 10 + timestamp_ms // 1000) if key[1] == 0 else 0 for key in partitions}


def at(positions: dict[Key, Target], force: bool = False) -> dict[Key, int]:
    return resolve(Logs(), positions, lambda _: 12, force=force)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "offset"),
    [
        ("earliest", 10),
        ("latest", 20),
        (10, 10),
        (15, 15),
        (20, 20),
        (datetime.fromtimestamp(3, UTC), 13),
        (datetime.fromtimestamp(3, timezone(timedelta(hours=9))), 13),
        (datetime(1950, 1, 1, tzinfo=UTC), 10),
        (datetime(2100, 1, 1, tzinfo=UTC), 20),
    ],
)
def test_targets(target: Target, offset: int) -> None:
    assert at({("t", 0): target}) == {("t", 0): offset}


def test_one_question_for_each_moment_and_milliseconds_are_exact() -> None:
    logs = Logs()
    moment = datetime(2026, 11, 21, 3, 14, 15, 926_535, UTC)
    found = resolve(logs, {("t", 1): moment, ("t", 0): moment}, lambda _: 0, force=False)  # type: ignore[arg-type]
    assert list(found) == [("t", 0), ("t", 1)]
    assert logs.asked == [int(moment.timestamp()) * 1000 + 926]


@pytest.mark.parametrize("offset", [0, 9, 21, 2**63 - 1])
def test_offsets_outside_the_log_are_refused_unless_forced(offset: int) -> None:
    with pytest.raises(AdminError, match=rf"offset {offset} is outside the log, which holds 10 to 19"):
        at({("t", 0): offset})
    assert at({("t", 0): offset}, force=True) == {("t", 0): offset}


def test_partitions_that_are_not_there_are_refused_also_by_force() -> None:
    with pytest.raises(AdminError, match=r"t \[2\], u \[0\]: not on this cluster.*Nothing was changed"):
        at({("u", 0): 3, ("t", 0): 15, ("t", 2): "latest"}, force=True)


@pytest.mark.parametrize(
    "target",
    [-1, 2**63, True, 1.5, None, "newest", "15", datetime(2026, 11, 21, tzinfo=UTC).replace(tzinfo=None), b""],
    ids=repr,
)
def test_what_can_not_be_meant_is_refused(target: Any) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was changed"):
        at({("t", 0): target})


@pytest.mark.parametrize(
    "key", ["t", ("t",), ("t", -1), ("", 0), ("t", "0"), (0, "t"), ("a\nb", 0), ("t", True)], ids=repr
)
def test_what_names_no_partition_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was changed"):
        at({key: 15})


def test_nothing_asked_is_nothing_done() -> None:
    assert at({}) == {}


def test_moves_say_what_they_forget() -> None:
    world = World(0, 1)
    apply = _Script(world)
    apply(ClaimingPartition("i", "c", "g", "t", 0, 1_000))
    assert moves_to({("t", 0): 0, ("u", 3): 7}, lambda key: progress_in({0: world}, "g", key)) == [
        Move("t", 0, before=0, after=0),
        Move("u", 3, before=None, after=7),
    ]
    apply(CommitRanges("i", "c", "g", "t", 0, 0, ((5, 6), (9, 9))))
    (move,) = moves_to({("t", 0): 2}, lambda key: progress_in({0: world}, "g", key))
    assert (move.before, move.done_ahead, move.last_offset) == (0, 3, 1)
    assert str(Move("u", 3, None, 7)) == "u [3]: new → 7"


class _Script:
    """Applies records, one per millisecond."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = 0

    def __call__(self, record: Record) -> str:
        offset = self.world.next_offset
        return self.world.apply(offset, 1_000 + offset, encode(record)).code


class _Lease:
    """Stands in for a lease of the admin: its records go straight into the world, in order."""

    ids = ("i2", "ops", "g")

    def __init__(self, script: _Script, epoch: int) -> None:
        self.script = script
        self.key = ("t", 0, epoch)
        self.codes: list[str] = []

    def beat(self, last_offset: int, now: float) -> None:
        self.codes.append(self.script(Heartbeat(*self.ids, *self.key, last_offset)))

    def grant(self, last_offset: int, now: float) -> None:
        self.codes.append(self.script(ClaimingMessages(*self.ids, *self.key, last_offset)))

    def commit_ranges(self, ranges: tuple[tuple[int, int], ...]) -> None:
        self.codes.append(self.script(CommitRanges(*self.ids, *self.key, ranges)))


class _Engine:
    """Stands in for the admin's engine."""

    def take(self, consumer: None, function: Callable[..., object], *of: object) -> None:
        function(*of)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(-1, 60)),
        st.tuples(st.just("grant"), st.integers(0, 60)),
        st.tuples(
            st.just("commit"), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 6)), min_size=1, max_size=4)
        ),
    ),
    max_size=12,
)


@given(STEPS, st.integers(-1, 90))
def test_any_progress_can_be_put_back_in_full(steps: list[tuple[str, Any]], elsewhere: int) -> None:
    """C11: a heartbeat, a grant and ranges restore the complete old progress, whatever the present one is."""
    world = World(0, 1)
    script = _Script(world)
    worker = ("i", "c", "g", "t", 0)
    script(ClaimingPartition(*worker, 60_000))
    for name, value in steps:
        if name == "beat":
            script(Heartbeat(*worker, 0, value))
        elif name == "grant":
            script(ClaimingMessages(*worker, 0, value))
        else:
            script(CommitRanges(*worker, 0, tuple((first, first + more) for first, more in value)))
    script(ReleasingPartition(*worker, 0, None))
    before = _Done.of(world.lease("g", "t", 0))

    script(ReleaseGroup(*_Lease.ids, 1_000_000))
    for _ in range(2):  # the move, and then the way back
        epoch = world.next_offset
        assert script(ClaimingPartition(*_Lease.ids, "t", 0, 60_000)) == "OK"
        lease = _Lease(script, epoch)
        if _ == 0:
            script(ReleasingPartition(*_Lease.ids, "t", 0, epoch, elsewhere))
        else:
            lease.beat(before.first_beat, 0.0)
            _add(_Engine(), lease, before, 0.0)  # type: ignore[arg-type]
            assert set(lease.codes) <= {"OK", "REPOSITIONED"}
            script(ReleasingPartition(*_Lease.ids, "t", 0, epoch, None))
    assert _Done.of(world.lease("g", "t", 0)) == before
