"""Computations of `status` and `lag`: speed, the broker's time, lag."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.cli import status
from kafka_marshal.cli.watch import deleted_notes, lag_cell
from kafka_marshal.client.view import holdings
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.observe import stuck
from kafka_marshal.observe.meter import LISTEN_S, BrokerClock, RateMeter, beyond, listening_s
from kafka_marshal.observe.problems import places, problems_of
from kafka_marshal.observe.rows import FOREIGN_COMMIT, NO_TOPIC, GroupRow, LeaseRow, PauseRow, partitions_of
from kafka_marshal.observe.stuck import mark_held_back, mark_stuck
from kafka_marshal.observe.view import LiveView
from kafka_marshal.types import OpenMessages
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitRanges,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    World,
    encode,
)
from tests.fleet import Fleet, started

A = ("a1", "a", "g")
KEY = ("g", "t", 0, 0)


class Metered:
    """A world of one lease, sampled after each record."""

    def __init__(self, window_ms: int = 10_000) -> None:
        self.world = World(0, 1)
        self.meter = RateMeter(window_ms)
        self.add(ClaimingPartition(*A, "t", 0, 100_000), 0)

    def add(self, record: Record, at: int) -> None:
        assert self.world.apply(self.world.next_offset, at, encode(record)).accepted
        self.meter.sample(self.world)

    def beat(self, last_offset: int | None, at: int) -> None:
        self.add(Heartbeat(*A, "t", 0, 0, last_offset), at)

    def speed(self) -> float | None:
        return self.meter.track(KEY).per_second


def test_speed_is_what_was_done_over_log_time() -> None:
    metered = Metered()
    assert metered.speed() is None
    metered.beat(99, 1_000)
    assert metered.speed() is None, "where its consumer began, for all we know"
    metered.beat(199, 2_000)
    assert metered.speed() == 100.0
    metered.beat(199, 3_000)
    assert metered.speed() == 50.0


def test_what_is_done_beyond_a_gap_counts() -> None:
    metered = Metered()
    metered.add(CommitRanges(*A, "t", 0, 0, ((10, 19),)), 1_000)
    assert metered.speed() == 10.0
    metered.beat(9, 2_000)  # the gap is closed: 20 in all
    assert metered.speed() == 10.0


def test_only_the_window_counts() -> None:
    metered = Metered(window_ms=2_000)
    metered.beat(9, 500)
    metered.beat(999, 1_000)
    for second in range(2, 8):
        metered.beat(999, second * 1_000)
    assert metered.speed() == 0.0


def test_a_repositioned_lease_begins_again() -> None:
    metered = Metered()
    metered.beat(99, 1_000)
    metered.beat(999, 1_200)
    metered.add(ReleaseGroup("x", "a", "g", 1_700), 1_500)
    metered.beat(-1, 1_600)
    assert metered.speed() is None
    metered.beat(100, 2_600)
    metered.beat(201, 3_600)
    assert metered.speed() == 101.0


def test_a_reposition_forward_is_no_speed() -> None:
    """Even if a sample falls between the admin's claim and its release."""
    admin = ("x1", "admin", "g")
    metered = Metered()
    metered.beat(9, 1_000)
    metered.beat(19, 2_000)
    metered.add(ReleasingPartition(*A, "t", 0, 0, 19), 2_500)
    metered.add(ReleaseGroup("x1", "admin", "g", 50_000), 2_600)
    metered.add(ClaimingPartition(*admin, "t", 0, 100_000), 2_700)
    epoch = metered.world.leases()[0].epoch
    metered.add(ReleasingPartition(*admin, "t", 0, epoch, 30_000), 2_800)
    metered.add(ReleaseGroup("x1", "admin", "g", 0), 2_900)
    assert not metered.speed()
    metered.add(ClaimingPartition(*A, "t", 0, 100_000), 3_000)
    epoch = metered.world.leases()[0].epoch
    metered.add(Heartbeat(*A, "t", 0, epoch, 30_010), 4_000)
    assert metered.speed() == 10.0


