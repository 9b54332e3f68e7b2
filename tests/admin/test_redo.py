"""Done messages opened again from outside. The members are raw records on a log in memory, or real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path as File
from typing import Any

import pytest

from kafka_marshal import Admin, Group, Marshal
from kafka_marshal.admin import redo
from kafka_marshal.admin.redo import RedoPlan, RedoSpan
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS
from kafka_marshal.errors import AdminError, ConfigurationError
from rationalizer import ClaimingPartition, CommitEntry, CommitRanges, Upgrade, route_lease
from tests.admin.test_open_messages import CPS, DATA, GROUP, MESSAGES, PARKED, WAITING, Place, key_of
from tests.broker.helpers import eventually

OPEN = {*PARKED, WAITING}
DONE = [offset for offset in range(MESSAGES) if offset not in OPEN]


@pytest.fixture(params=["claimed", "coordinated"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


class StoppedError(BaseException):
    """The operator was killed here."""


def offsets(spans: tuple[RedoSpan, ...]) -> list[int]:
    return [offset for span in spans for offset in range(span.first, span.last + 1)]


def plan_of(place: Place, span: Any = None, **more: Any) -> RedoPlan:
    return place.admin.plan_redo(GROUP, {(DATA, 0): span}, **more)


def try_again(place: Place, offsets: Iterable[int], attempts: int = 1) -> None:
    """Their owner has them wait for their next try."""
    place.settle(opened=tuple((at, at, place.hash_of(at), attempts) for at in sorted(offsets)))


def stop_at(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is killed there."""
    left = [steps]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            raise StoppedError

    monkeypatch.setattr(redo, "passed", count)


def opened(place: Place) -> set[int]:
    """Open by now, and not before."""
    return {at for hole in place.progress().open for at in range(hole.first, hole.last + 1)} - OPEN


def test_what_is_done_is_found_and_what_is_open_set_aside_or_not_there_is_counted(place: Place) -> None:
    (found,) = plan_of(place, (2, 10)).partitions
    assert offsets(found.spans) == [2, 4, 6, 8, 10]
    assert (found.messages, found.parked, found.open, found.ahead, found.gone) == (5, 3, 1, 0, 0)
    assert found.first is not None
    assert found.last is not None
    assert (found.first.offset, found.first.key, found.last.offset) == (2, b"k2", 10)
    assert list(place.written()) == []
    place.cluster.broker.delete_records(DATA, 0, 4)
    (found,) = plan_of(place, (2, 10)).partitions
    assert (offsets(found.spans), found.gone) == ([4, 6, 8, 10], 2)


def test_what_is_not_done_yet_is_not_opened(place: Place) -> None:
    for offset in range(5):
        place.cluster.broker.produce(DATA, 0, b"new", key=key_of(offset))
    (found,) = plan_of(place).partitions
    assert offsets(found.spans) == DONE
    assert found.ahead == 5
    done = place.admin.redo(plan_of(place))
    assert (done.opened, dict(done.left)) == (len(DONE), {})
    assert opened(place) == set(DONE)


IN_TRANSACTIONS = ((KAFKA_COUNTS, KAFKA_COUNTS),)


def refuses_transactions(place: Place) -> None:
    with pytest.raises(AdminError, match=r"processes in transactions.*release-group \w+ --partition orders:0=OFFSET"):
        plan_of(place)
    assert list(place.written()) == []


def test_a_group_that_processes_in_transactions_is_refused(place: Place) -> None:
    if place.kind == "claimed":
        place.append(CommitRanges(*place.ids, DATA, 0, place.epoch, IN_TRANSACTIONS), place.cp)
    else:
        place.fleet.commit("w1", place.generation, CommitEntry(DATA, 0, ranges=IN_TRANSACTIONS))
    refuses_transactions(place)


def test_it_is_refused_where_a_position_was_set_and_other_partitions_say_so() -> None:
    """The position has taken the partition's mark away (M3), until the next member comes."""
    place, cp = Place("claimed"), route_lease(DATA, 1, CPS)
    epoch = place.append(ClaimingPartition(*place.ids, DATA, 1, 60_000), cp)
    place.append(CommitRanges(*place.ids, DATA, 1, epoch, IN_TRANSACTIONS), cp)
    refuses_transactions(place)


def test_only_these_keys(place: Place) -> None:
    plan = plan_of(place, keys=["k2", b"k4"])
    wanted = [at for at in DONE if at % 5 in (2, 4)]
    assert offsets(plan.partitions[0].spans) == wanted
    assert {span.key_hash for span in plan.partitions[0].spans} == {place.hash_of(2), place.hash_of(4)}
    place.admin.redo(plan)
    assert opened(place) == set(wanted)


