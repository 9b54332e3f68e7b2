"""Several Spark drivers share the topics, in processes of their own: kill -9, SIGSTOP (issue's A.2)."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from tests.client.conftest import Scene, wait_until

PARTITIONS, MESSAGES = 4, 300
HI = 1_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Drivers:
    """Drivers that copy one topic into one database."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self.topic = scene.topic(PARTITIONS, MESSAGES)
        self.database = folder / "places.db"
        self.processes: list[subprocess.Popen[bytes]] = []
        with sqlite3.connect(self.database) as connection:
            # No key: what is written twice shall be seen twice.
            connection.execute("CREATE TABLE places (partition INTEGER, offset INTEGER, client TEXT)")

    def start(self, client_id: str, **options: object) -> subprocess.Popen[bytes]:
        arguments = {
            "bootstrap": self.scene.bootstrap,
            "group": self.scene.group,
            "coordination": self.scene.coordination,
            "topic": self.topic,
            "client_id": client_id,
            "database": str(self.database),
            "hi": HI,
            "max_records": 100,
            "pause_s": 0.3,
            **options,
        }
        script = Path(__file__).with_name("claimer.py")
        process = subprocess.Popen([sys.executable, str(script), json.dumps(arguments)], start_new_session=True)
        self.processes.append(process)
        return process

    def places(self) -> Counter[tuple[int, int]]:
        with sqlite3.connect(self.database) as connection:
            return Counter(connection.execute("SELECT partition, offset FROM places").fetchall())

    def written_by(self, client_id: str) -> int:
        with sqlite3.connect(self.database) as connection:
            [[count]] = connection.execute("SELECT count(*) FROM places WHERE client = ?", (client_id,))
        return int(count)

    def check_all_once(self) -> None:
        found = self.places()
        assert len(found) == PARTITIONS * MESSAGES, "nothing is lost"
        assert set(found.values()) == {1}, "nothing is double"

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def drivers(scene: Scene, tmp_path: Path) -> Iterator[Drivers]:
    made = Drivers(scene, tmp_path)
    yield made
    made.close()


def test_partitions_move_to_a_second_driver_which_goes_on_when_the_first_is_killed(drivers: Drivers) -> None:
    first = drivers.start("first", available_now=True)
    wait_until(lambda: drivers.written_by("first") > 0, 90, "the first driver works")
    second = drivers.start("second", available_now=True)
    watcher = drivers.scene.member("watcher").world
    assert watcher.wait_for(lambda world: len({lease.client_id for lease in world.leases()} - {None}) == 2, 90)
    wait_until(lambda: drivers.written_by("second") > 0, 60, "the second driver works")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert sum(drivers.places().values()) < PARTITIONS * MESSAGES, "it was killed in the middle of the work"
    assert second.wait(150) == 0, "available_now ends when the group has done everything, also the dead one's part"
    drivers.check_all_once()

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
    assert second.wait(120) == 0
    drivers.check_all_once()
    first.send_signal(signal.SIGCONT)
    watcher = drivers.scene.member("watcher").world
    assert watcher.wait_for(lambda world: any(lease.client_id == "first" for lease in world.leases()), 30), (
        "it works on, and claims anew"
    )
    first.terminate()
    assert first.wait(60) == 0
    drivers.check_all_once()
