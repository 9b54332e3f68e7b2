"""The check of a campaign finds planted faults: each promise broken once, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Record,
    ReleasingPartition,
    Tick,
    encode,
)
from tests.campaigns.chaos import campaign
from tests.campaigns.chaos.check import Findings, Life, Story, check, replay_in_cuts
from tests.campaigns.chaos.fleet import Counts, Stop
from tests.campaigns.chaos.history import LogHistory
from tests.campaigns.chaos.lines import digest_of

HI = 500
GROUP, TOPIC = "g", "t"
KEY = (GROUP, TOPIC, 0)


@dataclass
class Planted:
    """A history in the making: one partition, one CP, offset = place in the log."""

    mode: str = "at least once"
    log: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    lines: dict[str, list[list[Any]]] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    stops: list[Stop] = field(default_factory=list)
    messages: int = 0
    rows: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)

    def append(self, at: int, record: Record) -> int:
        """Append a record that its sender reports as sent at that time."""
        value = encode(record)
        self.log.append((len(self.log), at, value))
        if record.instance_id in self.lines:
            self.lines[record.instance_id].append(["sent", at, 0, "beat", digest_of(value)])
        return len(self.log) - 1

    def claim(self, at: int, who: str, kind: str = "iterate") -> int:
        """Granted: the epoch."""
        self.lines.setdefault(who, [["start", at, GROUP, who, who, kind, ""]])
        return self.append(at, ClaimingPartition(who, who, GROUP, TOPIC, 0, HI))

    def beat(self, at: int, who: str, epoch: int, last: int | None) -> None:
        self.append(at, Heartbeat(who, who, GROUP, TOPIC, 0, epoch, last))

    def release(self, at: int, who: str, epoch: int, last: int | None) -> None:
        self.append(at, ReleasingPartition(who, who, GROUP, TOPIC, 0, epoch, last))

    def grant(self, at: int, who: str, epoch: int, last: int) -> None:
        self.append(at, ClaimingMessages(who, who, GROUP, TOPIC, 0, epoch, last))

    def say(self, who: str, what: str, at: float, *rest: object) -> None:
        self.lines[who].append([what, at, *rest])

    def handle(self, at: float, who: str, epoch: int, *offsets: int, done: bool = True) -> None:
        for offset in offsets:
            self.say(who, "begin", at, TOPIC, 0, offset, epoch, offset)
            self.say(who, "end", at + 1, TOPIC, 0, offset)
            if done:
                self.say(who, "done", at + 1, TOPIC, 0, offset)

    def write(self, epoch: int, *offsets: int) -> None:
        self.rows.extend((TOPIC, 0, offset, epoch, offset) for offset in offsets)

    def check(self) -> Findings:
        lives = [
            Life.of(name, number, name in self.killed, lines) for number, (name, lines) in enumerate(self.lines.items())
        ]
        wanted = [(cp, at) for life in lives for cp, at, _ in life.digests]
        messages: Mapping[tuple[str, int], Mapping[int, int]] = {(TOPIC, 0): {n: n for n in range(self.messages)}}
        return check(
            Story(
                HI,
                {KEY: self.mode},
                lives,
                LogHistory({0: self.log}, wanted),
                messages,
                {(TOPIC, 0): {n: n for n in range(self.messages)}},
                self.stops,
                self.rows,
                unexplained=self.unexplained,
            )
        )

    def promises(self) -> set[str]:
        return {each.promise for each in self.check().violations}


def taken_over(mode: str = "at least once", kind: str = "iterate") -> tuple[Planted, int, int]:
    """a held the partition and was killed after offset 3; b has it since 2,000; four messages."""
    planted = Planted(mode, messages=4)
    a = planted.claim(100, "a", kind)
    planted.killed.add("a")
    if mode == "at least once":
        planted.handle(200, "a", a, 0, 1)
        planted.beat(300, "a", a, 1)
        planted.handle(310, "a", a, 2)
    b = planted.claim(2_000, "b", kind)
    return planted, a, b


def test_a_history_without_a_fault_has_none() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    found = planted.check()
    assert found.violations == []
    assert found.counts["repeats"] == 1
    assert found.counts["messages"] == 4


def test_lost() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2)
    assert planted.promises() == {"lost"}


def test_what_was_begun_and_not_ended_is_lost() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2)
    planted.say("b", "begin", 2_200, TOPIC, 0, 3, b, 3)
    assert planted.promises() == {"lost"}


def test_repeated_though_the_log_called_it_done() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 1, 2, 3)
    assert planted.promises() == {"repeated"}


def test_repeated_since_a_beat_did_not_report_it() -> None:
    planted, a, _ = taken_over()
    planted.log.pop()
    planted.lines["b"].clear()
    planted.beat(600, "a", a, None)  # sent 290 ms after 2 was done, without reporting it
    b = planted.claim(2_000, "b")
    planted.lines["b"] = [["start", 2_000, GROUP, "b", "b", "iterate", ""]]
    planted.handle(2_100, "b", b, 2, 3)
    assert planted.promises() == {"repeated"}
    planted.stops.append(Stop(0, 350, 599))  # it was stopped between the two: the heartbeat may be from before
    assert planted.promises() == set()


def test_repeated_under_one_epoch() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    planted.handle(2_200, "b", b, 3)
    assert planted.promises() == {"repeated"}


def test_done_before_it_was_handled_is_as_good_as_lost() -> None:
    planted, _, b = taken_over()
    planted.beat(2_050, "b", b, 3)
    planted.handle(2_100, "b", b, 2, 3)
    assert planted.promises() == {"lost"}


def test_at_most_once_begun_before_it_was_granted() -> None:
    planted = Planted("at most once", messages=2)
    a = planted.claim(100, "a", "once")
    planted.grant(200, "a", a, 0)
    planted.handle(150, "a", a, 0)
    assert planted.promises() == {"not granted", "lost"}
    planted.grant(300, "a", a, 1)
    planted.handle(310, "a", a, 1)
    assert planted.promises() == {"not granted"}


def test_unseen() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    planted.say("b", "begin", 2_200, TOPIC, 0, 2, b, 77)
    assert "unseen" in planted.promises()


def test_dual_owner() -> None:
    planted, a, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    planted.handle(2_150, "a", a, 2)
    assert "dual owner" in planted.promises()


def test_dual_owner_by_what_was_never_held() -> None:
    planted, a, _ = taken_over()
    planted.handle(2_100, "b", a, 2, 3)
    assert "dual owner" in planted.promises()


def test_a_batch_in_flight_when_the_lease_ends_may_be_finished_and_one_delivered_later_not() -> None:
    for handed, expected in ((1_050, set[str]()), (2_150, {"dual owner"})):
        planted, a, b = taken_over()
        planted.say("a", "handed", handed, TOPIC, 0, 3, 3, a)
        planted.handle(2_160, "a", a, 3)
        planted.handle(2_200, "b", b, 2, 3)
        assert planted.promises() == expected


def test_a_stopped_worker_may_have_read_the_clock_before() -> None:
    planted, a, b = taken_over()
    planted.stops.append(Stop(0, 400, 2_140))
    planted.handle(2_150, "a", a, 3)
    planted.handle(2_200, "b", b, 2, 3)
    assert planted.promises() == set()
    for offset in range(4, 7):  # but not this many times
        planted.messages += 1
        planted.handle(2_150, "a", a, offset)
        planted.handle(2_300, "b", b, offset)
    assert planted.promises() == {"dual owner"}


def test_released_with_a_message_in_flight() -> None:
    planted = Planted(messages=1)
    a = planted.claim(100, "a")
    planted.say("a", "begin", 200, TOPIC, 0, 0, a, 0)
    planted.release(400, "a", a, None)
    planted.say("a", "end", 600, TOPIC, 0, 0)
    assert planted.promises() == {"dual owner"}
    planted.say("a", "lost", 410, TOPIC, 0)  # unless it had lost it by its own clock: then it finishes what it began
    assert planted.promises() == set()


def test_at_most_once_the_granted_batch_of_a_killed_worker_may_be_lost() -> None:
    planted, _, b = taken_over("at most once", "once")
    planted.log.pop()
    planted.grant(300, "a", 0, 1)
    b = planted.claim(2_000, "b", "once")
    planted.grant(2_100, "b", b, 3)
    planted.handle(2_200, "b", b, 2, 3)
    found = planted.check()
    assert found.violations == []
    assert found.counts["at most once, not handled: crash"] == 2
    planted.killed.clear()  # it closed regularly: then not
    assert planted.promises() == {"lost"}
    planted.say("a", "reported", 900, TOPIC, 0, 0, 1)  # except for what it reports
    assert planted.promises() == set()


def test_at_most_once_a_batch_before_the_last_may_not_be_lost() -> None:
    for kind, expected in (("once", {"lost"}), ("once ahead", set[str]())):
        planted = Planted("at most once", messages=4)
        a = planted.claim(100, "a", kind)
        planted.killed.add("a")
        planted.grant(200, "a", a, 1)
        planted.grant(300, "a", a, 3)
        planted.handle(400, "a", a, 2, 3, done=False)
        assert planted.promises() == expected


def test_at_most_once_what_a_lost_lease_leaves_may_be_lost_with_its_worker_soon_after() -> None:
    planted = Planted("at most once", messages=4)
    a = planted.claim(100, "a", "once")
    planted.killed.add("a")
    planted.grant(200, "a", a, 1)  # it does not receive this: its network is broken
    planted.release(900, "a", a, None)
    again = planted.claim(950, "a", "once")
    planted.grant(960, "a", again, 3)
    planted.handle(970, "a", again, 2, 3, done=False)
    assert planted.promises() == {"lost"}
    planted.say("a", "lost", 905, TOPIC, 0)
    assert planted.promises() == set()
    planted.say("a", "end", 5_000, TOPIC, 0, 3)  # it had enough time to report
    assert planted.promises() == {"lost"}


def test_at_most_once_so_may_what_was_granted_when_the_lease_was_given_up_already() -> None:
    """Seed 2835748: claim and release left an outage together, 300 ms after the worker's clock ended the lease."""
    planted = Planted("at most once", messages=4)
    a = planted.claim(100, "a", "once")
    planted.killed.add("a")
    planted.say("a", "lost", 500, TOPIC, 0)
    planted.grant(800, "a", a, 1)
    planted.release(810, "a", a, None)
    again = planted.claim(820, "a", "once")
    planted.grant(830, "a", again, 3)
    planted.handle(840, "a", again, 2, 3, done=False)
    assert planted.promises() == set()
    planted.say("a", "end", 5_000, TOPIC, 0, 3)
    assert planted.promises() == {"lost"}


