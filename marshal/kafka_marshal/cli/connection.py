"""The cluster that the options of a command name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.output import progress, warnings_from_the_library
from kafka_marshal.errors import MarshalError, TopicMissingError
from kafka_marshal.observe.text import near, span
from kafka_marshal.secret import visible
from kafka_marshal.topic_names import snapshots_topic

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin, Pause
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.log_size import Sizes
    from kafka_marshal.observe.view import LiveView
    from kafka_marshal.ports import Cluster


@contextmanager
def connected(options: Options) -> Iterator[Cluster]:
    """A client of the cluster that the options name. It does not connect yet."""
    servers, properties = options.connection()
    from kafka_marshal.adapters.kafka import KafkaCluster

    with warnings_from_the_library(options.debug):
        cluster = KafkaCluster(servers, properties)
        try:
            yield cluster
        except TopicMissingError as error:
            name_the_topic(error, cluster, options)
            raise
        finally:
            cluster.close()


def name_the_topic(error: TopicMissingError, cluster: Cluster, options: Options) -> None:
    """Add the similar topic name: a second coordination topic would assign the work twice."""
    try:
        topics = cluster.topics(options.timeout)
    except MarshalError:
        return
    hint = near(options.topic, topics.keys() - {snapshots_topic(name) for name in topics})
    if hint:
        error.add_note(f"There is a topic of a similar name{hint}")


@contextmanager
def view_of(cluster: Cluster, options: Options, window_ms: int = 30_000) -> Iterator[LiveView]:
    """What the log says now, to be caught up (*blocking*)."""
    from kafka_marshal.observe.view import LiveView

    view = LiveView(cluster, options.topic, options.timeout, window_ms)
    try:
        yield view
    finally:
        view.replica.close()


def catch_up(view: LiveView) -> None:
    """Read the log up to its end, with a bar of progress (*blocking*)."""
    with progress("reading the log") as progressed:
        view.catch_up(progressed)


@contextmanager
def viewing(options: Options) -> Iterator[LiveView]:
    """What the log says, to be caught up (*blocking*)."""
    with connected(options) as cluster, view_of(cluster, options) as view:
        yield view


def sizes_of(cluster: Cluster) -> Sizes:
    """How large the log is, and how long it is kept."""
    from kafka_marshal.observe.log_size import Sizes

    return Sizes(cluster)


@contextmanager
def admin_of(options: Options, client_id: str | None = None) -> Iterator[Admin]:
    """An Admin for the cluster and the topic that the options name."""
    from kafka_marshal.admin import Admin

    servers, properties = options.connection()
    with connected(options) as cluster:
        cluster.topic_info([options.topic], options.timeout)  # fails within --timeout if no broker answers
    try:
        with (
            warnings_from_the_library(options.debug),
            Admin(servers, topic=options.topic, client_id=client_id, config=properties) as admin,
        ):
            yield admin
    except TopicMissingError as error:
        with connected(options) as cluster:
            name_the_topic(error, cluster, options)
        raise


@contextmanager
def paused(admin: Admin, group: str, expires_ms: int, options: Options) -> Iterator[Pause]:
    """The group paused; the pause ends with the block, and if that fails, the user is warned."""
    words = ["kafka-marshal", "release-group", group, "--resume", "--client-id", admin.client_id]
    end_it = shlex.join(words) + options.reach()
    not_ended = f"The group may still be paused; that ends by itself within {span(expires_ms)}. To end it now: {end_it}"
    options.if_interrupted = not_ended
    pause = admin.pause(group, expires_ms / 1000).start()
    options.if_interrupted = "Nothing was moved, and the group is resumed."
    try:
        yield pause
    except BaseException as error:
        before, options.if_interrupted = options.if_interrupted, not_ended
        try:
            pause.resume()
        except MarshalError as second:
            error.add_note(str(second))
        options.if_interrupted = before
        raise
    options.if_interrupted = not_ended
    pause.resume()


def id_argument(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an argument that is not UTF-8: ids in the log are."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("is not UTF-8 text", context, parameter) from None
    return value


def note(options: Options, text: str) -> None:
    """A progress line on standard error; standard output is for the result. Not with --json."""
    if not options.json:
        click.echo(visible(text), err=True)
