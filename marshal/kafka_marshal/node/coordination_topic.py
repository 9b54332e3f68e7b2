"""The coordination topic and its log of snapshots: their settings (L1, S2), how to create them, what is wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from shlex import quote

from kafka_marshal.errors import (
    AuthorizationError,
    ConfigurationError,
    CoordinationTopicError,
    TopicChangedError,
    TopicMissingError,
    TopicUnsafeError,
    grant,
)
from kafka_marshal.logs import log
from kafka_marshal.ports import Ack, Cluster, FaultKind, LogEntry, TailBatch, TailFault, TopicConfig, TopicInfo
from kafka_marshal.topic_names import DEFAULT_TOPIC, snapshots_topic
from rationalizer import Record, Upgrade, encode
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.marker import marker, said_in
from rationalizer.snapshot_log import MAX_RECORD_BYTES


def log_name(topic: str) -> str:
    """A coordination topic, as offsets that groups commit in Kafka name it (M4); "": the usual one."""
    return "" if topic == DEFAULT_TOPIC else topic


#: Twice the largest value of E2: a record of any allowed size fits with its headers (L1).
MAX_MESSAGE_BYTES = 2_097_152

#: The most that a broker counts for a batch of one record, in addition to its value (bytes).
RECORD_OVERHEAD = 100


@dataclass(frozen=True, slots=True)
class WrongSetting:
    """One setting of the topic that differs from L1."""

    setting: str
    found: str
    wanted: str
    why: str
    #: The topic is refused with it; otherwise it is only logged.
    fatal: bool

    def __str__(self) -> str:
        return f"{self.setting} is {self.found}, must be {self.wanted}: {self.why}"


_FIXED = (
    ("cleanup.policy", "delete", "compaction would drop claims and beats, and replicas would no longer agree"),
    ("message.timestamp.type", "LogAppendTime", "one stray client clock would end every lease"),
    ("retention.ms", "-1", "what retention takes can't be replayed; old log is removed by prune only"),
    ("retention.bytes", "-1", "what retention takes can't be replayed; old log is removed by prune only"),
    ("unclean.leader.election.enable", "false", "an unclean election would undo claims that were granted"),
)


def required_settings(brokers: int) -> dict[str, str]:
    """The settings ``init`` creates the topic with, on a cluster of that many brokers."""
    settings = {name: value for name, value, _ in _FIXED}
    settings["max.message.bytes"] = str(MAX_MESSAGE_BYTES)
    settings["min.insync.replicas"] = "2" if brokers >= 3 else "1"
    return settings


def _problems(
    config: TopicConfig, fixed: Iterable[tuple[str, str, str]], least_bytes: int, large: str, *, fatal: bool
) -> list[WrongSetting]:
    """Settings that are not as fixed, or too small for what is large here."""
    problems = [
        WrongSetting(name, config.settings.get(name, "unknown"), wanted, why, fatal)
        for name, wanted, why in fixed
        if config.settings.get(name) != wanted
    ]
    size = config.settings.get("max.message.bytes", "0")
    if int(size) < least_bytes:
        why = f"large {large} would be refused by the broker"
        problems.append(WrongSetting("max.message.bytes", size, f"at least {MAX_MESSAGE_BYTES}", why, fatal))
    return problems


def find_problems(config: TopicConfig) -> list[WrongSetting]:
    """All settings in which the topic differs from L1, the fatal ones first."""
    problems = _problems(config, _FIXED, MAX_MESSAGE_BYTES, "records", fatal=True)
    replicas = config.settings.get("min.insync.replicas", "1")
    if config.replication_factor >= 3 and int(replicas) < 2:
        why = "an acknowledged claim could be lost with one broker"
        problems.append(WrongSetting("min.insync.replicas", replicas, "2", why, fatal=False))
    return problems


_FIXED_FOR_SNAPSHOTS = (
    ("cleanup.policy", "delete", "compaction would drop all snapshots but one, and parts of that"),
    ("retention.ms", "-1", "starting points vanish by themselves; replicas would have to go through the log again"),
    ("retention.bytes", "-1", "starting points vanish by themselves; replicas would have to go through the log again"),
)


def find_snapshot_problems(config: TopicConfig, partitions: int) -> list[WrongSetting]:
    """All settings in which a log of snapshots differs from S2. None is fatal: the log itself has everything.

    partitions: of the coordination topic.
    """
    least_bytes = MAX_RECORD_BYTES + RECORD_OVERHEAD
    problems = _problems(config, _FIXED_FOR_SNAPSHOTS, least_bytes, "snapshots", fatal=False)
    if config.info.partitions != partitions:
        why = "it is not used: snapshots of a partition are kept in the partition of the same number"
        problems.append(WrongSetting("partitions", str(config.info.partitions), str(partitions), why, fatal=False))
    return problems


#: How long a start waits for bootstrap addresses that have neither answered nor refused; members look again later.
ADDRESSES_S = 0.25


def check_one_cluster(cluster: Cluster, wait_s: float = 0.0) -> None:
    """Raise ConfigurationError if the bootstrap addresses that answered belong to more than one cluster.

    The first call begins to ask. wait_s: how long to wait for addresses not known to be up or down.
    """
    found = cluster.cluster_ids(wait_s)
    if len(set(found.values())) > 1:
        which = ", ".join(f"{address} is of {cluster_id}" for address, cluster_id in sorted(found.items()))
        raise ConfigurationError(
            f"bootstrap_servers names brokers of different clusters: {which}. Each has its own coordination log, "
            "so every partition could get two owners; nothing more is claimed. Name brokers of one cluster only"
        )


def check_topic(cluster: Cluster, topic: str, timeout_s: float) -> tuple[TopicConfig, list[WrongSetting]]:
    """The topic's configuration and its harmless problems (*blocking*).

    Raises TopicMissingError or TopicUnsafeError, each naming the command that repairs it.
    """
    config = cluster.topic_config(topic, timeout_s)
    if config is None:
        raise TopicMissingError(
            f"the coordination topic {topic!r} does not exist on this cluster. Nothing was claimed. "
            f"Create it: kafka-marshal init{topic_option(topic)}"
        )
    problems = find_problems(config)
    fatal = [str(problem) for problem in problems if problem.fatal]
    if fatal:
        raise TopicUnsafeError(
            f"the coordination topic {topic!r} is not safe to work with; nothing was claimed. {'; '.join(fatal)}. "
            f"kafka-marshal init{topic_option(topic)} says how to mend it"
        )
    return config, problems


def topic_option(topic: str) -> str:
    """The option that names this topic on the command line; nothing for the default one."""
    return "" if topic == DEFAULT_TOPIC else f" --topic {quote(topic)}"


def create_snapshots_topic(cluster: Cluster, topic: str, partitions: int, replicas: int, timeout_s: float) -> None:
    """Create the log of snapshots beside a coordination topic with these partitions and replicas (*blocking*, S2).

    If another client creates it at the same moment, that one is used.
    """
    name = snapshots_topic(topic)
    try:
        cluster.create_topic(name, partitions, replicas, required_settings(replicas), timeout_s)
    except CoordinationTopicError:
        if name not in cluster.topic_info([name], timeout_s):
            raise


def create_topic(cluster: Cluster, topic: str, partitions: int, timeout_s: float) -> None:
    """Create the topic as L1 says, each CP with its first records, and its log of snapshots (*blocking*)."""
    brokers = cluster.broker_count(timeout_s)
    cluster.create_topic(topic, partitions, min(3, brokers), required_settings(brokers), timeout_s)
    append_first_records(cluster, topic, dict.fromkeys(range(partitions), 0), timeout_s)
    create_snapshots_topic(cluster, topic, partitions, min(3, brokers), timeout_s)


def _first_records(ends: Mapping[int, int]) -> list[tuple[int, Record]]:
    """What CPs that end there lack: the marker (L2) and, in a topic without records, the newest level (E4).

    An existing topic keeps its level: members of older releases may be working on it.
    """
    name = f"init-{os.urandom(6).hex()}"
    is_new = all(end <= 2 for end in ends.values())
    records: list[tuple[int, Record]] = []
    for cp, end in ends.items():
        first = marker(name, len(ends))
        if end == 0:
            records.append((cp, first))
        if end < 2 and is_new:
            records.append((cp, Upgrade(first.instance_id, first.client_id, first.group_id, SUPPORTED_LEVEL)))
    return records


def append_first_records(cluster: Cluster, topic: str, ends: Mapping[int, int], timeout_s: float) -> None:
    """Append what CPs lack of their first records (*blocking*). ends: the log end of each CP, one of them 0."""
    failures: list[str] = []
    forbidden: list[Ack] = []

    def answered(ack: Ack) -> None:
        if ack.error is not None:
            failures.append(ack.error)
        if ack.forbidden:
            forbidden.append(ack)

    appender = cluster.appender(topic, delivery_timeout_ms=int(timeout_s * 1000))
    try:
        for cp, record in _first_records(ends):
            appender.append(cp, encode(record), answered)
        left = appender.flush(timeout_s)
    finally:
        appender.close()
    if failures or left:
        needs = f". {grant('WRITE', 'topic', [topic])}" if forbidden else ""
        raise CoordinationTopicError(
            f"the topic {topic!r} exists, but its first records could not be written "
            f"({'; '.join(sorted(set(failures))) or 'no answer in time'}). Run kafka-marshal init again; it continues "
            f"where it stopped{needs}"
        )


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
