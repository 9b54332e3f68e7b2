"""`checkpoint`, `checkpoints`, `rollback`, and what the other commands say of a group that takes checkpoints, on a real
Kafka. Its members are raw records."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin.session import caught_up, group_in
from rationalizer.wire.wellformed import REACHED_AND_LEAVES
from tests.cli.harness import Command
from tests.cli.test_docs import documented, fields, slim
from tests.cli.test_kafka import Append, append, cluster, data
from tests.fleet import Fleet, cut, started

__all__ = ["append", "cluster", "data"]  # fixtures

LONG = 600_000


class Delays:
    """Two members, w1 with partitions 0 and 1, w2 with 2; the first checkpoint, and that of the hand-over."""

    def __init__(self, fleet: Fleet, data: str) -> None:
        self.fleet = fleet
        self.data = data
        fleet.configure()
        self.first = fleet.begin("operator", 0)
        generation = fleet.join("w1", {data: 3}, instance="host-a/17/0.1.0/x", session=LONG)
        fleet.commit("w1", generation, *started(data, 0, 1, 2))
        self.generation = fleet.join("w2", {data: 3}, instance="host-b/18/0.1.0/x", session=LONG)
        self.passing = fleet.begin("w1", self.first, keep=0)
        entries = [cut(data, number, 1) for number in range(3)]
        self.generation = fleet.answer("w1", self.generation, self.passing, *entries)
        self.newest = self.passing

    def taken(self, *through: int | None) -> int:
        """A complete checkpoint: partition → done through (None: not handed in)."""
        entries = [cut(self.data, number, done) for number, done in enumerate(through) if done is not None]
        barrier = self.fleet.begin("w1", self.newest, keep=5)
        self.fleet.answer("w1", self.generation, barrier, *(each for each in entries if each.partition < 2))
        self.fleet.answer("w2", self.generation, barrier, *(each for each in entries if each.partition == 2))
        self.newest = barrier
        return barrier

    def run_out(self, kafka: Command) -> None:
        """The open barrier is over, and a heartbeat closes it."""
        while _barrier(kafka, "delays") is not None:
            time.sleep(0.05)
            self.fleet.beat("w1", self.generation)


@pytest.fixture
def delays(append: Append, data: str) -> Delays:
    return Delays(Fleet("delays", 2, append), data)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on tables are drawn as on a terminal of 80 columns."""

    def draw() -> None:
        monkeypatch.setenv("COLUMNS", "80")
        for module in ("output", "watch"):
            monkeypatch.setattr(f"kafka_marshal.cli.{module}.is_terminal", lambda: True)

    return draw


def test_the_list(kafka: Command, delays: Delays, drawn: Callable[[], None]) -> None:
    taken = delays.taken(9, 9, 9)
    ended = delays.fleet.begin("w1", taken, timeout_ms=100)
    delays.run_out(kafka)
    newest = delays.taken(9, 12, None)
    open_one = delays.fleet.begin("w1", newest)
    delays.fleet.answer("w1", delays.generation, open_one)
    ran = kafka("checkpoints", "delays", "--json")
    assert ran.status == 0, ran.err
    plain = kafka("checkpoints", "delays")
    assert [row["kind"] for row in plain.table] == ["initial", "periodic", "periodic"]
    assert plain.err.startswith(f"delays: newest checkpoint {newest}, "), "a pipe gets the table, people the headline"
    found = ran.json
    assert (found["keep"], found["hold"], found["newest"]) == (3, False, newest)
    assert found["barrier"]["waits_for"] == ["w2"]
    assert (found["barrier"]["id"], found["barrier"]["passing"]) == (open_one, False)
    first, second, third = found["checkpoints"]
    assert [each["checkpoint"] for each in (first, second, third)] == [delays.first, taken, newest]
    assert [each["kind"] for each in (first, second, third)] == ["pinned", "periodic", "periodic"]
    assert (second["members"], second["partitions"], second["slowest"], second["missing"]) == (2, 3, "w2", [])
    assert second["took_ms"] >= 0
    assert first["oldest"] is None
    oldest = third["oldest"]
    assert (oldest["topic_partition"], oldest["client"], oldest["cut"]) == (2, "w2", taken)
    assert found["ended"] == [
        {"barrier": ended, "log_time": found["ended"][0]["log_time"], "why": "over", "client": "w1, w2"}
    ]
    assert fields(found) - {"checkpoints[].missing[]", "went_back[]", "barrier", "notes[]"} >= {"barrier.id"}
    drawn()
    shown = kafka("checkpoints", "delays").out
    assert all(len(line) <= 80 for line in shown.splitlines()), shown
    assert f"{open_one} is being taken" in shown


