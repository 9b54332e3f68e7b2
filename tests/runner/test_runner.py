"""Worker processes: settings that are refused, metrics of all, and on a broker kill -9, SIGTERM and a bad import."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest

from kafka_marshal import ConfigurationError, Worker
from kafka_marshal.cli.work import _priority, _rate
from kafka_marshal.runner.child import WholeLines
from kafka_marshal.runner.parent import MOST_SILENT, Child, merged
from kafka_marshal.testing.layout import free_ports
from tests.client.conftest import Scene, wait_until


def a_worker(**given: object) -> Worker:
    settings = {"bootstrap_servers": "localhost:1", "handler": "app:handle", "group": "g", "topics": ["t"], **given}
    return Worker(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"processes": 0}, "processes must be at least 1"),
        ({"processes": 1_000}, "processes must be at most 256"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"drain": -1}, "drain must be at least 0 seconds"),
        ({"topics": []}, "topics must be a list of names"),
        ({"topics": "orders"}, "topics must be a list of names"),
        ({"group": ""}, "group_id must be a string that is not empty"),
        ({"name": 300 * "x"}, "no member would accept records with"),
        ({"bootstrap_servers": " "}, "bootstrap_servers must be"),
        ({"port": 70_000}, "port must be at most 65535"),
        ({"marshal": {"client_id": "x"}}, "marshal has 'client_id': the Worker has that itself"),
        ({"settings": {"concurrency": 3}}, "settings has 'concurrency': the Worker has that itself"),
        ({"handler": lambda message: None}, "can't be sent to another process"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_starts(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        a_worker(**given).check()


def test_members_have_the_name_of_the_machine_and_no_secret_is_shown() -> None:
    worker = a_worker(processes=2, config={"sasl.password": "hush"})
    assert worker.members == [f"{socket.gethostname()}-1", f"{socket.gethostname()}-2"]
    assert "hush" not in repr(worker)


def test_it_needs_the_main_thread() -> None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            a_worker().run()
        except ConfigurationError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "needs the main thread" in str(found[0])


def test_the_metrics_of_all_processes_are_one_page_with_each_family_once() -> None:
    page = '# HELP a x\n# TYPE a gauge\na{{client="{0}"}} 1\n# HELP b y\n# TYPE b gauge\nb{{client="{0}",c="d"}} 2\n'
    assert merged([page.format("w-1"), page.format("w-2")]).splitlines() == [
        "# HELP a x",
        "# TYPE a gauge",
        'a{client="w-1"} 1',
        'a{client="w-2"} 1',
        "# HELP b y",
        "# TYPE b gauge",
        'b{client="w-1",c="d"} 2',
        'b{client="w-2",c="d"} 2',
    ]


def test_a_line_that_a_thread_prints_is_whole_whatever_others_print_meanwhile() -> None:
    out: io.TextIOWrapper[io.BytesIO] = io.TextIOWrapper(io.BytesIO(), "utf-8")
    lines = WholeLines(out)

    def shown() -> str:
        return out.buffer.getvalue().decode()

    def aside(*texts: str, end: str = "\n") -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(print, *texts, sep=end, end=end, file=lines).result()

    lines.write("of the ")
    aside("of another\nand its", "second")
    assert shown() == "of another\nand its\nsecond\n"
    print("first", "thread", file=lines)
    assert shown().endswith("second\nof the first thread\n")
    lines.write("dots")
    aside("left", end="")
    assert shown().endswith("first thread\n")
    lines.flush()
    assert shown().endswith("first thread\ndots")
    lines.end()
    assert shown().endswith("dotsleft\n")


class Started:
    """`kafka-marshal work`, its folder and what it says."""

    def __init__(self, scene: Scene, folder: Path, source: str, *more: str) -> None:
        self.app = folder / "app.py"
        self.app.write_text(source)
        self._log = folder / "log"
        argv = [sys.executable, "-m", "kafka_marshal", "work", "--name", "w", "--bootstrap", scene.bootstrap]
        argv += ["--topic", scene.coordination, "--group", scene.group, "app:handle", *more]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(argv, cwd=folder, stdout=out, stderr=out)

    def said(self) -> str:
        return self._log.read_text()

    def await_text(self, pattern: str, count: int = 1) -> list[Any]:
        def found() -> list[Any]:
            assert self.process.poll() is None, self.said()
            return re.findall(pattern, self.said())

        wait_until(lambda: len(found()) >= count, what=f"{count} × {pattern} in {self._log}")
        return found()

    def await_end(self) -> int:
        return self.process.wait(60)


Start = Callable[..., Started]


@pytest.fixture
def start(scene: Scene, tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def one(source: str, *more: str) -> Started:
        started.append(Started(scene, tmp_path, source, *more))
        return started[-1]

    yield one
    for each in started:
        each.process.kill()  # processes end with it
        each.process.wait()


HANDLE = r"""
import os

