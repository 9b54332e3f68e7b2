"""`ui`: the command."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, WRONG_USE, CommandError
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import print_json_line, say, warnings_from_the_library
from kafka_marshal.extras import needs
from kafka_marshal.visible import visible

if TYPE_CHECKING:
    from types import FrameType

    import uvicorn

    from kafka_marshal.admin.stored_message import StoredMessage
    from kafka_marshal.ports import TopicPartition
    from kafka_marshal.ui.archive import Archive
    from kafka_marshal.ui.live import Live
    from kafka_marshal.ui.server import ReadMessage
    from kafka_marshal.ui.steering import Steering

__all__ = ["SWITCH_S", "ui"]

PORT: Final = 9450

#: Threads take turns so often: who asks does not wait long for the one that reads the history.
SWITCH_S: Final = 0.001

#: Threads that read get so long to see that they shall end; then the process ends without them.
JOIN_S: Final = 5.0


@command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Listen here (127.0.0.1: this machine alone).")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=PORT, help=f"And on this port ({PORT}; 0: any free one)."
)
@click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="What this server is called, too (repeatable)."
)
@click.option("--no-payloads", is_flag=True, help="Show no messages of topics: neither keys nor values.")
@click.option("--allow-steering", is_flag=True, help="Let the page pause, reposition, evict and drain.")
@click.option(
    "--dump",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="Look at a dump (see dump) instead of Kafka.",
)
@click.pass_obj
def ui(
    options: Options,
    host: str,
    port: int,
    names: tuple[str, ...],
    no_payloads: bool,
    allow_steering: bool,
    dump: Path | None,
) -> int:
    r"""A live page of the groups, and their whole history by a slider, until Ctrl-C.

    Who owns what, lag and rates, rebalances as they happen, who waits for whom; and of any moment of the log: who
    owned what, why that changed, what was rejected. The page needs nothing from elsewhere. Its address goes to
    standard output.

    It shows the message that a partition stands at, too, as the command show does, unless --no-payloads is given.

    It only shows, unless --allow-steering: then the page runs the commands release-group, evict and drain, each
    with its dry run first. It needs the whole address that is printed, with its token.

    \b
    Exit status: 0 ended by Ctrl-C; 2 wrong use, the port is taken, or the dump is none; 3 no Kafka.
    """
    needs("ui", "starlette", "uvicorn")
    if dump is not None and allow_steering:
        raise click.UsageError("--allow-steering needs Kafka: a dump can't be steered.")
    with ExitStack() as stack:
        stack.enter_context(warnings_from_the_library(options.debug))
        listener = _listen(host, port)
        stack.callback(listener.close)
        payloads = None if no_payloads or dump is not None else partial(_read_message, options)
        return _serve(stack, options, listener, [*names, host], allow_steering, dump, payloads)


def _read_message(options: Options, key: TopicPartition, offset: int) -> StoredMessage:
    from kafka_marshal.admin.stored_message import read_message
    from kafka_marshal.cli.reading import connected

    with connected(options) as cluster:
        return read_message(cluster, key, offset, options.timeout)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)  # its address is told before the server runs: who is quick waits
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
    dump: Path | None,
    payloads: ReadMessage | None,
) -> int:
    import uvicorn

    from kafka_marshal.ui.archive import Archive
    from kafka_marshal.ui.server import application
    from kafka_marshal.ui.steering import Steering

    sys.setswitchinterval(SWITCH_S)
    stop = threading.Event()
    archive = Archive(options.topic, is_live=dump is None)
    live, steering = None, None
    if dump is None:
        live = _start_live(stack, options, archive, stop)
        if allow_steering:
            steering = Steering(options)
            stack.callback(steering.close)
    stack.callback(stop.set)
    app = application(archive, live, steering, names, payloads)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, server_header=False
    )
    server = uvicorn.Server(config)
    failed: list[Exception] = []
    if dump is not None:
        _start_dump(archive, dump, stop, server, failed)
    url = _announce(options, listener, steering, payloads)
    options.if_interrupted = f"{url} is gone."
    _run(server, listener, live)
    for error in failed:
        raise error
    return DONE


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
            click.echo(f"Whoever can reach this address can see {seen}.", err=True)
    return url


def _start_live(stack: ExitStack, options: Options, archive: Archive, stop: threading.Event) -> Live:
    """Ask first whether there is such a Kafka, and such a topic: raises as `status` does."""
    from kafka_marshal.cli.reading import Log, connected
    from kafka_marshal.ui.archive import read_around_moments, read_kafka
    from kafka_marshal.ui.live import Live

    with connected(options) as cluster:
        Log(cluster, options.topic, options.timeout)
    live = Live(options, archive)
    for thread in (
        threading.Thread(target=live.run, args=(stop,), name="kafka-marshal-live", daemon=True),
        threading.Thread(target=read_kafka, args=(archive, options, stop), name="kafka-marshal-history", daemon=True),
        threading.Thread(
            target=read_around_moments, args=(archive, options, stop), name="kafka-marshal-moments", daemon=True
        ),
    ):
        thread.start()
        stack.callback(thread.join, JOIN_S)
    return live


def _start_dump(
    archive: Archive, path: Path, stop: threading.Event, server: uvicorn.Server, failed: list[Exception]
) -> None:
    from kafka_marshal.ui.archive import read_dump
    from rationalizer.dump import DumpError

    begun = threading.Event()
    archive.on_news = begun.set

    def read() -> None:
        try:
            with path.open("rb") as file:
                read_dump(archive, file, stop)
        except (DumpError, OSError) as error:
            failed.append(error)
            server.should_exit = True
        finally:
            begun.set()

    threading.Thread(target=read, name="kafka-marshal-dump", daemon=True).start()
    begun.wait()
    if archive.whole is None:  # it is none: there is nothing to open in a browser
        raise failed[0]


def _run(server: uvicorn.Server, listener: socket.socket, live: Live | None) -> None:
    """Serve until Ctrl-C or SIGTERM; both end it in order."""

    def end(number: int, frame: FrameType | None) -> None:
        server.should_exit = True
        if live is not None:
            live.end()

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            with suppress(TypeError):
                signal.signal(number, handler)


def _no_signals() -> nullcontext[None]:
    """uvicorn would raise the signal again once it has ended, and the command would be interrupted."""
    return nullcontext()
