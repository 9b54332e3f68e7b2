"""``consumer.run`` in processes that are killed, started and stopped: nothing is lost, each key is in order.

CI runs a few of each; ``make campaign ARGS=tests/client/test_run_campaign.py`` a hundred, of both kinds of consumer.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from tests.client.conftest import wait_until
from tests.client.running import Crew, crew

__all__ = ["crew"]

PARTITIONS, KEYS, WORKERS = 6, 200, 4

#: Messages per second, and the longest handler (s); the most frequent key has a sixth of them.
RATE, LONGEST_S = 300, 0.008

HI, SESSION = 800, 3_000

#: Messages handled between two faults.
BETWEEN = 40


class Line(NamedTuple):
    """What a worker wrote."""

    what: str
    pid: int
    partition: int
    offset: int
    key: str
    at: int


class Verdict(NamedTuple):
    """What is wrong, in words."""

    lost: list[str]
    inverted: list[str]
    repeated: list[str]


def judge(lines: Iterable[Line], published: set[tuple[int, int]], killed: set[int]) -> Verdict:
    """Check first handlings: of one key, each begins after its predecessor's end.

    Only messages that a killed worker (or one that lost its lease) had in flight or had not reported are handled again.
    """
    excused = killed | {line.pid for line in lines if line.what == "lost"}
    begun: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    keys: dict[tuple[int, str], set[int]] = defaultdict(set)
    under_way: dict[tuple[int, int, int], Line] = {}
    enders: dict[tuple[int, int], set[int]] = defaultdict(set)
    repeated: list[str] = []
    for line in sorted((line for line in lines if line.offset >= 0), key=lambda each: each.at):
        place = (line.partition, line.offset)
        if line.what == "begin":
            begun.setdefault(place, line.at)
            keys[line.partition, line.key].add(line.offset)
            under_way[line.pid, *place] = line
            if enders[place] - excused:
                repeated.append(f"{line} again, after {enders[place]}")
            continue
        under_way.pop((line.pid, *place), None)
        if line.what == "end":
            ended.setdefault(place, line.at)
            enders[place].add(line.pid)
    repeated += [f"{line} has not ended" for (pid, *_), line in under_way.items() if pid not in excused]
    inverted = []
    for (partition, key), offsets in keys.items():
        before = -1
        for offset in sorted(offsets):
            if before >= 0 and begun[partition, offset] < ended.get((partition, before), sys.maxsize):
                inverted.append(f"{key} of [{partition}]: {offset} began before {before} had ended")
            before = offset
    return Verdict([str(place) for place in sorted(published - ended.keys())], inverted, repeated)


class Campaign:
    """Workers, their output, and the faults."""

    def __init__(self, crew: Crew, kind: str, folder: Path, seed: int) -> None:
        self._crew = crew
        self._rng = random.Random(seed)
        self._out = folder / "handled.txt"
        self._out.touch()
        self._read_to = 0
        self._topic = crew.topic(PARTITIONS)
        self._session = SESSION if kind == "group" else 0
        self._number = 0
        self.lines: list[Line] = []
        self.ended: set[tuple[int, int]] = set()
        self.published: set[tuple[int, int]] = set()
        self.killed: set[int] = set()
        self.workers: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._publisher = threading.Thread(target=self._publish, daemon=True)

    def _publish(self) -> None:
        producer = Producer({"bootstrap.servers": self._crew.bootstrap, "linger.ms": 2})
        rng, weights = random.Random(1), [1 / rank for rank in range(1, KEYS + 1)]

        def told(error: Any, message: Any) -> None:
            assert error is None
            self.published.add((message.partition(), message.offset()))

        while not self._is_over.wait(0.05):
            for number in rng.choices(range(KEYS), weights, k=RATE // 20):
                producer.produce(self._topic, b"x", f"k{number}", partition=number % PARTITIONS, on_delivery=told)
            producer.poll(0)
        assert producer.flush(20) == 0

    def start(self) -> None:
        self._number += 1
        arguments = {
            "bootstrap": self._crew.bootstrap,
            "group": self._crew.group,
            "coordination": self._crew.coordination,
            "topic": self._topic,
            "client_id": f"w{self._number}",
            "out": str(self._out),
            "hi": HI,
            "session": self._session,
            "longest_s": LONGEST_S,
            "failing": 0.02,
        }
        command = [sys.executable, str(Path(__file__).with_name("run_worker.py")), json.dumps(arguments)]
        self.workers.append(subprocess.Popen(command))

    def read(self) -> int:
        """Number of handled messages."""
        with self._out.open() as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read_to += len(whole)
        for each in whole.splitlines():
            what, pid, partition, offset, key, at = each.split()
            self.lines.append(Line(what, int(pid), int(partition), int(offset), key, int(at)))
            if what == "end":
                self.ended.add((int(partition), int(offset)))
        return len(self.ended)

    def has_begun(self, pid: int, what: str = "begin") -> bool:
        self.read()
        return any(line.pid == pid for line in self.lines if line.what == what)

    def await_more(self) -> None:
        wanted = self.read() + BETWEEN
        wait_until(lambda: self.read() >= wanted, 180, "messages are handled")

    def run(self, kills: int, handovers: int) -> Verdict:
        for _ in range(WORKERS):
            self.start()
        self._publisher.start()
        mishaps = ["kill"] * kills + ["handover"] * handovers
        self._rng.shuffle(mishaps)
        for mishap in mishaps:
            self.await_more()
            victim = self.workers.pop(self._rng.randrange(len(self.workers)))
            wait_until(partial(self.has_begun, victim.pid), 180, "it handles messages")
            if mishap == "kill":
                self.killed.add(victim.pid)
                victim.kill()
                victim.wait()
                self.start()
            else:
                self.start()
                victim.send_signal(signal.SIGTERM)
                assert victim.wait(40) == 0
        self.await_more()
        self._is_over.set()
        self._publisher.join()
        wait_until(lambda: self.read() >= len(self.published), 90, "all is handled")
        for worker in self.workers:
            wait_until(partial(self.has_begun, worker.pid, "started"), 180, "it has started")
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            assert worker.wait(40) == 0
        self.read()
        return judge(self.lines, self.published, self.killed)

    def end(self) -> None:
        self._is_over.set()
        for worker in self.workers:
            worker.kill()
            worker.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def carry_out(crew: Crew, kind: str, folder: Path, kills: int, handovers: int) -> None:
    campaign = Campaign(crew, kind, folder, seed=1)
    began = time.monotonic()
    try:
        verdict = campaign.run(kills, handovers)
    finally:
        campaign.end()
    lost_leases = sum(line.what == "lost" for line in campaign.lines)
    failures = sum(line.what == "failed" for line in campaign.lines)
    again = sum(line.what == "end" for line in campaign.lines) - len(campaign.ended)
    print(
        f"{kind}: {len(campaign.published)} messages, {len(campaign.killed)} kills, {handovers} handovers, "
        f"{failures} failures, {again} repeats, {lost_leases} lost leases, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert verdict == Verdict([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["claims", pytest.param("group", marks=pytest.mark.campaign)])
def test_a_few_kills_and_handovers(crew: Crew, kind: str, folder: Path) -> None:
    carry_out(crew, kind, folder, kills=3, handovers=3)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["claims", "group"])
def test_a_hundred_kills_and_handovers(crew: Crew, kind: str, folder: Path) -> None:
    carry_out(crew, kind, folder, kills=100, handovers=100)


# The judge itself.

GOOD = [
    Line("begin", 1, 0, 0, "a", 1),
    Line("failed", 1, 0, 0, "a", 2),
    Line("begin", 1, 0, 0, "a", 3),
    Line("end", 1, 0, 0, "a", 4),
    Line("begin", 2, 0, 1, "a", 5),
    Line("end", 2, 0, 1, "a", 6),
]


@pytest.mark.parametrize(
    ("lines", "killed", "verdict"),
    [
        (GOOD, set(), (0, 0, 0)),
        (GOOD[:4], set(), (1, 0, 0)),
        ([*GOOD[:3], *GOOD[4:], GOOD[3]._replace(at=7)], set(), (0, 1, 0)),
        ([*GOOD, *(each._replace(pid=2, at=each.at + 9) for each in GOOD[2:4])], set(), (0, 0, 1)),
        ([*GOOD, *(each._replace(pid=2, at=each.at + 9) for each in GOOD[2:4])], {1}, (0, 0, 0)),
        ([*GOOD, Line("begin", 3, 1, 5, "b", 7)], set(), (0, 0, 1)),
        ([*GOOD, Line("begin", 3, 1, 5, "b", 7)], {3}, (0, 0, 0)),
    ],
)
def test_the_judge_sees(lines: list[Line], killed: set[int], verdict: tuple[int, int, int]) -> None:
    found = judge(lines, {(0, 0), (0, 1)}, killed)
    assert (len(found.lost), len(found.inverted), len(found.repeated)) == verdict, found
