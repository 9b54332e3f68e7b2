"""A story whose members start, freeze and end when a script says: what counts is the log that they write.

No promise is checked and no message published, so an hour of it takes a minute or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from kafka_marshal.client.modes import Claims, Group
from kafka_marshal.errors import MarshalError
from kafka_marshal.observe.intents import GroupIntents, Intents, MemberLife
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS
from kafka_marshal.testing.simulation.process import Job, Process
from kafka_marshal.testing.simulation.recorded import Judge
from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.story import SimulatedStory
from rationalizer.log_hash import Entry

#: A script's times are in this unit (ms), the "HI" of its story: members start up to one of it late.
UNIT_MS = 100
#: What a broker sends reaches a member at multiples of this (ms): a fetch for each record costs the simulator most.
FETCH_MS = 40.0
#: In units: for good.
FOR_EVER = 1e9
#: How often progress is reported.
STEPS = 100


@dataclass(frozen=True, slots=True)
class Script(Scenario):
    """What happens to one group between two log times (ms)."""

    group_id: str = ""
    topics: tuple[tuple[str, int], ...] = ()
    #: (client, topic) of all that they read.
    read: frozenset[tuple[str, str]] = frozenset()
    mode: Claims | Group | None = None
    begin_ms: int = 0
    #: (log time in ms, coordination partition, value): appended then, as by an operator.
    appended: tuple[tuple[int, int, bytes], ...] = ()

    @property
    def data_topics(self) -> dict[str, int]:
        """See the base class."""
        return dict(self.topics)

    def topics_of(self, client_id: str) -> list[str]:
        """See the base class."""
        return sorted(topic for client, topic in self.read if client == client_id)


class _Unchecked(Checks):
    """Keeps the log, and checks nothing."""

    def __init__(self, script: Scenario, story: SimulatedStory) -> None:
        super().__init__(script, story.scheduler)
        self.entries: list[tuple[int, Entry]] = []

    def watch(self, process: Living, driver: object) -> None:
        """Checks no replica."""

    def record(self, cp: int, offset: int, stamp: int, value: bytes, sender: Living, sent_at: float) -> None:
        self.entries.append((cp, (offset, stamp, value)))


class _Scripted(SimulatedStory):
    def __init__(self, script: Script, progress: Callable[[int, int], object]) -> None:
        self._script = script
        self._progress = progress
        super().__init__(script, self._live)

    def checks_of(self, judge: Judge | None) -> Checks:
        return _Unchecked(self.scenario, self)

    def run(self) -> None:
        script, network = self._script, self.network
        shift = script.begin_ms - BROKER_EPOCH_MS
        network.clock_shift = dict.fromkeys(range(script.coordination_partitions), shift)
        operator = Process("operator", self.faults.admin_host, network, self.checks, script.seed)
        for at, cp, value in script.appended:
            append = partial(network.arrive, script.topic, cp, value, operator, 0.0)
            self.scheduler.call_at(float(at - script.begin_ms), append)
        for step in range(STEPS):
            self.scheduler.call_at(script.intervals * UNIT_MS * step / STEPS, partial(self._progress, step, STEPS))
        super().run()

    def _live(self, job: Job) -> None:
        mode: Any = self._script.mode
        if isinstance(mode, Group):
            mode = Group(strategy=mode.strategy, session_timeout=job.session_timeout)
        with job.marshal() as marshal, marshal.consumer(job.topics, mode=mode) as consumer:
            for _ in consumer:
                pass  # no message is ever there


def script_of(
    group: GroupIntents,
    lives: Sequence[MemberLife],
    mode: Claims | Group,
    begin_ms: int,
    end_ms: int,
    coordination_partitions: int,
    seed: int = 0,
) -> Script:
    """The story in which these lives of a group are lived, between two log times (ms).

    mode: of all members; a session timeout is that of each life.
    """
    there = [life for life in lives if life.begin <= end_ms and (life.end is None or life.end > begin_ms)]
    clients: list[Client] = []
    faults: list[Fault] = []
    for name, of_client in groupby(sorted(there, key=lambda life: (life.client, life.begin)), lambda life: life.client):
        found = list(of_client)
        paces = tuple(life.interval_ms / UNIT_MS for life in found)
        joins = max(0.0, (found[0].begin - begin_ms) / UNIT_MS)
        clients.append(Client(name, "yours", joins=joins, paces=paces, fetches_every=FETCH_MS / UNIT_MS))
        for life, following in pairwise([*found, None]):
            assert life is not None
            faults += _faults(life, following, begin_ms)
    return Script(
        seed,
        tuple(clients),
        tuple(sorted(faults, key=lambda fault: fault.at)),
        heartbeat_interval_ms=UNIT_MS,
        coordination_partitions=coordination_partitions,
        messages=0.0,
        intervals=-(-(end_ms - begin_ms) // UNIT_MS),
        recovers=False,
        strategy=mode.strategy if isinstance(mode, Group) else None,
        group_id=group.name,
        topics=tuple(sorted(group.topics.items())),
        read=frozenset((life.client, topic) for life in there for topic in life.topics),
        mode=mode,
        begin_ms=begin_ms,
        appended=tuple(each for each in group.pauses if begin_ms <= each[0] <= end_ms),
    )


def _faults(life: MemberLife, following: MemberLife | None, begin_ms: int) -> Iterator[Fault]:
    for since, until in life.frozen:
        if until > begin_ms:
            since = max(since, begin_ms)
            yield Fault((since - begin_ms) / UNIT_MS, "stop", life.client, (until - since) / UNIT_MS)
    if life.end is not None:
        away = FOR_EVER if following is None else (following.begin - life.end) / UNIT_MS
        kind = "term" if life.is_orderly else "crash"
        yield Fault((life.end - begin_ms) / UNIT_MS, kind, life.client, away)


def log_of(script: Script, progress: Callable[[int, int], object] = lambda *_: None) -> list[tuple[int, Entry]]:
    """Play it: (coordination partition, record) in the order in which they were written.

    progress: called with (steps of the time that passed, steps in all). Raises MarshalError if a member ended with an
    error that its script does not explain.
    """
    story = _Scripted(script, progress)
    story.play()
    assert isinstance(story.checks, _Unchecked)
    if story.checks.broken is not None:
        raise MarshalError(f"the replay of {script.group_id!r} failed, and shows nothing: {story.checks.broken}")
    return story.checks.entries


def replay(script: Script, progress: Callable[[int, int], object] = lambda *_: None) -> GroupIntents:
    """Play it as `log_of` does, and fold its log."""
    fold = Intents(script.coordination_partitions)
    for cp, entry in log_of(script, progress):
        fold.take(cp, entry)
    return fold.groups.get(script.group_id, GroupIntents(script.group_id))
