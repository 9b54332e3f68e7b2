"""Counting workers in processes, on a real broker: deploys, kill -9, SIGSTOP, a rollback; states lie in a folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin, CheckpointPolicy, Group, Restore
from kafka_marshal.checkpoints import Folder
from tests.cli.harness import Command
from tests.client.conftest import Scene, Worker, wait_until

SESSION = 1_500
PARTITIONS = 4


class Counting(Scene):
    """Counting workers on a new topic and a new folder."""

    def __init__(self, bootstrap: str, new_topic: Callable[..., str], folder: Path) -> None:
        super().__init__(bootstrap, new_topic)
        self.folder = folder
        self.data = self.topic(PARTITIONS)
        self.messages = 0
        self.states = folder / "states"
        self.admin = Admin(bootstrap, topic=self.coordination)

    def produce(self, count: int) -> None:
        """This many to each partition."""
        self.publish(self.data, PARTITIONS, count)
        self.messages += count

    def start(self, client_id: str, every: float | None = 0.5, **options: object) -> Worker:
        arguments = {
            "policy": {"every": every, "drain": 1.0, "timeout": 2.0},
            "states": str(self.states),
            "session": SESSION,
            **options,
        }
        return self.worker(client_id, self.data, self.folder, program="counting.py", **arguments)

    def said(self, what: str) -> list[dict[str, Any]]:
        """Lines of all workers ever."""
        return [line for worker in self.workers for line in worker.lines() if line["what"] == what]

    def handled(self) -> Counter[tuple[int, int]]:
        return Counter((line["partition"], line["offset"]) for line in self.said("handled"))

    def await_saved(self) -> None:
        """A checkpoint has all that was produced."""
        wanted = [self.messages - 1] * PARTITIONS
        wait_until(lambda: [lease.stable for lease in self.admin.progress(self.group)] == wanted, 90)

    def repeated(self) -> set[int]:
        """Partitions of which something was handled twice."""
        return {partition for (partition, _), times in self.handled().items() if times > 1}

    def read(self, restore: Callable[[Restore], object]) -> None:
        """After the last worker has left: what a new one restores; it gets no message."""
        restored: list[Restore] = []
        policy = CheckpointPolicy(every=None, on_restore=restored.append)
        mode = Group(session_timeout=SESSION / 1000)
        member = self.member("reader")
        with member.consumer([self.data], mode=mode, checkpoints=policy) as consumer:
            wait_until(lambda: sum(len(each.pieces) for each in restored) == PARTITIONS)
            assert consumer.poll(0.2) is None
        for each in restored:
            restore(each)


@pytest.fixture
def counting(kafka_bootstrap: str, topic_factory: Callable[..., str], tmp_path: Path) -> Iterator[Counting]:
    made = Counting(kafka_bootstrap, topic_factory, tmp_path)
    yield made
    made.close()


def restored(worker: Worker) -> list[tuple[str, int]]:
    return [(line["why"], line["partition"]) for line in worker.lines() if line["what"] == "restored"]


def owns(worker: Worker) -> set[int]:
    """Partitions that it restored and has not dropped since."""
    found: set[int] = set()
    for line in worker.lines():
        if line["what"] == "restored":
            found.add(line["partition"])
        elif line["what"] == "dropped":
            found.discard(line["partition"])
    return found


def shared(*workers: Worker) -> bool:
    held = [owns(worker) for worker in workers]
    return sorted(partition for each in held for partition in each) == list(range(PARTITIONS)) and all(held)


def test_the_example_counts_exactly(counting: Counting) -> None:
    """It is killed, and started again."""
    source = (Path(__file__).parents[2] / "examples" / "counting_worker.py").read_text()
    source = source.replace('group_id="delays"', f'group_id="{counting.group}", topic="{counting.coordination}"')
    program, out = counting.folder / "counting_worker.py", counting.folder / "out"
    program.write_text(source.replace("every=30", "every=0.3"))
    command = [sys.executable, str(program), counting.bootstrap, counting.data, str(counting.states), "one"]

    def start() -> subprocess.Popen[bytes]:
        with out.open("ab") as file:
            return subprocess.Popen(command, stdout=file)

    counting.produce(100)
    worker = start()
    try:
        wait_until(lambda: out.read_text().count("joined: partition") == PARTITIONS, 90)
        worker.kill()
        worker.wait()
        worker = start()
        wait_until(lambda: out.read_text().count("lost: partition") == PARTITIONS, 90)
        counting.produce(100)
        counting.await_saved()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.wait()
    found: list[dict[str, int]] = []
    store = Folder(counting.states)
    counting.read(lambda restore: found.extend(json.loads(store.load(piece)) for piece in restore.pieces))
    assert found == [Counter(2 * [str(number)[:2] for number in range(100)])] * PARTITIONS


def test_a_store_that_refuses_is_told_by_check_and_nobody_is_blamed(
    counting: Counting, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = counting.start("a"), counting.start("b")
    wait_until(lambda: shared(a, b))
    counting.produce(20)
    counting.await_saved()
    away = counting.states.rename(counting.folder / "away")
    counting.states.write_text("no folder")  # root may write everywhere, but into no file
    counting.produce(20)

    kafka = Command(capfd, monkeypatch)
    about = ("--bootstrap", counting.bootstrap, "--topic", counting.coordination)

    def problems() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = kafka("check", "--group", counting.group, "--json", *about).json["problems"]
        return found

    wait_until(lambda: [each["amount"] for each in problems() if each["kind"] == "unsaved"] == [2], 180)
    time_of_hung = time.monotonic() + 15  # later than a worker without progress is called hung
    wait_until(lambda: time.monotonic() > time_of_hung, 180)
    (problem,) = problems()
    assert "was not saved by 2 members (a, b)" in problem["text"]
    assert "the store of states refuses or hangs" in problem["text"]
    for shown in (kafka(name, *about).out for name in ("check", "status", "lag")):
        assert "evict" not in shown and "hung" not in shown and "held back" not in shown, shown
    assert a.lines() and {line["partition"] for line in counting.said("handled")} == set(range(PARTITIONS))
    counting.states.unlink()
    away.rename(counting.states)
    wait_until(lambda: problems() == [], 180)
    counting.await_saved()
    assert counting.repeated() == set()