def test_fields_are_those_of_the_page(kafka: Command, delays: Delays) -> None:
    taken = delays.taken(9, 9, 9)
    barrier = delays.fleet.begin("w1", taken, timeout_ms=100)
    delays.fleet.answer("w1", delays.generation, barrier, cut(delays.data, 0, 9))
    delays.run_out(kafka)  # complete, without w2
    delays.fleet.begin("w1", barrier)
    delays.fleet.leave("w2", delays.generation)  # it ends, and w2 is lost
    newest = kafka("checkpoints", "delays", "--json").json["newest"]
    delays.fleet.begin("w1", newest)
    found = slim(fields(kafka("checkpoints", "delays", "--json").json))
    wanted = documented("checkpoints") - {"notes[]"}
    nested = {path for path in found if path.startswith(("checkpoints[].missing[].", "checkpoints[].oldest."))}
    assert nested
    assert found - nested - {"notes[]"} | {"checkpoints[].missing[]"} == wanted


def test_one_is_taken_pinned_and_retired(kafka: Command, delays: Delays) -> None:
    def answer() -> None:
        until = time.monotonic() + 20
        while (found := _barrier(kafka, "delays")) is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        for client, numbers in (("w1", (0, 1)), ("w2", (2,))):
            entries = [cut(delays.data, number, 5) for number in numbers if number != 1]
            delays.fleet.answer(client, delays.generation, found, *entries)

    answering = threading.Thread(target=answer)
    answering.start()
    ran = kafka("checkpoint", "delays", "--pin", "--timeout", "1m", "--json")
    answering.join()
    assert ran.status == 1, "partition 1 was not handed in, though messages wait"
    found = ran.json
    assert (found["pinned"], found["members"]) == (True, 2)
    ((older),) = found["older"]
    assert (older["topic_partition"], older["client"], older["cut"]) == (1, "w1", delays.passing)
    assert kafka("checkpoints", "delays", "--json").json["checkpoints"][-1]["kind"] == "pinned"
    refused = kafka("checkpoints", "delays", "--retire", found["checkpoint"])
    assert refused.status == 1
    assert "it is the newest" in refused.err
    assert kafka("checkpoints", "delays", "--retire", delays.first, "--json").json == {
        "group": "delays",
        "done": "retire",
        "checkpoint": delays.first,
    }
    assert kafka("checkpoints", "delays", "--pin", delays.first).status == 1


def _barrier(kafka: Command, group: str) -> int | None:
    _, bootstrap, _, topic = kafka.before
    with caught_up(KafkaCluster(bootstrap, {}), topic, 10) as replica:
        found = group_in(replica.worlds, group)
        assert found is not None
        assert found.checkpoints is not None
        return None if found.checkpoints.barrier is None else found.checkpoints.barrier.id


def test_a_rollback(kafka: Command, delays: Delays, drawn: Callable[[], None]) -> None:
    good, bad = delays.taken(4, 4, 4), delays.taken(9, 9, 9)
    assert kafka("checkpoints", "delays", "--pin", bad).status == 0
    asked = kafka("rollback", "delays", "--to", good)
    assert asked.status == 2
    assert "--yes" in asked.err and f"1 checkpoint goes with it, for good: {bad} (pinned)" in asked.err
    planned = kafka("rollback", "delays", "--to", good, "--dry-run", "--json").json
    assert (planned["to"], planned["generation"], planned["dropped"], planned["paused"]) == (good, None, [bad], False)
    assert planned["pinned"] == [bad]
    assert planned["partitions"][0] == {
        "topic": delays.data,
        "partition": 0,
        "from": 10,
        "to": 5,
        "messages": 5,
        "gone": 0,
    }
    drawn()
    shown = kafka("rollback", "delays", "--to", good, "--dry-run").out
    assert all(len(line) <= 80 for line in shown.splitlines()), shown
    ran = kafka("rollback", "delays", "--to", good, "--yes")
    assert ran.status == 0, ran.err
    assert "15 messages come again" in ran.out
    assert f"1 checkpoint went with it, for good: {bad} (pinned)" in ran.err
    found = kafka("checkpoints", "delays", "--json").json
    (back,) = found["went_back"]
    assert (back["why"], back["checkpoint"], back["pieces"]) == ("rollback", good, 3)
    assert found["newest"] == good
    assert kafka("rollback", "delays", "--to", bad, "--yes").status == 1
    group = kafka("group", "delays", "--json").json
    assert group["rebalances"][-1]["rolled_back"] == {"checkpoint": good, "client": back["client"]}
    assert "put the group back" in group["rebalances"][-1]["why"]
    assert {each["epoch"] for each in group["pieces"]} == {group["generation"]}
    who = kafka("who", "delays", delays.data, 0, "--json").json
    assert "went back to a checkpoint" in who["history"][-2]["ended"]