def test_at_most_once_never_twice() -> None:
    planted = Planted("at most once", messages=1)
    a = planted.claim(100, "a", "once")
    planted.grant(200, "a", a, 0)
    planted.handle(300, "a", a, 0)
    b = planted.claim(2_000, "b", "once")
    planted.handle(2_100, "b", b, 0)
    assert planted.promises() == {"repeated", "not granted"}


#: Writes of a and b in turn, and the promises that they break.
SINKS: Mapping[str, tuple[list[tuple[str, list[int]]], set[str]]] = {
    "good": ([("a", [0, 1]), ("b", [2, 3])], set()),
    "stale epoch": ([("a", [0]), ("b", [1]), ("a", [2]), ("b", [3])], {"stale write"}),
    "twice": ([("a", [0, 1]), ("b", [1, 2, 3])], {"stale write"}),
    "out of order": ([("a", [1, 0]), ("b", [2, 3])], {"stale write"}),
    "lost": ([("a", [0, 1]), ("b", [3])], {"lost"}),
}


@pytest.mark.parametrize("name", SINKS)
def test_the_fenced_sink(name: str) -> None:
    writes, expected = SINKS[name]
    planted, a, b = taken_over("sink", "sink")
    for who, offsets in writes:
        planted.write(a if who == "a" else b, *offsets)
    assert planted.promises() == expected


