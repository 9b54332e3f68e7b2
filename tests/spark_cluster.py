"""A standalone Spark on this machine: a master and two workers, started from PySpark's classes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from kafka_marshal.pipeline.session import NEEDED_MODULE, NEWEST_JAVA
from kafka_marshal.testing.jars import find_java
from kafka_marshal.testing.layout import free_ports
from tests.client.conftest import wait_until
from tests.pipeline.programs import kill_groups


class Cluster:
    """A standalone Spark on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        home = Path(pyspark.__path__[0])
        java = find_java(NEWEST_JAVA, NEEDED_MODULE).path.resolve().parent.parent
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
        kill_groups(self.processes)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        wait_until(lambda: made.log("master").count("Registering worker") == 2, 90, "two workers at the master")
        yield made
    finally:
        made.close()