def test_it_stays_paused_and_sinks_are_rewound(
    kafka: Command, delays: Delays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = delays.taken(4, 4, 4)
    delays.taken(9, 9, 9)
    barrier = delays.fleet.begin("w1", delays.newest, keep=0)
    for client in ("w1", "w2"):
        delays.fleet.answer(client, delays.generation, barrier, answer=REACHED_AND_LEAVES)
    (Path.cwd() / "rewinding_sinks.py").write_text(
        "def undo(restore):\n"
        "    with open('rewound', 'w') as file:\n"
        "        print(restore.checkpoint, restore.why, restore.pieces[0].position, file=file)\n"
    )
    wrong = kafka("rollback", "delays", "--to", good, "--yes", "--undo", "rewinding_sinks:undo")
    assert wrong.status == 2
    assert "--stay-paused" in wrong.err
    missing = kafka("rollback", "delays", "--to", good, "--stay-paused", "1m", "--undo", "no_such_module:undo")
    assert missing.status == 2
    assert "Nothing was changed" in missing.err
    args = ("rollback", "delays", "--to", good, "--yes", "--stay-paused", "1m", "--undo", "rewinding_sinks:undo")
    ran = kafka(*args, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["paused"] is True
    assert Path("rewound").read_text() == f"{good} rollback 5\n"
    assert kafka("groups", "--json").json["groups"][0]["paused"] is True
    assert kafka("release-group", "delays", "--resume", "--yes").status == 0


def test_what_other_commands_say(kafka: Command, delays: Delays) -> None:
    newest = delays.taken(9, 12, 9)
    status = kafka("status", "--json").json["groups"][0]
    assert (status["newest"], status["barrier"]) == (newest, None)
    assert status["age_ms"] >= 0
    group = kafka("group", "delays", "--json").json
    assert (group["newest"], [each["cut"] for each in group["pieces"]]) == (newest, [newest] * 3)
    totals = kafka("lag", "--group", "delays", "--json").json["totals"][0]
    assert (totals["newest"], totals["lag"]) == (newest, 60 - 10 - 13 - 10)
    log = kafka("log", "--group", "delays", "--json")
    why = [line for line in log.lines if f'"offset": {newest + 2}' in line and '"AnswerBarrier"' in line]
    assert any(f"checkpoint {newest} is complete after" in line for line in why), log.out
    assert any("2 of 2 members" in line for line in why)


def test_an_eviction_says_what_goes_back(kafka: Command, delays: Delays) -> None:
    assert "its pieces go back to their last cuts" in kafka("evict", "--member", "w1", "--dry-run").err
    ran = kafka("evict", "--member", "w1", "--yes", "--force")
    assert ran.lines[-1] == (
        "delays takes checkpoints: its pieces go back to their last cuts, and what it did since is done again, on the "
        "states of then"
    )


def test_a_group_without_any_and_an_unknown_one(kafka: Command, append: Append) -> None:
    fleet = Fleet("plain", 2, append)
    fleet.configure()
    ran = kafka("checkpoints", "plain")
    assert ran.status == 1
    assert "takes no checkpoints" in ran.err
    assert "did you mean 'plain'?" in kafka("checkpoints", "plan").err
    assert kafka("checkpoints", "plain", "--pin", 3, "--end").status == 2
    assert kafka("checkpoints", "plain", "--keep", 3).status == 2
    started_one = kafka("checkpoints", "plain", "--start", "--keep", 4)
    assert started_one.status == 0, started_one.err
    found = kafka("checkpoints", "plain", "--json").json
    assert (found["keep"], found["checkpoints"][0]["kind"]) == (4, "pinned")
    assert kafka("checkpoints", "plain", "--end", "--json").json == {
        "group": "plain",
        "done": "end",
        "checkpoint": None,
    }
    assert kafka("checkpoints", "plain").status == 1
