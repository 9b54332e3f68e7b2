"""What can be made to go wrong with an in-memory Kafka."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class AppendFate(StrEnum):
    """The result of one record that a client appends."""

    #: In the log, and acknowledged.
    WRITTEN = "written"
    #: In the log, but the acknowledgement is lost: the client gets a timeout.
    UNACKNOWLEDGED = "unacknowledged"
    #: In the log twice, and acknowledged without an offset: a retry of what had been written (C17).
    DUPLICATED = "duplicated"
    #: Not in the log; the client gets a timeout.
    LOST = "lost"
    #: Not in the log; the appender is in a fatal state from now on and must be replaced (C17).
    FATAL = "fatal"


def _written(client: str, topic: str, partition: int, value: bytes) -> AppendFate:
    return AppendFate.WRITTEN


def _done(client: str, transactional_id: str, request: str) -> AppendFate:
    return AppendFate.WRITTEN


def _at_once(client: str, topic: str, partition: int, offset: int) -> int:
    return 0


def _hears(client: str, topic: str, partition: int, tails: int, restarts: int) -> bool:
    return False


@dataclass(slots=True)
class Faults:
    """Hooks, called under the broker's lock: they decide, and call nothing back. Change them through MemoryBroker.

    Clients are named by ``MemoryCluster.connect(name)``.
    """

    #: (client, topic, partition, value) → the result of the record.
    append: Callable[[str, str, int, bytes], AppendFate] = _written
    #: (client, transactional id, "init", "send_offsets", "commit" or "abort") → the result of the request: WRITTEN,
    #: UNACKNOWLEDGED, LOST or FATAL.
    request: Callable[[str, str, str], AppendFate] = _done
    #: (client, topic, partition, offset) → ms that pass until this client's readers can see the record. Order within
    #: a partition is kept: a record that is held back holds back those after it.
    delay_ms: Callable[[str, str, int, int], int] = _at_once
    #: (client, topic, partition, readers of that kind that the client has opened, restarts of the partition in the last
    #: one) → whether that one gets nothing of it, and no error: as librdkafka's when a fetch is stuck.
    stalled: Callable[[str, str, int, int, int], bool] = _hears
    #: Clients that can't reach the broker now.
    unreachable: set[str] = field(default_factory=set)
