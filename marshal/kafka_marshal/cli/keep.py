"""`topic`: how large the coordination log is, and how long it is kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import connected
from kafka_marshal.cli.failures import DONE
from kafka_marshal.cli.output import print_json, say, say_warning
from kafka_marshal.node.kept import check_keep, keep_settings
from kafka_marshal.observe.text import parse_span, span

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options

#: Written so, since 0 could mean either.
FOREVER = -1


def keep_option(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The callback of --keep: milliseconds, or FOREVER."""
    if value is None:
        return None
    if value == "forever":
        return FOREVER
    try:
        return check_keep(parse_span(value))
    except ValueError as error:
        raise click.BadParameter(f"{error}, or forever", context, parameter) from None


def kept_text(keep: int) -> str:
    """What was set, for people."""
    if keep == FOREVER:
        return "the log is kept for ever"
    return f"members remove log that is older than {span(keep)}, behind checked snapshots"


@command()
@click.option(
    "--keep",
    callback=keep_option,
    metavar="SPAN|forever",
    help="How long members keep the log: 30d, 12h (at least 1h), or forever.",
)
@click.pass_obj
def topic(options: Options, keep: int | None) -> int:
    r"""How large the coordination log is, how old, how long it is kept; with --keep, how long from now on.

    Members remove what is older by themselves, one at a time, up to a snapshot that a replay has borne out, and within
    a tenth of that time. They need the right DELETE on both topics. History before the cut is gone for log, who, dump
    and audit, but for what was archived before (kafka-marshal archive). It stands in the topic's settings
    min.compaction.lag.ms and max.compaction.lag.ms, which have no other use on it.

    \b
    Exit status: 0 done; 2 wrong use; 3 Kafka was not reachable, or forbids it.
    """
    from kafka_marshal.node.coordination_topic import check_topic
    from kafka_marshal.observe.log_size import measure

    options.if_interrupted = "It may be set or not: kafka-marshal topic says it."
    with connected(options) as cluster:
        check_topic(cluster, options.topic, options.timeout)
        if keep is not None:
            wanted = None if keep == FOREVER else keep
            cluster.alter_topic(options.topic, keep_settings(wanted), options.timeout)
        config, _ = check_topic(cluster, options.topic, options.timeout)
        size = measure(cluster, options.topic, options.timeout, time.time() * 1000, living=None)
    if options.json:
        print_json(
            {"topic": options.topic, "partitions": config.info.partitions, **size.json, "warnings": size.warnings()}
        )
    else:
        if keep is not None:
            say(f"{kept_text(keep)}.")
        say(f"{options.topic}: {size.text}.")
        for warning in size.warnings():
            say_warning(warning)
    return DONE
