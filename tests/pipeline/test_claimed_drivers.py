"""Several Spark drivers share the topics, in processes of their own: kill -9, SIGSTOP (issue's A.2)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from tests.client.conftest import Scene, wait_until
from tests.pipeline.programs import Places, kill_groups

PARTITIONS, MESSAGES = 4, 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Drivers(Places):
    """Drivers that share one topic."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        super().__init__(scene, scene.topic(PARTITIONS, MESSAGES), folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, client_id: str, **options: object) -> subprocess.Popen[bytes]:
        arguments = self.arguments(client_id, **{"max_records": 100, "pause_s": 0.3, **options})
        script = Path(__file__).with_name("claimer.py")
        process = subprocess.Popen([sys.executable, str(script), json.dumps(arguments)], start_new_session=True)
        self.processes.append(process)
        return process

    def close(self) -> None:
        kill_groups(self.processes)


@pytest.fixture
def drivers(scene: Scene, tmp_path: Path) -> Iterator[Drivers]:
    made = Drivers(scene, tmp_path)
    yield made
    made.close()


def test_partitions_move_to_a_second_driver_which_goes_on_when_the_first_is_killed(drivers: Drivers) -> None:
    # It has more than half a minute of work: the second one's Spark takes long to start on a busy machine.
    first = drivers.start("first", available_now=True, max_records=50, pause_s=1.0)
    wait_until(lambda: drivers.written_by("first") > 0, 90, "the first driver works")
    second = drivers.start("second", available_now=True)
    watcher = drivers.scene.member("watcher").world
    assert watcher.wait_for(lambda world: len({lease.client_id for lease in world.leases()} - {None}) == 2, 90)
    wait_until(lambda: drivers.written_by("second") > 0, 60, "the second driver works")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert sum(drivers.count().values()) < PARTITIONS * MESSAGES, "it was killed in the middle of the work"
    assert second.wait(150) == 0, "available_now ends when the group has done everything, also the dead one's part"
    drivers.check_all_once(PARTITIONS * MESSAGES)

    assert [lease.stable for lease in watcher.leases()] == [MESSAGES - 1] * PARTITIONS
    check_lag(drivers)
    groups = AdminClient({"bootstrap.servers": drivers.scene.bootstrap}).list_consumer_groups().result(20).valid
    ours = (drivers.scene.group, "spark-kafka")
    assert [group.group_id for group in groups if group.group_id.startswith(ours)] == [], "no Kafka group took part"


def check_lag(drivers: Drivers) -> None:
    """`kafka-marshal lag` shows Spark's progress like anybody's."""
    command = [sys.executable, "-m", "kafka_marshal.cli", "lag", "--json"]
    place = ["--bootstrap", drivers.scene.bootstrap, "--topic", drivers.scene.coordination]
    answer = subprocess.run([*command, *place], capture_output=True, text=True, timeout=60, check=True)
    rows = [row for row in json.loads(answer.stdout)["partitions"] if row["topic"] == drivers.topic]
    assert [(row["partition"], row["log_end"], row["lag"]) for row in rows] == [
        (partition, MESSAGES, 0) for partition in range(PARTITIONS)
    ]


def test_a_stopped_driver_is_replaced_and_what_it_still_writes_is_refused(drivers: Drivers) -> None:
    first = drivers.start("first", pause_s=1.0)
    wait_until(lambda: drivers.written_by("first") > 0, 90, "the first driver works")
    first.send_signal(signal.SIGSTOP)  # Python only: its lease runs out while it holds a round
    second = drivers.start("second", available_now=True)
    assert second.wait(150) == 0
    drivers.check_all_once(PARTITIONS * MESSAGES)
    first.send_signal(signal.SIGCONT)
    watcher = drivers.scene.member("watcher").world
    assert watcher.wait_for(lambda world: any(lease.client_id == "first" for lease in world.leases()), 30), (
        "it works on, and claims anew"
    )
    first.terminate()
    assert first.wait(60) == 0
    drivers.check_all_once(PARTITIONS * MESSAGES)
