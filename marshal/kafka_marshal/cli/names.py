"""Names of groups, topics and clients: unknown ones are refused, and the shell can complete them.

Reading Kafka for a completion is quick, or abandoned silently.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import click

from kafka_marshal.cli.failures import NO, CommandError
from kafka_marshal.cli.options import Options
from kafka_marshal.observe.text import LogNames, clients_of, names_of, near, no_group

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: A user has pressed Tab and waits: the time for a broker to answer (s),
_COMPLETION_S = 1.5
#: and for the whole log (s).
_LIMIT_S = 2.5


def read_names(options: Options, timeout_s: float, limit_s: float = math.inf) -> LogNames:
    """The names in the log (*blocking*). Raises MarshalError, CommandError; TimeoutError after limit_s."""
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
    """Raise CommandError if the log does not know the group, or no partition of it on that topic (*blocking*).

    effect: what it means for the data.
    """
    refuse_name(read_names(options, options.timeout), group, topic, effect)


def refuse_name(known: LogNames, group: str, topic: str | None, effect: str = "") -> None:
    """The same, with names already read."""
    if group not in known:
        raise CommandError(f"{no_group(group, known)} {effect}".rstrip(), NO)
    if topic is not None and topic not in known[group]:
        hint = near(topic, known[group]) or "."
        raise CommandError(f"group {group!r} never had a partition of topic {topic!r}{hint} {effect}".rstrip(), NO)


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
