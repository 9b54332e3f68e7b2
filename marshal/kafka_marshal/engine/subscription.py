"""Which partitions a consumer reads: names and patterns, matched against the cluster's topics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kafka_marshal.ports import TopicInfo
from kafka_marshal.types import Key


class Subscription:
    """Topics by name, or by a regular expression starting with ``^`` as in confluent-kafka.

    A named topic may not exist yet. Patterns leave out Kafka's internal topics and our own coordination topics.
    """

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    #: All known partitions, sorted.
    partitions: tuple[Key, ...]
    #: Topics that match and exist, and all named ones.
    topics: frozenset[str]

    def __init__(self, topics: Iterable[str], coordination_topic: str) -> None:
        self._coordination = coordination_topic
        self._counts: dict[str, int] = {}
        self._ids: dict[str, str] = {}
        #: Topics whose current id is known: reported since they last appeared.
        self._told: set[str] = set()
        #: Partitions that were added since the first ``update``: they start at the earliest offset (P9).
        self.grown: set[Key] = set()
        #: Whether ``update`` was called since the last ``change``.
        self.looked: bool = False
        #: The names and patterns before that; None: it was looked, or there were none.
        self._before: tuple[frozenset[str], tuple[re.Pattern[str], ...]] | None = None
        self.names, self.patterns = frozenset(), ()
        self.change(topics)

    def change(self, topics: Iterable[str]) -> None:
        """From now on it is these topics; ``update`` finds those that are new, which begin where ``start=`` says."""
        if self.looked:
            self._before, self.looked = (self.names, self.patterns), False
        wanted = list(dict.fromkeys(topics))
        self.names = frozenset(topic for topic in wanted if not topic.startswith("^"))
        self.patterns = tuple(re.compile(topic) for topic in wanted if topic.startswith("^"))
        # Ids stay: a topic that is recreated meanwhile must not pass for the old one (P11).
        kept = [x for x in self._counts if x in self.names or any(pattern.match(x) for pattern in self.patterns)]
        self._counts = {name: self._counts[name] for name in kept}
        self._list()

    def _list(self) -> None:
        self.topics = frozenset(self._counts) | self.names
        self.partitions = tuple((name, p) for name, count in sorted(self._counts.items()) for p in range(count))

    @property
    def pattern(self) -> str:
        """All names and patterns as one regular expression; "": there is no pattern (G12)."""
        if not self.patterns:
            return ""
        return "|".join(
            sorted({*(pattern.pattern for pattern in self.patterns), *(f"^{name}$" for name in self.names)})
        )

    @property
    def absent(self) -> list[str]:
        """Named topics that the cluster does not have, sorted; [] before it was asked (any thread)."""
        return sorted(name for name in self.names if self.looked and name not in self._counts)

    def counts(self) -> tuple[tuple[str, int], ...]:
        """(topic, number of partitions), sorted; 0: a named topic does not exist (yet)."""
        return tuple(sorted({**dict.fromkeys(self.names, 0), **self._counts}.items()))

    def matches(self, info: TopicInfo) -> bool:
        """Whether a name or pattern matches a topic."""
        return self._match(info, self.names, self.patterns)

    def _match(self, info: TopicInfo, names: frozenset[str], patterns: tuple[re.Pattern[str], ...]) -> bool:
        if info.name in names:
            return True
        hidden = info.internal or info.name.startswith((self._coordination, "__"))
        return not hidden and any(pattern.match(info.name) for pattern in patterns)

    def has(self, key: Key) -> bool:
        """Whether this partition is one of ``partitions``."""
        return 0 <= key[1] < self._counts.get(key[0], 0)

    def topic_id(self, name: str) -> str | None:
        """The id of an existing topic; None: the cluster has not reported it yet."""
        return self._ids[name] if name in self._told else None

    def learn(self, topics: Mapping[str, TopicInfo]) -> None:
        """Add the ids of known topics without one."""
        for name, info in topics.items():
            if name in self._counts and info.topic_id and not self._ids[name]:
                self._ids[name] = info.topic_id
                self._told.add(name)

    def replaced(self, name: str, topic_id: str) -> bool:
        """Set the id of a recreated topic, reported out of turn. Returns whether it changed."""
        if self._ids.get(name) == topic_id:
            return False
        self._ids[name] = topic_id
        return True

    def update(self, topics: Mapping[str, TopicInfo]) -> tuple[set[str], set[str]]:
        """Set the topics that the cluster has now. Returns the deleted topics, and the recreated ones."""
        first_look, self.looked = not self.looked, True
        before, self._before = self._before, None
        found = {name: info for name, info in sorted(topics.items()) if self.matches(info)}
        gone = set(self._counts) - set(found)
        recreated: set[str] = set()
        for name, info in found.items():
            old = self._counts.get(name)
            old_id = self._ids.get(name, "")
            if old_id and info.topic_id and old_id != info.topic_id:
                recreated.add(name)
            if old is None and (self._match(info, *before) if before else not first_look):
                self.grown.update((name, partition) for partition in range(info.partitions))
            elif old is not None and info.partitions > old:
                self.grown.update((name, partition) for partition in range(old, info.partitions))
            self._counts[name] = info.partitions
            self._ids[name] = info.topic_id or old_id
            if info.topic_id:
                self._told.add(name)
        for name in gone:
            self._told.discard(name)
            del self._counts[name]  # keep its id: a recreated topic must not pass for the old one (P11)
        self._list()
        return gone, recreated