def test_since_when_nothing_moves_and_since_when_its_holder_has_it() -> None:
    metered = Metered()
    metered.beat(9, 1_000)
    metered.beat(9, 5_000)
    assert (metered.meter.track(KEY).moved_at, metered.meter.track(KEY).granted_at) == (1_000, 0)
    metered.add(ReleasingPartition(*A, "t", 0, 0, 9), 6_000)
    metered.add(ClaimingPartition(*A, "t", 0, 100_000), 7_000)
    assert (metered.meter.track(KEY).moved_at, metered.meter.track(KEY).granted_at) == (1_000, 7_000)


def test_unknown_leases_have_no_speed() -> None:
    assert RateMeter(1_000).track(KEY).per_second is None


def test_the_brokers_time_is_learned_from_fresh_records() -> None:
    local = 1_000_000.0
    clock = BrokerClock(lambda: local)
    assert (str(clock.source), clock.now_ms(), clock.local_is_behind_ms) == ("local", 1_000_000, 0)
    clock.heard(1_060_000)
    assert (clock.source, clock.now_ms()) == ("traffic", 1_060_000)
    assert clock.local_is_behind_ms == 60_000
    local += 500
    assert clock.now_ms() == 1_060_500
    clock.heard(1_060_100)  # took longer in transit: less accurate
    assert clock.now_ms() == 1_060_500
    clock.heard(1_060_700, "tick")
    assert (clock.source, clock.now_ms()) == ("tick", 1_060_700)


def test_a_clock_that_runs_ahead_of_the_broker_is_corrected() -> None:
    clock = BrokerClock(lambda: 1_000_000.0)
    clock.heard(900_000)
    assert clock.now_ms() == 900_000
    assert clock.local_is_behind_ms == 0


def test_the_brokers_time_is_never_before_a_stamp_that_was_seen() -> None:
    clock = BrokerClock(lambda: 1_000.0)
    clock.at_least(5_000)
    assert (clock.source, clock.now_ms()) == ("local", 5_000)
    assert clock.local_is_behind_ms == 4_000


def test_of_many_members_one_is_heard_soon() -> None:
    assert listening_s([1.0] * 50) == 0.2
    assert listening_s([1.0] * 10) == pytest.approx(0.65)
    assert listening_s([1.0]) == pytest.approx(1.0)
    assert listening_s([200.0] * 50) == listening_s([]) == LISTEN_S, "they write too rarely to be waited for"
    assert listening_s([200.0] * 50 + [1.0] * 10) == pytest.approx(0.65, abs=0.06)


@pytest.mark.parametrize("is_live", [True, False])
def test_who_is_at_work_is_heard_while_the_log_is_read(is_live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 5.0)
    appender = cluster.appender("__marshal", delivery_timeout_ms=1_000)
    for number in range(50):
        claim = ClaimingPartition(f"host/{number}/0.2.0/x", f"w{number}", "g", "t", number, 3_000)
        appender.append(0, encode(claim))
    assert appender.flush(1.0) == 0
    view = LiveView(cluster, "__marshal", 5.0)
    if is_live:
        appender.append(0, encode(Heartbeat("host/0/0.2.0/x", "w0", "g", "t", 0, 2, None)))
    view.catch_up(lambda done, of_all: None)
    assert view.clock.source == ("traffic" if is_live else "local")
    waited: list[float] = []
    monkeypatch.setattr(view, "follow", lambda seconds, until: waited.append(seconds))
    view.learn_time()
    assert waited[0] <= 0.2, "what fifty members write would have come"
    view.replica.close()


def row(**known: object) -> LeaseRow:
    return LeaseRow(group="g", topic="t", partition=0, **known)  # type: ignore[arg-type]


def hole(first: int, last: int | None = None, *, parked: str | None = None) -> OpenMessages:
    return OpenMessages(first, first if last is None else last, 1, None, parked, None)


def test_a_row_of_the_log_has_its_open_messages() -> None:
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 5.0)
    cluster.broker.create_topic("t", 1)
    for _ in range(20):
        cluster.broker.produce("t", 0, b"")

    def append(record: Record) -> int:
        return cluster.broker.produce("__marshal", 0, encode(record))

    epoch = append(ClaimingPartition(*A, "t", 0, 600_000))
    append(SettlingMessages(*A, "t", 0, epoch, 99, open=((3, 4, None, 1),), parked=((5, 8, 5, "Bad"),)))
    append(Heartbeat(*A, "t", 0, epoch, 9))
    view = LiveView(cluster, "__marshal", 5.0)
    view.catch_up(lambda done, of_all: None)
    view.look_at_data(["g"])
    (found,) = view.groups("g")[0].leases
    assert (found.next, found.lag, found.open_messages, found.parked) == (3, 12, 2, 1)
    view.replica.close()


