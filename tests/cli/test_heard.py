"""Messages about workers that hold nothing, and about unknown names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal.cli.connection import name_the_topic
from kafka_marshal.cli.options import Options
from kafka_marshal.errors import KafkaUnavailableError, TopicMissingError
from kafka_marshal.observe.problems import problems_of
from kafka_marshal.observe.rows import GroupRow, LeaseRow, WorkerRow
from kafka_marshal.observe.text import near
from kafka_marshal.observe.view import why_no_share
from rationalizer.groups.group import Group, Member, Settings

A = ("host/17/1.0/x", "a", "g")

IDLE = WorkerRow("g", "a", A[0], 4_000)


@pytest.mark.parametrize(
    ("changed", "doing"),
    [
        ({}, "silent for 4.0 s; others took over what it held"),
        ({"waits": True}, "waits for a partition"),
        ({"waits": True, "silence_ms": 15_000}, "silent for 15 s; it waited for a partition"),
        ({"waits": True, "silence_ms": 15_000, "interval_ms": 6_000}, "waits for a partition"),
        ({"released_ms": 3_000}, "released all it held 3.0 s ago"),
        (
            {"released_ms": 3_000, "asked_ms": 9_000},
            "asked to hand over 9.0 s ago: claims nothing until it is restarted",
        ),
        ({"is_member": True}, "a member; there is no partition for it"),
        (
            {"is_member": True, "no_share": "only some share flights"},
            "a member; there is no partition for it, and no share of keys: only some share flights",
        ),
        ({"refused": "X"}, "the log rejected it: X"),
        (
            {"evictor": "ann", "evicted_ms": 3_000, "was_alive": True, "asked_ms": 9_000},
            "evicted by ann 3.0 s ago; claims nothing until its handler returns",
        ),
        (
            {"evictor": "ann", "evicted_ms": 3_000, "was_alive": True, "is_coordinated": True},
            "evicted by ann 3.0 s ago; joins again after three sessions, once its handler returns",
        ),
        ({"evictor": "ann", "evicted_ms": 3_000}, "evicted by ann 3.0 s ago; silent for 4.0 s"),
    ],
)
def test_what_one_that_holds_nothing_does(changed: dict[str, bool | int | str], doing: str) -> None:
    assert replace(IDLE, **changed).doing == doing  # type: ignore[arg-type]


def test_a_member_without_a_share_of_keys_says_why() -> None:
    group = Group("g")
    group.settings = Settings(accept_range_fetch=("flights", "orders"))
    for slot, (client, topics, shares) in enumerate(
        [("a", {"flights", "x"}, False), ("b", {"flights"}, True), ("c", {"x"}, True), ("d", {"x"}, False)]
    ):
        member = group.clients[client] = Member(slot, client)
        member.topics, member.allow_key_share = frozenset(topics), shares
    assert [why_no_share(group, client) for client in "abcde"] == [
        "only members with allow_key_share=True share flights",
        "",
        "the group's setting accept_range_fetch names none of its topics",
        "",
        "",
    ]
    assert why_no_share(None, "a") == ""


def test_a_group_without_a_holder_names_the_workers_that_may_run() -> None:
    free = LeaseRow("g", "t", 0, cp=0, log_start=0, log_end=1_605)
    left = GroupRow("g", [free], silent_ms=35_000, heard=[replace(IDLE, released_ms=4_000)])
    (problem,) = problems_of(left)
    assert problem.text == (
        "1 partition without a holder (t 0), 1,605 messages waiting. No worker holds anything of the group; "
        "a (host:17) released all it held 4.0 s ago. Last seen 35 s ago. Start its workers: they "
        "continue at its positions"
    )
    evicted = replace(IDLE, evictor="ann", evicted_ms=3_000, was_alive=True)
    (problem,) = problems_of(replace(left, heard=[evicted]))
    assert "a (host:17) evicted by ann 3.0 s ago; claims nothing until its handler returns" in problem.text


@pytest.mark.parametrize("kind", ["claimed", "coordinated"])
def test_the_remedy_is_by_age_and_lag(kind: str) -> None:
    """Dropping the positions of a group whose members have just died would do more harm than the problem."""
    waiting = LeaseRow("my g", "t", 0, cp=0, stable=4, log_start=0, log_end=10, kind=kind)
    state = {"kind": kind, "state": "READY" if kind == "coordinated" else None}
    young = GroupRow("my g", [waiting], silent_ms=35_000, **state)  # type: ignore[arg-type]
    (problem,) = problems_of(young)
    assert "forget-group" not in problem.text
    assert problem.text.endswith("Last seen 35 s ago. Start its workers: they continue at its positions")
    (problem,) = problems_of(replace(young, silent_ms=86_400_001, silent_at_least=True))
    assert problem.text.endswith(
        "Last seen over 1 d ago. Start its workers: they continue at its positions. If it is over: kafka-marshal "
        "forget-group 'my g' (its positions are lost then)"
    )
    done = replace(waiting, stable=9)
    assert problems_of(replace(young, leases=[done])) == [], "nobody is left, and all is done"
    asks = replace(IDLE, waits=True, silence_ms=100)
    assert [each.kind for each in problems_of(replace(young, leases=[done], heard=[asks]))] == ["no_holder"]
    never = LeaseRow("my g", "t", 1, log_start=0, log_end=3, kind=kind)
    assert [each.kind for each in problems_of(replace(young, leases=[done, never]))] == ["no_holder"]


def test_the_last_worker_that_is_gone_is_to_be_restarted() -> None:
    held = LeaseRow("g", "t", 0, cp=0, client="a", instance=A[0], heartbeat_interval_ms=1_000, log_start=0, log_end=9)
    gone = replace(held, silence_ms=5_000)
    (problem,) = problems_of(GroupRow("g", [gone]))
    assert problem.text == (
        "a (host:17) is gone: silent for 5.0 s. It holds 1 partition (t 0), 9 waiting. No other worker is alive: "
        "start one, it continues at their positions"
    )
    other = replace(gone, partition=1, client="b", instance="host/18/1.0/x", silence_ms=100)
    (problem,) = problems_of(GroupRow("g", [gone, other]))
    assert problem.text.endswith("It holds 1 partition (t 0)")


def test_how_many_shall_be_alive() -> None:
    """Counts holders, members and waiting clients, not those that left or were evicted."""
    free = LeaseRow("g", "t", 0, cp=0, log_start=0, log_end=0)
    asks, silent = replace(IDLE, waits=True, silence_ms=100), replace(IDLE, client="b", waits=True, silence_ms=60_000)
    member = replace(IDLE, client="c", is_member=True)
    group = GroupRow("g", [free], heard=[asks, silent, member])
    assert group.living == 2
    (problem,) = [each for each in problems_of(group, min_members=3) if each.kind == "members"]
    assert (problem.text, problem.amount) == ("2 members alive, fewer than 3", 2)
    assert all(each.kind != "members" for each in problems_of(group, min_members=2))


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
    """The topic that `init` would create beside it would assign the same work a second time."""
    error = TopicMissingError("no such topic")
    name_the_topic(error, Topics(*topics), Options(topic="__marshal_snapshot"))  # type: ignore[arg-type]
    assert getattr(error, "__notes__", []) == notes
