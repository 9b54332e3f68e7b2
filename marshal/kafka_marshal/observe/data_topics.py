"""The topics that groups work on, as the cluster describes them to this user."""

from __future__ import annotations

from kafka_marshal.client.view import LeaseInfo
from kafka_marshal.engine.work.lost import why_lost
from kafka_marshal.errors import AuthorizationError
from kafka_marshal.observe.rows import NO_TOPIC
from kafka_marshal.ports import Cluster, TopicInfo
from kafka_marshal.rights import grant
from kafka_marshal.types import Key
from rationalizer import Progress

__all__ = ["DataTopics"]


class DataTopics:
    """The topics, as the cluster described them when last asked."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: Where each partition's log begins and ends.
        self.marks: dict[Key, tuple[int, int]] = {}
        self._topics: dict[str, TopicInfo] = {}
        #: Topics that this user may not see.
        self._hidden: frozenset[str] = frozenset()

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
        return why_lost(topic, progress, log_end)