def test_lag() -> None:
    assert row(log_start=0, log_end=100, stable=39).lag == 60
    assert row(log_start=0, log_end=100).lag == 100
    assert row(log_start=0, log_end=0).lag == 0
    assert row(log_start=50, log_end=100, stable=9).lag == 50, "what retention took can't be done any more"
    assert row(log_start=0, log_end=100, stable=39, ranges=((60, 69),)).lag == 50
    assert row(log_start=30, log_end=40, stable=9, ranges=((12, 19), (35, 36))).lag == 8, "retention took what was done"
    assert row(log_start=0, log_end=10, stable=39, stuck="position lost: the log ends at 10").lag is None


def test_open_messages_are_lag_and_parked_ones_are_not() -> None:
    opened = (hole(9, 11), hole(20, parked="Bad"), hole(45, parked="Bad"), hole(62), hole(95))
    some = row(log_start=0, log_end=100, cp=0, stable=39, ranges=((60, 69),), open=opened)
    assert some.lag == 50 + 3 + 1 - 1, "9 to 11 and 62 were passed; 45 is set aside, 95 counts anyway"
    assert (some.open_messages, some.parked, some.next) == (5, 2, 9)
    assert replace(some, log_start=11).lag == 50 + 1 + 1 - 1, "what retention took can't be done any more"
    assert replace(some, open=opened[1:3]).next == 40
    assert row(log_start=0, log_end=1, stable=None, open=(hole(0, parked="Bad"),)).lag == 0
    assert row(stable=39).lag is None, "no such partition"


@pytest.mark.parametrize(
    ("silence_ms", "state", "seen"),
    [
        (1_000, "seen", "1.0 s ago"),
        (1_001, "silent", "silent 1.0 s"),
        (2_000, "silent", "silent 2.0 s"),
        (2_001, "gone", "gone 2.0 s"),
        (None, "free", "free"),
    ],
)
def test_what_is_said_of_a_holder(silence_ms: int | None, state: str, seen: str) -> None:
    holder = {} if silence_ms is None else {"client": "a"}
    found = row(cp=0, heartbeat_interval_ms=1000, silence_ms=silence_ms, **holder)
    assert (found.state, found.seen) == (state, seen)


def test_in_an_outage_no_worker_is_seen_or_gone() -> None:
    found = row(cp=0, client="a", heartbeat_interval_ms=1000, silence_ms=90_000, outage=True)
    assert (found.state, found.seen) == ("unknown", "not known")
    group = GroupRow("g", [found])
    assert (problems_of(group), group.members[0].state) == ([], "unknown")


def test_a_lag_of_several_is_no_number_where_one_is_not_known() -> None:
    """0 would mean that all is done."""
    done = row(log_start=0, log_end=10, stable=9)
    lost, unknown = row(log_start=0, log_end=10, stuck="position lost: …"), row()
    assert (GroupRow("g", [done]).lag, lag_cell([done]).text) == (0, "0")
    assert (GroupRow("g", [done, lost]).lag, lag_cell([done, lost]).text) == (None, "position lost")
    assert (GroupRow("g", [done, unknown]).lag, lag_cell([done, unknown]).text) == (None, "0+")
    assert (GroupRow("g", [unknown]).lag, lag_cell([unknown]).text) == (None, "-")
    assert GroupRow("g", [held(), held(1, stuck="position lost: …")]).known_lag == 10
    assert "lag" in kinds(held(), held(1, stuck="position lost: …"), max_lag=9)


def test_a_topic_that_is_gone_is_a_reason_by_itself() -> None:
    gone = held(client=None, silence_ms=None, log_start=None, log_end=None, stuck=f"{NO_TOPIC} on this cluster")
    (problem,) = problems_of(GroupRow("my g", [gone]))
    assert problem.kind == "no_topic"
    assert "kafka-marshal forget-group 'my g'" in problem.text


