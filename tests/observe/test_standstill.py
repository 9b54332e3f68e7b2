"""Silence and outages: a silent log makes no member dead, hung or slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.observe.problems import open_problems, problems_of
from kafka_marshal.observe.rows import GroupRow
from kafka_marshal.observe.view import LiveView
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    CommitRanges,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    Tick,
    Upgrade,
    encode,
    route_lease,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.marker import marker

LOG, DATA, GROUP = "__marshal", "orders", "g"
BEGIN = 1_700_000_000_000
HI = 3_000


class Fleet:
    """Workers of one partition each, in memory, on the time of a clock that stands."""

    def __init__(self, workers: int, cps: int = 1) -> None:
        self.now = float(BEGIN)
        self.cps = cps
        self.cluster = MemoryCluster(clock=lambda: self.now)
        self.cluster.create_topic(LOG, cps, 1, required_settings(1), 10)
        self.cluster.broker.create_topic(DATA, workers)
        for cp in range(cps):
            self._append(cp, marker("m", cps), Upgrade("m", "m", "m", SUPPORTED_LEVEL))
        self.ids = [(f"h/{number}/1.0/x", f"w{number}", GROUP) for number in range(workers)]
        self.epochs = [
            self.append(number, ClaimingPartition(*ids, DATA, number, HI)) for number, ids in enumerate(self.ids)
        ]

    def append(self, number: int, *records: Record) -> int:
        """Append records about that partition; the last one's offset."""
        return self._append(route_lease(DATA, number, self.cps), *records)

    def _append(self, cp: int, *records: Record) -> int:
        return [self.cluster.broker.produce(LOG, cp, encode(record)) for record in records][-1]

    def beat(self, number: int, last: int | None = None) -> None:
        self.append(number, Heartbeat(*self.ids[number], DATA, number, self.epochs[number], last))

    def work(self, seconds: int, *workers: int) -> None:
        """These beat each second."""
        for _ in range(seconds):
            self.now += 1_000
            for number in workers:
                self.beat(number)

    def messages(self, number: int, amount: int) -> None:
        for _ in range(amount):
            self.cluster.broker.produce(DATA, number, b"")

    def look(self, judge: Callable[[LiveView, GroupRow], Any]) -> Any:
        view = LiveView(self.cluster.connect("view"), LOG, 5, now=lambda: self.now)
        try:
            view.catch_up(lambda done, of_all: None)
            view.look_at_data()
            (row,) = view.groups(GROUP)
            return judge(view, row)
        finally:
            view.replica.close()

    def check(self, **limits: int) -> list[tuple[str, int, str]]:
        cluster = self.cluster.connect("check")
        found = self.look(lambda view, row: [*problems_of(row, **limits), *open_problems(cluster, view, row)])
        return [(each.kind, each.amount, each.text) for each in found]

    def states(self) -> list[str]:
        found: list[str] = self.look(lambda _, row: [member.state for member in row.members])
        return found


@pytest.mark.parametrize("cps", [1, 3])
def test_all_silent_at_the_same_second_is_one_line_about_kafka(cps: int) -> None:
    fleet = Fleet(4, cps)
    fleet.work(60, 0, 1, 2, 3)
    fleet.messages(0, 50)
    fleet.now += 5_000
    assert [kind for kind, _, _ in fleet.check()] == []
    fleet.now += 40_000
    ((kind, amount, text),) = fleet.check(max_silence_ms=10_000)
    assert (kind, amount) == ("all_silent", 4)
    assert text.startswith("all 4 members silent since 2023-")
    assert "(45 s)" in text
    assert "check Kafka" in text
    assert "Kafka answered this command within" in text
    assert "They hold 4 partitions, 50 waiting" in text
    assert "start one" not in text
    assert "evict" not in text
    assert fleet.states() == ["silent"] * 4


def test_one_that_died_before_is_gone_and_the_rest_are_silent() -> None:
    fleet = Fleet(4)
    fleet.work(60, 0, 1, 2, 3)
    fleet.work(20, 0, 1, 2)
    fleet.now += 45_000
    assert [(kind, amount) for kind, amount, _ in fleet.check()] == [("all_silent", 3), ("gone", 1)]
    assert fleet.states() == ["silent"] * 3 + ["gone"]
    (_, (_, _, gone)) = fleet.check()
    assert gone == "w3 (h:3) is gone: silent for 1 min 5 s. It holds 1 partition (orders 3)"


def test_while_others_write_to_the_same_log_they_are_gone() -> None:
    """Here another group's member shows that Kafka takes records."""
    fleet = Fleet(2)
    other = ("h/9/1.0/x", "other", "another")
    epoch = fleet.append(0, ClaimingPartition(*other, "t", 0, HI))
    fleet.work(60, 0, 1)
    for _ in range(20):
        fleet.now += 1_000
        fleet.append(0, Heartbeat(*other, "t", 0, epoch, None))
    assert [kind for kind, _, _ in fleet.check()] == ["gone", "gone"]
    assert fleet.check()[0][2].endswith("No other worker is alive: start one, it continues at their positions")


def test_after_long_they_are_gone_and_it_is_still_one_line() -> None:
    fleet = Fleet(3)
    fleet.work(60, 0, 1, 2)
    fleet.now += 700_000
    assert [kind for kind, _, _ in fleet.check()] == ["all_silent"]
    assert fleet.states() == ["gone"] * 3


def test_one_alone_is_gone_and_kafka_may_be_why() -> None:
    fleet = Fleet(1)
    fleet.work(60, 0)
    fleet.now += 20_000
    ((kind, _, text),) = fleet.check()
    assert kind == "gone"
    assert text.startswith(
        "w0 (h:0) is gone: silent for 20 s. It holds 1 partition (orders 0), 0 waiting. Nothing else came to the log "
        "since: check Kafka, and whether its process runs. Kafka answered this command within "
    )
    fleet.append(0, Tick("i", "c", "x"))
    ((_, _, text),) = fleet.check()
    assert text.endswith("No other worker is alive: start one, it continues at their positions")


