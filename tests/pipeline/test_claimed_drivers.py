"""Several Spark drivers share the topics, in separate processes: kill -9, SIGSTOP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from kafka_marshal.client.view import WorldView
from tests.client.conftest import Scene, wait_until
from tests.pipeline.programs import Places, kill_groups

PARTITIONS, MESSAGES = 4, 400

#: What takes seconds takes a minute and more where ten processes share two cores.
BUSY_S = 150

#: Two Spark drivers for a minute or two; the demo kills a driver in every run of the tests.
pytestmark = [pytest.mark.campaign, pytest.mark.slow, pytest.mark.timeout(600)]


class Drivers(Places):
    """Drivers that share one topic."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        super().__init__(scene, scene.topic(PARTITIONS, MESSAGES), folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, client_id: str, **options: object) -> subprocess.Popen[bytes]:
        arguments = self.arguments(client_id, max_records=100, gate=str(self.gate(client_id)), **options)
        script = Path(__file__).with_name("claimer.py")
        process = subprocess.Popen([sys.executable, str(script), json.dumps(arguments)], start_new_session=True)
        self.processes.append(process)
        return process

    def gate(self, client_id: str) -> Path:
        return self.database.with_name(f"{client_id}.gate")

    def opens(self, client_id: str, pause_s: float) -> None:
        """Its rounds take ``pause_s`` seconds from now on."""
        new = self.gate(client_id).with_suffix(".new")
        new.write_text(str(pause_s))
        new.replace(self.gate(client_id))

    def holds(self, client_id: str) -> None:
        """Let it read a round without writing it."""
        self.gate(client_id).unlink()
        wait_until(self.gate(client_id).with_suffix(".waiting").exists, 180, f"{client_id} holds a round")

    def close(self) -> None:
        kill_groups(self.processes)


@pytest.fixture
def drivers(scene: Scene, tmp_path: Path) -> Iterator[Drivers]:
    made = Drivers(scene, tmp_path)
    yield made
    made.close()


def test_two_share_the_work_and_one_continues_alone_when_the_other_is_stopped_and_killed(drivers: Drivers) -> None:
    world = drivers.scene.member("watcher").world
    drivers.opens("first", 0)
    first = drivers.start("first")
    wait_until(lambda: drivers.written_by("first") > 0, BUSY_S, "the first works")
    drivers.holds("first")  # until there is another driver
    drivers.opens("second", 1.5)
    second = drivers.start("second", available_now=True)
    wait_until(drivers.gate("second").with_suffix(".ready").exists, BUSY_S, "the second has its Spark")
    drivers.opens("first", 1.5)
    wait_until(lambda: drivers.written_by("second") > 0, BUSY_S, "the second works")
    assert world.wait_for(lambda seen: owners(seen) == {"first", "second"}, BUSY_S)

    # Stopped in the middle of a round: replaced, and its later writes are rejected.
    drivers.holds("second")
    drivers.holds("first")
    theirs = {lease.partition for lease in world.leases() if lease.client_id == "first"}
    first.send_signal(signal.SIGSTOP)  # Python only
    assert world.wait_for(lambda seen: owners(seen) == {"second"}, BUSY_S)
    written = drivers.written_by("first")
    before = drivers.count()
    drivers.opens("second", 0.5)
    wait_until(
        lambda: theirs <= {p for p, _ in drivers.count() - before}, BUSY_S, "the second goes on with what it took"
    )
    drivers.holds("second")
    drivers.opens("first", 0)
    first.send_signal(signal.SIGCONT)
    wait_until(drivers.gate("first").with_suffix(".refused").exists, BUSY_S, "the sink refuses its round")
    drivers.opens("second", 4)  # slowly: some must be left for the first
    assert world.wait_for(lambda seen: "first" in owners(seen), BUSY_S), "it works on, and claims anew"
    drivers.holds("second")
    drivers.holds("first")
    drivers.check_all_once()

    # Killed in the middle of a round.
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert written < PARTITIONS * MESSAGES > sum(drivers.count().values()), "in the middle of the work"
    drivers.opens("second", 0)
    assert second.wait(BUSY_S) == 0, "available_now ends when the group has done everything, also the dead one's part"
    drivers.check_all_once(PARTITIONS * MESSAGES)

    assert [lease.stable for lease in world.leases()] == [MESSAGES - 1] * PARTITIONS
    check_lag(drivers)
    groups = AdminClient({"bootstrap.servers": drivers.scene.bootstrap}).list_consumer_groups().result(20).valid
    ours = (drivers.scene.group, "spark-kafka")
    assert [group.group_id for group in groups if group.group_id.startswith(ours)] == [], "no Kafka group took part"


def owners(world: WorldView) -> set[str | None]:
    return {lease.client_id for lease in world.leases()} - {None}


def check_lag(drivers: Drivers) -> None:
    """`kafka-marshal lag` shows Spark's progress like any worker's."""
    command = [sys.executable, "-m", "kafka_marshal", "lag", "--json"]
    place = ["--bootstrap", drivers.scene.bootstrap, "--topic", drivers.scene.coordination]
    answer = subprocess.run([*command, *place], capture_output=True, text=True, timeout=180, check=True)
    rows = [row for row in json.loads(answer.stdout)["partitions"] if row["topic"] == drivers.topic]
    assert [(row["partition"], row["log_end"], row["lag"]) for row in rows] == [
        (partition, MESSAGES, 0) for partition in range(PARTITIONS)
    ]