def test_what_retention_took_unread_is_reported() -> None:
    assert row(log_start=50, log_end=100, stable=9).deleted == 40
    assert row(log_start=10, log_end=100, stable=9).deleted == 0
    assert row(log_start=50, log_end=100).deleted == 0, "where it will begin is not known"
    assert kinds(held(log_start=95, idle_ms=0)) == ["deleted"]
    (note,) = deleted_notes([GroupRow("g", [held(log_start=95)]), GroupRow("h", [held()])])
    assert note.startswith("g: t 0: 5 offsets were deleted (retention) that the group had not done: lost")


def test_a_member_whose_tries_fail_does_not_hang() -> None:
    waits = OpenMessages(5, 5, 3, None, None, None)
    row = held(held_ms=60_000, idle_ms=60_000, waiting_ms=60_000, open=(waits,))
    hung = next(each for each in problems_of(GroupRow("g", [row])) if each.kind == "hung")
    assert "no progress for 1 min, messages wait for their next try. It holds" in hung.text
    assert "hung?" not in hung.text
    assert "an eviction moves that elsewhere" in hung.text


def test_a_member_with_nothing_to_do_but_a_lost_position_says_so() -> None:
    lost = held(stuck="position lost: the log ends at 10", log_end=0, idle_ms=0)
    (member,) = GroupRow("g", [lost]).members
    assert status._progress(member).text == "position lost"
    (member,) = GroupRow("g", [held(log_end=10, stable=9, idle_ms=0)]).members
    assert status._progress(member).text == "nothing to do"


def test_a_stand_still_that_began_before_all_that_was_read_is_at_least_as_long() -> None:
    short = held(idle_at_least=True, held_ms=60_000, waiting_ms=90_000)
    assert problems_of(GroupRow("g", [short]))[0].text.startswith(
        "w (host:17) beats, but no progress for over 1 min, hung?"
    )
    assert GroupRow("g", [short]).is_behind_longer
    for exact in ({"idle_at_least": False}, {"waiting_ms": 50_000}):  # it moved then; its message came then
        found = GroupRow("g", [replace(short, **exact)])
        assert not found.is_behind_longer
        assert "over" not in problems_of(found)[0].text


def test_whether_a_position_was_seen_to_move() -> None:
    metered = Metered()
    assert not metered.meter.track(KEY).has_moved
    metered.add(Heartbeat(*A, "t", 0, 0, None), 1_000)
    assert not metered.meter.track(KEY).has_moved
    metered.beat(9, 2_000)
    assert metered.meter.track(KEY).has_moved


def test_it_was_never_claimed() -> None:
    assert (row().state, row().next, row(cp=0).next, row(cp=0, stable=4).next) == ("never claimed", None, 0, 5)


# -- members and groups ----------------------------------------------------------------------------------------------


def held(number: int = 0, /, **known: object) -> LeaseRow:
    """A partition of a seen member, with ten waiting messages and no progress for a minute."""
    facts: dict[str, object] = {
        "cp": 0,
        "client": "w",
        "instance": "host/17/1.0/x",
        "heartbeat_interval_ms": 3_000,
        "silence_ms": 500,
        "stable": 89,
        "log_start": 0,
        "log_end": 100,
        "idle_ms": 60_000,
        "held_ms": 90_000,
        "waiting_ms": 50_000,
    }
    return LeaseRow(group="g", topic="t", partition=number, **(facts | known))  # type: ignore[arg-type]


def kinds(*rows: LeaseRow, pauses: list[PauseRow] | None = None, **limits: int) -> list[str]:
    return [problem.kind for problem in problems_of(GroupRow("g", list(rows), pauses or []), **limits)]


def test_a_member_that_beats_and_gets_nothing_done_may_hang() -> None:
    (member,) = GroupRow("g", [held(0), held(1)]).members
    assert (member.no_progress_ms, member.is_hung, member.lag) == (50_000, True, 20)
    assert member.runs_at is not None
    assert (str(member.runs_at), member.runs_at.release) == ("host:17", "1.0")
    assert kinds(held(0), held(1)) == ["hung"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"idle_ms": 2_000}, "it moved"),
        ({"held_ms": 2_000}, "it has just got it"),
        ({"waiting_ms": 2_000}, "its message has just come"),
        ({"waiting_ms": None}, "nothing was read of it"),
        ({"log_end": 90}, "nothing to do"),
        ({"heartbeat_interval_ms": 20_000}, "three of its heartbeat intervals are longer"),
    ],
)
def test_a_member_that_does_not_hang(changed: dict[str, int | None], why: str) -> None:
    assert kinds(held(**changed)) == [], why


