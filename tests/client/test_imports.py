"""What is imported when: package and command answer at once, and a worker loads nothing in the middle of its work."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kafka_marshal
import rationalizer
from kafka_marshal.cli.app import COMMANDS
from tests.client.conftest import Scene

#: What takes long to import, and neither the package nor the help of a command needs.
NOT_FOR_NOTHING = {
    "asyncio",
    "concurrent",
    "confluent_kafka",
    "email",
    "html",
    "http",
    "msgpack",
    "multiprocessing",
    "rich",
    "ssl",
    "subprocess",
    "tempfile",
    "urllib.request",
}


def imported(program: str) -> set[str]:
    """All modules that a new interpreter has after this program, less those it begins with."""
    text = f"import sys; before = set(sys.modules)\n{program}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in ("kafka_marshal", "rationalizer")}


def test_the_package_imports_next_to_nothing() -> None:
    found = imported("import kafka_marshal; kafka_marshal.__version__; dir(kafka_marshal)")
    assert found & {*NOT_FOR_NOTHING, "dataclasses", "inspect", "json", "logging", "socket", "uuid"} == set()
    assert ours(found) == {
        "kafka_marshal",
        "kafka_marshal.instance",
        "rationalizer",
        "rationalizer.later",
        "rationalizer.levels",
    }


def test_a_plain_worker_imports_no_part_that_it_does_not_use() -> None:
    found = imported("import kafka_marshal; kafka_marshal.Marshal")
    elsewhere = {"difflib", "platform", "shutil", "statistics", "uuid"}
    assert found & elsewhere == set()
    parts = (
        "checkpoints",
        "metrics",
        "client.group_consumer",
        "client.ranges",
        "client.shared",
        "engine.groups.client",
        "engine.groups.checkpoints.member",
        "engine.recording",
        "engine.shares.consumer",
        "watchdog",
    )
    names = {f"kafka_marshal.{part}" for part in parts}
    assert {name for name in found if name in names or name.startswith("kafka_marshal.metrics.")} == set()
    assert len(ours(found)) <= 149, sorted(ours(found))


@pytest.mark.parametrize("name", ["--version", "--help"])
def test_the_command_itself_imports_little(name: str) -> None:
    found = imported(f"from kafka_marshal.cli import main; main([{name!r}])")
    assert found & {*NOT_FOR_NOTHING, "logging", "socket"} == set()
    assert len(ours(found)) <= 17, sorted(ours(found))


def test_the_help_of_a_command_imports_little() -> None:
    """Of all of them in one process: no module that reads a log, and none that reaches Kafka."""
    found = imported(f"from kafka_marshal.cli import main\nfor name in {list(COMMANDS)}: main([name, '--help'])")
    assert found & NOT_FOR_NOTHING == set()
    parts = ("kafka_marshal.admin", "kafka_marshal.adapters", "kafka_marshal.client", "kafka_marshal.node")
    heavy = {name for name in ours(found) if name.startswith((*parts, "rationalizer.wire", "rationalizer.groups"))}
    assert heavy - {"kafka_marshal.node", "kafka_marshal.node.kept"} == set(), "the latter imports nothing itself"
    assert len(ours(found)) <= 65, sorted(ours(found))


def test_a_command_that_reads_the_log_does_without_the_members_part() -> None:
    program = "import kafka_marshal.observe.view, kafka_marshal.adapters.kafka, kafka_marshal.cli.status"
    found = ours(imported(program))
    unwanted = (
        "kafka_marshal.admin",
        "kafka_marshal.engine.engine",
        "kafka_marshal.engine.groups",
        "kafka_marshal.watchdog",
    )
    assert {name for name in found if name.startswith(unwanted)} == set()
    assert len(found) <= 179, sorted(found)


@pytest.mark.parametrize("package", [kafka_marshal, rationalizer], ids=lambda package: package.__name__)
def test_type_checkers_see_what_is_imported_later(package: ModuleType) -> None:
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        f"{node.module}.{each.name}" for node in block.body if isinstance(node, ast.ImportFrom) for each in node.names
    }
    later = {
        f"{package.__name__}.{module}.{name}" for module, names in package._LATER.items() for name in names.split()
    }
    assert seen - {"kafka_marshal.errors"} == later
    assert set(package.__all__) <= set(dir(package))
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Nonsense'"):
        _ = package.Nonsense


@pytest.mark.broker
def test_a_worker_imports_nothing_in_the_middle_of_its_work(scene: Scene) -> None:
    """A module that is missing, or slow to read, must not be met when a heartbeat is due.

    Metrics are imported by the thread that asks for them first.
    """
    topics = [scene.topic(messages=3) for _ in range(2)]
    arguments = {
        "bootstrap": scene.bootstrap,
        "group": scene.group,
        "coordination": scene.coordination,
        "topics": topics,
    }
    program = [sys.executable, str(Path(__file__).with_name("importing.py")), json.dumps({**arguments, "hi": 600})]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [
        ["MainThread", f"kafka_marshal.metrics{part}"] for part in (".measure", "", ".rows")
    ]
