"""A replica: tails the coordination topic into one World per CP (C15), and refuses what it can't trust (L1, L2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic

from kafka_marshal.adapters.interface import Cluster, FaultKind, LogEntry, Tail, TailBatch, TailFault, TopicInfo
from kafka_marshal.coordination import check_topic
from kafka_marshal.errors import (
    AuthorizationError,
    CoordinationTopicError,
    KafkaUnavailableError,
    TopicChangedError,
)
from rationalizer import Outcome, RejectedValueError, Tick, World, decode

__all__ = ["Applied", "Replica"]

logger = logging.getLogger("kafka_marshal.replica")

#: Called for each record applied once the replica has caught up: CP, offset, outcome.
Applied = Callable[[int, int, Outcome], None]

_REMEDY = (
    "Leases of this process are in doubt and end by themselves. Restart it; if the topic was made anew on purpose, all "
    "members must restart (L2)"
)


class Replica:
    """Worlds of all CPs of one coordination topic. Not thread-safe: the caller locks around ``apply``."""

    def __init__(self, cluster: Cluster, topic: str, timeout_s: float) -> None:
        """Check the topic (L1), find where its log ends now, and start to read (*blocking*)."""
        config, problems = check_topic(cluster, topic, timeout_s)
        for problem in problems:
            logger.warning("coordination topic %s: %s", topic, problem)
        self.topic = topic
        self.info: TopicInfo = config.info
        self.worlds = {cp: World(cp, config.info.partitions) for cp in range(config.info.partitions)}
        self._cluster = cluster
        marks = cluster.watermarks([(topic, cp) for cp in self.worlds], timeout_s)
        cut = {cp: low for (_, cp), (low, _) in marks.items() if low > 0}
        if cut:
            raise CoordinationTopicError(
                f"the log of {topic!r} does not reach back to its beginning in partition(s) {sorted(cut)}, and no "
                "snapshot "
                "bridges the gap: who holds what can't be known, so nothing was claimed. Old log may only be "
                "removed by "
                "kafka-marshal prune (L1)"
            )
        missing = sorted(cp for cp in self.worlds if (topic, cp) not in marks)
        if missing:
            raise KafkaUnavailableError(
                f"partition(s) {missing} of {topic!r} have no leader at the moment; nothing was claimed. Try again "
                "when the brokers that hold them are back"
            )
        #: CPs that have not reached the high watermark found at start, with it (C15).
        self.behind = {cp: high for (_, cp), (_, high) in sorted(marks.items()) if high > 0}
        self.target_records = sum(self.behind.values())
        self._tail: Tail = cluster.tail(topic, dict.fromkeys(self.worlds, 0))

    @property
    def caught_up(self) -> bool:
        """The state of the world is determined (C15)."""
        return not self.behind

    @property
    def records_read(self) -> int:
        """How much of the log is applied, in offsets over all CPs."""
        return sum(world.next_offset for world in self.worlds.values())

    def read(self, timeout_s: float) -> TailBatch:
        """Wait for news; ``apply`` takes it in."""
        return self._tail.read(timeout_s)

    def apply(self, batch: TailBatch, applied: Applied | None = None, *, history: bool = False) -> None:
        """Apply what was read; report each record once caught up, or from the first one on (history).

        Raises an error of the CoordinationTopicError family, or AuthorizationError, where reading can't go on.
        """
        live = history or self.caught_up
        for cp, entries in batch.records.items():
            self._apply_entries(self.worlds[cp], entries, applied if live else None)
        for cp, end in batch.ends.items():
            self._reached(cp, end)
        for cp in batch.records:
            self._reached(cp, self.worlds[cp].next_offset)
        for fault in batch.faults:
            self._judge(fault)

    def _apply_entries(self, world: World, entries: list[LogEntry], applied: Applied | None) -> None:
        if world.next_offset == 0 and entries and entries[0][0] == 0:
            self._check_marker(world.partition, entries[0][2])
        if applied is None:
            world.apply_many(entries)
            return
        for offset, timestamp_ms, value in entries:
            applied(world.partition, offset, world.apply(offset, timestamp_ms, value))

    def _reached(self, cp: int, offset: int) -> None:
        if offset >= self.behind.get(cp, offset + 1):
            del self.behind[cp]

    def _check_marker(self, cp: int, value: bytes | None) -> None:
        """The first record says how many CPs there were when the topic was made (L2)."""
        try:
            record = decode(value) if value is not None else None
        except RejectedValueError:
            return
        prefix, _, count = record.group_id.partition("=") if isinstance(record, Tick) else ("", "", "")
        if prefix == "partitions" and count != str(len(self.worlds)):
            raise TopicChangedError(
                f"{self.topic!r} has {len(self.worlds)} partitions, but its first record in partition {cp} says that "
                "it "
                f"was made with {count}: members that count differently would not see each other's claims. Nothing was "
                "claimed. Make a new topic with the count you want, and move all members to it (L2)"
            )

    def _judge(self, fault: TailFault) -> None:
        where = f"{self.topic!r}" if fault.partition is None else f"{self.topic!r} partition {fault.partition}"
        match fault.kind:
            case FaultKind.OUT_OF_RANGE:
                raise TopicChangedError(
                    f"{where}: our position is not in the log any more ({fault.message}): it was cut or made anew. "
                    f"{_REMEDY}"
                )
            case FaultKind.UNKNOWN_TOPIC:
                raise TopicChangedError(f"{where} is gone ({fault.message}). {_REMEDY}")
            case FaultKind.REFUSED:
                raise AuthorizationError(f"{where} can't be read: {fault.message}. {_REMEDY}")
            case FaultKind.FATAL:
                logger.warning("%s: reader replaced after a fatal error: %s", where, fault.message)
                self._tail.close()
                self._tail = self._cluster.tail(self.topic, {cp: w.next_offset for cp, w in self.worlds.items()})
            case _:
                logger.warning("%s: %s", where, fault.message)

    def check(self, info: TopicInfo | None) -> None:
        """Compare the topic as it is now with the one we read (L2); raises TopicChangedError."""
        if info is None:
            raise TopicChangedError(f"{self.topic!r} is gone. {_REMEDY}")
        if info.partitions != self.info.partitions:
            raise TopicChangedError(
                f"{self.topic!r} has {info.partitions} partitions now, it had {self.info.partitions}: members that "
                "count "
                f"differently do not see each other's claims. {_REMEDY}"
            )
        if info.topic_id and self.info.topic_id and info.topic_id != self.info.topic_id:
            raise TopicChangedError(f"{self.topic!r} was deleted and made anew. {_REMEDY}")

    def catch_up(
        self,
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
        applied: Applied | None = None,
    ) -> None:
        """Read up to the high watermark found at start (*blocking*), for those who only look.

        progress is called with (records applied, records there were), applied for each record. Raises
        KafkaUnavailableError when nothing came for timeout_s.
        """
        deadline = monotonic() + timeout_s
        while not self.caught_up:
            batch = self.read(0.2)
            self.apply(batch, applied, history=True)
            if batch.records or batch.ends:
                deadline = monotonic() + timeout_s
            elif monotonic() > deadline:
                raise KafkaUnavailableError(
                    f"{self.topic!r}: nothing read for {timeout_s:g} s, and partition(s) {sorted(self.behind)} are not "
                    "read to their end. Is the broker that leads them reachable?"
                )
            if progress is not None:
                progress(self.records_read, self.target_records)

    def stopped(self) -> Iterable[tuple[int, int]]:
        """CPs that stand before an Upgrade this release can't follow, with the level asked for (E4)."""
        return [(cp, level) for cp, world in self.worlds.items() if (level := world.required_level) is not None]

    def close(self) -> None:
        """Stop reading."""
        self._tail.close()
