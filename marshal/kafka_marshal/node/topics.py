"""The topics that the consumers of one client need, and how they are checked.

A full check describes each topic: it returns the ids, and creates Python objects for every partition while it holds the
interpreter's lock. For thousands of partitions that is too expensive every few seconds. Between two full checks such a
client lists the topics and counts their partitions, at a tenth of the price. Only the coordination topic's id is
checked every time (L2). A result that another member of the process got a moment ago counts, too (Q39).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.ports import Cluster, TopicInfo

#: Called with topics and a timeout (s): topic → number of partitions, of those that answer in time.
CountPartitions = Callable[[Iterable[str], float], Mapping[str, int]]

#: How long one look-up may take before it is tried again (s).
LOOKUP_TIMEOUT_S = 5.0

#: How long the cheap check of a consumer's first topics may take, before the full one replaces it (s).
COUNT_TIMEOUT_S = 1.0

#: How often topics are checked: for new partitions, and (within the 10 s of L2) for a recreated coordination topic.
METADATA_INTERVAL_MS = 5_000.0

#: Jitter: ± this share, drawn for each check, so that members that start together do not ask together for ever.
METADATA_JITTER = 0.25

#: The ids of topics that were only counted are asked for after this, with jitter, or once a partition is granted (P12).
#: With few partitions, at once; a thousand cost milliseconds while every member is starting.
IDS_WITHIN_MS = 2_000.0
FEW_PARTITIONS = 200

#: Describing takes some 15 us for each partition, and may take a thousandth of the time.
IDS_MS_PER_PARTITION = 15.0

#: Data topics are described at least this often, to notice recreated ones (P11).
IDS_AT_LEAST_EVERY_MS = 30_000.0

#: Metadata that another client of this process fetched within this time is reused, so none is older than 8.25 s (L2:
#: 10 s). Metadata from before this member began, before a consumer came, or before our last check is not reused.
SHARED_MS = 2_000.0

#: The same for data topics, as a share of the interval between two checks of their ids.
SHARED_PART = 0.25

#: Listing a partition costs this many times less than describing it, but always lists the whole cluster.
LISTING_GAIN = 8


@dataclass(frozen=True, slots=True)
class _Waiter:
    """The topics of one consumer: by name, and (patterns) all that match."""

    names: frozenset[str]
    matches: Callable[[TopicInfo], bool] | None


#: By consumer.
Interest = Mapping[int, _Waiter]


class TopicWatch:
    """Checks topics, for all consumers of one client.

    ``interest`` is replaced, never changed: so a check knows afterwards whether it asked for all topics.
    """

    def __init__(self, cluster: Cluster, coordination: str) -> None:
        self.interest: Interest = {}
        self._cluster = cluster
        self._coordination = coordination
        #: When data topics are described again; ``_there``: those that the last check found.
        self._ids_due = 0.0
        #: When we began (the coordination topic existed), a consumer came, or we last checked: metadata that others
        #: fetched before that is not used.
        self._known_at = cluster.runtime.now_ms()
        self._there: frozenset[str] = frozenset()
        #: How many partitions the last description and the last list had.
        self._described = 0
        self._listed = 0

    def add(self, number: int, subscription: Subscription) -> None:
        """Check the topics of one more consumer."""
        matches = subscription.matches if subscription.patterns else None
        self.interest = {**self.interest, number: _Waiter(subscription.names, matches)}
        self._ids_due = 0.0
        self._known_at = self._cluster.runtime.now_ms()

    def describe_next(self) -> None:
        """Make the next check a full one: ids are needed."""
        self._ids_due = 0.0

    def ask_afresh(self) -> None:
        """Use nothing that another client fetched before now: the question is whether Kafka still answers."""
        self._known_at = self._cluster.runtime.now_ms()

    def remove(self, number: int) -> None:
        """A consumer has ended."""
        self.interest = {key: waiter for key, waiter in self.interest.items() if key != number}

    @staticmethod
    def count(interest: Interest, count: CountPartitions | None) -> dict[str, TopicInfo]:
        """The topics of the only consumer, if the cheap count finds all of them; otherwise nothing (*blocking*)."""
        (waiter, *others) = interest.values()
        if count is None or others or waiter.matches is not None:
            return {}
        counts = count(waiter.names, COUNT_TIMEOUT_S)
        if counts.keys() != waiter.names:
            return {}
        return {name: TopicInfo(name, partitions, "") for name, partitions in sorted(counts.items())}

    def check(self, interest: Interest) -> dict[str, TopicInfo]:
        """The existing topics of these consumers, perhaps without ids, and the coordination topic (*blocking*).

        Raises what the cluster raises.
        """
        now = self._cluster.runtime.now_ms()
        names = {self._coordination}.union(*(waiter.names for waiter in interest.values()))
        oldest_ms = now - self._known_at
        age_ms = min(SHARED_MS, oldest_ms)
        patterns = [waiter.matches for waiter in interest.values() if waiter.matches is not None]
        is_cheap = now < self._ids_due and self._listed <= LISTING_GAIN * self._described
        listed: dict[str, TopicInfo] = {}
        if is_cheap or patterns:
            listed = self._cluster.topics(LOOKUP_TIMEOUT_S, age_ms / 1000)
            self._listed = sum(info.partitions for info in listed.values())
            names.update(name for name, info in listed.items() if any(matches(info) for matches in patterns))
        if is_cheap and self._there <= listed.keys():
            found = {name: listed[name] for name in sorted(names & listed.keys())}
            found |= self._cluster.topic_info([self._coordination], LOOKUP_TIMEOUT_S, age_ms / 1000)
        else:
            found = self._describe(names, age_ms, oldest_ms)
            self._described = sum(info.partitions for info in found.values())
            interval_ms = self._ids_interval_ms()
            self._ids_due = now + interval_ms if interval_ms > METADATA_INTERVAL_MS else 0.0
        self._there = frozenset(found)
        self._known_at = max(now, self._known_at)
        return found

    def _describe(self, names: set[str], age_ms: float, oldest_ms: float) -> dict[str, TopicInfo]:
        ids_age_ms = min(oldest_ms, max(age_ms, self._ids_interval_ms() * SHARED_PART))
        if ids_age_ms == age_ms:
            return self._cluster.topic_info(sorted(names), LOOKUP_TIMEOUT_S, age_ms / 1000)
        found = self._cluster.topic_info(sorted(names - {self._coordination}), LOOKUP_TIMEOUT_S, ids_age_ms / 1000)
        return found | self._cluster.topic_info([self._coordination], LOOKUP_TIMEOUT_S, age_ms / 1000)

    def _ids_interval_ms(self) -> float:
        return min(self._described * IDS_MS_PER_PARTITION, IDS_AT_LEAST_EVERY_MS)
