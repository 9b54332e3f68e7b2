"""The holes of a group, as the log has them: offsets that progress has passed and that are open all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from rationalizer.routing import route_group

if TYPE_CHECKING:
    from kafka_marshal.ports import TopicPartition
    from rationalizer import World
    from rationalizer.holes import Hole


class Holding(NamedTuple):
    """A hole, and where it is."""

    cp: int
    topic: str
    partition: int
    hole: Hole

    @property
    def key(self) -> TopicPartition:
        """(topic, partition)"""
        return self.topic, self.partition


def holdings_of(worlds: Mapping[int, World], group_id: str) -> list[Holding]:
    """All holes of a group, sorted by topic, partition and offset."""
    home = route_group(group_id, len(worlds))
    marked = (world.group(group_id) for world in (worlds[home], *worlds.values()))
    group = next((each for each in marked if each is not None), None)
    if group is not None:
        found = [
            Holding(home, topic, partition, hole)
            for topic, partition, kept in group.all_progress()
            for hole in kept.progress.open
        ]
    else:
        found = [
            Holding(cp, lease.topic, lease.partition, hole)
            for cp, world in worlds.items()
            for lease in world.leases()
            if lease.group_id == group_id
            for hole in lease.progress.open
        ]
    return sorted(found, key=lambda each: (each.topic, each.partition, each.hole.first))