def test_progress_in_one_partition_is_progress() -> None:
    """A worker that processes one backlog has not begun with the other."""
    assert kinds(held(0), held(1, idle_ms=100)) == []


class Message:
    """The next message of a partition, with its timestamp."""

    def __init__(self, partition: int, stamp: int) -> None:
        self._partition, self._stamp = partition, stamp

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

    def timestamp(self) -> tuple[int, int]:
        return 1, self._stamp

    def offset(self) -> int:
        return 90

    def key(self) -> bytes:
        return b"k7"


class Reader:
    """Reads one message of each partition, with its age (ms) at 1,000,000."""

    def __init__(self, ages_ms: dict[int, int]) -> None:
        self._messages = [Message(partition, 1_000_000 - age) for partition, age in ages_ms.items()]
        self.asked: dict[tuple[str, int], int] = {}

    def data_reader(self, group_id: str, config: object) -> Reader:
        return self

    def assign(self, positions: dict[tuple[str, int], int]) -> None:
        self.asked = dict(positions)

    def unassign(self, partitions: object) -> None: ...

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[object]]:
        return self._messages, []

    def close(self) -> None: ...


def marked(*rows: LeaseRow, **ages_ms: int) -> list[str]:
    reader = Reader({int(name[1:]): age for name, age in ages_ms.items()})
    return [row.stuck for row in mark_stuck(reader, list(rows), 1_000_000)]  # type: ignore[arg-type]


def test_a_partition_stands_still_where_its_message_has_waited() -> None:
    waiting = held(waiting_ms=None)
    assert marked(waiting, p0=50_000) == ["no progress for 50 s with messages waiting: see w's log"]
    assert marked(waiting, p0=100) == [""], "a quiet topic's message that has just come"
    assert marked(held(waiting_ms=None, idle_ms=2_000), p0=50_000) == [""]
    assert marked(waiting, held(1, waiting_ms=None, idle_ms=100), p0=50_000) == ["", ""], "it is at work on another one"
    assert marked(held(waiting_ms=None, silence_ms=60_000), p0=50_000) == [""], "gone is said elsewhere"


def held_back(*rows: LeaseRow, **ages_ms: int) -> list[LeaseRow]:
    reader = Reader({int(name[1:]): age for name, age in ages_ms.items()})
    found = mark_stuck(reader, list(rows), 1_000_000)  # type: ignore[arg-type]
    return mark_held_back(reader, found)  # type: ignore[arg-type]


def test_a_key_that_hangs_is_a_problem_though_the_others_continue() -> None:
    """Its worker makes progress, in this partition and in others: no figure of a worker shows the hang."""
    stuck = held(0, idle_ms=100, ranges=((95, 97),), stable_ms=30_000, waiting_ms=None)
    rows = held_back(stuck, held(1, idle_ms=100, waiting_ms=None), p0=50_000)
    assert [row.held_back for row in rows] == ["held back at offset 90 for 30 s by key k7", ""]
    (problem,) = problems_of(GroupRow("g", rows))
    assert (problem.kind, problem.partitions) == ("stuck_key", [rows[0]])
    assert problem.text == (
        "t 0: held back at offset 90 for 30 s by key k7. See w's log. If its handler hangs: kafka-marshal evict g "
        "--member w --force (what it has in hand is repeated)"
    )
    failing = replace(stuck, open=(hole(92),))
    (problem,) = problems_of(GroupRow("g", held_back(failing, p0=50_000)))
    assert "wait for their next try" in problem.text
    assert "evict g" not in problem.text, "its handlers fail; none hangs"
    assert kinds(*held_back(replace(stuck, stable_ms=9_000), p0=50_000)) == []
    assert kinds(*held_back(held(0, ranges=((95, 97),), stable_ms=60_000, waiting_ms=None), p0=50_000)) == [
        "stuck_key",
        "hung",
    ]


