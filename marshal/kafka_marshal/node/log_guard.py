"""Whether the coordination topic is harmed while members work: emptied, or given a retention (L1).

Members at work continue: they know what they have read. But no member can start on such a log, so only running members
know what the group has done. They write it to Kafka's own consumer group of that name, where an import finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from shlex import quote

from kafka_marshal.engine.work.copies import Copy
from kafka_marshal.errors import LogCutError, MarshalError, SnapshotDifferenceError
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import find_problems, topic_option
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.node.kept import keep_of
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.start import Begin, ReplayStart
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import Cluster, TopicPartition
from rationalizer import Progress, World

#: The topic is checked once a heartbeat interval, but no more often than this (ms).
SHORTEST_MS = 1_000.0

#: While the log is harmed, positions are written this often (ms).
SAVE_EVERY_MS = 5_000.0

#: The most positions of one request, each with up to 4 KB of metadata: a batch of __consumer_offsets has 1 MB.
AT_ONCE = 100


class LogGuard:
    """The regular check of one driver; a job of its upkeep."""

    def __init__(self, cluster: Cluster, replica: Replica, lock: EngineLock, *, keep: bool) -> None:
        """keep: the driver is a member's, which has positions to keep; otherwise nothing is checked."""
        self._cluster = cluster
        self._replica = replica
        self._lock = lock
        self._keep = keep
        self._now_ms = cluster.runtime.now_ms
        self._next_at = self._now_ms() + self._interval_ms
        self._is_running = False
        #: Where the logs began when a start was last known to be possible.
        self._begins = {cp: start.log_start for cp, start in replica.starts.items()}
        self._save_at = 0.0
        self._kept = ""
        #: What is wrong with the topic, for people; "": nothing. Any thread may ask.
        self.harm: str = ""
        #: How long the log is to be kept (ms), as its topic says (Q52); None: for ever, or it was not asked yet.
        self.keep_ms: int | None = None
        #: How many offsets the log has, in the CPs that are read; None: it was not asked yet.
        self.records: int | None = None

    @property
    def _interval_ms(self) -> float:
        return max(SHORTEST_MS, self._lock.engine.settings.heartbeat_interval_ms)

    def is_due(self, now: float) -> bool:
        """Whether :meth:`run` has to be called now; the lock is held."""
        if not self._keep or self._is_running or now < self._next_at:
            return False
        self._is_running = True
        return True

    def run(self) -> None:
        """Check the topic (*blocking*); no caller sees what this raises."""
        try:
            self._report(self._found())
        except MarshalError as error:  # a missing broker or permission is reported elsewhere
            log(logging.DEBUG, "topic_not_checked", "%r is not checked this time: %s", self._replica.topic, error)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            log(logging.ERROR, "topic_not_checked", "checking the coordination topic failed", error=error)
        finally:
            self._next_at = self._now_ms() + self._interval_ms
            self._is_running = False

    def _found(self) -> str:
        topic = self._replica.topic
        config = self._cluster.topic_config(topic, LOOKUP_TIMEOUT_S)
        found = [] if config is None else [str(problem) for problem in find_problems(config) if problem.fatal]
        self.keep_ms = None if config is None else keep_of(config.settings)
        return "; ".join([*self._cut(), *found])

    def _cut(self) -> list[str]:
        """Texts about CPs whose log was cut so that no member can start; a prune leaves the snapshots needed."""
        topic, cps = self._replica.topic, sorted(self._begins)
        marks = self._cluster.watermarks([(topic, cp) for cp in cps], LOOKUP_TIMEOUT_S)
        begins = {cp: low for (_, cp), (low, _) in marks.items()}
        self.records = sum(high - low for low, high in marks.values())
        if all(low <= self._begins.get(cp, low) for cp, low in begins.items()):
            return []
        start = ReplayStart(self._cluster, topic, LOOKUP_TIMEOUT_S, Begin.SNAPSHOT)
        start.found(start.read(), self._replica.info.partitions)
        start.check({cp: marks[topic, cp] for cp in begins}, self._replica.info.partitions)
        cut = []
        for cp, low in begins.items():
            try:
                start.world(cp)
                self._begins[cp] = low
            except (LogCutError, SnapshotDifferenceError):
                cut.append(f"partition {cp} was emptied up to offset {low}, and not by kafka-marshal prune")
        return cut

    def _report(self, found: str) -> None:
        before = bool(self.harm)
        if not found:
            self.harm = ""
            if before:
                log(logging.WARNING, "topic_mended", "%r is as it must be again", self._replica.topic)
            return
        saved = self._save()
        group = quote(self._lock.engine.settings.group_id)
        claimed = "" if self._lock.engine.groups else f", then convert-group {group} --to claimed"
        self.harm = (
            f"the coordination topic {self._replica.topic!r} was harmed while members work: {found}. Members that run "
            "continue, but none can start or restart. Only the running members know what the group has done: stop "
            f"none of them. {saved}. Then make a new topic (kafka-marshal init --topic NEW-NAME), take the positions "
            f"over (kafka-marshal --topic NEW-NAME import-group {group}{claimed}), and move all members to it. If "
            f"nothing is lost yet: kafka-marshal init{topic_option(self._replica.topic)} says how to mend its settings"
        )
        if not before:
            log(logging.ERROR, "topic_harmed", "%s", self.harm)

    def _save(self) -> str:
        """Write the group's positions to Kafka's own group of that name, if due; returns the result in words."""
        group_id, now = self._lock.engine.settings.group_id, self._now_ms()
        kept = f"Its positions are kept in Kafka's own consumer group {group_id!r}"
        if now < self._save_at:
            return self._kept or kept
        self._save_at = now + SAVE_EVERY_MS
        with self._lock.condition:
            copies = self._copies(group_id)
        try:
            there = self._cluster.kafka_group(group_id, LOOKUP_TIMEOUT_S)
            if there.members:
                return (
                    "Its positions could not be kept: Kafka's own consumer group of that name has members. Stop them, "
                    "or note what marshal.world.leases() says"
                )
            new = [
                (key, (copy.offset, copy.text))
                for key, copy in copies.items()
                if copy.replaces(Copy.read(*there.committed.get(key, (0, ""))))
            ]
            for at in range(0, len(new), AT_ONCE):
                self._cluster.commit_for_group(group_id, dict(new[at : at + AT_ONCE]), LOOKUP_TIMEOUT_S)
        except MarshalError as error:
            return f"Its positions could not be kept in Kafka's own consumer group of that name, trying again ({error})"
        short = [f"{key[0]} [{key[1]}]" for key, copy in copies.items() if copy.is_short]
        self._kept = kept + (", with its open messages in the metadata" if any(x.open for x in copies.values()) else "")
        if short:
            self._kept += (
                f" (of {', '.join(short[:3])}{f' and {len(short) - 3} more' * (len(short) > 3)} only some: the others "
                "come again, with what is done behind them)"
            )
        return self._kept

    def _copies(self, group_id: str) -> dict[TopicPartition, Copy]:
        """What Kafka's group is to hold; the lock is held."""
        copies = {}
        groups = [group for world in self._replica.worlds.values() if (group := world.group(group_id)) is not None]
        for key, progress in sorted(progress_of_all(self._replica.worlds, group_id).items()):
            kept = [each for group in groups if (each := group.kept(*key)) is not None]
            if progress.stable >= 0:
                copies[key] = Copy.of(progress, kept[0].metadata if kept else None)
        return copies


def progress_of_all(worlds: Mapping[int, World], group_id: str) -> dict[TopicPartition, Progress]:
    """Partition → the group's live progress."""
    found: dict[TopicPartition, Progress] = {}
    for world in worlds.values():
        group = world.group(group_id)
        for topic, partition, kept in () if group is None else group.all_progress():
            found[topic, partition] = kept.progress
        for lease in world.leases():
            if lease.group_id == group_id:
                found[lease.topic, lease.partition] = lease.progress
    return found
