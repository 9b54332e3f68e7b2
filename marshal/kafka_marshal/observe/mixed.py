"""Members of one group that do not fit together: two groups of one name, other settings, another mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_marshal.observe.text import span

if TYPE_CHECKING:
    from kafka_marshal.observe.rows import GroupRow

#: The most members that a text names.
_LISTED = 3


def mixed_texts(group: GroupRow) -> list[str]:
    """What differs among the group's living members, in words; a rolling deploy may be why."""
    living = [member for member in group.members if member.state != "gone"]
    intervals: dict[int, list[str]] = {}
    sides: list[tuple[set[str], set[str]]] = []
    for member in living:
        intervals.setdefault(member.heartbeat_interval_ms, []).append(member.client)
        clients, topics = {member.client}, {row.topic for row in member.leases}
        for side in [each for each in sides if each[1] & topics]:
            sides.remove(side)
            clients, topics = clients | side[0], topics | side[1]
        sides.append((clients, topics))
    found = []
    if len(intervals) > 1:
        each = "; ".join(f"{span(ms)}: {_some(names)}" for ms, names in sorted(intervals.items()))
        found.append(f"members have different heartbeat intervals ({each}): a longer one delays take-overs")
    if len(sides) > 1 and all(len(clients) > 1 for clients, _ in sides):
        each = "; ".join(f"{_some(topics)}: {_some(clients)}" for clients, topics in sides)
        found.append(f"no member holds partitions of all topics ({each}): two groups of one name?")
    for topic in sorted({row.topic for row in group.leases if row.sharers}):
        whole = {row.client for row in group.leases if row.topic == topic and row.held and not row.sharers}
        if names := {name for name in whole if name is not None}:
            found.append(f"{topic}: some partitions are shared, and {_some(names)} holds others whole: another mode?")
    return [f"{group.group}: {text}" for text in found]


def _some(names: set[str] | list[str]) -> str:
    return ", ".join(sorted(names)[:_LISTED]) + (", …" if len(names) > _LISTED else "")
