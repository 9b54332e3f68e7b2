"""A tail that notices when it is stalled (:mod:`.stalled_fetch`), and recovers.

First the partitions are assigned again; if that does not help, a new client continues; if that fails, too, it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.logs import log
from kafka_marshal.node.stalled_fetch import FetchMonitor
from kafka_marshal.ports import Cluster, Tail, TailBatch

#: How long a look-up of log ends may take (s).
ASK_TIMEOUT_S = 5.0

#: How many new clients are tried before it ends, in 24 heartbeat intervals (of 1 to 3 s). A broker that has just thawed
#: on a busy machine may need longer than two of them for the first answer.
NEW_CLIENTS = 6


class MonitoredTail:
    """A :class:`~kafka_marshal.ports.Tail` over those that a cluster gives. One thread reads."""

    def __init__(self, cluster: Cluster, topic: str, positions: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Read each partition from its position. ends: where logs are known to end."""
        self._cluster = cluster
        self._topic = topic
        #: The tail that it reads with now.
        self.tail: Tail = cluster.tail(topic, positions)
        #: What it has to receive.
        self.monitor: FetchMonitor[int] = FetchMonitor(cluster.runtime, f"the reader of {topic!r}", self._ends)
        self.monitor.begin(positions)
        self._closed = False
        for cp, end in ends.items():
            self.monitor.knows(cp, end - 1)

    def _ends(self, cps: list[int]) -> dict[int, int]:
        marks = self._cluster.watermarks([(self._topic, cp) for cp in cps], ASK_TIMEOUT_S)
        return {cp: high for (_, cp), (_, high) in marks.items()}

    def read(self, timeout_s: float) -> TailBatch:
        """As a tail; raises KafkaUnavailableError if no new client gets what the log holds."""
        monitor = self.monitor
        monitor.begin_read()
        if missing := monitor.missing():
            self._mend(sorted(missing))
        batch = self.tail.read(timeout_s)
        monitor.end_read(timeout_s)
        for cp, entries in batch.records.items():
            monitor.received(cp, entries[-1][0] + 1)
        for cp, end in batch.ends.items():
            monitor.received(cp, end)
        if batch.is_full:
            monitor.flooded()
        return batch

    def rest(self) -> bool:
        """As a tail."""
        return self.tail.rest()

    def _mend(self, stalled: list[int]) -> None:
        monitor = self.monitor
        what = monitor.what(stalled)
        tries = monitor.tries(stalled)
        if tries == 0:
            log(logging.WARNING, "reader_deaf", "%s: it reads again from there", what)
            self.tail.restart({cp: monitor.next[cp] for cp in stalled})
        elif tries <= NEW_CLIENTS:
            log(logging.ERROR, "reader_deaf", "%s, nor when it read again from there: a new client reads on", what)
            self.renew()
        else:
            error = KafkaUnavailableError(
                f"{what}, and {NEW_CLIENTS} new clients did not get it either. Nothing more is done with what is not "
                "known, and what is held here ends by itself: others continue. Restart this process; if that does not "
                "help, look whether the brokers answer fetch requests from here (quotas, network)"
            )
            log(logging.ERROR, "reader_deaf", "%s", error)
            raise error
        monitor.tried(stalled, new=tries > 0)

    def renew(self) -> None:
        """Continue with a new client (called by the thread that reads)."""
        old, self.tail = self.tail, self._cluster.tail(self._topic, self.monitor.next)
        # The old client may never close: no thread waits for it.
        self._cluster.runtime.start(old.close, "kafka-marshal-close")
        if self._closed:
            self.tail.close()

    # As a tail.

    def position(self, partition: int) -> int:
        return self.tail.position(partition)

    def log_ends(self) -> Mapping[int, int]:
        return self.tail.log_ends()

    def follow(self, positions: Mapping[int, int]) -> None:
        self.monitor.begin(positions)  # first: what comes is compared with it
        self.tail.follow(positions)

    def leave(self, partitions: Iterable[int]) -> None:
        left = list(partitions)
        self.tail.leave(left)
        self.monitor.end(left)

    def restart(self, positions: Mapping[int, int]) -> None:
        self.monitor.begin(positions)
        self.tail.restart(positions)

    def close(self) -> None:
        self._closed = True
        self.tail.close()
