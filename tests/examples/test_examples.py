"""Every Python example of README and docs, under the two type checkers that users run."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: A package without types.
UNTYPED = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"

#: A stub for names that fragments use without importing them. Users' functions are declared with confluent-kafka's
#: class, to check that our messages need no cast.
GIVEN = """
from typing import Any
import json as json
import sqlite3 as sqlite3
import time as time
import confluent_kafka
from pyspark.sql import DataFrame as DataFrame, SparkSession, functions
from kafka_marshal import Attempt as Attempt, Batch, Consumer, Marshal as Marshal, Message as Message, OffsetRange
from kafka_marshal.admin import Admin
from kafka_marshal import Batches as Batches, Claims as Claims, Group as Group, Keys as Keys
from kafka_marshal import Leader, LeaseLostError as LeaseLostError, Retry as Retry, Transactions as Transactions
from kafka_marshal import MessagesFailedError as MessagesFailedError, RetryAfter as RetryAfter
import psycopg as psycopg
from datetime import UTC as UTC, datetime as datetime
from kafka_marshal.checkpoints import Folder, RestorePiece
from kafka_marshal.pipeline.claimed import ClaimedBatch as ClaimedBatch, ClaimedBatches
from kafka_marshal.sinks import SqliteSink, fence as fence

F = functions
INSERT: str
Order: Any
admin: Admin
UPSERT: str
batch: Batch
batches: ClaimedBatches
consumer: Consumer
counts: dict[Any, Any]
database: Any
df: DataFrame
marshal: Marshal
path: str
piece: RestorePiece
root: str
sink: SqliteSink
spark: SparkSession
states: Folder
sparks_batch: ClaimedBatch

def charge(message: confluent_kafka.Message) -> None: ...
def add(seen: dict[int, Any], rows: list[Any]) -> None: ...
def copy(given: OffsetRange) -> None: ...
def dump(state: Any) -> bytes: ...
def fn(df: DataFrame, batch: ClaimedBatch) -> None: ...
def load(kept: bytes | None) -> Any: ...
def handle(message: confluent_kafka.Message) -> None: ...
def insert_rows(messages: list[Message]) -> dict[int, Exception]: ...
def invoice_of(message: confluent_kafka.Message) -> bytes: ...
def make_thumbnail(message: confluent_kafka.Message) -> None: ...
def my_worker(bootstrap_servers: str) -> None: ...
def parse(df: DataFrame) -> DataFrame: ...
def row(message: confluent_kafka.Message) -> tuple[object, ...]: ...
def started(leader: Leader) -> None: ...
def send_mail(value: bytes | None) -> None: ...
def shop_is_open() -> bool: ...
def stopped(leader: Leader) -> None: ...
def stored_last(given: OffsetRange) -> int: ...
def summarise(df: DataFrame, seen: object = None) -> DataFrame: ...
def tick(token: int) -> None: ...
def undo(tx: Any, piece: RestorePiece, position: int, ranges: tuple[tuple[int, int], ...]) -> None: ...
def work(batch: Batch) -> None: ...
def write(df: DataFrame, batch: ClaimedBatch) -> None: ...
def write_report(token: int) -> None: ...
"""

#: Beside the docs' examples: other typical code, and code that must not pass.
PROGRAM = """
import confluent_kafka
from kafka_marshal import Consumer, Delivery, Marshal, Message


def theirs(message: confluent_kafka.Message) -> None: ...


def ours(message: Message) -> int:
    topic: str = message.topic()
    return message.offset() + message.partition() + len(topic)


def work(consumer: Consumer, delivery: Delivery) -> None:
    for message in consumer:
        theirs(message)
        ours(message)
    polled = consumer.poll(1.0)
    if polled is not None:
        theirs(polled)
        consumer.done(polled)
    for each in consumer.consume(10, timeout=1.0):
        theirs(each)
    for batch in consumer.batches():
        print(sum(m.offset() for m in batch), batch.last_offset + 1, [ours(m) for m in batch.messages])


def settle(consumer: Consumer, message: confluent_kafka.Message) -> None:
    consumer.done(message)
"""
WRONG = """
from kafka_marshal import Marshal

with Marshal("h:1", group_id="g") as marshal:
    marshal.consumer(["t"], delivery="at_most_once")
"""


def examples() -> dict[str, str]:
    """File name → a program."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found[f"{page.stem.lower()}_{line}.py"] = with_names(match[1])
    return found | {"deployed.py": (ROOT / "docs" / "deploy" / "worker.py").read_text(encoding="utf-8")}


def with_names(example: str) -> str:
    """The example, with a declaration of each name that it does not define."""
    tree = ast.parse(example)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    free = sorted({node.id for node in names} - bound - set(dir(builtins)))
    # One of Spark if attributes are used that only it has.
    given = ["sparks_batch as batch" if name == "batch" and "batch.ranges" in example else name for name in free]
    return f"from given import {', '.join(given)}\n{example}" if given else example


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    found = examples()
    assert len(found) >= 15
    ours = {"given.pyi": GIVEN, "pyarrow.pyi": UNTYPED, "program.py": PROGRAM, "wrong.py": WRONG}
    ours |= {"django/__init__.pyi": "", "django/db.pyi": UNTYPED}
    for name, text in {**found, **ours}.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    (made / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT / "marshal"}", "{ROOT}"]}}')
    return made


def complaints(folder: Path, *command: str) -> list[str]:
    """A checker's errors in a program."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "MYPYPATH": f"{ROOT / 'marshal'}:{ROOT}", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert found, done.stdout + done.stderr
    return [line for line in found if "wrong.py" not in line]


@pytest.mark.slow
def test_examples_pass_mypy(folder: Path) -> None:
    command = (
        "mypy",
        "--strict",
        "--disable-error-code=import-untyped",
        "--follow-imports=silent",
        "--no-incremental",
        "--config-file=",
        ".",
    )
    assert complaints(folder, *command) == []


@pytest.mark.slow
def test_examples_pass_pyright(folder: Path) -> None:
    assert complaints(folder, "pyright", "--pythonpath", sys.executable, ".") == []


@pytest.mark.campaign
def test_every_type_that_users_see_is_known() -> None:
    """As in `make types`: inferred types differ between type checkers."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),  # it asks that Python
        "PYTHONPATH": f"{ROOT / 'marshal'}{os.pathsep}{ROOT}",
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [sys.executable, "-m", "pyright", "--verifytypes", "kafka_marshal", "--ignoreexternal"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "Type completeness score: 100%" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
