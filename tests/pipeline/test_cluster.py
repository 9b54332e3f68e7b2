"""Claimed batches on a real cluster: a master and two workers from PySpark's own classes, the job by spark-submit."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

import kafka_marshal
import rationalizer
from kafka_marshal.pipeline.session import connector_jars
from kafka_marshal.testing.java import find_java
from kafka_marshal.testing.ports import free_ports
from tests.client.conftest import Scene, wait_until

PARTITIONS, MESSAGES = 2, 400

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(420)]


class Cluster:
    """A standalone Spark on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        home = Path(pyspark.__path__[0])
        java = find_java(newest=23).path.resolve().parent.parent
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(java),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        }
        self.spark_class, self.submit = str(home / "bin" / "spark-class"), str(home / "bin" / "spark-submit")
        port, web, *self.webs = free_ports(4)
        self.url = f"spark://127.0.0.1:{port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        place = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web))
        self.start("master", "org.apache.spark.deploy.master.Master", *place)
        self.workers = [self.worker(number) for number in range(2)]

    def worker(self, number: int) -> subprocess.Popen[bytes]:
        name = f"worker-{number}"
        more = ("--webui-port", str(self.webs[number]), "--work-dir", str(self.folder / name))
        place = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g")
        return self.start(name, "org.apache.spark.deploy.worker.Worker", self.url, *place, *more)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [self.spark_class, *arguments],
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # executors are its children: all of them end with it
        )
        log.close()
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        wait_until(lambda: made.log("master").count("Registering worker") == 2, 90, "two workers at the master")
        yield made
    finally:
        made.close()


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
