"""Takes snapshots of the replica, and compares it with those of others (S2): a job of look-up threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kafka_marshal.errors import MarshalError, SnapshotDifferenceError
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import topic_option
from kafka_marshal.node.fork_guard import Life
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import Cluster
from kafka_marshal.runtime import Condition
from kafka_marshal.snapshots.publisher import SnapshotKeeper
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.snapshots.start import Difference
from rationalizer.log_hash import LogHash


class SnapshotUpkeep:
    """The snapshots of one replica, if its driver keeps them and there is a topic for them."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        condition: Condition,
        life: Life,
        report: Callable[[SnapshotDifferenceError], object],
        *,
        keep: bool,
    ) -> None:
        """keep: False: do nothing. report: makes each consumer raise the error."""
        #: Snapshots that were found to differ from our replica.
        self.alarms: list[SnapshotDifferenceError] = []
        self._cluster = cluster
        self._replica = replica
        self._condition = condition
        self._life = life
        self._report = report
        self._keep = keep
        self._keeper: SnapshotKeeper | None = None
        self._is_running = False
        if keep and replica.start.snapshots is not None:
            self._keeper = self._new_keeper(replica.start.snapshots)
        elif keep:
            self._warn()

    def _warn(self) -> None:
        log(
            logging.WARNING,
            "snapshots_missing",
            "%s: members start from the beginning of the log, which takes longer as it grows, and do not compare what "
            "they hold. kafka-marshal init%s makes it, and says what is wrong with one that is there",
            self._replica.start.lacks_snapshots,
            topic_option(self._replica.topic),
        )

    def _new_keeper(self, reader: SnapshotReader) -> SnapshotKeeper:
        runtime, topic = self._cluster.runtime, self._replica.start.snapshots_topic
        return SnapshotKeeper(self._cluster, reader, topic, runtime.random(), runtime.now_ms())

    def note(self, cp: int, next_offset: int, state: bytes, log_hash: LogHash | None) -> None:
        """A snapshot is due, with this state, and the hash of the log since the last one; the lock is held."""
        if self._keeper is not None:
            self._keeper.note(cp, next_offset, state, self._cluster.runtime.now_ms(), log_hash)

    def is_due(self, now: float) -> bool:
        """Whether :meth:`run` has to be called now; the lock is held."""
        if self._keeper is None or self._is_running or now < self._keeper.due_at():
            return False
        self._is_running = True
        return True

    def run(self) -> None:
        """Compare, and write what is due (*blocking*); no caller sees what this raises."""
        try:
            now, read = self._cluster.runtime.now_ms(), frozenset(self._replica.worlds)
            found = self._keeper.work(now, read) if self._keeper is not None else []
            with self._condition:
                if found and not self._life.ended:
                    self.report(found)
                    self._condition.notify_all()
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            # A bug in the library. Work continues without snapshots, as it does without a topic for them.
            text = "no more snapshots are taken by this process, nor compared"
            log(logging.ERROR, "snapshots_failed", text, error=error)
            self._keeper = None
        finally:
            self._is_running = False

    def report(self, found: Iterable[Difference]) -> None:
        """Report each difference, once; the lock is held."""
        for difference in found:
            if self._keeper is not None and not self._keeper.is_news(difference):
                continue
            error = difference.error(self._replica.topic, self._replica.start.snapshots_topic)
            log(logging.ERROR, "snapshot_differs", "%s", error)
            self.alarms.append(error)
            self._report(error)

    def find(self) -> None:
        """Use the topic if it was created meanwhile (*blocking*)."""
        start = self._replica.start
        if self._keep and self._keeper is None and start.snapshots is None:
            try:
                reader = SnapshotReader.find(self._cluster, start.snapshots_topic, LOOKUP_TIMEOUT_S)
            except MarshalError as error:  # was logged at start; work continues without
                log(logging.DEBUG, "snapshots_missing", "no snapshots: %s", error)
                return
            if reader is not None and len(reader.partitions) == self._replica.info.partitions:
                start.snapshots = reader
                self._keeper = self._new_keeper(reader)
