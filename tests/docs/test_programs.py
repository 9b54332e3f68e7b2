"""Python blocks in README and docs marked as programs (``# program: NAME``) run and end cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from kafka_marshal import Admin, errors
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing import LocalBroker
from kafka_marshal.topic_names import DEFAULT_TOPIC
from rationalizer import Upgrade, encode
from tests.client.conftest import wait_until

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """(name, source) of the blocks marked as this kind."""
    for page in PAGES:
        for source in BLOCK.findall(page.read_text(encoding="utf-8")):
            if match := re.match(rf"# {kind}: (\S+)\n", source):
                yield match[1], source


PROGRAMS = dict(blocks("program"))
TESTS = dict(blocks("test"))

#: Output that shows that a program works; others end by themselves.
SAYS = {"transform.py": "", "json_log.py": '"event": "claimed"', "own_policy.py": "", "serving.py": "lag"}


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    """A separate broker, as the programs use the docs' names."""
    with LocalBroker() as running:
        cps = Admin(running.bootstrap_servers).init().partitions
        probe = Probe(running.bootstrap_servers)
        probe.create_topic("flights", 4, 1, {})
        probe.create_topic("flights-dead", 1, 1, {})
        probe.create_topic("flights-loud", 1, 1, {})
        producer = Producer({"bootstrap.servers": running.bootstrap_servers})
        for number in range(40):
            producer.produce("flights", b"no number" if number == 9 else str(number).encode(), partition=number % 4)
        for cp in range(cps):  # coordinated groups need level 2
            producer.produce(DEFAULT_TOPIC, encode(Upgrade("i", "operator", "any", 2)), b"", cp)
        assert producer.flush(20) == 0
        yield running


@pytest.fixture
def run(broker: LocalBroker, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        group = f"delays-{uuid.uuid4().hex[:6]}"
        source = PROGRAMS[name].replace("localhost:9092", broker.bootstrap_servers).replace('"delays"', f'"{group}"')
        (tmp_path / name).write_text(source)
        with (tmp_path / "out").open("wb") as out:
            started.append(subprocess.Popen([sys.executable, name], cwd=tmp_path, stdout=out, stderr=out))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def first_dead_letter(broker: LocalBroker) -> Message | None:
    reader = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "x"})
    reader.assign([TopicPartition("flights-dead", 0, 0)])
    try:
        return reader.poll(30)
    finally:
        reader.close()


def test_the_docs_hold_programs() -> None:
    assert {"worker.py", "group_worker.py", "threads.py", "with_asyncio.py", "processes.py", "json_log.py"} <= set(
        PROGRAMS
    )


@pytest.mark.broker
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_of_the_docs_runs(
    name: str, run: Callable[[str], subprocess.Popen[bytes]], broker: LocalBroker, tmp_path: Path
) -> None:
    process = run(name)
    says = SAYS.get(name, "handled")

    def said() -> str:
        return (tmp_path / "out").read_text(errors="replace")

    if says:
        wait_until(lambda: says in said() or process.poll() is not None, 180, f"{name} says {says}")
        assert process.poll() is None, said()
        if name == "handlers.py":
            put_aside = first_dead_letter(broker)
            assert put_aside is not None
            assert put_aside.value() == b"no number"
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, said()
    assert "Traceback" not in said()


@pytest.mark.broker
def test_the_tests_of_the_docs_pass(broker: LocalBroker, tmp_path: Path) -> None:
    for name, source in TESTS.items():
        (tmp_path / name).write_text(source)
    environment = {**os.environ, "KAFKA_MARSHAL_TEST_BOOTSTRAP": broker.bootstrap_servers}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"= {len(TESTS)} passed" in done.stdout, done.stdout + done.stderr


def test_the_page_of_errors_names_them_all_and_where_they_are_imported_from() -> None:
    import kafka_marshal

    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"`(\w+Error)`(\*?)", page))
    assert set(errors.__all__) <= set(named)
    starred = {name for name in errors.__all__ if re.search(rf"`{name}`\*", page)}
    assert starred == {name for name in errors.__all__ if name in kafka_marshal.__all__}


def test_the_zip_for_executors_holds_both_packages(tmp_path: Path) -> None:
    """It contains the imported package, installed or not; the working directory does not matter."""
    command = [sys.executable, "-m", "kafka_marshal.pipeline.zip", str(tmp_path / "marshal.zip")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    program = (
        "import kafka_marshal, rationalizer, json; print(json.dumps([kafka_marshal.__file__, rationalizer.__file__]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "marshal.zip")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({_site()!r}); {program}"],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert all("marshal.zip" in path for path in json.loads(done.stdout))


def _site() -> str:
    """The folder of installed dependencies, without the paths of an editable install."""
    import msgpack

    return str(Path(msgpack.__file__).parents[1])