def test_a_worker_whose_replica_differs() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    there = LogHistory({0: planted.log}, [(0, 2)]).digests[0, 2]
    planted.say("b", "digest", 3_000, 0, 2, there)
    assert planted.promises() == set()
    planted.say("b", "digest", 3_000, 0, 3, there)
    assert planted.promises() == {"replicas"}


def test_a_worker_that_failed() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    planted.say("b", "error", 3_000, "KeyError", "'x'")
    assert planted.promises() == {"worker failed"}


def test_a_worker_that_died_of_itself_though_others_have_made_it_good() -> None:
    planted, _, b = taken_over()
    planted.handle(2_100, "b", b, 2, 3)
    planted.unexplained.append("a: worker died of signal 11")
    assert [str(each) for each in planted.check().violations] == ["worker failed: a: worker died of signal 11"]


def test_the_report_of_a_campaign_names_workers_that_died_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "read_topic", lambda _, __, partitions: {number: [] for number in partitions})
    made = campaign._Campaign(campaign.Options(), tmp_path, None, lambda _: None)
    made._prepare_sink()
    ground: Any = SimpleNamespace(bootstrap="", counts={})
    writer: Any = SimpleNamespace(acknowledged={}, written=0)
    fleet: Any = SimpleNamespace(files={}, killed=set(), stops=[], counts=Counts(), unexplained=["a: of signal 11"])
    result, _ = made._account(ground, fleet, writer, 1.0, 1.0, 1.0)
    assert result.to_json()["violations"] == ["worker failed: a: of signal 11"]


def test_replays_that_differ() -> None:
    planted, _, _ = taken_over()
    for at in range(200):
        planted.append(3_000 + at, Tick("i", "c", "g"))
    reference = LogHistory({0: planted.log})
    assert replay_in_cuts({0: planted.log}, reference, 1) == []
    assert [x.promise for x in replay_in_cuts({0: planted.log[:-1]}, reference, 1)] == ["replicas"]
