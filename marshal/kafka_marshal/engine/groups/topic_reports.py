"""When a member reports topics (G12): it sees what its group does not know, or no longer sees what only it reported."""

from __future__ import annotations

from math import inf
from random import Random

from kafka_marshal.engine.settings import BEATS_PER_INTERVAL
from kafka_marshal.engine.subscription import Subscription
from rationalizer import Group, Member

__all__ = ["TopicReports"]

#: A report waits for up to this share of the session: another member may report the same (G12).
REPORT_SHARE = 1 / 20


class TopicReports:
    """What one member sees of the topics, compared with what its group knows. Times: own clock, ms."""

    def __init__(self, subscription: Subscription, session_timeout_ms: int, rng: Random) -> None:
        self.subscription: Subscription = subscription
        self._session_ms = session_timeout_ms
        self._rng = rng
        #: When the next report goes out; inf: there is nothing to report.
        self.due: float = inf

    def is_due(self, group: Group | None, me: Member | None, now: float) -> bool:
        """Whether to report now, after a jitter in which another member may report it. me: None if it must not.

        If the group still lacks it, the next report is due one beat later.
        """
        if group is None or me is None or not self._lacks(group, me):
            self.due = inf
        elif self.due == inf:
            self.due = now + self._rng.random() * REPORT_SHARE * self._session_ms
        elif now >= self.due:
            self.due = now + self._session_ms / BEATS_PER_INTERVAL
            return True
        return False

    def _lacks(self, group: Group, me: Member) -> bool:
        seen = dict(self.subscription.counts())
        with_us = [other for other in group.members.values() if me.pattern and other.pattern == me.pattern]
        subscribed = me.topics.union(*(other.topics for other in with_us))
        if any(
            topic not in subscribed or count > group.counts.get(topic, -1)
            for topic, count in seen.items()
            if me.pattern or topic in me.topics
        ):
            return True
        others = [other.topics for other in group.members.values() if other is not me]
        gone = me.topics - seen.keys() if me.pattern else frozenset[str]()
        return any(all(topic not in topics for topics in others) for topic in gone)
