"""A redo of what a bad release has written to a fenced sink: each row once and right, also when the owner dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal import Admin
from kafka_marshal.admin import RedoPlan
from kafka_marshal.errors import AdminError
from tests.broker.helpers import REPOSITORY
from tests.client.conftest import Scene, wait_until
from tests.sinks.conftest import Kind

pytestmark = pytest.mark.broker

#: Of two partitions together; every tenth message is A's, and every tenth B's.
MESSAGES = 1000
KEYS = "ABcdefghij"


@pytest.fixture
def scene(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Scene]:
    made = Scene(kafka_bootstrap, topic_factory)
    yield made
    made.close()


class Story:
    """A group whose release writes A and B wrong; then it is mended."""

    def __init__(self, scene: Scene, kind: Kind, form: str) -> None:
        self.scene, self.kind, self.form = scene, kind, form
        self.topic = scene.topic(2)
        kind.ask("DROP TABLE results")
        kind.ask("CREATE TABLE results (place bigint, at bigint, value text, times bigint, PRIMARY KEY (place, at))")
        producer = Producer({"bootstrap.servers": scene.bootstrap})
        for number in range(MESSAGES):
            producer.produce(self.topic, b"x", KEYS[number // 2 % 10], number % 2)
        assert producer.flush(30) == 0
        self.admin = Admin(scene.bootstrap, topic=scene.coordination)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, mended: bool, dies: int = 0) -> None:
        about = {
            "bootstrap": self.scene.bootstrap,
            "group": self.scene.group,
            "coordination": self.scene.coordination,
            "topic": self.topic,
            "client_id": "a",
            "kind": self.kind.name,
            "where": self.kind.where,
            "form": self.form if mended or self.form != "handlers" else "claims",
            "mended": mended,
            "dies": dies,
        }
        paths = os.pathsep.join(filter(None, ("marshal", ".", os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "tests.sinks.redo_writer", json.dumps(about)]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": paths})

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)

    def rows(self) -> Counter[tuple[str, int]]:
        """(value, how often it was written) → rows."""
        return Counter((value, times) for value, times in self.kind.ask("SELECT value, times FROM results"))

    def reopened(self) -> int:
        """Offsets that the sink still takes as to be written again."""
        marked = f"group_id LIKE '{self.scene.group}_%'"
        [(found,)] = self.kind.ask(f"SELECT count(*) FROM kafka_marshal_done WHERE {marked}")
        return int(found)

    def plan(self) -> RedoPlan:
        """Of A and B."""
        return self.admin.plan_redo(self.scene.group, {(self.topic, at): None for at in (0, 1)}, keys=["A", "B"])

    def first_release(self) -> RedoPlan:
        """It has written all, and ends; what is to be done again."""
        self.start(mended=False)
        wait_until(lambda: sum(self.rows().values()) == MESSAGES, what="all is written")
        wait_until(self._is_done, what="all is done")
        self.end()
        assert self.rows() == Counter({("wrong", 1): 200, **{(key, 1): 100 for key in KEYS[2:]}})
        return self.plan()

    def _is_done(self) -> bool:
        try:
            return self.plan().messages == 200
        except AdminError:  # no group yet
            return False

    def is_handled(self) -> bool:
        """Nothing of it is open any more."""
        return not any(each.open for each in self.plan().partitions) and self.plan().messages == 200


@pytest.fixture
def story(scene: Scene, kind: Kind, request: pytest.FixtureRequest) -> Iterator[Story]:
    made = Story(scene, kind, getattr(request, "param", "handlers"))
    yield made
    made.end()


RIGHT = Counter({("A", 2): 100, ("B", 2): 100, **{(key, 1): 100 for key in KEYS[2:]}})


@pytest.mark.parametrize(
    ("kind", "story"),
    [
        ("sqlite", "handlers"),
        ("sqlite", "batches"),
        ("postgres", "handlers"),
        ("postgres", "claims"),
        ("postgres", "group"),
    ],
    indirect=True,
)
def test_each_row_is_there_once_and_right_though_the_owner_dies(story: Story, tmp_path: Path) -> None:
    """``times`` says how often each was written: those of A and B twice, whatever was handled a third time."""
    file = tmp_path / "plan.json"
    story.first_release().write(file)
    plan = RedoPlan.read(file)
    assert plan.messages == 200
    story.start(mended=True, dies=60)
    story.kind.sink().rewind(plan.group, redone=plan.offsets)
    done: list[Any] = []

    def redo() -> None:
        done.append(story.admin.redo(plan, path=file, rate=50))

    operator = threading.Thread(target=redo)
    operator.start()
    assert story.process is not None
    assert story.process.wait(60) == -signal.SIGKILL
    story.start(mended=True)
    operator.join(120)
    assert [(each.opened, dict(each.left)) for each in done] == [(200, {})]
    wait_until(lambda: story.rows() == RIGHT, what="each row is right")
    wait_until(story.is_handled, what="all is done again")
    story.end()
    assert story.rows() == RIGHT
    assert story.reopened() == 0


def test_without_a_rewind_the_wrong_rows_stay_and_it_counts_as_done(story: Story) -> None:
    plan = story.first_release()
    before = story.rows()
    story.start(mended=True)
    assert story.admin.redo(plan).opened == 200
    wait_until(story.is_handled, what="all is done again")
    story.end()
    assert story.rows() == before
