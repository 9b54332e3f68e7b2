"""The names that a log knows, and which of them a mistyped name may mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rationalizer import World

#: The least similarity of a name that is offered, and the most names.
_ALIKE, _OFFERED = 0.6, 4

#: group → topic → clients that hold something of it
LogNames = dict[str, dict[str, set[str]]]


def near(name: str, known: Iterable[str]) -> str:
    """The similar known name as the end of a sentence; "" if no known name is similar. Ties are all named."""
    from difflib import SequenceMatcher

    likeness = {each: SequenceMatcher(None, each, name).ratio() for each in known}
    best = max(likeness.values(), default=0.0)
    found = [each for each in sorted(likeness) if likeness[each] == best] if best >= _ALIKE else []
    if len(found) > _OFFERED:
        found = [*found[:_OFFERED], "…"]
    return f"; did you mean {' or '.join(each if each == '…' else repr(each) for each in found)}?" if found else ""


def no_group(group: str, known: Iterable[str]) -> str:
    """A message: the log knows no such group, with the similar name."""
    return f"no group {group!r}" + (near(group, known) or ": the log knows no lease and no member of it.")


def names_of(worlds: Iterable[World]) -> LogNames:
    """All groups that have leases, are coordinated or paused."""
    found: LogNames = {}
    for world in worlds:
        for lease in world.leases():
            clients = found.setdefault(lease.group_id, {}).setdefault(lease.topic, set())
            if lease.client_id is not None:
                clients.add(lease.client_id)
        for group in world.groups():
            topics = found.setdefault(group.group_id, {})
            for topic in {*group.counts, *(topic for topic, _ in group.partitions())}:
                topics.setdefault(topic, set())
            for member in group.members.values():
                for topic in member.topics:
                    topics.setdefault(topic, set()).add(member.client_id)
        for pause in world.pauses():
            found.setdefault(pause.group_id, {})
    return found


def clients_of(known: LogNames, group: str | None) -> set[str]:
    """The clients that hold partitions, of that group if it is known, else of all."""
    chosen = [known[group]] if group in known else list(known.values())
    return {client for topics in chosen for clients in topics.values() for client in clients}
