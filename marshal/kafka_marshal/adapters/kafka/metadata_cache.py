"""Topic metadata shared by the members of one process: one request serves all that ask soon after.

A request creates Python objects for every partition while it holds the interpreter's lock, and so many of them that the
garbage collector runs through the whole process again and again. With ten members and 900 partitions in one process
everything paused for 50 ms every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from weakref import WeakValueDictionary

from kafka_marshal.ports import TopicInfo

#: What is older than this is useless, and dropped.
KEPT_S = 60.0


class Looks:
    """The last metadata of all topics, and of each that was described. Thread-safe."""

    def __init__(self) -> None:
        self._listed: tuple[float, dict[str, TopicInfo]] = (float("-inf"), {})
        #: By name: when it was described last, and how (None: there was none).
        self._described: dict[str, tuple[float, TopicInfo | None]] = {}

    def topics(self, max_age_s: float) -> dict[str, TopicInfo] | None:
        """All topics, if they were listed since."""
        asked_at, found = self._listed
        return dict(found) if asked_at > time.monotonic() - max_age_s else None

    def record_topics(self, found: Mapping[str, TopicInfo], asked_at: float) -> None:
        """Store a list of topics (monotonic seconds: from when on it was valid)."""
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
    """Shared by all clients of this process that reach the same brokers as the same user, with the same settings."""
    try:
        key = (bootstrap, frozenset((name, value) for name, value in config.items() if name != "client.id"))
    except TypeError:  # an unhashable value: it can't be compared with another's
        return Looks()
    return _looks.setdefault(key, Looks())
