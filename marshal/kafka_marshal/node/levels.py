"""CPs that were raised above the level that this release knows (E4), and how consumers learn of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kafka_marshal.errors import UpgradeRequiredError
from kafka_marshal.logs import log
from kafka_marshal.node.replica import Replica

__all__ = ["Levels"]


class Levels:
    """What the consumers of one driver are given to raise. The lock is held."""

    def __init__(self, replica: Replica, tell: Callable[[UpgradeRequiredError], object]) -> None:
        """tell: has each consumer raise it."""
        self._replica = replica
        self._tell = tell
        self._stopped: set[int] = set()

    def look(self) -> None:
        """Pass on each once."""
        for cp, level in self._replica.stopped():
            if cp not in self._stopped:
                self._stopped.add(cp)
                error = self._error(cp, level)
                log(logging.ERROR, "upgrade_required", "%s", error, log_partition=cp, level=level)
                self._tell(error)

    def _error(self, cp: int, level: int) -> UpgradeRequiredError:
        return UpgradeRequiredError(
            f"partition {cp} of {self._replica.topic!r} was raised to protocol level {level}, which this release of "
            "kafka-marshal does not know: leases in it end, the other partitions continue. Install a release that "
            "supports it",
            level=level,
        )

    def told(self) -> list[UpgradeRequiredError]:
        """What a consumer that comes now has missed."""
        return [self._error(cp, level) for cp, level in self._replica.stopped() if cp in self._stopped]

    def check(self, cp: int) -> None:
        """Raise UpgradeRequiredError if this release can read nothing more of this CP."""
        level = self._replica.worlds[cp].required_level
        if level is not None:
            raise self._error(cp, level)