def test_after_a_thaw_the_time_of_the_outage_counts_for_nobody() -> None:
    """The first one is heard; the others were silent no longer than before it."""
    fleet = Fleet(3)
    fleet.work(60, 0, 1, 2)
    fleet.now += 45_000
    fleet.beat(0)
    fleet.now += 500
    assert fleet.states() == ["seen"] * 3
    assert fleet.check(max_silence_ms=10_000) == []
    rows = fleet.look(lambda _, row: [(each.silence_ms, each.stood_ms) for each in row.leases])
    assert rows == [(500, 0), (45_500, 45_000), (45_500, 45_000)]
    fleet.work(15, 0)
    assert fleet.states() == ["seen", "silent", "silent"], "they may still be connecting"
    fleet.work(3, 0)
    assert fleet.states() == ["seen", "gone", "gone"]
    (_, _, text), _ = fleet.check()
    assert text == (
        "w1 (h:1) is gone: silent for 1 min 4 s (an outage: nothing came to the log for 45 s of that). It holds 1 "
        "partition (orders 1)"
    )


def test_after_a_thaw_one_that_connects_anew_is_silent() -> None:
    """A broker that was stopped first appends what was on its way; then its clients connect again, each when it can."""
    fleet = Fleet(3)
    fleet.work(60, 0, 1, 2)
    fleet.now += 45_000
    for number in range(3):
        fleet.beat(number)
    fleet.work(8, 0)
    assert fleet.states() == ["seen", "silent", "silent"]
    fleet.work(9, 0)
    assert fleet.states() == ["seen", "gone", "gone"]


def test_after_a_thaw_nobody_hangs_and_nothing_is_held_back() -> None:
    fleet = Fleet(2)
    fleet.work(60, 0, 1)
    fleet.messages(0, 20)
    fleet.beat(0, 1)
    fleet.append(0, CommitRanges(*fleet.ids[0], DATA, 0, fleet.epochs[0], ((5, 9),)))
    fleet.now += 64_000
    fleet.work(2, 0, 1)
    assert fleet.check() == []
    fleet.work(12, 0, 1)
    assert [kind for kind, _, _ in fleet.check()] == ["stuck_key", "hung"]
    assert "held back at offset 2 for 13 s" in fleet.check()[0][2]


def test_a_sole_sharer_that_is_gone_does_not_beat() -> None:
    """Judged by the broker's clock, not by the log's: it stands when its member is dead."""
    fleet = Fleet(1)
    fleet.messages(0, 30)
    ids = fleet.ids[0]
    fleet.now += 10_000
    epoch = fleet.append(0, ClaimingShare(*ids, DATA, 0, HI, start=0))
    fleet.append(0, SettlingMessages(*ids, DATA, 0, epoch, 30, take=(10, 29, False)))
    for _ in range(70):
        fleet.now += 1_000
        fleet.append(0, SettlingMessages(*ids, DATA, 0, epoch, 30))
    assert [kind for kind, _, _ in fleet.check()] == ["hung", "stuck_batch"]
    fleet.now += 30_000
    assert [kind for kind, _, _ in fleet.check()] == ["gone"]


def test_what_is_judged_is_of_when_the_log_was_read() -> None:
    fleet = Fleet(2)
    fleet.work(10, 0, 1)

    def later(view: LiveView, row: GroupRow) -> Any:
        fleet.now += 30_000  # brokers took that long to say where the topics end
        (row,) = view.groups(GROUP)
        return [member.state for member in row.members], view.silence.notes()

    states, (note,) = fleet.look(later)
    assert states == ["seen", "seen"]
    assert note.startswith("judged as of 2023-")
    assert ", 30 s ago: " in note
    assert fleet.look(lambda view, _: view.silence.notes()) == []


# -- pauses --------------------------------------------------------------------------------------------------


def test_a_pause_that_lasts_while_messages_wait_is_a_problem() -> None:
    fleet = Fleet(2)
    fleet.work(10, 0, 1)
    fleet.messages(0, 1_500)
    pause = fleet.append(0, ReleaseGroup("x", "ann", GROUP, int(fleet.now) + 3_600_000))
    for number, ids in enumerate(fleet.ids):
        fleet.append(number, ReleasingPartition(*ids, DATA, number, fleet.epochs[number], None))
    fleet.now += 240_000
    assert fleet.check() == [], pause
    assert [kind for kind, _, _ in fleet.check(max_pause_ms=60_000)] == ["paused"]
    fleet.append(0, ReleaseGroup("x", "ann", GROUP, int(fleet.now) + 3_600_000))  # it is made longer
    fleet.now += 120_000
    ((kind, _, text),) = fleet.check()
    assert kind == "paused"
    assert text == (
        "paused by ann for 6 min, 58 min left; 1,500 messages waiting, no worker there, longer than 5 min. If what it "
        "was for is done: kafka-marshal release-group g --resume"
    )
    fleet.append(0, ReleaseGroup("x", "ann", GROUP, 0))
    fleet.append(0, ReleaseGroup("x", "ann", GROUP, int(fleet.now) + 3_600_000))
    assert fleet.check() == [], "another one"


def test_a_pause_without_messages_waiting_is_none() -> None:
    fleet = Fleet(1)
    fleet.append(0, ReleaseGroup("x", "ann", GROUP, int(fleet.now) + 36_000_000))
    fleet.append(0, ReleasingPartition(*fleet.ids[0], DATA, 0, fleet.epochs[0], None))
    fleet.now += 900_000
    assert fleet.check() == []
