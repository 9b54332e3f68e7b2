"""A broker that freezes repeatedly, and members of all kinds.

Half of the members claim, half are of coordinated groups. After each thaw every member must read the log, and messages
of every partition must be delivered again, within a limit.
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import LocalBroker, RunningKafka
from rationalizer import route_lease
from tests.campaigns.frame import Result, Say

CPS = 4
PARTITIONS = 4
GROUPS = 2

#: Time limit from the thaw until all continue.
LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Freeze:
    """A freeze, and the time from its thaw until the last member and partition continued (s); None: too late."""

    frozen_s: float
    members_s: float | None
    partitions_s: float | None
    late: tuple[str, ...] = ()


class _Heard(logging.Handler):
    """How often members noticed that their readers received nothing, by the step taken."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Counter[str] = Counter()
        #: The last lines, with their times (monotonic).
        self.lines: deque[tuple[float, str]] = deque(maxlen=2_000)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))
        if (event := getattr(record, "event", "")) in ("reader_deaf", "reader_back", "reader_replaced"):
            text = record.getMessage()
            known = ("reads again from there", "a new client reads on", "Restart this process", "reads on, after")
            self.steps[f"{event}: {next((x for x in known if x in text), text[-60:])}"] += 1


def _names() -> list[str]:
    """Groups, and their topics, that have leases in each CP: members of one without records would read nothing."""
    while True:
        names = [f"{kind}-{uuid.uuid4().hex[:6]}" for kind in ("claimed", "coordinated") for _ in range(GROUPS)]
        if len({route_lease(name, each, CPS) for name in names[:GROUPS] for each in range(PARTITIONS)}) == CPS:
            return names


class Crowd:
    """Members of several groups in this process, and a writer of messages."""

    def __init__(self, bootstrap: str, members: int, heartbeat_interval_ms: int) -> None:
        self._bootstrap = bootstrap
        self._coordination = f"__marshal-{uuid.uuid4().hex[:8]}"
        self._hi = heartbeat_interval_ms
        self._wanted = members
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stack = ExitStack()
        self.members: dict[str, Marshal] = {}
        #: Group and partition → time of the last delivery (monotonic). Each group has its own topic.
        self.moved: dict[tuple[str, int], float] = {}
        #: Members that have made their consumers.
        self.started: set[str] = set()
        self.failures: list[str] = []
        self.heard = _Heard()

    def __enter__(self) -> Self:
        logging.getLogger("kafka_marshal").addHandler(self.heard)
        self._stack.callback(logging.getLogger("kafka_marshal").removeHandler, self.heard)
        cluster = self._stack.enter_context(closing(KafkaCluster(self._bootstrap)))
        create_topic(cluster, self._coordination, CPS, 10)
        admin = AdminClient({"bootstrap.servers": self._bootstrap})
        self._groups = _names()
        for made in admin.create_topics([NewTopic(group, PARTITIONS) for group in self._groups]).values():
            made.result(20)
        self._begin(self._feed)
        for number in range(self._wanted):
            group = self._groups[number % len(self._groups)]
            name = f"{group}/{number}"
            self.members[name] = Marshal(
                self._bootstrap,
                group_id=group,
                client_id=name,
                topic=self._coordination,
                heartbeat_interval=self._hi / 1000,
            )
            self._begin(lambda name=name, group=group: self._work(name, group))  # type: ignore[misc]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def _begin(self, target: Callable[[], object]) -> None:
        self._threads.append(threading.Thread(target=target))
        self._threads[-1].start()

    def _feed(self) -> None:
        producer = Producer({"bootstrap.servers": self._bootstrap, "message.timeout.ms": 5_000})
        while not self._ended.is_set():
            for group in self._groups:
                for partition in range(PARTITIONS):
                    with suppress(BufferError):  # the broker is frozen
                        producer.produce(group, b"x", partition=partition)
            producer.poll(0.2)
        producer.flush(2)

    def _work(self, name: str, group: str) -> None:
        member = self.members[name]
        try:
            with member:
                consumer: Any = (
                    member.consumer([group])
                    if group.startswith("claimed")
                    else member.consumer([group], mode=Group(session_timeout=(3 * self._hi) / 1000))
                )
                self.started.add(name)
                with consumer:
                    while not self._ended.is_set():
                        for message in consumer.consume(500, 0.5):
                            consumer.done(message)
                            self.moved[group, message.partition()] = time.monotonic()
        except Exception as error:  # noqa: BLE001 - reported
            self.failures.append(f"{name}: {error!r}")

    def begin(self) -> None:
        """Wait until all members work."""
        _, late = _wait(lambda: [*self.still(0.0), *self.members.keys() - self.started], time.monotonic(), 120)
        assert not late, late

    # What is to be seen.

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [(group, partition) for group in self._groups for partition in range(PARTITIONS)]

    def heard_after(self, offsets: dict[str, dict[int, int]]) -> list[str]:
        """The members that have read nothing of some CP since these offsets."""
        return [
            f"{name} CP {cp}"
            for name, member in self.members.items()
            for cp, world in list(member._driver.replica.worlds.items())
            if world.next_offset <= offsets[name].get(cp, -1)
        ]

    def offsets(self) -> dict[str, dict[int, int]]:
        return {
            name: {cp: world.next_offset for cp, world in list(member._driver.replica.worlds.items())}
            for name, member in self.members.items()
        }

    def still(self, since: float) -> list[str]:
        """The partitions without a delivery since then."""
        return [
            f"{group} [{partition}]" for group, partition in self.keys if self.moved.get((group, partition), 0) < since
        ]


