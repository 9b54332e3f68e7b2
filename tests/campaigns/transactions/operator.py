"""What operators and others do to a group at work: repositions, dropped offsets, foreign commits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from kafka_marshal.admin import Admin, Pause
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS
from kafka_marshal.errors import KafkaUnavailableError
from tests.campaigns.frame import Violation
from tests.campaigns.transactions.ground import Ground, Offsets, Reader

__all__ = ["Acts"]

#: How far a reposition goes at most.
JUMP = 60

#: How long the owner of a partition with a foreign commit is watched.
WATCHED_S = 3.0


class Acts:
    """What is done to the group; each waits until a worker has begun."""

    def __init__(self, ground: Ground, reader: Reader, rng: Random) -> None:
        #: Partition → where the group was set to, in order.
        self.restarts: dict[int, list[int]] = defaultdict(list)
        self.violations: list[Violation] = []
        #: While it is set, no worker may be stopped: a stopped owner would overwrite a foreign commit.
        self.none_stopped = threading.Event()
        self._ground = ground
        self._reader = reader
        self._rng = rng
        self._offsets = Offsets(ground)
        #: Partitions whose offset in Kafka counts. (Without the mark the next owner sets it, whatever it is.)
        self._marked: list[int] = []

    def all(self) -> list[Callable[[], None]]:
        """One after the other."""
        return [self.backwards, self.forwards, self.drop, self.foreign]

    def close(self) -> None:
        """Nothing is under way."""
        self._offsets.close()

    def _begun(self, admin: Admin) -> Admin:
        """When a worker has begun: an operator's positions of an unknown group would make it a claimed one."""
        if not admin.progress(self._ground.group):
            raise KafkaUnavailableError("no worker has begun")
        return admin

    @contextmanager
    def _paused(self) -> Iterator[tuple[Pause, dict[int, int]]]:
        """The group is paused; and the next offset of each partition by the log."""
        ground = self._ground
        with (
            Admin(ground.bootstrap, topic=ground.coordination) as admin,
            self._begun(admin).pause(ground.group, expires_in=60) as pause,
        ):
            pause.wait_released(30)
            following = dict.fromkeys(range(ground.partitions), 0)
            infos = admin.progress(ground.group)
            self._marked = [x.partition for x in infos if x.ranges and x.ranges[-1][1] == KAFKA_COUNTS]
            following |= {x.partition: (-1 if x.stable is None else x.stable) + 1 for x in infos}
            yield pause, following

    def _set(self, pause: Pause, partition: int, offset: int) -> None:
        self.restarts[partition].append(offset)
        pause.reposition({(self._ground.topic, partition): offset})

    def backwards(self) -> None:
        with self._paused() as (pause, following):
            partition = self._rng.choice(sorted(following))
            self._set(pause, partition, max(0, following[partition] - self._rng.randint(1, JUMP)))

    def forwards(self) -> None:
        """By at most what is there."""
        with self._paused() as (pause, following):
            partition = self._rng.choice(sorted(following))
            last = max((each.offset for each in list(self._reader.inputs[partition])), default=0)
            self._set(pause, partition, min(last, following[partition] + self._rng.randint(1, JUMP)))

    def drop(self) -> None:
        """Kafka's offsets of the group are dropped: it falls back to the log's."""
        with self._paused() as (_, following):
            committed = self._offsets.committed()
            for partition, offset in following.items():
                if committed.get(partition, offset) != offset:  # killed before its report to the log
                    self.restarts[partition].append(offset)
            self._offsets.drop()

    def foreign(self) -> None:
        """Another program commits: the partition stops, until it is repositioned."""
        self.none_stopped.set()
        try:
            time.sleep(0.2)
            with self._paused() as (_, following):
                committed = self._offsets.committed()
                if not self._marked:
                    return
                partition = self._rng.choice(self._marked)
                offset = committed.get(partition, following[partition])
                self._offsets.set(partition, max(0, offset + self._rng.choice((-7, 0, 5))))
                since = time.time() * 1000
            time.sleep(WATCHED_S)
            if later := sum(at > since for at in list(self._reader.times[partition])):
                what = f"[{partition}] went on with {later} outputs after another program committed"
                self.violations.append(Violation("foreign commit", what))
            with self._paused() as (pause, _):
                self._set(pause, partition, offset)
        finally:
            self.none_stopped.clear()
