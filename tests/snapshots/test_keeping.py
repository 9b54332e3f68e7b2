"""Members keep the log as long as its topic says, behind checked snapshots (Q52, Q53)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal.adapters.memory import broker, readers
from kafka_marshal.adapters.memory.broker import MemoryMessage
from kafka_marshal.admin import Admin
from kafka_marshal.errors import (
    AuthorizationError,
    ConfigurationError,
    KafkaUnavailableError,
    SnapshotDifferenceError,
    TopicChangedError,
)
from kafka_marshal.node import jobs, log_keeper, replica
from kafka_marshal.node.engine_lock import Shared
from kafka_marshal.node.jobs import LogGuard, LongJob
from kafka_marshal.node.kept import LEAST_KEEP_MS, check_keep, keep_of, keep_settings
from kafka_marshal.node.life import Life
from kafka_marshal.node.log_keeper import LogKeeper
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.observe.log_size import measure
from kafka_marshal.observe.text import span
from kafka_marshal.runtime import THREADS
from kafka_marshal.snapshots import prune
from kafka_marshal.snapshots.prune import OlderThan, PrunePlan, carry_out, make_plan
from kafka_marshal.snapshots.publisher import JITTER_MS, LOOK_MS, RETRY_MS, SnapshotKeeper
from kafka_marshal.snapshots.reader import SnapshotReader
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import LogHash, encode_hash
from tests.snapshots.conftest import SNAPSHOTS, TIMEOUT_S, TOPIC, Story, wait_until
from tests.snapshots.test_start import log_start, starts_true
from tests.stored_snapshot import encode_snapshot

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def now_ms() -> float:
    """The time at which the story ends."""
    return time.time() * 1000


@pytest.fixture
def story(now_ms: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    """Its first records are ten days old."""
    with monkeypatch.context() as during:
        during.setattr(broker, "time_of_day_ms", lambda: now_ms - 10 * DAY_MS)
        made = Story()
    yield made
    made.close()


def days(story: Story, now_ms: float, ago: list[float], beats: int = 10) -> list[int]:
    """A snapshot after some records, each this many days ago; returns their places."""
    places = []
    for each in ago:
        story.broker.clock = lambda each=each: now_ms - each * DAY_MS  # type: ignore[misc]
        story.beat(beats)
        places.append(story.snapshot())
    story.broker.clock = lambda: now_ms
    return places


def plan_of(story: Story, now_ms: float, keep_days: float, **options: object) -> PrunePlan:
    old = OlderThan(keep_days * DAY_MS, now_ms)
    return make_plan(story.cluster.connect("pruner"), TOPIC, TIMEOUT_S, older_than=old, **options)  # type: ignore[arg-type]


# -- the settings ----------------------------------------------------------------------------------------------------


def test_q52_it_is_two_equal_settings_and_nothing_else() -> None:
    assert keep_of(dict[str, str](keep_settings(7 * DAY_MS))) == 7 * DAY_MS  # type: ignore[arg-type]
    defaults = {"min.compaction.lag.ms": "0", "max.compaction.lag.ms": str(2**63 - 1)}
    template = {**defaults, "max.compaction.lag.ms": str(DAY_MS)}
    floor = {**defaults, "min.compaction.lag.ms": str(DAY_MS)}
    odd = [dict.fromkeys(defaults, text) for text in ("0", "-1", "", "x", "1.5", str(2**63 - 1), "٣")]
    assert [keep_of(each) for each in ({}, defaults, template, floor, *odd)] == [None] * 11


def test_q52_less_than_an_hour_is_refused_and_counts_as_an_hour_where_it_was_set_by_other_means() -> None:
    with pytest.raises(ConfigurationError, match=r"an hour at least.*60 s.*Nothing was changed"):
        check_keep(60_000)
    assert check_keep(LEAST_KEEP_MS) == LEAST_KEEP_MS
    assert keep_of(dict[str, str](keep_settings(60_000))) == LEAST_KEEP_MS  # type: ignore[arg-type]


def test_q52_admin_sets_it_changes_it_and_drops_it(story: Story) -> None:
    admin = Admin.on_cluster(lambda: story.cluster.connect("admin"), topic=TOPIC)
    assert admin.init().keep is None
    assert admin.init(keep=30 * 86_400).keep == 30 * 86_400
    settings = story.broker.existing[TOPIC].settings
    assert (keep_of(settings), settings["retention.ms"]) == (30 * DAY_MS, "-1")
    admin.keep_log(3_600)
    assert keep_of(settings) == HOUR_MS
    for wrong in (60, 0, -1, float("nan"), "30d"):
        with pytest.raises(ConfigurationError, match="Nothing was"):
            admin.keep_log(wrong)  # type: ignore[arg-type]
    admin.keep_log(None)
    assert keep_of(settings) is None


# -- what goes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep_days", "cut"), [(0.5, 3), (1.5, 2), (2.5, 1), (3.5, 0), (4.5, None), (100, None)])
def test_q53_never_more_than_what_is_older(story: Story, now_ms: float, keep_days: float, cut: int | None) -> None:
    places = days(story, now_ms, [4, 3, 2, 1, 0.2, 0.1])
    story.beat()
    plan = plan_of(story, now_ms, keep_days)
    assert plan.partitions[0].cut == (None if cut is None else places[cut])
    carry_out(story.cluster, plan, TIMEOUT_S)
    assert log_start(story) == (0 if cut is None else places[cut])
    assert starts_true(story) == places[-2]
    assert plan_of(story, now_ms, keep_days).records_removed == 0


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH", 50)


@pytest.mark.usefixtures("small_batches")
def test_q53_no_more_is_replayed_than_has_to_be_checked(story: Story, now_ms: float) -> None:
    places = days(story, now_ms, [9, 8, *[1 - each / 1000 for each in range(40)]])
    read: list[tuple[int, int]] = []
    plan = plan_of(story, now_ms, 5, progress=lambda *each: read.append(each))
    assert plan.partitions[0].cut == places[1]
    assert places[3] <= read[-1][0] < read[-1][1]


@pytest.mark.usefixtures("small_batches")
def test_q53_a_step_removes_some_and_the_next_one_more(story: Story, now_ms: float) -> None:
    places = days(story, now_ms, [9 - each / 50 for each in range(100)], beats=20)
    story.beat()
    starts = [0]
    while (plan := plan_of(story, now_ms, 5, step=500)).records_removed:
        carry_out(story.cluster, plan, TIMEOUT_S)
        starts.append(log_start(story))
    assert len(starts) > 2 and starts == sorted(set(starts)) and starts[-1] == places[-3]
    assert starts_true(story) == places[-2]


def test_q53_neither_a_clock_that_is_ahead_here_nor_one_of_a_broker_makes_records_old(
    story: Story, now_ms: float
) -> None:
    places = days(story, now_ms, [4, 3, 2, 1, 0.5])
    story.beat()
    ahead = now_ms + 365 * DAY_MS
    assert plan_of(story, ahead, 2.5).partitions[0].cut == places[1]
    story.broker.clock = lambda: ahead
    story.beat()
    assert plan_of(story, now_ms, 2.5).partitions[0].cut == places[1]
    behind = plan_of(story, now_ms - 365 * DAY_MS, 2.5)
    assert (behind.records_removed, behind.partitions[0].why) == (0, "nothing up to a checked snapshot is that old")


def test_q53_records_of_a_broker_that_was_behind_are_not_old(story: Story, now_ms: float) -> None:
    """Log time does not go back (T1), though their stamps do."""
    days(story, now_ms, [1])
    days(story, now_ms, [30, 30, 30, 30])
    story.beat()
    assert plan_of(story, now_ms, 5).records_removed == 0


@pytest.mark.parametrize("where", [0, 1, 2, 3, 4, 5])
def test_q53_it_stops_at_a_forged_snapshot_as_the_command_does(story: Story, now_ms: float, where: int) -> None:
    places = []
    for number, ago in enumerate([9.0, 8, 7, 6, 1, 0.5]):
        story.broker.clock = lambda ago=ago: now_ms - ago * DAY_MS  # type: ignore[misc]
        story.beat(10)
        places.append(story.lie() if number == where else story.snapshot())
    story.broker.clock = lambda: now_ms
    story.beat()
    whole = make_plan(story.cluster, TOPIC, TIMEOUT_S).partitions[0]
    each = plan_of(story, now_ms, 5).partitions[0]
    assert each.cut is None or each.cut < places[where] or where > 4
    assert (each.cut or 0) <= (whole.cut or 0)


@pytest.mark.usefixtures("small_batches")
def test_q53_a_hash_of_more_than_goes_is_compared_first(story: Story, now_ms: float) -> None:
    """No member stores one: they are of one interval each (S4)."""
    places = days(story, now_ms, [9, 8, *[1 - each / 1000 for each in range(40)]])
    true = story.hash_of(0, places[30])
    story.store(encode_hash(true))
    assert plan_of(story, now_ms, 5).partitions[0].cut == places[1]
    story.store(encode_hash(LogHash(0, 0, places[30], "0" * 32)))
    plan = plan_of(story, now_ms, 5)
    assert (plan.records_removed, [each.since for each in plan.differences]) == (0, [0])


def test_a_process_that_was_stopped_before_the_removal_removes_nothing(
    story: Story, now_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    days(story, now_ms, [9, 8, 1, 0.5])
    plan = plan_of(story, now_ms, 5)
    assert not carry_out(story.cluster, plan, TIMEOUT_S, lambda: False)
    monkeypatch.setattr(prune, "FRESH_MS", -1.0)
    with pytest.raises(Exception, match="was stopped just before the removal"):
        carry_out(story.cluster, plan, TIMEOUT_S)
    assert log_start(story) == 0


def test_s3_a_start_reads_snapshots_that_are_left_as_old_ones_are_removed(story: Story, now_ms: float) -> None:
    places = days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    reader = SnapshotReader.find(story.cluster, SNAPSHOTS, TIMEOUT_S)
    assert reader is not None
    story.broker.delete_records(SNAPSHOTS, 0, 3)
    reader.read_newest(6)
    assert sorted(each.next_offset for each in reader.partitions[0].sorted()) == places[3:]
    again = SnapshotReader.find(story.cluster, SNAPSHOTS, TIMEOUT_S)
    assert again is not None
    story.broker.delete_topic(SNAPSHOTS)
    story.broker.create_topic(SNAPSHOTS, 1)
    with pytest.raises(TopicChangedError):
        again.read_newest(6)


def test_s3_a_start_passes_a_first_record_over_that_is_removed_meanwhile(
    story: Story, now_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = days(story, now_ms, [9, 8, 7, 1])

    def cut_first(*args: Any, **options: Any) -> Any:
        story.cut(places[0])
        return read_range(*args, **options)

    monkeypatch.setattr(replica, "read_range", cut_first)
    assert starts_true(story) == places[-2]


# -- members -----------------------------------------------------------------------------------------------------


class Keeping:
    """The keeper of one member, whose turns are taken by hand."""

    def __init__(self, story: Story, now_ms: float, keep_ms: int, name: str = "a") -> None:
        self.now = 0.0
        self.cluster = story.cluster.connect(name)
        self.replica = story.replica()
        self.guard = LogGuard.__new__(LogGuard)
        self.guard.keep_ms = keep_ms
        lock: Any = SimpleNamespace(life=Life(self.cluster.runtime))
        none: Any = None
        self.keeper = LogKeeper(Shared(self.cluster, self.replica, lock, none, none), self.guard, lambda: now_ms)
        self.keeper._now_ms = lambda: self.now

    def look(self, later_ms: float = 0.0) -> None:
        self.now += later_ms
        assert self.keeper.is_due(self.now + DAY_MS)
        LongJob.run(self.keeper)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are ten records apart; no rest."""
    monkeypatch.setattr(log_keeper, "interval", lambda listed: 10)
    monkeypatch.setattr(log_keeper, "SHARE", 1.0)