def _wait(left: Callable[[], Sequence[str]], since: float, limit_s: float) -> tuple[float | None, tuple[str, ...]]:
    while late := left():
        if time.monotonic() > since + limit_s:
            return None, tuple(late)
        time.sleep(0.05)
    return time.monotonic() - since, ()


def freeze(broker: RunningKafka, crowd: Crowd, frozen_s: float, limit_s: float = LIMIT_S) -> Freeze:
    """Freeze the broker, and check that all continue after the thaw."""
    broker.pause()
    time.sleep(frozen_s)
    offsets = crowd.offsets()
    broker.resume()
    thaw = time.monotonic()
    partitions_s, still = _wait(lambda: crowd.still(thaw), thaw, limit_s)
    members_s, deaf = _wait(lambda: crowd.heard_after(offsets), thaw, limit_s)
    unwell = [f"{name}: {m.health()}" for name, m in crowd.members.items() if m.health().needs_restart]
    return Freeze(frozen_s, members_s, partitions_s, (*still, *deaf, *unwell))


def campaign(freezes: Iterable[float], members: int, hi: int, say: Say) -> list[Freeze]:
    """Start a broker and freeze it for each of these times (s)."""
    found: list[Freeze] = []
    with LocalBroker() as broker, Crowd(broker.bootstrap_servers, members, hi) as crowd:
        crowd.begin()
        for frozen_s in freezes:
            one = freeze(broker, crowd, frozen_s)
            found.append(one)
            say(
                json.dumps(
                    [len(found), round(frozen_s, 1), one.members_s, one.partitions_s, one.late, dict(crowd.heard.steps)]
                )
            )
            if one.late:  # and measure how long it takes in the end
                began = time.monotonic() - LIMIT_S
                wait_s, late = _wait(lambda: crowd.still(time.monotonic() - 5), time.monotonic(), 60)
                say(f"late: {wait_s} {late} {crowd.failures}")
                for at, line in [x for x in crowd.heard.lines if x[0] > began - 5]:
                    say(f"  {at - began:6.1f} s {line[:200]}")
            time.sleep(2 * hi / 1000)
        if crowd.failures:
            say(f"members ended: {crowd.failures}")
            found.append(Freeze(0.0, None, None, tuple(crowd.failures)))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--freezes", type=int, default=200)
    parser.add_argument("--shortest", type=float, default=5.0, help="seconds")
    parser.add_argument("--longest", type=float, default=40.0, help="seconds")
    parser.add_argument("--members", type=int, default=24)
    parser.add_argument("--heartbeat-interval-ms", type=int, default=1_000)


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    rng, began = Random(chosen.seed), time.monotonic()
    times = [rng.uniform(chosen.shortest, chosen.longest) for _ in range(chosen.freezes)]
    found = campaign(times, chosen.members, chosen.heartbeat_interval_ms, say)
    slowest_s = max((max(one.members_s or 0, one.partitions_s or 0) for one in found), default=0.0)
    counts = Counter({"freezes": len(found), "members": chosen.members, "slowest ms": int(1000 * slowest_s)})
    late = [one for one in found if one.late]
    yield Result("freezes", chosen.seed, late, time.monotonic() - began, counts=counts)
