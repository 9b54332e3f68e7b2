"""Claimed batches on a real cluster: a master and two workers from PySpark's classes, the job by spark-submit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

import kafka_marshal
import rationalizer
from kafka_marshal.pipeline.session import connector_jars
from tests.client.conftest import Scene, wait_until
from tests.pipeline.programs import Places
from tests.spark_cluster import Cluster

PARTITIONS, MESSAGES = 2, 400

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(420)]


def packed(folder: Path) -> Path:
    """Our packages as a zip for spark-submit --py-files."""
    archive = folder / "marshal.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for package in (kafka_marshal, rationalizer):
            home = Path(package.__path__[0])
            for path in sorted(home.rglob("*")):
                if path.suffix in (".py", ".typed"):
                    file.write(path, path.relative_to(home.parent))
    return archive


class Job(Places):
    """A program submitted to a cluster, and what it has written."""

    program = "claimer.py"

    def __init__(self, cluster: Cluster, scene: Scene, topic: str, folder: Path) -> None:
        super().__init__(scene, topic, folder)
        self.cluster = cluster
        self.checkpoint = folder / "checkpoint"
        self.archive = packed(folder)

    def submit(self, client_id: str, *conf: str, **more: object) -> subprocess.Popen[bytes]:
        usual = {"max_records": 80, "available_now": True, "checkpoint": str(self.checkpoint)}
        arguments = self.arguments(client_id, master=None, **{**usual, **more})  # the master comes from spark-submit
        settings = ("spark.executor.memory=512m", "spark.driver.host=127.0.0.1", *conf)
        job = subprocess.Popen(
            [
                *(self.cluster.submit, "--master", self.cluster.url, "--jars", ",".join(map(str, connector_jars()))),
                *("--py-files", str(self.archive), *(part for each in settings for part in ("--conf", each))),
                *(str(Path(__file__).with_name(self.program)), json.dumps(arguments)),
            ],
            env=self.cluster.environment,
            start_new_session=True,
        )
        self.cluster.processes.append(job)
        return job

    def works(self, job: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: len(self.count()) > 0 or job.poll() is not None, 200, "the job works")
        assert job.poll() is None, "it ended before it was done"

    def lose_an_executor(self) -> None:
        os.killpg(self.cluster.workers[0].pid, signal.SIGKILL)  # the worker and its executor


def test_a_job_by_spark_submit_continues_when_an_executor_is_lost(
    cluster: Cluster, scene: Scene, tmp_path: Path
) -> None:
    made = Job(cluster, scene, scene.topic(PARTITIONS, MESSAGES), tmp_path)
    job = made.submit("submitted", pause_s=0.2)
    made.works(job)
    made.lose_an_executor()
    assert job.wait(150) == 0
    assert len(made.count()) == PARTITIONS * MESSAGES
    assert set(made.count().values()) == {1}


def test_at_most_once_an_executor_lost_costs_its_round_and_repeats_nothing(
    cluster: Cluster, scene: Scene, tmp_path: Path
) -> None:
    """Spark would read the round again on the other executor; the job ends, and the next one continues behind it."""
    made = Job(cluster, scene, scene.topic(PARTITIONS, MESSAGES), tmp_path)
    once = {"delivery": "at-most-once", "max_records": 200}
    job = made.submit("first", "spark.task.maxFailures=1", task_s=4.0, **once)
    made.works(job)
    made.lose_an_executor()
    status = job.wait(150)
    lost = PARTITIONS * MESSAGES - len(made.count())
    again = made.submit("second", "spark.task.maxFailures=1", **once)
    assert again.wait(150) == 0
    assert set(made.count().values()) == {1}
    missing = PARTITIONS * MESSAGES - len(made.count())
    # The running round, and at most one more that was requested meanwhile.
    assert missing <= 2 * 200
    assert (status != 0) == (missing > 0)
    assert lost >= missing


def test_the_stream_source_continues_when_an_executor_is_lost(cluster: Cluster, scene: Scene, tmp_path: Path) -> None:
    """Executors read with confluent-kafka; the driver's claims decide which partitions, and from where."""
    made = Job(cluster, scene, scene.topic(PARTITIONS, MESSAGES), tmp_path)
    made.program = "streamer.py"
    job = made.submit("query")
    made.works(job)
    made.lose_an_executor()
    wait_until(lambda: len(made.count()) == PARTITIONS * MESSAGES or job.poll() is not None, 150, "it goes on")
    assert len(made.count()) == PARTITIONS * MESSAGES
    assert set(made.count().values()) == {1}
    watcher = scene.member("watcher")
    done = [MESSAGES - 1] * PARTITIONS
    wait_until(lambda: [lease.stable for lease in watcher.world.leases()] == done, 180, "the log says that it is done")
