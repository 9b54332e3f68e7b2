"""The topics that groups read, as the cluster describes them: where their logs begin and end, why none is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kafka_marshal.engine.work.topic_mark import POSITION_LOST, kafka_counts, why_lost
from kafka_marshal.errors import AuthorizationError, MarshalError
from kafka_marshal.observe.rows import FOREIGN_COMMIT, NO_TOPIC
from kafka_marshal.rights import grant

if TYPE_CHECKING:
    from kafka_marshal.ports import Cluster, TopicInfo
    from kafka_marshal.types import Key, LeaseInfo
    from rationalizer import Progress


class DataTopics:
    """The topics, as the cluster described them when last asked."""

    def __init__(self, cluster: Cluster, log_name: str) -> None:
        self._cluster = cluster
        self._log_name = log_name
        #: Where each partition's log begins and ends.
        self.marks: dict[Key, tuple[int, int]] = {}
        self._topics: dict[str, TopicInfo] = {}
        #: Topics that this user may not see.
        self._hidden: frozenset[str] = frozenset()
        #: By group that processes in transactions: the offsets in Kafka that count, and the metadata beside them (M7).
        self._offsets: dict[str, Mapping[Key, tuple[int, str]]] = {}

    def look_at_offsets(self, groups: set[str], timeout_s: float) -> None:
        """Ask for the committed offsets of these groups (*blocking*); those that this user may not see are left out."""
        self._offsets = {}
        for group in groups:
            with suppress(MarshalError):
                self._offsets[group] = self._cluster.kafka_group(group, timeout_s).committed

    def look(self, topics: set[str], timeout_s: float) -> None:
        """Ask for these topics, and where their logs begin and end (*blocking*)."""
        self._topics = self._visible(topics, timeout_s) if topics else {}
        partitions = [
            (name, number)
            for name, info in self._topics.items()
            for number in range(info.partitions)
            if number not in info.leaderless
        ]
        self.marks = self._cluster.watermarks(partitions, timeout_s) if partitions else {}

    def _visible(self, topics: set[str], timeout_s: float) -> dict[str, TopicInfo]:
        """Those that this user may see: a claim can name any topic, and a forbidden one hides no other (*blocking*)."""
        self._hidden = frozenset()
        try:
            return self._cluster.topic_info(topics, timeout_s)
        except AuthorizationError:
            seen = topics & self._cluster.topics(timeout_s).keys()
            self._hidden = frozenset(topics - seen)
            return self._cluster.topic_info(seen, timeout_s) if seen else {}

    def why_stuck(self, info: LeaseInfo, progress: Progress) -> str:
        """Why no worker can read this partition; "": the topic shows no reason."""
        topic = self._topics.get(info.topic)
        if info.topic in self._hidden:
            return f"not to be seen by this user, if it is there. {grant('DESCRIBE', 'topic', [info.topic])}"
        if topic is None:
            return f"{NO_TOPIC} on this cluster any more"
        if info.partition >= topic.partitions:
            return f"{NO_TOPIC} with that many partitions any more: it has {topic.partitions}"
        if info.partition in topic.leaderless:
            return "no leader: nobody can read or write it"
        _, log_end = self.marks.get((info.topic, info.partition), (None, None))
        return why_lost(topic, progress, log_end) or self._foreign(info, progress)

    def _foreign(self, info: LeaseInfo, progress: Progress) -> str:
        """Why no member works on it: another program has committed for the group in Kafka (M7); "": none has."""
        from kafka_marshal.engine.work.taking_over import is_ours

        found = self._offsets.get(info.group_id, {}).get((info.topic, info.partition))
        if info.client_id is not None or found is None or not kafka_counts(progress):
            return ""
        offset, metadata = found
        if is_ours(metadata, info.epoch, self._log_name):
            return ""
        return (
            f"{POSITION_LOST}: {FOREIGN_COMMIT} offset {offset} for this group in Kafka, which processes "
            "in transactions"
        )
