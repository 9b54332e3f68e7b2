"""`redo` on a real Kafka."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_marshal import Marshal
from kafka_marshal.admin import RedoPlan
from kafka_marshal.sinks import SqliteSink
from tests.cli.harness import Command, Terminal
from tests.cli.test_kafka import Append, append, cluster
from tests.cli.test_open_messages import orders, parked
from tests.client.conftest import wait_until

__all__ = ["append", "cluster", "orders", "parked"]  # fixtures


def open_now(kafka: Command) -> list[str]:
    return [row["offset"] for row in kafka("open-messages", "g").rows]


def test_it_shows_asks_opens_and_is_undone(
    kafka: Command, parked: Append, orders: str, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    file = tmp_path / "plan.json"
    shown = kafka("redo", "g", f"{orders}:0", "--offsets", "0..8", "--dry-run")
    assert shown.status == 0
    (row,) = shown.rows
    assert (row["again"], row["from"].split()[0], row["to"].split()[0]) == ("5", "0", "7")
    assert row["means"] == "1 wait for a try, or are in a batch; 3 set aside (redrive)"
    assert open_now(kafka) == ["1", "3", "6", "8"]
    asking = terminal(*kafka.before, "redo", "g", orders, "--plan", str(file))
    asking.read_until(lambda found: b"Have 6 messages of group g handled again?" in found)
    asking.type(b"n\n")
    assert b"Nothing was changed." in asking.finish()
    assert not file.exists()
    ran = kafka("redo", "g", orders, "--key", "Zoë", "--yes", "--plan", str(file))
    assert (ran.status, ran.lines[-1]) == (0, "group g: 3 messages are opened again.")
    assert f"--undo {file}" in ran.err
    assert open_now(kafka) == ["1", "3", "5", "6", "7", "8", "9"]
    again = kafka("redo", "g", "--from-file", str(file), "--yes")
    assert (again.status, again.lines[-1]) == (0, "group g: 3 messages are opened again.")
    assert open_now(kafka) == ["1", "3", "5", "6", "7", "8", "9"]
    undone = kafka("redo", "g", "--undo", str(file), "--yes")
    assert (undone.status, undone.out) == (0, "3 messages of group g count as done.\n")
    assert open_now(kafka) == ["1", "3", "6", "8"]
    whose = kafka("who", "g", orders, 0)
    assert "opened again (kafka-marshal redo):" in whose.out
    assert whose.lines[-1].split("\t")[-1] == "3: 5, 7, 9"
    (redone,) = kafka("who", "g", orders, 0, "--json").json["redone"]
    assert redone["ranges"] == [[5, 5], [7, 7], [9, 9]]
    assert redone["client"].startswith("admin-")


def test_a_fenced_sink_is_rewound_by_a_saved_plan_before_it_is_opened(
    kafka: Command, parked: Append, orders: str, tmp_path: Path
) -> None:
    file, sink = tmp_path / "plan.json", SqliteSink(tmp_path / "rows.db")
    told = "a fenced sink leaves these out as done, unless it is rewound, once, before: "
    wanted = ("redo", "g", orders, "--offsets", "0..4", "--dry-run")
    assert f"{told}first --dry-run --plan FILE" in kafka(*wanted).err
    ran = kafka(*wanted, "--plan", file)
    assert ran.status == 0
    assert f"{told}plan = RedoPlan.read({str(file)!r}); sink.rewind(plan.group, redone=plan.offsets); then: " in ran.err
    assert f"redo g --from-file {file}" in ran.err
    assert open_now(kafka) == ["1", "3", "6", "8"]
    plan = RedoPlan.read(file)
    assert plan.offsets == {(orders, 0): [0, 2, 4]}
    sink.rewind("g", {(orders, 0): -1}, epochs={(orders, 0): 0})
    sink.rewind(plan.group, redone=plan.offsets)
    again = kafka("redo", "g", "--from-file", file, "--yes")
    assert (again.status, again.lines[-1]) == (0, "group g: 3 messages are opened again.")
    assert open_now(kafka) == ["0", "1", "2", "3", "4", "6", "8"]
    undone = kafka("redo", "g", "--undo", file, "--yes")
    assert f"plan = RedoPlan.read({str(file)!r}); sink.rewind(plan.group, undone=plan.offsets)" in undone.err
    found = json.loads(kafka(*wanted, "--plan", tmp_path / "other.json", "--json").out)
    assert (found["done"], found["plan"]) == (False, str(tmp_path / "other.json"))
    sink.close()


def test_json_and_messages_of_a_file(kafka: Command, parked: Append, orders: str, tmp_path: Path) -> None:
    named, plan = tmp_path / "wrong.csv", tmp_path / "plan.json"
    named.write_text(f"topic,partition,offset\n{orders},0,2\n{orders},0,4\n{orders},0,3\n")
    found = json.loads(kafka("redo", "g", "--from-file", str(named), "--yes", "--json", "--plan", str(plan)).out)
    assert (found["done"], found["opened"], found["left"], found["plan"]) == (True, 2, [], str(plan))
    (of,) = found["partitions"]
    assert (of["messages"], of["parked"], of["first"]["offset"], of["last"]["offset"]) == (2, 1, 2, 4)
    assert open_now(kafka) == ["1", "2", "3", "4", "6", "8"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("g",), "say which messages"),
        (("g", "t", "--undo", "x"), "say which messages"),
        (("g", "--from-file", "x", "--key", "a"), "go with TOPIC"),
        (("g", "t", "--offsets", "9..3"), "no offsets"),
        (("g", "t", "--offsets", "a"), "--offsets"),
        (("g", "t", "--time", "03:10"), "FROM..UNTIL"),
        (("g", "t", "--time", "2026-11-21T04:50Z..2026-11-21T04:40Z"), "ends before it begins"),
        (("g", "t", "--time", "2h..1h", "--offsets", "1..2"), "use one"),
        (("g", "t", "--plan", "."), "--plan"),
    ],
)
def test_wrong_use(kafka: Command, given: tuple[str, ...], says: str) -> None:
    ran = kafka("redo", *given)
    assert (ran.status, says in ran.err) == (2, True), ran.err


def test_what_is_not_there_or_not_done(kafka: Command, parked: Append, orders: str) -> None:
    assert kafka("redo", "g", "nothing-of-it", "--yes").status == 1
    ran = kafka("redo", "g", orders, "--offsets", "8", "--yes")
    assert (ran.status, "nothing of it is done" in ran.err) == (1, True)
    assert kafka("redo", "h", orders, "--yes").status == 1


def test_workers_handle_them_again_while_they_work_on(
    kafka: Command, append: Append, orders: str, kafka_bootstrap: str, log_topic: str, tmp_path: Path
) -> None:
    handled: list[int] = []
    with Marshal(kafka_bootstrap, group_id="g", topic=log_topic, heartbeat_interval=0.3) as marshal:
        consumer = marshal.consumer([orders])
        worker = threading.Thread(
            target=lambda: consumer.run(lambda message: handled.append(message.offset() or 0), order="key")
        )
        worker.start()
        wait_until(lambda: len(handled) == 10)

        def done() -> bool:
            found = json.loads(kafka("redo", "g", orders, "--key", "Zoë", "--dry-run", "--json").out)
            return bool(found["partitions"][0]["messages"] == 5)

        wait_until(done)
        ran = kafka("redo", "g", orders, "--key", "Zoë", "--yes", "--rate", 2, "--plan", tmp_path / "plan.json")
        assert (ran.status, ran.out.splitlines()[-1]) == (0, "group g: 5 messages are opened again.")
        wait_until(lambda: len(handled) == 15)
        marshal.stop()
        worker.join()
    assert sorted(handled[10:]) == [1, 3, 5, 7, 9]
