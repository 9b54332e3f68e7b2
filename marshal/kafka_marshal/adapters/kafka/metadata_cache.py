"""What members of one process were told of topics: one look does for all of them that ask soon after.

A look makes Python objects of every partition, with the interpreter's lock in hand, and so many of them that the
collector of cycles goes through the whole process again and again: ten members of one process made it stand still for
50 ms every few seconds, with 900 partitions.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from weakref import WeakValueDictionary

from kafka_marshal.ports import TopicInfo

__all__ = ["Looks", "looks_with"]

#: What is older than this is of no use to anybody, and forgotten.
KEPT_S = 60.0


class Looks:
    """The last look at all topics, and at each that was described. Any thread may ask and tell."""

    def __init__(self) -> None:
        self._listed: tuple[float, dict[str, TopicInfo]] = (float("-inf"), {})
        #: By name: when it was described last, and how (None: there was none).
        self._described: dict[str, tuple[float, TopicInfo | None]] = {}

    def topics(self, max_age_s: float) -> dict[str, TopicInfo] | None:
        """All topics, if somebody listed them since."""
        asked_at, found = self._listed
        return dict(found) if asked_at > time.monotonic() - max_age_s else None

    def record_topics(self, found: Mapping[str, TopicInfo], asked_at: float) -> None:
        """Somebody listed the topics (monotonic seconds: from when on that was so)."""
        if asked_at > self._listed[0]:
            self._listed = (asked_at, dict(found))

    def topic_info(self, names: Iterable[str], max_age_s: float) -> dict[str, TopicInfo] | None:
        """Those of names that exist, if each was described since."""
        since = time.monotonic() - max_age_s
        described, found = self._described, {}
        for name in names:
            asked_at, info = described.get(name, (float("-inf"), None))
            if asked_at <= since:
                return None
            if info is not None:
                found[name] = info
        return found

    def record_topic_info(self, names: Iterable[str], found: Mapping[str, TopicInfo], asked_at: float) -> None:
        """Another client described these topics; those it did not find do not exist."""
        # Replaced, never changed: others may be reading it.
        described = {name: known for name, known in self._described.items() if known[0] > asked_at - KEPT_S}
        for name in names:
            if asked_at > described.get(name, (float("-inf"), None))[0]:
                described[name] = (asked_at, found.get(name))
        self._described = described


_looks: WeakValueDictionary[Hashable, Looks] = WeakValueDictionary()


def looks_with(bootstrap: str, config: Mapping[str, object]) -> Looks:
    """Those of everybody in this process who reaches the same brokers as the same user, with the same settings."""
    try:
        key = (bootstrap, frozenset((name, value) for name, value in config.items() if name != "client.id"))
    except TypeError:  # a value that can't be hashed: whether another's is the same can't be told
        return Looks()
    return _looks.setdefault(key, Looks())