def test_times_are_offsets_by_the_broker(place: Place) -> None:
    log = place.cluster.broker.log(DATA, 0)
    assert log is not None
    stamps = [message.timestamp()[1] for message in log.messages]
    begin, end = datetime.fromtimestamp(stamps[0] / 1000, UTC), datetime.fromtimestamp(stamps[-1] / 1000 + 1, UTC)
    (found,) = plan_of(place, (begin, end)).partitions
    assert offsets(found.spans) == DONE
    (found,) = plan_of(place, (datetime(2001, 1, 1, tzinfo=UTC), begin)).partitions
    assert found.messages == 0


def test_a_claimed_partition_takes_ranges_and_reads_no_messages_between() -> None:
    place = Place("claimed")
    (found,) = plan_of(place, (12, 19)).partitions
    assert found.spans == (RedoSpan(12, 19, None),)
    place.admin.redo(plan_of(place, (12, 19)))
    (hole,) = [hole for hole in place.progress().open if hole.first == 12]
    assert (hole.last, hole.attempts) == (19, 0)


def test_a_copy_of_a_record_opens_nothing_twice(place: Place) -> None:
    place.admin.redo(plan_of(place, (14, 16)))
    (record,) = [each for each in place.written() if each.open]
    assert record.redo
    place.settle(done=((14, 16),))
    assert opened(place) == set()
    place.append(record, place.cp)
    assert opened(place) == set()


@pytest.mark.parametrize("steps", range(1, 5))
def test_killed_anywhere_it_is_carried_on_from_its_file(
    place: Place, steps: int, tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is opened once, though the records are appended again."""
    path = tmp_path / "plan.json"
    monkeypatch.setattr(redo._Redo, "_wait_for_room", lambda *_: None)  # its owner settles only below
    stop_at(steps, monkeypatch)
    with pytest.raises(StoppedError):
        place.admin.redo(plan_of(place, (12, 19)), path=path, rate=4)
    was = opened(place)
    place.settle(done=tuple((at, at) for at in sorted(was)))  # its owner has done them again meanwhile
    monkeypatch.setattr(redo, "passed", lambda: None)
    saved = RedoPlan.read(path)
    done = place.admin.redo(saved, path=path, rate=4)
    assert done.left == {}
    assert opened(place) == set(range(12, 20)) - was
    assert done.opened == 8


def test_what_others_opened_or_set_back_meanwhile_is_not_opened_on_top(place: Place) -> None:
    plan = plan_of(place, (12, 15))
    place.admin.redo(plan_of(place, (13, 14)))
    place.settle(done=((13, 14),))
    late = replace(plan, records=[redo._Written(DATA, 0, 1, plan.partitions[0].spans)])
    done = place.admin.redo(late)
    assert opened(place) == set()
    assert [span[2:] for span in done.left] == [(each.first, each.last) for each in plan.partitions[0].spans]
    assert all("another operator" in why for why in done.left.values())


def test_undone_what_is_still_open_counts_as_done(place: Place, tmp_path: File) -> None:
    path = tmp_path / "plan.json"
    place.admin.redo(plan_of(place, (12, 19)), path=path)
    place.settle(done=((12, 13),))
    found = place.admin.undo_redo(RedoPlan.read(path))
    assert [offset for _, _, offset in found.messages] == list(range(14, 20))
    assert opened(place) == set()
    assert set(place.holes()) == OPEN


def test_undone_what_waits_for_its_next_try_since_counts_as_done_and_what_is_set_aside_stays(place: Place) -> None:
    """The mended release fails, too: its owner has opened them again, with attempts."""
    plan = place.admin.redo(plan_of(place, (12, 19))).plan
    place.settle(done=((12, 12),))
    try_again(place, range(13, 17), 3)
    place.park({17: "ValueError"})
    found = place.admin.undo_redo(plan)
    assert [offset for _, _, offset in found.messages] == [13, 14, 15, 16, 18, 19]
    assert opened(place) == {17}


def test_of_what_was_opened_by_another_meanwhile_nothing_is_undone(place: Place) -> None:
    ours = place.admin.redo(plan_of(place, (12, 15))).plan
    place.settle(done=((13, 15),))
    try_again(place, [12])
    place.admin.redo(plan_of(place, (14, 15)))
    try_again(place, [15])
    found = place.admin.undo_redo(ours)
    assert [offset for _, _, offset in found.messages] == [12]
    assert opened(place) == {14, 15}


@pytest.mark.parametrize("steps", [1, 2])
def test_undone_after_a_kill_the_record_whose_answer_is_missing_counts(
    place: Place, steps: int, tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the record was appended, or before its answer was saved."""
    path = tmp_path / "plan.json"
    stop_at(steps, monkeypatch)
    with pytest.raises(StoppedError):
        place.admin.redo(plan_of(place, (12, 19)), path=path)
    was = opened(place)
    assert was == (set(range(12, 20)) if steps == 2 else set())
    plan = RedoPlan.read(path)
    assert [each.offset for each in plan.records] == [None]
    assert {offset for _, _, offset in place.admin.undo_redo(plan).messages} == was
    assert opened(place) == set()


def test_what_fails_again_counts_as_open_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "STILL_S", 0.5)
    seen: list[set[int]] = []

    def fail() -> None:
        seen.append(opened(place))
        try_again(place, seen[-1])

    monkeypatch.setattr(redo, "passed", fail)
    with pytest.raises(AdminError, match="no member has worked off any of 4 messages"):
        place.admin.redo(plan_of(place, (12, 19)), rate=4)
    assert seen[-1] == opened(place) == {12, 13, 14, 15}


