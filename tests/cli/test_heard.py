"""Workers that hold nothing, as the log's last records show them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal.cli.heard import Heard, Run
from kafka_marshal.cli.names import near
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.problems import problems_of
from kafka_marshal.cli.reading import name_the_topic
from kafka_marshal.cli.rows import GroupRow, HeardRow, LeaseRow
from kafka_marshal.errors import KafkaUnavailableError, TopicMissingError
from rationalizer import (
    ClaimingPartition,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    World,
    encode,
)
from tests.fleet import Fleet

A = ("host/17/1.0/x", "a", "g")
B = ("host/18/1.0/x", "b", "g")


class Log:
    """A world of one partition of the log, looked at after each record."""

    def __init__(self) -> None:
        self.world = World(0, 1)
        self.heard = Heard({0: self.world})

    def add(self, record: Record, at: int) -> None:
        offset = self.world.next_offset
        self.heard.note(0, offset, self.world.apply(offset, at, encode(record)))
        self.heard.look(self.world)

    def run(self, client: str = "a") -> Run:
        return next(run for run in self.heard.since(0) if run.client == client)


def test_a_worker_that_holds_something_is_heard_by_its_beats() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1_000), 0)
    log.add(Heartbeat(*A, "t", 0, 0, 5), 700)
    assert log.run() == Run("g", "a", A[0], 700)
    assert log.heard.since(701) == []


def test_one_that_waits_and_one_that_released_all() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1_000), 0)
    log.add(ClaimingPartition(*B, "t", 0, 1_000), 100)
    assert (log.run("b").waits, log.run("b").released) == (True, False)
    log.add(ReleasingPartition(*A, "t", 0, 0, 5), 200)
    assert (log.run().released, log.run().last_at) == (True, 200)


def test_one_that_was_asked_to_hand_over_until_it_is_started_again() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1_000), 0)
    log.add(ReleasingPartition("operator", "a", "g", "t", 0, 0, None), 500)
    assert log.run().asked_at == 500
    log.add(ReleasingPartition(*A, "t", 0, 0, 5), 600)
    assert (log.run().asked_at, log.run().released) == (500, True)
    log.add(ClaimingPartition("host/19/1.0/y", "a", "g", "t", 0, 1_000), 700)
    assert (log.run().instance, log.run().asked_at) == ("host/19/1.0/y", None)


def test_a_late_record_of_an_epoch_before_asks_for_nothing() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1_000), 0)
    log.add(ReleasingPartition(*A, "t", 0, 0, 5), 100)
    log.add(ClaimingPartition(*A, "t", 0, 1_000), 200)
    log.add(ReleasingPartition("before", "a", "g", "t", 0, 0, 5), 300)
    assert log.run().asked_at is None


def test_members_of_a_coordinated_group() -> None:
    log = Log()
    clock = [0]

    def append(record: Record, cp: int) -> int:
        clock[0] += 100
        log.add(record, clock[0])
        return log.world.next_offset - 1

    fleet = Fleet("g", 1, append)
    fleet.upgrade()
    generation = fleet.join("a", {"t": 1})
    assert (log.run().last_at, log.run().asked_at) == (200, None)
    append(LeaveGroup("operator", *fleet.ids("a")[1:], generation), 0)
    assert log.run().asked_at == 300
    fleet.leave("a", generation)
    assert (log.run().asked_at, log.run().released) == (300, True)
    append(JoinGroup("b1", "b", "g", "", 0, 1_000, "worst", False, "", (("t", 1),)), 0)
    assert log.run("b").refused == "UNKNOWN_PARTITIONING_STRATEGY"
    assert HeardRow("g", "b", "b1", 0, refused="X").doing == "its join was rejected: X"
    assert HeardRow("g", "b", "b1", 0, is_member=True).doing == "a member; there is no partition for it"


def test_an_admin_is_no_worker() -> None:
    log = Log()
    log.add(ReleaseGroup("x", "admin", "g", 50_000), 0)
    log.add(ClaimingPartition("x", "admin", "g", "t", 0, 1_000), 100)
    assert log.heard.since(0) == []


# -- in words --------------------------------------------------------------------------------------------------------

IDLE = HeardRow("g", "a", A[0], 4_000)


@pytest.mark.parametrize(
    ("changed", "doing"),
    [
        ({}, "silent for 4.0 s; others took over what it held"),
        ({"waits": True}, "waits for a partition"),
        ({"released": True}, "released all it held 4.0 s ago"),
        (
            {"released": True, "asked_ms": 9_000},
            "asked to hand over 9.0 s ago: claims nothing until it is restarted",
        ),
    ],
)
def test_what_one_that_holds_nothing_does(changed: dict[str, bool | int], doing: str) -> None:
    assert replace(IDLE, **changed).doing == doing  # type: ignore[arg-type]


def test_a_group_without_a_holder_names_the_workers_that_may_run() -> None:
    free = LeaseRow("g", "t", 0, cp=0, log_start=0, log_end=0)
    (problem,) = problems_of(GroupRow("g", [free], heard=[replace(IDLE, released=True)]))
    assert problem.text == (
        "1 partition without a holder (t 0). No worker holds anything of the group; a (host:17) released all it held "
        "4.0 s ago"
    )


def test_who_holds_something_is_not_idle_and_says_that_it_was_asked() -> None:
    lease = LeaseRow(
        "g", "t", 0, cp=0, client="a", instance=A[0], heartbeat_interval_ms=1_000, silence_ms=0, log_start=0, log_end=0
    )
    group = GroupRow("g", [lease], heard=[replace(IDLE, asked_ms=9_000), replace(IDLE, client="b")])
    assert [run.client for run in group.idle] == ["b"]
    assert [(member.client, member.asked_ms) for member in group.members] == [("a", 9_000)]
    started_again = GroupRow("g", [replace(lease, instance="host/19/1.0/y")], heard=[replace(IDLE, asked_ms=9_000)])
    assert [member.asked_ms for member in started_again.members] == [None]


def test_a_name_like_several_others_is_no_reason_to_guess() -> None:
    assert near("delay", ["delays", "flights"]) == "; did you mean 'delays'?"
    assert near("w-9", ["w-2", "w-1"]) == "; did you mean 'w-1' or 'w-2'?"
    assert near("w-9", [f"w-{n}" for n in range(8)]).endswith("'w-3' or …?")
    assert near("zz", ["delays"]) == ""
    assert near("zz", []) == ""


class Topics:
    """A cluster that has these topics; None: it does not answer."""

    def __init__(self, *names: str | None) -> None:
        self._names = names

    def topics(self, timeout_s: float) -> dict[str, None]:
        if None in self._names:
            raise KafkaUnavailableError("no answer")
        return {str(name): None for name in self._names}


@pytest.mark.parametrize(
    ("topics", "notes"),
    [
        (("__marshal", "__marshal_snapshots"), ["There is a topic of a similar name; did you mean '__marshal'?"]),
        (("flights",), []),
        ((None,), []),
    ],
)
def test_a_mistyped_coordination_topic_comes_with_the_one_that_may_be_meant(
    topics: tuple[str | None, ...], notes: list[str]
) -> None:
    """What `init` would make beside it would share out the same work once more."""
    error = TopicMissingError("no such topic")
    name_the_topic(error, Topics(*topics), Options(topic="__marshal_snapshot"))  # type: ignore[arg-type]
    assert getattr(error, "__notes__", []) == notes
