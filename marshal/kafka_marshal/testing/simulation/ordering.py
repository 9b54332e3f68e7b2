"""The order in which messages of one key, or of one partition, are handled (``consumer.run``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING

from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario


class Ordering:
    """Checks the order of a story's handlers, if it has one and no user's worker takes part."""

    def __init__(self, scenario: Scenario, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        judged = all(client.worker != "yours" for client in scenario.clients)
        self._order = scenario.order if judged else None
        #: The lane of each message, and the last message of each lane so far.
        self._lanes: dict[tuple[Key, int], Hashable] = {}
        self._last: dict[tuple[Key, Hashable], int] = {}
        #: Each message's predecessor in its lane.
        self._before: dict[tuple[Key, int], int] = {}
        #: Begun at least once.
        self._begun: set[tuple[Key, int]] = set()
        #: (process, partition, lane) → offset that a handler of that process has.
        self._running: dict[tuple[Living, Key, Hashable], int] = {}
        #: The message that kills: set aside, it lets its key continue before the log shows that (U2).
        self.killing: tuple[Key, int] | None = None
        #: Lanes with a hanging handler.
        self.hung: set[tuple[Key, Hashable]] = set()

    def published(self, key: Key, offset: int, message_key: bytes | None) -> None:
        """A message was written to a partition."""
        if self._order is None:
            return
        keyed = self._order == "key" and message_key is not None
        lane: Hashable = message_key if keyed else "all" if self._order == "partition" else offset
        self._lanes[key, offset] = lane
        if (key, lane) in self._last:
            self._before[key, offset] = self._last[key, lane]
        self._last[key, lane] = offset

    def begins(self, process: Living, key: Key, offset: int, handled: Collection[int]) -> None:
        """A handler begins with a message; handled: what any process has handled, or an admin skipped."""
        lane = self._lanes.get((key, offset))
        if lane is None:
            return
        other = self._running.get((process, key, lane))
        if other is not None and process.host.in_lanes:
            what = f"{process.name} begins {_name(key)} offset {offset}, and has {other} with a handler still"
            self._fail("order", f"{what} (order={self._order!r})")
        self._running[process, key, lane] = offset
        if (key, offset) in self._begun:
            return
        self._begun.add((key, offset))
        before = self._before.get((key, offset))
        if before is not None and before not in handled and (key, before) != self.killing:
            what = f"{process.name} begins {_name(key)} offset {offset}, and no process has handled {before}"
            self._fail("order", f"{what}, which comes before it (order={self._order!r})")

    def ended(self, process: Living, key: Key, offset: int) -> None:
        """A handler has returned or failed."""
        lane = self._lanes.get((key, offset))
        if self._running.get((process, key, lane)) == offset:
            del self._running[process, key, lane]

    def hangs(self, key: Key, offset: int) -> None:
        """A handler hangs with this message."""
        self.hung.add((key, self._lanes.get((key, offset))))

    def waits(self, key: Key, offset: int) -> bool:
        """Whether this message hangs or waits for one that does."""
        return (key, self._lanes.get((key, offset))) in self.hung


def _name(key: Key) -> str:
    return f"{key[0]} [{key[1]}]"