@pytest.fixture
def five_days(story: Story) -> None:
    story.broker.alter_topic(TOPIC, keep_settings(5 * DAY_MS))


@pytest.mark.usefixtures("short", "five_days")
def test_q53_one_member_prunes_when_its_turn_comes_and_the_others_draw_again(story: Story, now_ms: float) -> None:
    places = days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    fleet = [Keeping(story, now_ms, 5 * DAY_MS, f"m{number}") for number in range(20)]
    for each in fleet:
        each.look()
    assert log_start(story) == 0
    order = sorted(fleet, key=lambda each: each.keeper._turns[0][1])
    assert all(each.keeper._turns[0][1] <= DAY_MS / 2 for each in fleet)
    for each in order:
        each.look(each.keeper._turns[0][1])
    assert [each.keeper.cuts for each in order] == [1] + [0] * 19
    assert log_start(story) == places[2]
    assert [place for place, _ in story.stored()] == places[2:]
    assert [(each.keeper._turns, each.keeper.failing) for each in fleet] == [({}, "")] * 20
    assert starts_true(story) == places[-2]


@pytest.mark.usefixtures("short", "five_days")
def test_q53_a_member_whose_turn_comes_late_replays_nothing(
    story: Story, now_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one has cut while it was busy with another partition."""
    places = days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    one = Keeping(story, now_ms, 5 * DAY_MS)
    one.look()
    story.cut(places[0])
    monkeypatch.setattr(log_keeper, "make_plan", lambda *_, **__: pytest.fail("it replays"))
    one.keeper._take_turn(0)
    assert one.keeper._turns == {}


@pytest.mark.usefixtures("short", "five_days")
def test_q53_two_at_once_remove_the_same(story: Story, now_ms: float) -> None:
    places = days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    plans = [plan_of(story, now_ms, 5) for _ in range(2)]
    for plan in plans:
        carry_out(story.cluster, plan, TIMEOUT_S)
    assert log_start(story) == places[2]
    days(story, now_ms, [0.1])
    carry_out(story.cluster, plans[0], TIMEOUT_S)  # a frozen one wakes up later
    assert (log_start(story), starts_true(story)) == (places[2], places[-1])


@pytest.mark.usefixtures("short", "five_days")
@pytest.mark.parametrize("keep_ms", [None, 30 * DAY_MS])
def test_q53_a_time_that_was_changed_meanwhile_stops_it(story: Story, now_ms: float, keep_ms: int | None) -> None:
    days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    one = Keeping(story, now_ms, 5 * DAY_MS)
    one.look()
    story.broker.alter_topic(TOPIC, keep_settings(keep_ms))
    one.look(DAY_MS)
    assert (log_start(story), one.keeper.cuts) == (0, 0)


@pytest.mark.usefixtures("short", "five_days")
def test_a_member_without_the_right_says_so_once_by_name_and_replays_nothing(
    story: Story, now_ms: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    one = Keeping(story, now_ms, 5 * DAY_MS)
    monkeypatch.setattr(one.cluster, "operations", lambda name, _: frozenset(["READ", *["DELETE"] * (name == TOPIC)]))
    monkeypatch.setattr(log_keeper, "make_plan", lambda *_, **__: pytest.fail("it replays"))
    for _ in range(3):
        one.look(DAY_MS)
    (line,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert (line.event, line.levelno) == ("prune_refused", logging.WARNING)  # type: ignore[attr-defined]
    assert f"DELETE on topic '{SNAPSHOTS}'" in line.getMessage() and "the log grows" in line.getMessage()
    assert "DELETE" in one.keeper.failing


@pytest.mark.usefixtures("short", "five_days")
@pytest.mark.parametrize("error", [KafkaUnavailableError("away"), RuntimeError("a bug"), AuthorizationError("no")])
def test_a_failure_is_said_once_and_the_next_turn_tries_again(
    story: Story, now_ms: float, error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    one = Keeping(story, now_ms, 5 * DAY_MS)

    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as during:
        during.setattr(one.cluster, "delete_records", broken)
        one.look()
        one.look(DAY_MS)
        assert one.keeper.failing and not one.keeper.is_due(one.now + log_keeper.SHORTEST_LOOK_MS - 1)
        one.look(DAY_MS)
    said = [each for each in caplog.records if each.levelno >= logging.WARNING and "prune" in each.event]  # type: ignore[attr-defined]
    assert len(said) == {KafkaUnavailableError: 0, AuthorizationError: 1, RuntimeError: 2}[type(error)]
    assert log_start(story) == 0
    one.look(DAY_MS)
    assert (log_start(story), one.keeper.failing) == (places[2], "")


@pytest.mark.usefixtures("short", "five_days")
def test_a_member_that_ends_leaves_its_replay(story: Story, now_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    one = Keeping(story, now_ms, 5 * DAY_MS)
    one.look()
    one.keeper._life.ended = True
    monkeypatch.setattr(log_keeper, "carry_out", lambda *_: pytest.fail("it has replayed to the end"))
    one.look(DAY_MS)
    assert (log_start(story), one.keeper.cuts, one.keeper.failing) == (0, 0, "")


@pytest.mark.usefixtures("short", "five_days")
def test_a_forged_snapshot_is_an_alarm_and_the_reason(
    story: Story, now_ms: float, caplog: pytest.LogCaptureFixture
) -> None:
    story.broker.clock = lambda: now_ms - 9 * DAY_MS
    story.beat(10)
    story.lie()
    days(story, now_ms, [8, 7, 1, 0.5, 0.2])
    one = Keeping(story, now_ms, 5 * DAY_MS)
    for _ in range(3):
        one.look(DAY_MS)
    assert [each.levelno for each in caplog.records if each.event == "snapshot_differs"] == [logging.ERROR]  # type: ignore[attr-defined]
    assert log_start(story) == 0 and "contradicts the log" in one.keeper.failing


def test_about_one_of_any_number_of_members_comes_first() -> None:
    """Within a hundredth of a turn, which is more than a step takes."""
    rng = Random(5)
    for members in (1, 10, 100, 1_000):
        early = []
        for _ in range(40):
            drawn = sorted(log_keeper._draw(rng.random()) for _ in range(members))
            early.append(sum(each <= drawn[0] + 0.01 for each in drawn))
        assert 1 <= sum(early) / len(early) < 2.5, members


def test_a_member_at_work_keeps_its_log(
    story: Story, now_ms: float, at_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SHORTEST_MS", 50.0)
    monkeypatch.setattr(log_keeper, "interval", lambda listed: 10)
    monkeypatch.setattr(log_keeper, "SHORTEST_LOOK_MS", 50.0)
    monkeypatch.setattr(log_keeper, "turn_ms", lambda wish: 200.0)
    monkeypatch.setattr(LogGuard, "_interval_ms", 50.0)
    places = days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    members = [story.member(name) for name in "ab"]
    wait_until(lambda: all(each.metrics().log_records for each in members), "both have checked the topic")
    assert log_start(story) == 0
    Admin.on_cluster(lambda: story.cluster.connect("admin"), topic=TOPIC).keep_log(5 * 86_400)
    wait_until(lambda: log_start(story) == places[2], "the cut")
    assert [each.alarms for each in members] == [(), ()]
    assert all(each.health().ok for each in members)


# -- what is shown -----------------------------------------------------------------------------------------------


def test_what_an_operator_sees(story: Story, now_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from kafka_marshal.observe import log_size

    monkeypatch.setattr(log_size, "SNAPSHOT_INTERVAL", 10)

    def size(living: int = 2) -> log_size.LogSize:
        return measure(story.cluster, TOPIC, TIMEOUT_S, now_ms, living=living)

    days(story, now_ms, [9, 8, 7, 1, 0.5, 0.2])
    found = size()
    assert (found.records, found.keep_ms, found.next_prune_ms, found.warnings()) == (story.end, None, None, [])
    assert found.oldest is not None and 70 * found.records < found.bytes < 300 * found.records
    assert "kept for ever" in found.text
    monkeypatch.setattr(log_size, "LARGE", 50)
    assert "--keep 30d has members remove what is older" in size().warnings()[0]
    monkeypatch.setattr(log_size, "LARGE", 1_000)
    story.broker.alter_topic(TOPIC, keep_settings(5 * DAY_MS))
    assert "DELETE" in size().overdue and "prune_refused" in size().overdue and "--older-than 7200m" in size().overdue
    assert "no member is at work" in size(0).overdue
    assert size().text.endswith(f"kept for {span(5 * DAY_MS)}, next prune due")
    story.broker.alter_topic(TOPIC, keep_settings(30 * DAY_MS))
    assert size().overdue == ""
    story.broker.alter_topic(TOPIC, keep_settings(5 * DAY_MS))
    story.broker.delete_records(SNAPSHOTS, 0, 1_000)
    assert "no snapshots are stored for partition(s) 0" in size().overdue


# -- Taking snapshots, and comparing with those of other members (S2) ---------------------------------------------


K = SNAPSHOT_INTERVAL


def keeper_of(story: Story, client: str = "keeper") -> SnapshotKeeper:
    cluster = story.cluster.connect(client)
    reader = SnapshotReader.find(cluster, SNAPSHOTS, 0.05)
    assert reader is not None
    reader.read_newest(2)
    return SnapshotKeeper(cluster, reader, SNAPSHOTS, Random(1), 0.0)


# -- members -----------------------------------------------------------------------------------------------


def test_s2_a_member_writes_the_last_two_that_a_start_needs(story: Story, at_once: Callable[[], None]) -> None:
    for place in range(K, 5 * K, K):
        story.up_to(place)
    story.beat(7)
    story.member("a")
    wait_until(lambda: len(story.stored()) == 2, "two snapshots")
    assert dict(story.stored()) == {place: story.digests[place] for place in (3 * K, 4 * K)}
    replica = story.replica()
    assert replica.starts[0].begun_at == 3 * K
    assert replica.worlds[0].snapshot() == story.truth.snapshot()


def test_s2_it_is_taken_where_the_next_offset_is_exactly_a_multiple_while_the_log_runs(
    story: Story, at_once: Callable[[], None]
) -> None:
    story.up_to(K - 20)
    members = [story.member(name) for name in "ab"]
    values = [(K, 0), (2 * K, 3)]
    for place, more in values:
        story.up_to(place)
        story.beat(more)
    wait_until(lambda: {K, 2 * K} <= dict(story.stored()).keys(), "both snapshots")
    assert set(story.stored()) == {(place, story.digests[place]) for place in (K, 2 * K)}
    assert [member.alarms for member in members] == [(), ()]


def test_s2_one_that_lies_is_an_alarm_that_names_the_offset(
    story: Story, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    story.up_to(K - 5)
    member = story.member("a")
    story.broker.create_topic("data", 1)
    with caplog.at_level(logging.ERROR), member.consumer(["data"]) as consumer:
        story.up_to(K)
        story.lie()
        wait_until(lambda: member.alarms, "the alarm")
        with pytest.raises(SnapshotDifferenceError, match=f"at offset {K}"):
            for _ in range(100):
                consumer.poll(0.1)
        assert consumer.poll(0.0) is None, "told once; work goes on"
    assert [type(alarm) for alarm in member.alarms] == [SnapshotDifferenceError]
    assert story.digests[K] in str(member.alarms[0])
    assert sum(f"at offset {K}" in record.getMessage() for record in caplog.records) == 1
    wait_until(lambda: (K, story.digests[K]) in story.stored(), "the truth is written beside the lie")


def test_s2_one_between_two_places_is_an_alarm_though_no_member_stores_one_there(
    story: Story, at_once: Callable[[], None]
) -> None:
    """Two equal wrong snapshots deceive a start, and a forger would write them where no member compares."""
    story.up_to(K - 5)
    member = story.member("a")
    story.up_to(K + 7)
    lie = story.lie()
    assert K < lie < 2 * K
    story.up_to(2 * K + 3)
    wait_until(lambda: member.alarms, "the alarm")
    assert [f"at offset {lie}" in str(alarm) for alarm in member.alarms] == [True]
    assert "not due for a snapshot" in str(member.alarms[0])


def test_s2_one_that_lay_there_at_start_is_an_alarm(story: Story, at_once: Callable[[], None]) -> None:
    story.beat(10)
    lie = story.lie()
    story.beat(10)
    story.snapshot()
    story.beat(5)
    member = story.member("a")
    assert [f"at offset {lie}" in str(alarm) for alarm in member.alarms] == [True]


def test_s2_without_the_topic_members_work_and_say_so_once(
    story: Story, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    story.broker.delete_topic(SNAPSHOTS)
    with caplog.at_level(logging.WARNING):
        member = story.member("a")
        story.up_to(K)
        lease = member.claim("u", 0)
        assert lease.valid
    said = [record.getMessage() for record in caplog.records if SNAPSHOTS in record.getMessage()]
    assert len(said) == 1
    assert "kafka-marshal init" in said[0]
    assert member.alarms == ()


def test_s4_a_member_stores_the_hash_of_what_it_has_read_between_two_snapshots(
    story: Story, at_once: Callable[[], None]
) -> None:
    story.up_to(K - 20)
    members = [story.member(name) for name in "ab"]
    for place in (K, 2 * K):
        story.up_to(place)
        story.beat(3)
    wait_until(lambda: len(story.hashes()) >= 2, "both hashes")
    assert set(story.hashes()) == {story.hash_of(0, K), story.hash_of(K, 2 * K)}
    assert [member.alarms for member in members] == [(), ()]


def test_s4_a_start_notices_that_the_log_was_changed_since_it_was_read(
    story: Story, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A changed timestamp leads to the same state; a member of an earlier release has stored the other snapshot."""
    for place in (K, 2 * K):
        story.up_to(place)
        story.snapshot()
    read = story.hash_of(K, 2 * K)
    story.store(encode_hash(read))
    log = story.broker.log(TOPIC, 0)
    assert log is not None
    at = next(at for at, each in enumerate(log.messages) if each.offset() == K + 5)
    kind, stamp = log.messages[at].timestamp()
    log.messages[at] = MemoryMessage(TOPIC, 0, K + 5, None, log.messages[at].value(), (kind, stamp - 1))
    assert story.hash_of(K, 2 * K) != read
    member = story.member("a")
    wait_until(lambda: member.alarms, "the alarm")
    (alarm,) = member.alarms
    assert f"the hash of the log that is stored for partition 0 of {TOPIC!r}, offsets {K} to {2 * K - 1}" in str(alarm)
    assert read.digest in str(alarm)
    assert "removed, added, altered or moved in time" in str(alarm)


def test_s4_members_of_an_earlier_release_store_none_without_an_alarm(
    story: Story, at_once: Callable[[], None]
) -> None:
    for place in (K, 2 * K):
        story.up_to(place)
        story.snapshot()
    member = story.member("a")
    story.up_to(3 * K)
    wait_until(lambda: len(story.hashes()) == 2, "the hashes since its start")
    assert story.hashes() == [story.hash_of(K, 2 * K), story.hash_of(2 * K, 3 * K)]
    assert member.alarms == ()


# -- the keeper by itself ------------------------------------------------------------------------------------


def test_s2_nothing_is_written_before_its_jitter_is_over(story: Story) -> None:
    keeper = keeper_of(story)
    story.beat(10)
    keeper.note(0, story.end, story.truth.snapshot(), 1_000.0)
    due_at = keeper.due_at()
    assert 1_000.0 <= due_at <= 1_000.0 + JITTER_MS
    assert keeper.work(due_at - 1.0, [0]) == []
    assert story.stored() == []
    keeper.work(due_at, [0])
    assert story.stored() == [(story.end, story.truth.digest())]
    assert keeper.due_at() == due_at + LOOK_MS


def test_s2_jitters_of_different_members_differ(story: Story) -> None:
    story.beat(10)
    waits = []
    for seed in range(20):
        keeper = keeper_of(story)
        keeper._rng = Random(seed)
        keeper.note(0, story.end, story.truth.snapshot(), 0.0)
        waits.append(keeper.due_at())
    assert max(waits) - min(waits) > JITTER_MS / 2


def test_s2_they_are_written_in_the_order_of_their_places(story: Story) -> None:
    for seed in range(20):
        keeper = keeper_of(story)
        keeper._rng = Random(seed)
        places = []
        for _ in range(2):
            story.beat(10)
            places.append(story.end)
            keeper.note(0, story.end, story.truth.snapshot(), 0.0)
        while keeper.due_at() <= JITTER_MS:
            keeper.work(keeper.due_at(), [0])
        assert [place for place, _ in story.stored()][-2:] == places


@pytest.mark.parametrize("seen_at_start", [True, False])
def test_s2_a_writer_skips_one_that_is_there_already(story: Story, seen_at_start: bool) -> None:
    story.beat(10)
    if seen_at_start:
        story.snapshot()
    keeper = keeper_of(story)
    if not seen_at_start:
        story.snapshot()
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    assert keeper.work(JITTER_MS, [0]) == []
    assert len(story.stored()) == 1


def test_s2_half_a_snapshot_is_not_one_that_is_there(story: Story) -> None:
    for number in range(2_000):
        story.claim(number, ("1", "c" * 255, "g" * 250))
    first, second = encode_snapshot(story.truth)
    story.store(first)
    keeper = keeper_of(story)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    keeper.work(JITTER_MS, [0])
    assert (story.end, story.truth.digest()) in story.stored()
    story.store(second)
    assert keeper.work(2 * JITTER_MS, [0]) == []


def test_s2_a_difference_is_found_in_either_order(story: Story) -> None:
    keeper = keeper_of(story)
    story.beat(10)
    story.lie()
    assert keeper.work(0.0, [0]) == [], "nothing of ours to compare with yet"
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    (found,) = keeper.work(0.0, [0])
    assert (found.cp, found.next_offset, found.ours) == (0, story.end, story.truth.digest())
    assert keeper.is_news(found)
    assert not keeper.is_news(found)


def test_q27_a_damaged_one_is_reported(story: Story) -> None:
    keeper = keeper_of(story)
    story.beat(10)
    story.damage()
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    (found,) = keeper.work(0.0, [0])
    assert "damaged" in found.why


def test_s2_an_outage_is_no_news_and_made_up_for(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    keeper = keeper_of(story, "cut off")
    story.beat(10)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    story.broker.set_reachable("cut off", False)
    with caplog.at_level(logging.DEBUG, "kafka_marshal"):
        assert keeper.work(JITTER_MS, [0]) == []
        assert keeper.work(2 * JITTER_MS, [0]) == []
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]  # the member logs it once
    assert keeper.due_at() == 2 * JITTER_MS + RETRY_MS
    story.broker.set_reachable("cut off", True)
    keeper.work(keeper.due_at(), [0])
    assert story.stored() == [(story.end, story.truth.digest())]


def test_s2_old_snapshots_may_be_removed_while_it_follows(story: Story) -> None:
    keeper = keeper_of(story)
    for _ in range(3):
        story.beat(10)
        story.snapshot()
    story.broker.delete_records(SNAPSHOTS, 0, 2)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    assert keeper.work(JITTER_MS, [0]) == []
    assert len(story.stored()) == 1


def test_s2_it_follows_a_recreated_snapshots_topic(story: Story) -> None:
    story.beat(10)
    story.store(*[b"junk"] * 10)
    keeper = keeper_of(story)
    story.broker.delete_topic(SNAPSHOTS)
    story.broker.create_topic(SNAPSHOTS, 1)
    story.lie()
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    assert [found.next_offset for found in keeper.work(JITTER_MS, [0])] == [story.end]
    assert story.stored()[-1] == (story.end, story.truth.digest())


def test_q51_of_what_is_not_read_nothing_is_written_nor_compared(story: Story) -> None:
    """Q51: a member of a coordinated group leaves them to others; a CP that is read again is followed from there on."""
    keeper = keeper_of(story)
    story.beat(10)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    story.lie()
    assert keeper.work(JITTER_MS, []) == []
    assert (story.end, story.truth.digest()) not in story.stored()
    assert keeper.due_at() == JITTER_MS + LOOK_MS, "it does not wait to be written"
    assert keeper.work(2 * JITTER_MS, [0]) == [], "a start compares what was there before"
    story.lie()
    (found,) = keeper.work(3 * JITTER_MS, [0])
    assert found.ours == story.truth.digest()


def test_s2_only_the_two_youngest_states_are_kept_until_they_are_written(story: Story) -> None:
    keeper = keeper_of(story)
    for _ in range(5):
        story.beat(10)
        keeper.note(0, story.end, story.truth.snapshot(), THREADS.now_ms())
    keeper.work(THREADS.now_ms() + JITTER_MS, [0])
    assert [place for place, _ in story.stored()] == [story.end - 10, story.end]


def test_the_log_of_snapshots_is_read_in_time(story: Story) -> None:
    """A reader that gets only irrelevant records ends nevertheless."""
    story.store(*[b"junk"] * 100)
    reader = SnapshotReader.find(story.cluster, SNAPSHOTS, TIMEOUT_S)
    assert reader is not None
    reader.read_newest(2)
    assert not reader.read_older(0)
    assert reader.partitions[0].junk == 100
    assert SnapshotReader.find(story.cluster, TOPIC + "x", TIMEOUT_S) is None