def handle(message):
    print(f"handled {message.partition()} {message.offset()} {os.getpid()}")
"""


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.broker
def test_a_killed_process_returns_under_its_name_and_sigterm_drains(scene: Scene, start: Start) -> None:
    topic, (port,) = scene.topic(4, 5), free_ports(1)
    runner = start(HANDLE, "--topics", topic, "--processes", "2", "--port", str(port))
    runner.await_text(r"w-\d \| handled", 20)
    wait_until(lambda: page(port, "/readyz")[0] == 200)
    assert re.findall(r"^w-\d: \w+;", page(port, "/readyz")[1], re.MULTILINE) == ["w-1: ready;", "w-2: ready;"]
    assert page(port, "/livez")[0] == 200
    assert json.loads(page(port, "/lag")[1])["lag"] is not None
    assert page(port, "/x")[0] == 404
    metrics = page(port, "/metrics")[1]
    assert metrics.count("# TYPE kafka_marshal_ready gauge") == 1
    assert len(re.findall(r"kafka_marshal_ready\{.*w-[12].*\} 1.0", metrics)) == 2

    def pids() -> dict[str, str]:
        scene.publish(topic, 4, 1)
        return dict(re.findall(r"(w-\d) \| handled \d+ \d+ (\d+)", runner.said()))

    wait_until(lambda: len(pids()) == 2)
    os.kill(int(pids()["w-2"]), signal.SIGKILL)
    runner.await_text(r"WARNING w-2 has ended \(signal 9\).* it is started again in 0.5 s")
    runner.await_text(r"w-2 \| .*joined", 2)
    wait_until(lambda: page(port, "/readyz")[0] == 200)
    runner.process.terminate()
    assert runner.await_end() == 0, runner.said()
    assert "is killed" not in runner.said()
    assert runner.said().count("left") == 2
    assert not re.findall("Traceback|[a-z]Warning", runner.said())


@pytest.mark.broker
def test_a_handler_that_can_not_be_imported_ends_the_runner_at_once(scene: Scene, start: Start) -> None:
    runner = start("import no_such_module\n", "--topics", scene.topic(1), "--processes", "2")
    assert runner.await_end() == 2
    assert "No module named 'no_such_module'" in runner.said()
    assert "started again" not in runner.said()


@pytest.mark.broker
def test_without_the_coordination_topic_it_ends_and_names_the_command(scene: Scene, start: Start) -> None:
    runner = start(HANDLE, "--topics", scene.topic(1), "--topic", "absent")
    assert runner.await_end() == 1
    assert "kafka-marshal init --topic absent. Nor could another process: all are ended" in runner.said()


@pytest.mark.broker
def test_a_port_in_use_is_said_before_anything_starts(scene: Scene, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        runner = start(HANDLE, "--topics", "t", "--port", str(port))
        assert runner.await_end() == 2
    assert "the port is in use. Nothing was started" in runner.said()


@pytest.mark.broker
def test_check_says_what_it_would_do_and_what_is_missing(scene: Scene, start: Start) -> None:
    topic = scene.topic(1)
    well = start(HANDLE, "--topics", topic, "--processes", "2", "--check")
    assert well.await_end() == 0, well.said()
    assert well.said() == f"group {scene.group}, topics {topic}, 16 handlers in each process:\n  w-1\n  w-2\n"
    wrong = start(
        "import x_y\n", "--topics", "absent", "--topic", "gone", "--dead-letters", "dead", "--check", "--json"
    )
    assert wrong.await_end() == 1
    found = json.loads(wrong.said())
    assert (found["members"], found["topics"]) == (["w-1"], ["absent"])
    assert [re.findall(r"'app:handle'|'absent'|'gone'|'dead'", text)[0] for text in found["problems"]] == [
        "'app:handle'",
        "'absent'",
        "'gone'",
        "'dead'",
    ]


@pytest.mark.broker
def test_a_rate_of_the_command_is_kept(scene: Scene, start: Start) -> None:
    topic, (port,) = scene.topic(1, 5), free_ports(1)
    runner = start(HANDLE, "--topics", topic, "--rate", f"{topic}=0.001", "--port", str(port))
    runner.await_text(r"w-1 \| handled")
    wait_until(lambda: re.search(r"kafka_marshal_rate_limited\{.*\} [1-9]", page(port, "/metrics")[1]))
    assert runner.said().count("| handled") == 1, "a burst of one, and the next after a thousand seconds"


@pytest.mark.parametrize(
    ("given", "found"), [((), None), (("100",), 100.0), (("a=100", "b=0.5"), {"a": 100.0, "b": 0.5})]
)
def test_rates_of_the_command(given: tuple[str, ...], found: object) -> None:
    assert _rate(given) == found


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("fast",), "is not N"),
        (("a=",), "is not N"),
        (("a=1", "a=2"), "one for each topic"),
        (("1", "a=2"), "one of all topics"),
        (("a=0",), "must be a number above 0"),
        (("nan",), "must be a number above 0"),
    ],
)
def test_what_is_no_rate_is_refused(given: tuple[str, ...], text: str) -> None:
    with pytest.raises((click.UsageError, ConfigurationError), match=text):
        _rate(given)


@pytest.mark.broker
def test_a_priority_of_the_command_says_which_topic_begins_first(scene: Scene, start: Start) -> None:
    (low, high), (port,) = (scene.topic(1, 30), scene.topic(1, 30)), free_ports(1)
    handle = "def handle(message):\n    print('begun', message.topic())\n"
    topics = ("--topics", f"{low},{high}", "--concurrency", "1", "--rate", "20")
    runner = start(handle, *topics, "--priority", f"{low}=0", "--port", str(port))
    wait_until(lambda: runner.said().count(f"begun {high}") == 30)
    begun = re.findall(r"begun (\S+)", runner.said())
    late = begun[begun.index(high) :][:20]
    assert late.count(high) > late.count(low), "one in ten is of the lower one"


def test_priorities_of_the_command() -> None:
    found = _priority(("backfill=0", "a=b=7"))
    assert found is not None
    assert found.levels == {"backfill": 0, "a=b": 7}
    assert _priority(()) is None
    for wrong in (("backfill",), ("=1",), ("a=10",), ("a=x",), ("a=1", "a=2")):
        with pytest.raises(click.UsageError, match="TOPIC=0 to TOPIC=9"):
            _priority(wrong)


@pytest.mark.broker
def test_reload_starts_again_when_a_file_changes_and_a_mistake_waits_for_the_next(scene: Scene, start: Start) -> None:
    topic = scene.topic(1, 1)
    runner = start(HANDLE, "--topics", topic, "--reload")
    runner.await_text(r"\| handled 0 0")
    runner.app.write_text("def handle(message:\n")
    runner.await_text("SyntaxError.* It is started again when a file changes")
    assert "left" in runner.said()
    runner.app.write_text(HANDLE.replace("handled", "changed"))
    scene.publish(topic, 1, 1)
    runner.await_text(r"\| changed 0 1")
    assert "has ended" not in runner.said()


FAILING = """
import kafka_marshal.client.marshal
from kafka_marshal import errors

