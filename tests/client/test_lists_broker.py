"""Handlers of lists in three processes of which one after the other is killed (kill -9), on a real broker."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.client.conftest import Worker, wait_until, written
from tests.client.running import Crew

pytestmark = pytest.mark.broker

PARTITIONS = 4
KEYS = 40
KILLS = 4
#: Messages that are published before each kill; every twentieth fails its first try.
PORTION = 400

Place = tuple[int, str, int]


class Fleet:
    """Workers that write to one file, which has all that they do in order."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew, self.folder, self.topic = crew, folder, crew.topic(PARTITIONS)
        self.out = folder / "all.jsonl"
        self.published = 0
        #: Of each name: the number of its newest process.
        self.numbers: dict[str, int] = {}
        self.workers = {name: self.start(name) for name in "abc"}

    def start(self, name: str) -> Worker:
        self.numbers[name] = number = len(self.crew.workers)
        more = {"out": str(self.out), "process": number, "hi": 2_000}
        return self.crew.worker(name, self.topic, self.folder, program="lists_worker.py", **more)

    def kill(self) -> None:
        """Kill one that has a list of what is published now: of several, the one that has lived longest."""
        before = len(self.lines())
        self.publish()
        name = wait_until(lambda: self.busy(before), what="one has begun a list")
        self.workers[name].kill()
        with self.out.open("a") as out:
            out.write(json.dumps({"what": "killed", "process": self.numbers[name]}) + "\n")
        self.workers[name] = self.start(name)

    def busy(self, since: int) -> str | None:
        begun = {line["process"] for line in self.lines()[since:] if line["what"] == "begin"}
        return min(
            (name for name in self.workers if self.numbers[name] in begun), key=self.numbers.__getitem__, default=None
        )

    def publish(self) -> None:
        producer = Producer({"bootstrap.servers": self.crew.bootstrap, "linger.ms": 2})
        for number in range(self.published, self.published + PORTION):
            key = number * 7 % KEYS
            value = b"bad" if number % 20 == 3 else b"good"
            producer.produce(self.topic, value, f"k{key}", partition=key % PARTITIONS)
        assert producer.flush(20) == 0
        self.published += PORTION

    def lines(self) -> list[dict[str, Any]]:
        return written(self.out)


def test_lists_of_processes_that_are_killed_keep_each_message_and_the_order_of_keys(crew: Crew, tmp_path: Path) -> None:
    fleet = Fleet(crew, tmp_path)
    for _ in range(KILLS):
        fleet.kill()
    wait_until(lambda: len(first_ends(fleet.lines())) == fleet.published, 120, "all messages")
    lines = fleet.lines()
    by_key: dict[tuple[int, str], list[int]] = defaultdict(list)
    for partition, key, offset in first_ends(lines):
        by_key[partition, key].append(offset)
    assert len(by_key) == KEYS
    assert [offsets for offsets in by_key.values() if offsets != sorted(offsets)] == []
    assert overlaps(lines) == []
    ends = [line for line in lines if line["what"] == "end"]
    assert any(len(line["places"]) > 10 for line in lines if line["what"] == "begin"), "lists"
    assert any(line["failed"] and line["done"] for line in ends), "some of a list has failed, and some has not"


def first_ends(lines: list[dict[str, Any]]) -> list[Place]:
    """Each message that was done, when it first was."""
    done = (tuple(place) for line in lines if line["what"] == "end" for place in line["done"])
    return list(dict.fromkeys(done))


def overlaps(lines: list[dict[str, Any]]) -> list[tuple[str, str, list[Any]]]:
    """Lists with handlers at the same time that share a key, but for one whose process was stopped for too long."""
    excused = {line["call"] for line in lines if line["what"] == "end" and not line["is_held"]}
    running: dict[str, dict[str, Any]] = {}
    found = []
    for line in lines:
        if line["what"] == "begin":
            keys = {(partition, key) for partition, key, _ in line["places"]}
            found += [
                (call, line["call"], sorted(keys & other["keys"]))
                for call, other in running.items()
                if keys & other["keys"] and not excused & {call, line["call"]}
            ]
            running[line["call"]] = {"keys": keys, "process": line["process"]}
        elif line["what"] == "end":
            del running[line["call"]]
        else:
            running = {call: each for call, each in running.items() if each["process"] != line["process"]}
    return found
