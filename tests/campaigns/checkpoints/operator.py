"""What operators do to a group that takes checkpoints: take, pin, retire, roll back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from kafka_marshal.admin import Admin
from kafka_marshal.errors import KafkaUnavailableError
from tests.campaigns.checkpoints.ground import Ground

__all__ = ["Acts"]

#: Pinned checkpoints beyond this number are retired: a group keeps 16 at most.
MOST_PINNED = 4


class Acts:
    """What is done to the group."""

    def __init__(self, ground: Ground, rng: Random) -> None:
        self._ground = ground
        self._rng = rng
        #: Held while something is done that others must not come into; and whether only brokers are restarted.
        self._acting = threading.Lock()
        self._only_restarts = False

    def all(self, every_s: float) -> dict[Callable[[], None], float]:
        """Each, and its mean distance, if something is done every ``every_s`` seconds."""
        return dict.fromkeys((self.checkpoint, self.rollback, self.retire), 3.5 * every_s)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Another operator is at work: inside the block this one does nothing but restart brokers."""
        self._only_restarts = True
        with self._acting:
            yield
        self._only_restarts = False

    @contextmanager
    def _admin(self) -> Iterator[Admin]:
        if self._only_restarts:
            raise KafkaUnavailableError("another operator is at work")
        with self._acting, Admin(self._ground.bootstrap, topic=self._ground.coordination) as admin:
            yield admin

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
