"""Starts each contestant."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from benchmarks.lane_peers.work import Order
from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.jars import KAFKA_VERSION, find_java, resolve

__all__ = ["MissingError", "Outcome", "Starter"]

ROOT = Path(__file__).parents[2]

PARALLEL_CONSUMER = ("io.confluent.parallelconsumer", "parallel-consumer-core", "0.5.3.3")
JARS = (PARALLEL_CONSUMER, ("org.apache.kafka", "kafka-clients", KAFKA_VERSION))

PYRALLEL = "pyrallel-consumer==1.0.0"
#: Minimum Python of pyrallel-consumer.
PYRALLEL_PYTHON = (3, 12)

#: Longest time of a contestant to start and to end (s).
SPARE_S = 60.0


class MissingError(Exception):
    """A contestant can't run here."""


@dataclass(frozen=True)
class Outcome:
    """A contestant's result."""

    done: int
    seconds: float
    inversions: int
    cpu_s: float
    peak_mb: float

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.done / max(self.seconds, 1e-9)


class Starter:
    """Starts contestants, each in its own process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = ""
        self._missing: dict[str, str] = {}

    @classmethod
    @contextmanager
    def in_a_folder(cls) -> Iterator[Starter]:
        """A starter with a temporary folder for installations."""
        with tempfile.TemporaryDirectory(prefix="kafka-marshal-lanes-") as folder:
            yield cls(Path(folder))

    def run(self, order: Order) -> Outcome:
        """Run one order.

        Raises:
            MissingError: it can't run here, or has failed.
        """
        if order.side in self._missing:
            raise MissingError(self._missing[order.side])
        try:
            command = self._command(order.side)
        except (MissingError, LocalBrokerError) as error:
            self._missing[order.side] = str(error).splitlines()[0]
            raise MissingError(self._missing[order.side]) from error
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "marshal", ROOT)))}
        try:
            run = subprocess.run(
                [*command, *order.arguments()],
                capture_output=True,
                text=True,
                cwd=self._folder,
                env=env,
                timeout=2 * order.limit_s + SPARE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MissingError("did not end in time") from None
        lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode != 0 or not lines:
            raise MissingError((run.stderr.strip().splitlines() or ["no output"])[-1])
        found: Mapping[str, Any] = json.loads(lines[-1])
        return Outcome(**found)

    def _command(self, side: str) -> Sequence[str]:
        match side:
            case "parallel" | "share":
                return java_command()
            case "pyrallel":
                self._python = self._python or with_pyrallel(self._folder / "pyrallel")
                return [self._python, "-m", "benchmarks.lane_peers.pyrallel"]
            case "pool":
                return [sys.executable, "-m", "benchmarks.lane_peers.pool"]
            case _:
                return [sys.executable, "-m", "benchmarks.lane_peers.ours"]


@cache
def java_command() -> Sequence[str]:
    """The program in Java, compiled as it starts."""
    java = find_java(module="jdk.compiler").path
    remedy = "Parallel Consumer and share groups do not take part"
    jars = resolve(f"parallel-consumer-{PARALLEL_CONSUMER[2]}", JARS, remedy=remedy)
    program = Path(__file__).with_name("Peers.java")
    return [str(java), "-Xmx1g", "-cp", os.pathsep.join(map(str, jars)), str(program)]


def with_pyrallel(folder: Path) -> str:
    """The Python of a separate environment with pyrallel-consumer."""
    python = new_enough_python()
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True)
    installed = folder / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = [str(installed), "-m", "pip", "install", "-q", "--disable-pip-version-check", PYRALLEL]
    run = subprocess.run(pip, check=False, capture_output=True, text=True, env=env)
    if run.returncode != 0:
        raise MissingError((run.stderr.strip().splitlines() or ["pip failed"])[-1])
    return str(installed)


def new_enough_python() -> str:
    """A suitable Python: this one, one on PATH, or one of pyenv."""
    wanted = ".".join(map(str, PYRALLEL_PYTHON))
    names = [sys.executable, *filter(None, map(shutil.which, ("python3.13", "python3.12", "python3")))]
    names += sorted(glob(os.path.expanduser("~/.pyenv/versions/3.1[2-9]*/bin/python")))
    for name in names:
        check = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {PYRALLEL_PYTHON})"
        if subprocess.run([name, "-c", check], capture_output=True, check=False).returncode == 0:
            return name
    raise MissingError(f"needs Python {wanted}, and there is none")
