"""Names of groups, topics and clients: what a mistyped one may mean, and what the shell can complete.

Reading Kafka for a completion is quick or is given up without a word.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import click

from kafka_marshal.cli.options import Options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rationalizer import World

__all__ = [
    "LogNames",
    "clients_of",
    "complete_any_topic",
    "complete_client",
    "complete_group",
    "complete_place",
    "complete_topic",
    "complete_topic_colon",
    "near",
    "no_group",
    "names_of",
    "read_names",
    "refuse_name",
    "refuse_unknown",
]

#: Somebody has pressed Tab and waits.
_COMPLETION_S = 1.5
#: And for so long at most, however long the log is.
_LIMIT_S = 2.5

#: How like a name must be to be offered, and how many at most.
_ALIKE, _OFFERED = 0.6, 4

#: group → topic → clients that hold something of it
LogNames = dict[str, dict[str, set[str]]]


def near(name: str, known: Iterable[str]) -> str:
    """The name that may be meant, as the end of a sentence; nothing where no known name is like it.

    Where several are as like it as the best, all of them: one at random would be a guess.
    """
    from difflib import SequenceMatcher

    likeness = {each: SequenceMatcher(None, each, name).ratio() for each in known}
    best = max(likeness.values(), default=0.0)
    found = [each for each in sorted(likeness) if likeness[each] == best] if best >= _ALIKE else []
    if len(found) > _OFFERED:
        found = [*found[:_OFFERED], "…"]
    return f"; did you mean {' or '.join(each if each == '…' else repr(each) for each in found)}?" if found else ""


def no_group(group: str, known: Iterable[str]) -> str:
    """That the log knows no such group, and which one may be meant."""
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


def read_names(options: Options, timeout_s: float, limit_s: float = math.inf) -> LogNames:
    """The names that the log knows (*blocking*). Raises MarshalError, CommandError, TimeoutError after limit_s."""
    from kafka_marshal.adapters.kafka import KafkaCluster
    from kafka_marshal.node.replica import Begin, Replica

    def check_time(done: int, of_all: int) -> None:
        if time.monotonic() > until:
            raise TimeoutError

    until = time.monotonic() + limit_s
    servers, properties = options.connection()
    cluster = KafkaCluster(servers, properties)
    try:
        replica = Replica(cluster, options.topic, timeout_s, Begin.SNAPSHOT)
        try:
            replica.catch_up(timeout_s, check_time)
            return names_of(replica.worlds.values())
        finally:
            replica.close()
    finally:
        cluster.close()


def refuse_unknown(options: Options, group: str, topic: str | None = None, effect: str = "") -> None:
    """Raise CommandError where the log knows no such group, or nothing of it on that topic (*blocking*).

    effect: what that means for the user's data.
    """
    refuse_name(read_names(options, options.timeout), group, topic, effect)


def refuse_name(known: LogNames, group: str, topic: str | None, effect: str = "") -> None:
    """The same, with what is known already."""
    from kafka_marshal.cli.failures import NO, CommandError

    if group not in known:
        raise CommandError(f"{no_group(group, known)} {effect}".rstrip(), NO)
    if topic is not None and topic not in known[group]:
        hint = near(topic, known[group]) or "."
        raise CommandError(f"group {group!r} never had a partition of topic {topic!r}{hint} {effect}".rstrip(), NO)


def clients_of(known: LogNames, group: str | None) -> set[str]:
    """The clients that hold something, in that group if it is one."""
    chosen = [known[group]] if group in known else list(known.values())
    return {client for topics in chosen for clients in topics.values() for client in clients}


# -- completion ----------------------------------------------------------------------------------------------


_Complete: TypeAlias = "Callable[..., list[CompletionItem]]"


def _completion(find: Callable[[LogNames, click.Context], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        logging.disable(logging.CRITICAL)
        try:
            options = context.find_object(Options) or Options()
            known = read_names(options, min(options.timeout, _COMPLETION_S), _LIMIT_S)
            names = find(known, context)
        except Exception:  # noqa: BLE001  (a line on the terminal would spoil the one that is being typed)
            return []
        return [CompletionItem(name) for name in sorted(set(names)) if name.startswith(incomplete)]

    return complete


def _topics(names: LogNames, context: click.Context) -> Iterable[str]:
    group = context.params.get("group")
    return names.get(group, {}) if group in names else {topic for topics in names.values() for topic in topics}


def _clients(names: LogNames, context: click.Context) -> Iterable[str]:
    before = context.params.get("names") or ()  # drain [GROUP] CLIENT
    return clients_of(names, context.params.get("group") or next(iter(before), None))


complete_group: _Complete = _completion(lambda names, _: names)
complete_topic: _Complete = _completion(_topics)
complete_client: _Complete = _completion(_clients)
#: TOPIC:, to be followed by a partition.
complete_place: _Complete = _completion(lambda names, context: [f"{topic}:" for topic in _topics(names, context)])


def complete_topic_colon(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """TOPIC: of any topic of the cluster, to be followed by a partition and an offset."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(f"{each.value}:") for each in complete_any_topic(context, parameter, incomplete)]


def complete_any_topic(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Any topic of the cluster but its own."""
    from click.shell_completion import CompletionItem

    logging.disable(logging.CRITICAL)
    try:
        from kafka_marshal.adapters.kafka import KafkaCluster

        options = context.find_object(Options) or Options()
        cluster = KafkaCluster(*options.connection())
        try:
            topics = cluster.topics(min(options.timeout, _COMPLETION_S))
        finally:
            cluster.close()
    except Exception:  # noqa: BLE001  (as above)
        return []
    return [
        CompletionItem(name) for name, topic in topics.items() if name.startswith(incomplete) and not topic.internal
    ]