def handle(message): ...

def fail(*_, **__):
    raise errors.{0}("no way")

kafka_marshal.client.marshal.Marshal = fail
"""


def command(folder: Path, source: str, *more: str, **settings: Any) -> subprocess.Popen[Any]:
    """The command, with a broker that is not there."""
    (folder / "app.py").write_text(source)
    argv = [sys.executable, "-m", "kafka_marshal", "work", "app:handle", "--bootstrap", "localhost:1"]
    argv += ["--name", "w", "--group", "g", "--topics", "t", "--no-watchdog", *more]
    return subprocess.Popen(argv, cwd=folder, **settings)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("AuthenticationError", 3),
        ("AuthorizationError", 3),
        ("TopicMissingError", 1),
        ("TopicUnsafeError", 1),
        ("ConfigurationError", 2),
    ],
)
def test_what_every_process_would_meet_ends_all(error: str, status: int, tmp_path: Path) -> None:
    process = command(tmp_path, FAILING.format(error), stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == status, said
    assert "w-1 can't work: no way. Nor could another process: all are ended" in said
    assert "Traceback" not in said


def test_an_outage_of_kafka_is_waited_for(tmp_path: Path) -> None:
    source = FAILING.format("KafkaUnavailableError")
    with command(tmp_path, source, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = "".join(line for _, line in zip(range(4), process.stdout, strict=False))
        assert [float(wait) for wait in re.findall("is started again in ([0-9.]+) s", said)] == [0.5, 1.0]
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_a_terminal_has_a_line_of_progress(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = command(tmp_path, HANDLE, "--processes", "2", stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while b"\r\x1b[K0 of 2 ready, 0 messages/s, lag 0, 0 restarts" not in said:
        said += os.read(ours, 10_000)
    process.terminate()
    assert process.wait(60) == 0
    os.close(ours)


def test_without_a_reader_of_its_lines_it_ends(tmp_path: Path) -> None:
    process = command(tmp_path, FAILING.format("KafkaUnavailableError"), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 141


def test_a_member_that_says_nothing_for_a_minute_is_replaced_and_one_that_says_a_line_is_not() -> None:
    child = Child("w-1")
    assert [child.checked() for _ in range(2 * MOST_SILENT)] == 2 * MOST_SILENT * [""], "it starts: no limit"
    said = b'{"live": true, "text": "works"}\n'
    for silence in (MOST_SILENT - 1, MOST_SILENT):
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(said)
        child._read_facts(ours, child.facts)
        texts = [child.checked() for _ in range(silence)]
    assert texts == [*(MOST_SILENT - 1) * [""], "it has said nothing for 60 s"]
    child.end(1.0)
    assert child.checked() == "", "it ends already"


COROUTINE = """
import asyncio

