"""What a group had claimed before a consumer was made: what was not there to be claimed then came later (P9).

Members that work see a topic grow. One that starts finds partitions that the group never held, and must tell those
that were added from those that nobody has got to yet: the first begin at the earliest offset, the others where
``start=`` says. A partition that is added gets the highest number; so it came later if the group has held all those
below it, the first of which it claimed long ago. Of a group that has just begun, or whose members hold as many as they
want and leave others alone, nothing of the kind can be said.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.types import Key

__all__ = ["Prior"]


class Prior:
    """The leases of a group, by topic, as they were when this was made."""

    def __init__(self, peers: Peers) -> None:
        #: By topic: how many partitions, and by CP the offset of the oldest claim that a lease still stands on.
        self._topics: dict[str, tuple[int, dict[int, int]]] = {}
        held: dict[str, set[int]] = {}
        for topic, partition in peers.claimed:
            held.setdefault(topic, set()).add(partition)
        for topic, partitions in held.items():
            if len(partitions) == max(partitions) + 1:
                self._topics[topic] = len(partitions), self._oldest(peers, topic, partitions)

    @staticmethod
    def _oldest(peers: Peers, topic: str, partitions: set[int]) -> dict[int, int]:
        oldest: dict[int, int] = {}
        for partition in partitions:
            if (lease := peers.lease((topic, partition))) is not None:
                cp = peers.cp_of((topic, partition))
                oldest[cp] = min(lease.epoch, oldest.get(cp, lease.epoch))
        return oldest

    def claims_before(self, key: Key) -> Mapping[int, int]:
        """Where a partition lies above all that were ever held: claims of those, an offset by CP. Else nothing.

        If one of them is older than it takes a member to see that a topic has grown, the partition came later.
        """
        count, oldest = self._topics.get(key[0], (0, {}))
        return oldest if 0 < count <= key[1] else {}
