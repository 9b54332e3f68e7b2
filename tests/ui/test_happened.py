"""Events on the page: rebalances with their causes, and records that are worth a line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.ui import moments
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.index import MOST_BUCKETS, Series
from kafka_marshal.ui.moments import Moment
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    Heartbeat,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    Tick,
    Upgrade,
    codes,
    route_lease,
)
from rationalizer.levels import SUPPORTED_LEVEL
from tests.cli.harness import Log
from tests.fleet import Fleet, started
from tests.ui.conftest import archive_of
from tests.ui.story import BEGIN

GROUP, TOPIC, CPS, INTERVAL_MS = "plans", "flights", 2, 3_000


class Recorded:
    """A log of one claimed group, and the history of it."""

    def __init__(self, folder: Path) -> None:
        self.log = Log(CPS)
        self.folder = folder
        self.epoch: dict[int, int] = {}
        for cp in range(CPS):
            self.log.add(Tick("init", "init", f"partitions={CPS}"), BEGIN, cp)

    def claim(self, second: float, worker: str, *numbers: int, run: int = 1) -> None:
        for number in numbers:
            record = ClaimingPartition(f"host/{run}/0.1.0/x", worker, GROUP, TOPIC, number, INTERVAL_MS)
            self.epoch[number] = self.log.add(record, self._at(second), route_lease(TOPIC, number, CPS))

    def beat(
        self, second: float, worker: str, *numbers: int, run: int = 1, is_new: bool = False, done: int | None = None
    ) -> None:
        for number in numbers:
            epoch = None if is_new else self.epoch[number]
            record = Heartbeat(f"host/{run}/0.1.0/x", worker, GROUP, TOPIC, number, epoch, done)
            self.log.add(record, self._at(second), route_lease(TOPIC, number, CPS))

    def release(self, second: float, worker: str, *numbers: int) -> None:
        for number in numbers:
            record = ReleasingPartition("host/1/0.1.0/x", worker, GROUP, TOPIC, number, self.epoch[number], None)
            self.log.add(record, self._at(second), route_lease(TOPIC, number, CPS))

    def evict(self, second: float, admin: str, worker: str, number: int) -> None:
        """The admin writes in its own name, which is rejected, and then releases in the owner's (C20)."""
        for client in (admin, worker):
            record = ReleasingPartition("host/1/0.1.0/x", client, GROUP, TOPIC, number, self.epoch[number], None)
            self.log.add(record, self._at(second), route_lease(TOPIC, number, CPS))

    def history(self) -> History:
        found = archive_of(self.log.dump, self.folder).whole
        assert found is not None
        return found

    def rebalances(self) -> list[dict[str, Any]]:
        history = self.history()
        return moments.rebalances(history, history.groups[GROUP], Moment(2**62), 50)

    @staticmethod
    def _at(second: float) -> int:
        return BEGIN + int(second * 1000)


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_a_rebalance_of_a_claimed_group_names_silent_members_and_the_time_without_an_owner(recorded: Recorded) -> None:
    recorded.claim(1, "worker-1", 0, 1)
    recorded.claim(1, "worker-2", 2, 3, 4)
    recorded.beat(30, "worker-2", 2, 3)
    recorded.beat(30.5, "worker-2", 4)
    recorded.claim(36.5, "worker-3", 2)
    recorded.claim(37, "worker-3", 3)
    recorded.claim(38, "worker-1", 4)
    last, first = recorded.rebalances()
    assert last["why"] == "worker-2 was silent for 7.5 s: worker-3 claimed 2, worker-1 claimed 1"
    assert (last["vacant"], last["moved"]) == ("7.5 s", 3)
    assert first["why"] == "worker-2 claimed 3, worker-1 claimed 2"
    assert first["vacant"] is None, "nobody had them before"


def test_a_free_partition_has_no_owner_since_then(recorded: Recorded) -> None:
    recorded.claim(1, "worker-1", 0, 1)
    recorded.beat(29, "worker-1", 0, 1)
    recorded.release(30, "worker-1", 0, 1)
    recorded.claim(32.5, "worker-2", 0)
    recorded.claim(33, "worker-2", 1)
    (last, _) = recorded.rebalances()
    assert (last["why"], last["vacant"]) == ("worker-1 released 2, worker-2 claimed 2", "3.0 s")


def test_a_restart_is_a_cause(recorded: Recorded) -> None:
    recorded.claim(1, "worker-1", 0, 1)
    recorded.beat(29, "worker-1", 0, 1)
    recorded.beat(30.5, "worker-1", 0, 1, run=2, is_new=True)
    (last, _) = recorded.rebalances()
    assert (last["why"], last["vacant"]) == ("worker-1 restarted: worker-1 took over 2", "1.5 s")


def test_an_eviction_is_a_cause_and_no_release_by_its_owner(recorded: Recorded) -> None:
    recorded.claim(1, "worker-1", 0)
    recorded.claim(2, "worker-2", 1)
    recorded.beat(30, "worker-1", 0)
    recorded.evict(31, "admin-7", "worker-1", 0)
    recorded.claim(32.5, "worker-2", 0)
    (last, _) = recorded.rebalances()
    assert (last["why"], last["vacant"]) == ("worker-1 was evicted by admin-7: worker-2 claimed 1", "1.5 s")


