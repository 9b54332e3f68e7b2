"""Claimed batches on a real cluster: a master and two workers from PySpark's own classes, the job by spark-submit."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import kafka_marshal
import rationalizer
from kafka_marshal.pipeline.session import connector_jars
from tests.client.conftest import Scene, wait_until
from tests.spark_cluster import Cluster

PARTITIONS, MESSAGES = 2, 400

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(420)]


def packed(folder: Path) -> Path:
    """Our packages as spark-submit --py-files takes them."""
    archive = folder / "marshal.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for package in (kafka_marshal, rationalizer):
            home = Path(package.__path__[0])
            for path in sorted(home.rglob("*")):
                if path.suffix in (".py", ".typed"):
                    file.write(path, path.relative_to(home.parent))
    return archive


def test_a_job_by_spark_submit_goes_on_when_an_executor_is_lost(cluster: Cluster, scene: Scene, tmp_path: Path) -> None:
    topic = scene.topic(PARTITIONS, MESSAGES)
    database = tmp_path / "places.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE places (partition INTEGER, offset INTEGER, client TEXT)")
    arguments = {
        "bootstrap": scene.bootstrap,
        "group": scene.group,
        "coordination": scene.coordination,
        "topic": topic,
        "client_id": "submitted",
        "database": str(database),
        "hi": 1_000,
        "max_records": 80,
        "pause_s": 0.2,
        "available_now": True,
        "master": None,  # what spark-submit says
    }
    executors = ("--conf", "spark.executor.memory=512m", "--conf", "spark.driver.host=127.0.0.1")
    job = subprocess.Popen(
        [
            *(cluster.submit, "--master", cluster.url, "--jars", ",".join(map(str, connector_jars()))),
            *("--py-files", str(packed(tmp_path)), *executors),
            *(str(Path(__file__).with_name("claimer.py")), json.dumps(arguments)),
        ],
        env=cluster.environment,
        start_new_session=True,
    )
    cluster.processes.append(job)

    def places() -> Counter[tuple[int, int]]:
        with sqlite3.connect(database) as connection:
            return Counter(connection.execute("SELECT partition, offset FROM places").fetchall())

    wait_until(lambda: len(places()) > 0 or job.poll() is not None, 200, "the job works")
    assert job.poll() is None, "it ended before it was done"
    os.killpg(cluster.workers[0].pid, signal.SIGKILL)  # the worker and its executor
    assert job.wait(150) == 0
    assert len(places()) == PARTITIONS * MESSAGES
    assert set(places().values()) == {1}