def test_no_more_are_open_at_once_than_the_rate_says(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(len(opened(place)))
        place.settle(done=tuple((at, at) for at in sorted(opened(place))))

    monkeypatch.setattr(redo, "passed", look)
    done = place.admin.redo(plan_of(place, (12, 19)), rate=3)
    assert done.opened == 8
    assert max(seen) == 3


def test_if_nobody_works_them_off_it_ends_and_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "STILL_S", 0.3)
    with pytest.raises(AdminError, match=r"no member has worked off any of 3 messages .* 3 of 8 are opened"):
        place.admin.redo(plan_of(place, (12, 19)), rate=3)


def test_what_can_not_be_done_again_is_refused(place: Place, tmp_path: File) -> None:
    with pytest.raises(AdminError, match="did you mean"):
        place.admin.plan_redo("delay", {(DATA, 0): None})
    with pytest.raises(ConfigurationError, match="partitions"):
        place.admin.plan_redo(GROUP, {})
    with pytest.raises(ConfigurationError, match="keys"):
        plan_of(place, keys=[3])
    with pytest.raises(ConfigurationError, match="no plan that redo wrote"):
        RedoPlan.read(tmp_path / "nothing.json")
    (tmp_path / "odd.json").write_text(json.dumps({"format": "kafka-marshal redo 1", "group": GROUP}))
    with pytest.raises(ConfigurationError, match="no plan that redo wrote"):
        RedoPlan.read(tmp_path / "odd.json")
    with pytest.raises(ConfigurationError, match="this plan is of group 'delays' of 'other'"):
        place.admin.redo(replace(plan_of(place), log="other"))


def test_below_level_5_it_names_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.admin.test_open_messages.SUPPORTED_LEVEL", 4)
    place = Place("claimed")
    with pytest.raises(ConfigurationError, match=r"level 5 .* which is at level 4\..*kafka-marshal upgrade"):
        plan_of(place)
    for cp in range(CPS):
        place.append(Upgrade("m", "m", "m", 5), cp)
    assert plan_of(place).messages == len(DONE)


@pytest.mark.parametrize("kind", ["claimed", "coordinated"])
def test_their_owner_handles_them_again_while_it_works_on(kind: str) -> None:
    place = Place(kind)
    place.cluster.broker.create_topic("live", 2)
    for offset in range(40):
        place.cluster.broker.produce("live", offset % 2, b"%d" % offset, key=key_of(offset))
    seen: list[tuple[int, int]] = []
    mode: Any = {"mode": Group()} if kind == "coordinated" else {}
    with Marshal.on_cluster(
        place.cluster.connect("w"), group_id="work", client_id="w", heartbeat_interval=0.3
    ) as marshal:

        def work() -> None:
            with marshal.consumer(["live"], **mode) as consumer:
                consumer.run(lambda m: seen.append((m.partition(), m.offset())), concurrency=2)

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: len(seen) == 40)
        admin = Admin.on_cluster(lambda: place.cluster.connect("admin"), client_id="ann")
        eventually(lambda: admin.plan_redo("work", {("live", 1): (5, 9)}).messages == 5)
        done = admin.redo(admin.plan_redo("work", {("live", 1): (5, 9)}))
        assert done.opened == 5
        place.cluster.broker.produce("live", 0, b"new", key=b"new")
        eventually(lambda: len(seen) == 46)
        marshal.stop()
        thread.join()
    assert sorted(seen[40:]) == [(0, 20), *((1, offset) for offset in range(5, 10))]