def test_several_were_silent_and_the_list_is_cut(recorded: Recorded) -> None:
    for number in range(8):
        recorded.claim(1 + number / 10, f"worker-{number}", number)
    recorded.claim(30, "heir", *range(8))
    (last, _) = recorded.rebalances()
    assert last["why"].startswith("worker-0 was silent for 29 s; worker-1 was silent for 29 s; ")
    assert last["why"].endswith("; …: heir claimed 8")
    assert last["vacant"] == "29 s"


def test_settings_are_one_line_and_not_one_for_each_part_of_the_log(recorded: Recorded) -> None:
    fleet = Fleet(GROUP, CPS, lambda record, cp: recorded.log.add(record, BEGIN + 1_000, cp))
    fleet.upgrade()
    fleet.configure()
    fleet.configure(accept_individual_commit=True)
    away = 1 - fleet.home
    recorded.log.add(ReleaseGroup("admin/1/0.1.0/x", "admin", GROUP, BEGIN + 60_000), BEGIN + 1_000, away)
    fleet.configure(accept_individual_commit=False)
    history = recorded.history()
    found = moments.events(history, GROUP, Moment(2**62), "all", None, 50)
    said = [(each["at"].split(":")[0], each["code"]) for each in found if each["type"] == "ConfigureGroup"]
    home = str(fleet.home)
    assert sorted(said) == sorted([(home, codes.OK)] * 3 + [(str(away), codes.PAUSED)])


def rates(recorded: Recorded) -> tuple[list[int], int]:
    """Messages done in each second, and how many of these seconds are complete."""
    history = recorded.history()
    end = max(world.log_time for world in history.worlds.values())
    found = moments.timeline(history.groups[GROUP], end)
    assert found["width"] == 1_000
    begin = (found["begin"] - BEGIN) // 1_000
    return [0] * begin + found["done"], (found["end"] - BEGIN) // 1_000


def test_what_a_beat_reports_was_done_since_the_one_before(recorded: Recorded) -> None:
    recorded.claim(1, "worker-1", 0)
    recorded.beat(1, "worker-1", 0, done=9)  # where it begins
    recorded.beat(4, "worker-1", 0, done=39)
    recorded.beat(7, "worker-1", 0, done=69)
    recorded.beat(9.5, "worker-1", 0, done=69)
    recorded.beat(12.5, "worker-1", 0, done=75)
    recorded.claim(13, "worker-2", 1)
    recorded.beat(14, "worker-2", 1)
    done, over = rates(recorded)
    assert done == [0, 10, 10, 10, 10, 10, 10, 0, 0, 1, 2, 2, 1]
    assert over == 12, "worker-1 has not said yet what it did then"


def test_nothing_is_lost_where_buckets_become_wider() -> None:
    rng, series, amount = random.Random(5), Series(("done",)), 0
    for _ in range(500):
        at = BEGIN + rng.randrange(40_000_000)
        more = rng.randrange(1_000)
        series.spread("done", at - rng.choice((0, 1, 1_000, 100_000, BEGIN)), at, more)
        amount += more
    assert series.width_ms > 1_000
    assert sum(series.lists()["done"]) == amount
    assert MOST_BUCKETS // 2 <= len(series.lists()["done"]) <= MOST_BUCKETS, "no wider than necessary"


def test_a_coordinated_group_reports_what_was_done_since_the_commit_before(recorded: Recorded) -> None:
    now = BEGIN + 1_000
    fleet = Fleet(GROUP, CPS, lambda record, cp: recorded.log.add(record, now, cp))
    fleet.upgrade()
    generation = fleet.join("a", {TOPIC: 2}, session=8_000)
    fleet.commit("a", generation, *started(TOPIC, 0, 1, through=0))
    for second, number, through in ((4, 0, 30), (7, 0, 60), (60, 0, 60), (62, 1, 8)):
        now = BEGIN + second * 1_000
        fleet.commit("a", generation, CommitEntry(TOPIC, number, through=through))
    done, _ = rates(recorded)
    assert done[1:8] == [10, 10, 10, 10, 10, 10, 0]
    assert sum(done[8:58]) == 0
    assert done[58:] == [2, 2, 2, 2], "it had no message for long: those of now came since its last beat"


def test_how_far_members_are_is_no_news(recorded: Recorded) -> None:
    """What each take-over opens and does would hide the rest: what is set aside, refused or discarded."""
    for cp in range(CPS):
        recorded.log.add(Upgrade("init", "init", "init", SUPPORTED_LEVEL), BEGIN, cp)
    recorded.claim(1, "w1", 0)
    ids, home, epoch = ("host/1/0.1.0/x", "w1", GROUP), route_lease(TOPIC, 0, CPS), recorded.epoch[0]

    def settle(second: int, of: int | None, **what: Any) -> None:
        recorded.log.add(SettlingMessages(*ids, TOPIC, 0, of, 2**40, **what), BEGIN + 1_000 * second, home)

    settle(2, epoch, open=((3, 5, None, 1),))
    settle(3, epoch, done=((3, 4),))
    settle(4, epoch, parked=((5, 1, 5, "ValueError"),))
    settle(5, epoch + 1, done=((7, 7),))
    settle(6, None, done=((5, 5),))
    history = recorded.history()
    found = moments.events(history, GROUP, Moment(2**62), "all", None, 50)
    assert [(each["type"], each["time"] - BEGIN, each["accepted"]) for each in reversed(found)] == [
        ("ClaimingPartition", 1_000, True),
        ("SettlingMessages", 4_000, True),
        ("SettlingMessages", 5_000, False),
        ("SettlingMessages", 6_000, True),
    ]
