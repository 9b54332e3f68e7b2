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
from kafka_marshal.admin import Admin
from kafka_marshal.errors import AuthorizationError, ConfigurationError, KafkaUnavailableError, TopicChangedError
from kafka_marshal.node import jobs, log_keeper, replica
from kafka_marshal.node.engine_lock import Shared
from kafka_marshal.node.jobs import Job, LogGuard
from kafka_marshal.node.kept import LEAST_KEEP_MS, check_keep, keep_of, keep_settings
from kafka_marshal.node.life import Life
from kafka_marshal.node.log_keeper import LogKeeper
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.observe.log_size import measure
from kafka_marshal.observe.text import span
from kafka_marshal.snapshots import prune
from kafka_marshal.snapshots.prune import OlderThan, PrunePlan, carry_out, make_plan
from kafka_marshal.snapshots.reader import SnapshotReader
from rationalizer.log_hash import LogHash, encode_hash
from tests.snapshots.conftest import SNAPSHOTS, TIMEOUT_S, TOPIC, Story, wait_until
from tests.snapshots.test_prune import log_start, starts_true

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
        Job.run(self.keeper)


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