@pytest.mark.parametrize(("most", "is_full"), [(3, True), (4, False)])
def test_g15_a_held_back_partition_without_room_says_that_nothing_more_is_handed_out(most: int, is_full: bool) -> None:
    row = held(0, idle_ms=100, ranges=((95, 97), (99, 99)), stable_ms=30_000, waiting_ms=None)
    (found,) = mark_held_back(Reader({0: 50_000}), [row], {"g": most})  # type: ignore[arg-type]
    text = f"; nothing above is delivered, as the log keeps no more intervals (max_individual_commits, {most})"
    assert found.held_back.endswith(text) is is_full


def test_a_free_partition_whose_position_is_lost_is_not_to_be_taken_up_by_new_workers() -> None:
    lost = LeaseRow("g", "t", 0, cp=0, stable=99, stuck="position lost: the topic was deleted and recreated")
    assert kinds(lost) == ["position_lost"]
    assert kinds(replace(lost, stuck="")) == ["no_holder"]


def test_a_partition_that_stands_still_beside_others_is_a_problem_after_a_while() -> None:
    busy = held(1, idle_ms=100, waiting_ms=None)
    still = held(0, idle_ms=70_000, waiting_ms=None)
    (text, _) = (row.held_back for row in held_back(still, busy, p0=65_000))
    assert text == "held back at offset 90 for 1 min 5 s by key k7, while w handles other partitions"
    assert kinds(*held_back(still, busy, p0=65_000)) == ["stuck_key"]
    assert kinds(*held_back(still, busy, p0=55_000)) == []
    assert kinds(*held_back(replace(still, held_ms=55_000), busy, p0=65_000)) == []
    assert kinds(*held_back(replace(still, heartbeat_interval_ms=30_000), busy, p0=65_000)) == []


def test_positions_of_the_last_minute() -> None:
    metered = Metered()
    assert metered.meter.track(KEY).positions_since(-1) == []
    for second in (10, 20, 30, 100):
        metered.beat(second, second * 1_000)
    assert metered.meter.track(KEY).positions_since(40_000) == [31, 101]
    assert metered.meter.track(KEY).positions_since(100_000) == [101]
    assert metered.meter.track(KEY).positions_since(20_000) == [], "no longer known"
    assert metered.meter.track(("g", "t", 1, 0)).positions_since(40_000) == []


def test_the_first_partition_of_every_holder_is_checked_before_any_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stuck, "PROBED_AT_MOST", 2)
    reader = Reader({0: 50_000, 9: 50_000})
    rows = [*(held(number, waiting_ms=None) for number in range(5)), held(9, waiting_ms=None, instance="other/1/1/x")]
    mark_stuck(reader, rows, 1_000_000)  # type: ignore[arg-type]
    assert set(reader.asked) == {("t", 0), ("t", 9)}


def test_what_check_looks_for() -> None:
    fine: dict[str, int | str | None] = {"idle_ms": 0}
    assert kinds(held(**fine)) == []
    assert kinds(held(stuck="position lost: the log ends at 10", **fine)) == ["position_lost"]
    assert kinds(held(stuck="no leader: nobody can read or write it", **fine)) == ["stuck"]
    assert kinds(held(silence_ms=7_000, **fine)) == ["gone"]
    assert kinds(held(silence_ms=7_000)) == ["gone"], "who does not beat does not hang"
    assert kinds(held(silence_ms=5_000, **fine)) == []
    assert kinds(held(silence_ms=5_000, **fine), max_silence_ms=4_000) == ["silence"]
    assert kinds(held(client=None, silence_ms=None, **fine)) == ["no_holder"]
    assert kinds(held(**fine), LeaseRow("g", "t", 1, log_start=0, log_end=0)) == ["no_holder"]
    assert kinds(held(**fine), max_lag=10) == []
    assert kinds(held(**fine), max_lag=9) == ["lag"]


def test_a_paused_group_needs_no_holders_until_its_pause_is_over() -> None:
    free = held(client=None, silence_ms=None, idle_ms=0)
    assert kinds(free, pauses=[PauseRow("g", "admin", 5_000, 1_000, {0: 5_000})]) == []
    assert kinds(free, pauses=[PauseRow("g", "admin", 5_000, -1_000, {0: 5_000})]) == ["no_holder", "pause_over"]


