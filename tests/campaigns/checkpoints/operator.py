"""What operators do to a group that takes checkpoints: take, pin, retire, roll back; and brokers that die."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from confluent_kafka import KafkaException

from kafka_marshal.admin import Admin
from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.testing import RunningKafka
from tests.campaigns.checkpoints.ground import Ground

__all__ = ["Operator"]

#: Pinned checkpoints beyond this number are retired: a group keeps 16 at most.
MOST_PINNED = 4


class Operator:
    """Does one thing after another in a thread."""

    def __init__(self, ground: Ground, rng: Random, every_s: float, kafka: RunningKafka | None) -> None:
        """kafka: restarted from time to time; None: never."""
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.failure: Exception | None = None
        self._ground = ground
        self._rng = rng
        self._every_s = every_s
        self._kafka = kafka
        self._end = threading.Event()
        #: Held while something is done that others must not come into; and whether only brokers are restarted.
        self._acting = threading.Lock()
        self._only_restarts = False
        self._acts: list[Callable[[], None]] = [self.checkpoint, self.rollback, self.retire] * 2
        if kafka is not None:
            self._acts.append(self.restart)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s * self._rng.uniform(0.5, 1.5)):
            act = self._rng.choice(self._acts)
            if self._only_restarts and act != self.restart:
                continue
            try:
                self._do(act)
            except (AdminError, KafkaException, KafkaUnavailableError) as error:
                self.counts[f"{act.__name__}: {type(error).__name__}"] += 1
                self.errors.append(f"{time.time():.1f} {act.__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - raised by close()
                self.failure = error
                return
            else:
                self.counts[act.__name__] += 1

    def _do(self, act: Callable[[], None]) -> None:
        if act == self.restart:
            act()
            return
        with self._acting:
            act()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Another operator is at work: inside the block this one does nothing but restart brokers."""
        self._only_restarts = True
        with self._acting:
            yield
        self._only_restarts = False

    def close(self) -> None:
        """Finish what has begun."""
        self._end.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _admin(self) -> Admin:
        return Admin(self._ground.bootstrap, topic=self._ground.coordination)

    def checkpoint(self) -> None:
        """As ``kafka-marshal checkpoint --pin`` does."""
        with self._admin() as admin:
            admin.checkpoint(self._ground.group, pin=self._rng.random() < 0.5, timeout=5.0)

    def rollback(self) -> None:
        """To the newest, or to any that is kept."""
        with self._admin() as admin:
            kept = admin.checkpoints(self._ground.group)
            to = kept[-1] if self._rng.random() < 0.3 else self._rng.choice(kept)
            admin.rollback(self._ground.group, to.id, timeout=20.0)

    def retire(self) -> None:
        """The oldest pinned ones."""
        with self._admin() as admin:
            pinned = [x.id for x in admin.checkpoints(self._ground.group) if x.kind == "pinned" and not x.is_newest]
            for number in pinned[:-MOST_PINNED]:
                admin.retire(self._ground.group, number)

    def restart(self) -> None:
        """kill -9 of the broker."""
        assert self._kafka is not None
        self._kafka.kill()
        time.sleep(self._rng.uniform(0.1, 3.0))
        self._kafka.restart()
