"""`ui`: the page."""

from __future__ import annotations

import shlex
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.archive import archive_option, history_of
from kafka_marshal.cli.failures import DONE, WRONG_USE, CommandError
from kafka_marshal.cli.output import print_json_line, say, warnings_from_the_library
from kafka_marshal.errors import needs
from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from kafka_marshal.admin.stored_message import StoredMessage
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.log import Source
    from kafka_marshal.ports import TopicPartition
    from kafka_marshal.ui.kept import KeptIndex
    from kafka_marshal.ui.server import ReadMessage
    from kafka_marshal.ui.steering import Steering

PORT: Final = 9450


@command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Listen here (127.0.0.1: this machine alone).")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=PORT, help=f"And on this port ({PORT}; 0: any free one)."
)
@click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="What this server is called, too (repeatable)."
)
@click.option("--no-payloads", is_flag=True, help="Show no messages of topics: neither keys nor values.")
@click.option(
    "--allow-steering", is_flag=True, help="Let the page pause, reposition, evict, drain, redrive and discard."
)
@click.option(
    "--dump",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="Show a dump (see dump) instead of Kafka.",
)
@archive_option
@click.option(
    "--index",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep the history of the log here between starts (a file of the user's cache folder).",
)
@click.option("--no-index", is_flag=True, help="Keep it nowhere: each start reads the whole log.")
@click.pass_obj
def ui(
    options: Options,
    host: str,
    port: int,
    names: tuple[str, ...],
    no_payloads: bool,
    allow_steering: bool,
    dump: Path | None,
    place: str | None,
    index: Path | None,
    no_index: bool,
) -> int:
    r"""A live page of the groups, and their whole history by a slider, until Ctrl-C.

    Owners, lag and rates, rebalances as they happen, and waiting members; for any moment of the log: the owners, why
    they changed, and what was rejected. The page loads nothing from elsewhere. Its address goes to standard output.

    It also shows the next message of a partition, as the command show, unless --no-payloads is given.

    It only reads, unless --allow-steering: then the page runs the commands release-group, evict, drain, redrive and
    discard, each with its dry run first. That needs the whole printed address, with its token.

    \b
    Exit status: 0 ended by Ctrl-C; 2 wrong use, the port is taken, or the dump is invalid; 3 no Kafka.
    """
    needs("ui", "starlette", "uvicorn")
    if dump is not None and allow_steering:
        raise click.UsageError("--allow-steering needs Kafka: a dump can't be steered.")
    if dump is not None and place is not None:
        raise click.UsageError("--archive is read beside Kafka, and --dump instead of it: give one of them.")
    if index is not None and (no_index or dump is not None):
        raise click.UsageError(f"--index has no use beside {'--no-index' if no_index else '--dump'}.")
    from kafka_marshal.ui.kept import KeptIndex

    with ExitStack() as stack:
        stack.enter_context(warnings_from_the_library(options.debug))
        listener = _listen(host, port)
        stack.callback(listener.close)
        payloads = None if no_payloads or dump is not None else partial(_read_message, options)
        source = dump or replace(options.source(), history=history_of(place))
        kept = None if no_index else KeptIndex(index)
        return _serve(stack, options, listener, [*names, host], allow_steering, source, kept, payloads)


def _read_message(options: Options, key: TopicPartition, offset: int) -> StoredMessage:
    from kafka_marshal.admin.stored_message import read_message
    from kafka_marshal.cli.connection import connected

    with connected(options) as cluster:
        return read_message(cluster, key, offset, options.timeout)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)  # the address is printed before the server runs: early requests wait
            stack.pop_all()
    except OSError as error:
        raise CommandError(
            f"can't listen on {visible(host)} port {port}: {error.strerror or error}. Nothing was started. Name "
            "another one with --port (0: any free one).",
            WRONG_USE,
        ) from None
    return found


def _serve(
    stack: ExitStack,
    options: Options,
    listener: socket.socket,
    names: list[str],
    allow_steering: bool,
    source: Source | Path,
    kept: KeptIndex | None,
    payloads: ReadMessage | None,
) -> int:
    from kafka_marshal.ui.archive import Histories
    from kafka_marshal.ui.server import Serving, application
    from kafka_marshal.ui.steering import Steering

    serving = Serving(stack, Histories(options.topic, is_live=not isinstance(source, Path)))
    steering = None
    if not isinstance(source, Path):
        _refuse_missing(options, source)
        serving.start_live(source, kept)
        if allow_steering:
            steering = Steering([*shlex.split(options.reach()), f"--timeout={options.timeout:g}"])
            stack.callback(steering.close)
    else:
        serving.start_dump(source)
    url = _announce(options, listener, steering, payloads)
    options.if_interrupted = f"{url} is gone."
    serving.run(application(serving.archive, serving.live, steering, names, payloads), listener)
    return DONE


def _refuse_missing(options: Options, source: Source) -> None:
    """Raise as `status` does if there is no such Kafka, no such topic, or if the archive is of another (*blocking*)."""
    from kafka_marshal.cli.connection import connected

    with connected(options) as cluster:
        source.open(cluster)


def _announce(
    options: Options, listener: socket.socket, steering: Steering | None, payloads: ReadMessage | None
) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/"
    token = "" if steering is None else f"#token={steering.token}"
    if options.json:
        print_json_line({"url": url + token})
    else:
        say(url + token)
        click.echo("Open it in a browser. Ctrl-C ends it.", err=True)
        if host not in ("127.0.0.1", "::1"):
            seen = "the groups, and what they work on" + ("" if payloads is None else ", messages of it included")
            click.echo(f"Anyone who can reach this address can see {seen}.", err=True)
    return url
