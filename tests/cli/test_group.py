"""Coordinated groups in the command, on a real Kafka; their members are raw records."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from rationalizer import ClaimingPartition, CommitEntry, JoinGroup, Record, encode
from tests.cli.harness import Command, Terminal
from tests.cli.test_kafka import Append, append, cluster, data
from tests.fleet import Fleet, let_go, started

__all__ = ["append", "cluster", "data"]  # fixtures

LONG = 600_000


@pytest.fixture
def fleet(append: Append) -> Fleet:
    """A coordinated group, billing, on a log of two partitions, still without members."""
    made = Fleet("billing", 2, append)
    made.configure()
    return made


@pytest.fixture
def two(fleet: Fleet, data: str) -> int:
    """w1 owns 0 and 1 of three partitions, all with a start, and w2 owns 2; returns the generation."""
    fleet.join("w1", {data: 3}, instance="host-a/17/0.1.0/x", session=LONG)
    generation = fleet.join("w2", {data: 3}, instance="host-b/18/0.1.0/x", session=LONG)
    fleet.commit("w1", generation, *started(data, 0, 1, 2), let_go(data, 2, 9))
    return generation


def test_all_groups_one_row_each(kafka: Command, append: Append, fleet: Fleet, two: int, data: str) -> None:
    append(ClaimingPartition("i", "c", "claims", data, 0, LONG))
    ran = kafka("groups")
    assert ran.status == 0, ran.err
    first, second = ran.rows
    assert first == {
        "group": "billing",
        "kind": "coordinated",
        "state": "STEADY",
        "generation": str(two),
        "strategy": "sticky",
        "members": "2",
        "partitions": "3/3",
        "lag": "50",
    }
    assert (second["group"], second["kind"], second["generation"], second["members"]) == ("claims", "claimed", "-", "1")
    assert [each["kind"] for each in kafka("groups", "--json").json["groups"]] == ["coordinated", "claimed"]
    (billing, _) = kafka("status", "--json").json["groups"]
    assert (billing["kind"], billing["state"], billing["generation"], billing["members"]) == (
        *("coordinated", "STEADY", two),
        2,
    )


def test_one_group(kafka: Command, fleet: Fleet, two: int, data: str) -> None:
    found = kafka("group", "billing", "--json").json
    assert (found["state"], found["generation"], found["strategy"]) == ("STEADY", two, "sticky")
    assert (found["partition"], found["lag"], found["topics"]) == (fleet.home, 50, {data: 3})
    members = {each["client"]: each for each in found["member_list"]}
    assert {name: (each["host"], each["pid"], each["partitions"]) for name, each in members.items()} == {
        "w1": ("host-a", 17, 2),
        "w2": ("host-b", 18, 1),
    }
    assert members["w1"]["member"] == fleet.members["w1"][1]
    pieces = [(each["topic_partition"], each["owner"], each["next"], each["lag"]) for each in found["pieces"]]
    assert pieces == [(0, "w1", 0, 10), (1, "w1", 0, 20), (2, "w2", 10, 20)]
    assert found["settings"]["max_individual_commits"] == 60_000
    first, second = found["rebalances"]
    assert (first["why"], second["why"]) == ("w1 joined", "w2 joined")
    assert (len(first["moved"]), len(second["moved"])) == (3, 1)
    (moved,) = second["moved"]
    assert (moved["from"], moved["to"], moved["topic_partition"], moved["nobody_ms"]) == ("w1", "w2", 2, 0)
    assert kafka("group", "billing", "--rebalances", 1, "--json").json["rebalances"] == [second]
    assert kafka("group", "billing", "--rebalances", 0, "--json").json["rebalances"] == []


def test_a_piece_on_its_way_and_a_member_that_is_silent(kafka: Command, fleet: Fleet, data: str) -> None:
    fleet.join("w1", {data: 3}, session=LONG)
    fleet.join("w2", {data: 3}, session=100)
    ran = kafka("group", "billing")
    assert ran.status == 0
    assert "w1 → w2" in ran.out
    while kafka("group", "billing", "--json").json["member_list"][1]["state"] != "gone":
        pass
    found = kafka("groups", "--json").json["groups"][0]
    assert (found["state"], found["members"]) == ("PREPARE_FOR_REBALANCE", 1)
    (row,) = kafka("status").table
    assert row["state"] == "1 moving"
    assert kafka("check", "--group", "billing").status == 0, "one that owns nothing leaves nothing undone"


def test_a_claimed_group_and_an_unknown_one(kafka: Command, append: Append, data: str) -> None:
    append(ClaimingPartition("host/17/1.0/x", "c", "claims", data, 0, LONG))
    found = kafka("group", "claims", "--json").json
    assert (found["kind"], found["state"], found["settings"], found["rebalances"]) == ("claimed", None, None, [])
    assert [each["client"] for each in found["member_list"]] == ["c"]
    ran = kafka("group", "claim")
    assert ran.status == 1
    assert "no group 'claim'; did you mean 'claims'?" in ran.err
    refused = kafka("group", "claims", "--set", "max_individual_commits=10")
    assert refused.status == 1
    assert "kafka-marshal convert-group claims --to coordinated" in refused.err


def test_r11_a_strategy_is_set_shown_and_unset(kafka: Command, fleet: Fleet, append: Append, data: str) -> None:
    fleet.join("w1", {data: 3}, session=LONG)
    ran = kafka("group", "billing", "--set", "strategy=range", "--set", "max_individual_commits=10")
    assert (ran.status, ran.lines[-2:]) == (0, ["max_individual_commits=10", "strategy=range"])
    found = kafka("group", "billing", "--json").json
    assert (found["strategy"], found["strategy_set"], found["settings"]["strategy"]) == ("range", "range", "range")
    assert "(range, set)" in kafka("group", "billing").err
    status = kafka("status")
    assert "group billing has strategy range by a setting" in status.out + status.err
    assert kafka("status", "--json").json["groups"][0]["strategy_set"] == "range"
    assert kafka("groups", "--json").json["groups"][0]["strategy_set"] == "range"
    words = kafka("log", "--group", "billing").out
    assert "strategy=range" in words
    assert kafka("group", "billing", "--unset", "strategy", "--unset", "max_individual_commits").status == 0
    assert "unsets strategy" in kafka("log", "--group", "billing").out
    found = kafka("group", "billing", "--json").json
    assert (found["strategy"], found["strategy_set"], found["settings"]["strategy"]) == ("range", None, None)
    assert found["settings"]["max_individual_commits"] == 60_000
    for given, why in (
        (("--set", "strategy=magic"), "must be 'range'"),
        (("--unset", "strateggy"), "did you mean 'strategy'?"),
        (("--set", "strategy=range", "--unset", "strategy"), "exclude each other"),
    ):
        refused = kafka("group", "billing", *given)
        assert refused.status == 2, given
        assert why in refused.err, given


def test_settings(kafka: Command, fleet: Fleet, append: Append) -> None:
    ran = kafka("group", "billing", "--set", "accept_range_fetch=a,b", "--set", "max_session_timeout_ms=5000")
    assert (ran.status, ran.lines[1:3]) == (0, ["accept_range_fetch=a,b", "max_session_timeout_ms=5000"])
    assert kafka("group", "billing", "--set", "accept_individual_commit=false", "--json").json["settings"] == {
        "accept_individual_commit": False,
        "accept_range_fetch": ["a", "b"],
        "max_session_timeout_ms": 5000,
        "max_individual_commits": 60000,
        "strategy": None,
    }
    assert "a,b" in kafka("group", "billing").out
    for wish, why in (
        ("max_sesion_timeout_ms=1", "did you mean 'max_session_timeout_ms'?"),
        ("nothing=1", "there are accept_individual_commit"),
        ("accept_individual_commit=yes", "true or false"),
        ("max_individual_commits=many", "is a number"),
        ("max_individual_commits", "KEY=VALUE"),
        ("max_individual_commits=0", "1 … 60,000"),
    ):
        refused = kafka("group", "billing", "--set", wish)
        assert refused.status == 2, wish
        assert why in refused.err, wish
    assert kafka("group", "biling", "--set", "max_individual_commits=10").status == 2, "nobody to ask"
    assert kafka("group", "other", "--set", "max_individual_commits=10", "--yes").status == 0
    assert {each["group"] for each in kafka("groups", "--json").json["groups"]} == {"billing", "other"}


@pytest.mark.parametrize("args", [["groups"], ["group", "{}"], ["status"], ["lag"], ["who", "{}", "{data}", "0"]])
def test_it_fits_80_columns(
    terminal: Callable[..., Terminal], kafka: Command, append: Append, data: str, args: list[str]
) -> None:
    name = "billing-of-the-whole-company"
    fleet = Fleet(name, 2, append, strategy="roundrobin")
    fleet.configure(accept_range_fetch=(data,))
    for number in range(5):
        generation = fleet.join(f"worker-{number}", {data: 3}, share=True, session=LONG)
    fleet.commit("worker-0", generation, *started(data, 0), CommitEntry(data, 0, 0, 2**62 - 1, through=4))
    words = [word.format(name, data=data) for word in args]
    opened = terminal(*kafka.before, *words, columns=80)
    shown = opened.finish().decode()
    assert opened.process.returncode == 0, shown
    import re

    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in shown.splitlines()]
    wide = [line for line in lines if len(line) > 80 and "(kept in" not in line and not line.startswith("Now")]
    assert wide == []
    assert any("%)" in line or "0-50%" in line for line in lines) or args[0] in ("groups", "status", "who")


def test_evict_a_member(kafka: Command, fleet: Fleet, two: int, data: str) -> None:
    refused = kafka("evict", "billing", data, 0, "--yes")
    assert refused.status == 1
    assert "kafka-marshal evict billing --member CLIENT" in refused.err
    for how in ("--yes", "--dry-run"):
        refused = kafka("evict", "--member", "w2", how)
        assert refused.status == 1
        assert "within half its session" in refused.err
    ran = kafka("evict", "--member", "w2", "--yes", "--force")
    assert (ran.status, ran.out) == (0, f"released: w2 no longer holds {data} partition 2 (epoch {two}).\n")
    found = kafka("group", "billing", "--json").json
    assert [each["owner"] for each in found["pieces"]] == ["w1", "w1", "w1"]
    (evicted,) = found["rebalances"][-1]["evicted"]
    assert (evicted["client"], found["rebalances"][-1]["left"]) == ("w2", [])
    told = kafka("log", "--group", "billing").table[-2:]
    assert [each["what"].partition(",")[0] for each in told] == ["leaves the group", "leaves the group"]
    assert (told[0]["client"], told[0]["why"]) == (evicted["by"], "an operator evicts w2")
    assert f"w2 was evicted by {evicted['by']}" in kafka("group", "billing").out
    assert kafka("evict", "--member", "w2", "--yes").status == 1


def test_evict_a_member_that_owns_nothing(kafka: Command, fleet: Fleet, data: str) -> None:
    fleet.join("w1", {data: 3}, session=LONG)
    fleet.join("w2", {data: 3}, session=LONG)
    assert (
        kafka("evict", "--member", "w2", "--dry-run", "--force").out
        == "w2 would leave group billing; it owns nothing.\n"
    )
    ran = kafka("evict", "billing", "--member", "w2", "--yes", "--force")
    assert (ran.status, ran.out) == (0, "w2 has left group billing; it owned nothing.\n")
    assert [each["client"] for each in kafka("group", "billing", "--json").json["member_list"]] == ["w1"]


def test_drain_asks_a_member_in_the_log(kafka: Command, fleet: Fleet, two: int) -> None:
    ran = kafka("drain", "w1")
    assert (ran.status, ran.out) == (0, "asked: w1 is to hand over 2 partitions of group billing.\n")
    last = json.loads(kafka("log", "--json", "--group", "billing").lines[-1])
    assert (last["type"], last["code"], last["client"]) == ("LeaveGroup", "UNKNOWN_CONSUMER", "w1")
    assert last["why"] == "an operator asks the member to hand over, and to leave"
    members = {each["client"]: each for each in kafka("status", "--members", "--json").json["members"]}
    assert members["w1"]["asked_to_hand_over_ms"] is not None
    assert members["w2"]["asked_to_hand_over_ms"] is None
    waited = kafka("drain", "billing", "w1", "--wait", "300ms")
    assert waited.status == 1
    assert "owns 2 partitions still" in waited.err
    fleet.leave("w1", two)
    assert kafka("drain", "w1").status == 1


def test_release_group_and_forget_group(kafka: Command, fleet: Fleet, two: int, data: str) -> None:
    refused = kafka("release-group", "billing", "--to", "earliest", "--yes", "--within", "300ms")
    assert refused.status == 1
    assert f"{data} [0] by 'w1'" in refused.err
    plan = kafka("release-group", "billing", "--to", "latest", "--dry-run", "--json").json
    assert [(move["before"], move["after"]) for move in plan["moves"]] == [(0, 10), (0, 20), (10, 30)]
    assert {move["epoch"] for move in plan["moves"]} == {None}
    fleet.leave("w1", two)
    fleet.leave("w2", two)
    ran = kafka("release-group", "billing", "--to", "latest", "--yes", "--json")
    assert ran.status == 0, ran.err
    assert [(move["before"], move["after"]) for move in ran.json["moves"]] == [(0, 10), (0, 20), (10, 30)]
    assert all(move["epoch"] > 0 for move in ran.json["moves"])
    found = kafka("group", "billing", "--json").json
    assert ([each["next"] for each in found["pieces"]], found["lag"], found["state"]) == ([10, 20, 30], 0, "READY")
    dry = kafka("forget-group", "billing", "--dry-run")
    assert dry.out.startswith("3 pieces with their positions")
    assert kafka("forget-group", "billing", "--dry-run", "--json").json["silence_ms"] < 600_000, "they left just now"
    ran = kafka("forget-group", "billing", "--yes")
    assert ran.status == 0, ran.err
    lost, forgotten = ran.lines
    places = f"{data} 0 at 10, {data} 1 at 20, {data} 2 at 30"
    assert lost.startswith(f"What is lost: next offsets {places}; 0 messages not done; last seen "), lost
    assert "over" not in lost
    assert forgotten == "forgotten: 3 partitions of group billing."
    assert kafka("group", "billing").status == 1


def test_a_group_of_members_only_is_active(kafka: Command, fleet: Fleet, data: str) -> None:
    """A member that owns nothing also prevents moving positions (G21)."""
    fleet.join("w1", {data: 3}, session=LONG)
    fleet.join("w2", {data: 3}, session=LONG)
    assert kafka("evict", "--member", "w1", "--yes", "--force").status == 0
    fleet.join("w3", {data: 3}, session=LONG)
    assert kafka("evict", "--member", "w2", "--yes", "--force").status == 0
    fleet.join("w4", {data: 3}, session=LONG)
    refused = kafka("forget-group", "billing", "--yes", "--within", "300ms")
    assert refused.status == 1
    assert "may be at work: after 0.3 s 'w3', 'w4' are not silent for long enough" in refused.err
    assert kafka("group", "billing").status == 0


def test_a_topic_at_level_1_says_what_is_due(
    kafka: Command, cluster: KafkaCluster, kafka_bootstrap: str, log_topic: str
) -> None:
    from kafka_marshal.adapters.probe import Probe
    from kafka_marshal.node.coordination_topic import required_settings
    from rationalizer.marker import marker

    Probe(kafka_bootstrap).create_topic(log_topic, 1, 1, required_settings(1))
    appender = cluster.appender(log_topic, delivery_timeout_ms=10_000)
    first: list[Record] = [marker("init-1", 1), JoinGroup("i", "c", "g", "", 0, 1_000, "range", False, "", (("t", 1),))]
    for record in first:
        appender.append(0, encode(record))
    assert appender.flush(10) == 0
    appender.close()
    ran = kafka("group", "billing", "--set", "max_individual_commits=10", "--yes")
    assert ran.status == 1
    assert "kafka-marshal upgrade" in ran.err
    assert kafka("log").rows[-1]["code"] == "UNSUPPORTED_VERSION"