def test_partitions_in_words() -> None:
    rows = [LeaseRow("g", topic, number) for topic, number in [("b", 3), ("a", 1), ("a", 2), ("a", 3), ("a", 7)]]
    assert places(rows) == "a 1-3, 7; b 3"
    assert places(LeaseRow("g", "a", 2 * number) for number in range(20)) == "a 0, 2, 4, 6, 8, 10, 12, 14, …"


def test_the_way_out_of_a_lost_position_names_what_is_lost() -> None:
    lost = {"stuck": "position lost: the log ends at 10"}
    (one,) = [
        each for each in problems_of(GroupRow("my g", [held(0, **lost), held(1)])) if each.kind == "position_lost"
    ]
    assert one.text.endswith("kafka-marshal release-group 'my g' --partition t:0=earliest")
    (all_of_it,) = problems_of(GroupRow("g", [held(0, **lost), held(1, **lost)]))
    assert all_of_it.text.endswith("release-group g --partition t=earliest")
    foreign = held(1, stable=41, stuck=f"position lost: {FOREIGN_COMMIT} offset 7")
    (kept,) = (each for each in problems_of(GroupRow("g", [foreign])) if each.kind == "position_lost")
    assert kept.text.endswith("release-group g --partition t:1=42")


def test_a_group_without_a_seen_member_for_a_day_is_dead() -> None:
    free = held(client=None, silence_ms=None)
    assert GroupRow("g", [free], silent_ms=86_400_001).is_dead
    assert not GroupRow("g", [free], silent_ms=86_400_000).is_dead
    assert not GroupRow("g", [held()], silent_ms=86_400_001).is_dead, "a holder with a long heartbeat interval"


class Shared:
    """A partition with 100 messages that two members share: w1 has done 49 of its half, w2 nothing."""

    HALF = 2**62 - 1

    def __init__(self) -> None:
        self.world = World(0, 1)
        self.meter = RateMeter(10_000)
        fleet = Fleet("g", 1, self.append)
        fleet.upgrade()
        fleet.configure(accept_range_fetch=("t",))
        fleet.join("w1", {"t": 1}, share=True)
        generation = fleet.join("w2", {"t": 1}, share=True)
        fleet.commit("w1", generation, *started("t", 0))
        fleet.commit("w1", generation, CommitEntry("t", 0, 0, self.HALF, through=49))

    def append(self, record: Record, cp: int) -> int:
        assert self.world.apply(self.world.next_offset, 1_000 * self.world.next_offset, encode(record)).accepted
        self.meter.sample(self.world)
        return self.world.next_offset - 1


def test_a_piece_is_a_row_as_a_lease_is() -> None:
    shared = Shared()
    first, second = (info for info, _ in holdings(shared.world))
    assert (first.kind, first.client_id, first.goes_to, first.stable) == ("coordinated", "w1", None, 49)
    assert (second.client_id, second.goes_to, second.stable) == ("w1", "w2", None)
    assert (first.hi, second.lo) == (Shared.HALF, Shared.HALF + 1)
    assert (first.freshness, first.heartbeat_interval_ms) == ("fresh", 5_000)
    assert first.epoch == second.epoch
    assert shared.meter.track(("g", "t", 0, 0)).has_moved
    assert not shared.meter.track(("g", "t", 0, Shared.HALF + 1)).has_moved


def test_an_owner_counts_its_part_of_the_keys() -> None:
    half = row(lo=0, hi=Shared.HALF, log_start=0, log_end=100, stable=49)
    assert (half.lag, half.place) == (25, "0 (0-50%)")
    rest = row(lo=Shared.HALF + 1, hi=2**63 - 1, log_start=0, log_end=100)
    assert (rest.lag, rest.place) == (50, "0 (50-100%)")
    assert (partitions_of([half, rest]), GroupRow("g", [half, rest]).lag) == (1, 75)
    assert row(client="a", goes_to="b").holder == "a → b"
    assert (row(client="a").holder, row().holder, row(kind="coordinated").state) == ("a", "-", "not assigned")


def test_beyond_and_in_flight() -> None:
    world = World(0, 1)
    world.apply(0, 0, encode(ClaimingPartition(*A, "t", 0, 1000)))
    world.apply(1, 1, encode(CommitRanges(*A, "t", 0, 0, ((2, 3), (7, 7)))))
    (lease,) = world.leases()
    assert beyond(lease.progress.ranges) == 3
