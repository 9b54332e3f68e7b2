"""Checks of the coordination topic while it is read (L1, L2). They report and refuse; they repair nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kafka_marshal.errors import AuthorizationError, TopicChangedError, TopicUnsafeError
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import topic_option
from kafka_marshal.ports import FaultKind, LogEntry, TailBatch, TailFault, TopicInfo
from kafka_marshal.rights import grant
from rationalizer.marker import said_in

_REMEDY = (
    "Leases of this process are in doubt and end by themselves. Restart it; if the topic was recreated on purpose, all "
    "members must restart"
)


#: Brokers' clocks differ by less than this (ms); a clock that is further behind log time was set back.
SET_BACK_MS = 1_000


def clock_set_back(topic: str, steps_ms: Mapping[int, int]) -> str:
    """The consequences of a broker's clock that is behind log time by this many ms in each of these CPs."""
    if not steps_ms:
        return ""
    return (
        f"the clock of the broker that leads partition(s) {', '.join(map(str, sorted(steps_ms)))} of {topic!r} was set "
        f"back by {max(steps_ms.values()) / 1000:.1f} s: log time stops until it has caught up. "
        "Live members continue, and nothing is lost; one that dies meanwhile is not replaced, and no pause ends. "
        "Set the broker's clock right (NTP), or wait that long"
    )


class TopicChecks:
    """Compares what one replica reads with the topic as it was at the start."""

    def __init__(self, info: TopicInfo) -> None:
        """info: of the coordination topic, at the start."""
        self._info = info
        #: Whether the last records seen carried the broker's time (T1).
        self._stamped = True
        #: By CP: how far the broker's clock is behind log time (ms), if it was set back.
        self._back: dict[int, int] = {}

    def first(self, cp: int, first: LogEntry) -> None:
        """Check the first record of a full replay (L1, L2); raises TopicUnsafeError or TopicChangedError."""
        if first[0] > 0:
            raise TopicUnsafeError(
                f"partition {cp} of {self._info.name!r} begins at offset 0, but its first record has offset "
                f"{first[0]}: what stood before it was compacted away, and others perhaps with it. Who holds what "
                "can't be known from what is left, so nothing was claimed. Let the members at work finish, then make "
                "a new topic: kafka-marshal init --topic NEW-NAME"
            )
        self.marker(cp, first[2])

    def marker(self, cp: int, value: bytes | None) -> None:
        """Compare the number of CPs with that in the first record (L2); raises TopicChangedError if they differ."""
        count = said_in(value)
        if count is not None and count != str(self._info.partitions):
            raise TopicChangedError(
                f"{self._info.name!r} has {self._info.partitions} partitions, but its first record in partition {cp} "
                f"says that it was made with {count}: members that count differently would not see each other's "
                "claims. Nothing was claimed. Make a new topic with the count you want, and move all members to it"
            )

    def stamps(self, batch: TailBatch) -> None:
        """Report a topic that was altered meanwhile: without the broker's stamps no lease ever goes stale (T1)."""
        topic = self._info.name
        for cp, entries in batch.records.items():
            if self._stamped and entries[-1][1] < 0:
                self._stamped = False
                log(
                    logging.ERROR,
                    "stamps_missing",
                    "records of %r (partition %d, offset %d) do not carry the broker's time any more: the topic was "
                    "altered to CreateTime. Log time stops: leases continue, but those of members that die are not "
                    "taken over, and no member can start. kafka-marshal init%s says how to mend it",
                    topic,
                    cp,
                    entries[-1][0],
                    topic_option(topic),
                )
            elif not self._stamped and entries[-1][1] >= 0:
                self._stamped = True
                text = "records of %r carry the broker's time again; work continues as before"
                log(logging.WARNING, "stamps_back", text, topic)

    def clocks(self, batch: TailBatch, log_times: Mapping[int, int]) -> None:
        """Report a broker's clock that was set back: log time stops until it catches up (T1).

        log_times: of each CP, after the batch was applied.
        """
        was_back = bool(self._back)
        for cp, entries in batch.records.items():
            step_ms = log_times[cp] - entries[-1][1]
            if entries[-1][1] >= 0 and step_ms >= SET_BACK_MS:
                self._back[cp] = step_ms
            else:
                self._back.pop(cp, None)
        if self._back and not was_back:
            log(logging.ERROR, "clock_set_back", "%s", self.back)
        elif was_back and not self._back:
            log(
                logging.WARNING,
                "clock_back",
                "the brokers' clocks are not behind log time any more; log time moves again",
            )

    @property
    def back(self) -> str:
        """What a clock that was set back means, for people; "": none was (any thread)."""
        return clock_set_back(self._info.name, dict(self._back))

    def fault(self, fault: TailFault) -> None:
        """Handle a fault of reading: raise an error if reading can't continue, else log it."""
        topic = self._info.name
        where = f"{topic!r}" if fault.partition is None else f"{topic!r} partition {fault.partition}"
        match fault.kind:
            case FaultKind.OUT_OF_RANGE:
                raise TopicChangedError(
                    f"{where}: our position is not in the log any more ({fault.message}): it was cut or recreated. "
                    f"{_REMEDY}"
                )
            case FaultKind.UNKNOWN_TOPIC:
                raise TopicChangedError(f"{where} is gone ({fault.message}). {_REMEDY}")
            case FaultKind.REFUSED:
                raise AuthorizationError(
                    f"{where} can't be read: {fault.message}. Nothing was changed; leases of this process, if it holds "
                    f"any, end by themselves. {grant('READ', 'topic', [topic])}"
                )
            case FaultKind.FATAL:
                text = "%s: reader replaced after a fatal error: %s"
                log(logging.WARNING, "reader_replaced", text, where, fault.message)
            case FaultKind.UNREACHABLE:  # another line reports the outage
                log(logging.DEBUG, "fault", "%s: %s", where, fault.message)
            case _:
                log(logging.WARNING, "fault", "%s: %s", where, fault.message)

    def now(self, info: TopicInfo | None) -> None:
        """Compare the topic as it is now (None: gone) with the one we read (L2); raises TopicChangedError."""
        before = self._info
        if info is None:
            raise TopicChangedError(f"{before.name!r} is gone. {_REMEDY}")
        if info.partitions != before.partitions:
            raise TopicChangedError(
                f"{before.name!r} has {info.partitions} partitions now, it had {before.partitions}: members that count "
                f"differently do not see each other's claims. {_REMEDY}"
            )
        if info.topic_id and before.topic_id and info.topic_id != before.topic_id:
            raise TopicChangedError(f"{before.name!r} was deleted and recreated. {_REMEDY}")