async def handle(message):
    await asyncio.sleep(0)
    print(f"awaited {message.offset()}", flush=True)
"""


@pytest.mark.broker
def test_a_coroutine_function_is_a_handler(scene: Scene, start: Start) -> None:
    runner = start(COROUTINE, "--topics", scene.topic(1, 5))
    runner.await_text(r"w-1 \| awaited", 5)
    runner.process.terminate()
    assert runner.await_end() == 0, runner.said()


ILL = (
    HANDLE
    + """
import dataclasses
from kafka_marshal import Marshal
examine = Marshal.health
Marshal.health = lambda self: dataclasses.replace(examine(self), needs_restart=os.path.exists("ill"))
"""
)


@pytest.mark.broker
def test_a_process_that_only_a_restart_helps_is_drained_and_started_again(scene: Scene, start: Start) -> None:
    runner = start(ILL, "--topics", scene.topic(1, 1), "--no-watchdog")
    runner.await_text("handled")
    ill = runner.app.with_name("ill")
    ill.touch()
    runner.await_text("WARNING w-1 is ended and started again, as only that helps: ")
    ill.unlink()
    runner.await_text("w-1 .* joined", 2)
    assert "left" in runner.said()
    assert "has ended" not in runner.said()


@pytest.mark.broker
def test_another_process_with_its_name_ends_it_and_the_log_is_json(scene: Scene, start: Start) -> None:
    topic = scene.topic(1, 1)
    runner = start(HANDLE, "--topics", topic, "--json", "--no-watchdog")
    runner.await_text("handled")
    scene.member("w-1").consumer([topic])
    assert runner.await_end() == 1
    lines = [json.loads(line) for line in runner.said().splitlines()]
    assert all({"process", "time", "level", "event", "text"} <= line.keys() for line in lines), lines
    assert {line["event"] for line in lines} >= {"joined", "output", "claimed"}
    refused = next(line for line in lines if line["event"] == "process_refused")
    assert (refused["process"], refused["level"]) == ("w", "ERROR")
    assert "w-1 can't work: " in refused["text"]


WAITING = r"""
import os, time

def handle(message):
    print("handled")
    while not os.path.exists("go"):
        time.sleep(0.01)
    print(200_000 * "x")  # more than a pipe holds
    open(f"done-{message.partition()}", "w").close()
"""


@pytest.mark.broker
def test_processes_end_in_good_order_if_the_parent_is_killed(scene: Scene, start: Start) -> None:
    topic = scene.topic(2, 1)
    runner = start(WAITING, "--topics", topic, "--no-watchdog")
    runner.await_text("handled", 2)
    runner.process.kill()
    runner.process.wait()
    runner.app.with_name("go").touch()
    wait_until(lambda: all(runner.app.with_name(f"done-{number}").exists() for number in range(2)))
    watching = scene.member("watching")

    def left() -> bool:
        leases = [watching.world.lease(topic, number) for number in range(2)]
        return all(lease is not None and lease.client_id is None and lease.stable == 0 for lease in leases)

    wait_until(left)


@pytest.mark.broker
def test_a_second_signal_kills_what_still_works(scene: Scene, start: Start) -> None:
    runner = start(WAITING, "--topics", scene.topic(1, 1))
    runner.await_text("handled")
    runner.process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        runner.process.wait(0.5)
    runner.process.terminate()
    assert runner.await_end() == 1
    assert "w-1 has not ended in time and is killed: what was in flight comes again" in runner.said()
