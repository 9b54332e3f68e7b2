"""Names of topics: those that Kafka allows, the coordination topic's by default, and what belongs to it."""

from __future__ import annotations

import re
from functools import lru_cache

#: The usual coordination topic.
DEFAULT_TOPIC = "__marshal"

#: The partitions that it gets if no number is given.
DEFAULT_PARTITIONS = 8

#: The names of topics that a broker accepts, except "." and "..".
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

#: The name of a coordination topic's log of snapshots ends in this (S2).
SNAPSHOTS_SUFFIX = "_snapshots"


#: Begins the name under which the log keeps a lock (partition 0). No topic of Kafka has a colon in its name.
LOCK = "lock:"


def is_lock(topic: str) -> bool:
    """Whether a lease of this topic is a lock's."""
    return topic.startswith(LOCK)


def named(topic: str, partition: int) -> str:
    """A lease, for people: ``flights [3]``, or ``the lock 'nightly-report'``."""
    return f"the lock {topic.removeprefix(LOCK)!r}" if is_lock(topic) else f"{topic} [{partition}]"


def snapshots_topic(topic: str) -> str:
    """The log of snapshots that belongs to a coordination topic (S2): ``__marshal_snapshots`` for ``__marshal``."""
    return topic + SNAPSHOTS_SUFFIX


@lru_cache  # asked of each record of a transaction
def is_topic_name(name: str) -> bool:
    """Whether Kafka allows a topic of this name."""
    return _TOPIC_NAME.fullmatch(name) is not None and name not in (".", "..")
