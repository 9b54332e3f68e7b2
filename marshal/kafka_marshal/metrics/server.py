"""``/metrics``, ``/livez``, ``/readyz`` and ``/lag`` over HTTP (:meth:`Marshal.serve`).

Separate threads answer without the engine's lock: neither a hung handler nor a held lock delays a probe. They only
read; errors are logged, and not shown to clients.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import socket
import weakref
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.metrics.measure import GroupLag, MarshalMeter
from kafka_marshal.metrics.rows import Metrics

#: Clients that send or read nothing for this long (s) are disconnected.
CLIENT_TIMEOUT_S = 5.0

#: The most concurrent requests: further connections are closed at once.
MOST_AT_ONCE = 32

#: How long ``close`` waits for the thread that accepts connections (s).
END_S = 1.0

_TEXT = "text/plain; charset=utf-8"

NO_EXPORTER = (
    "There are no metrics here: the package prometheus-client is not installed. Install it with: "
    "pip install 'kafka-marshal[prometheus]'\n"
)


class Response(NamedTuple):
    """An HTTP answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT


class MetricsServer:
    """Answers over HTTP for one Marshal, until ``close()``, of this server or the Marshal.

    Attributes:
        port: the one that it listens on.
        url: ``http://HOST:PORT``.
    """

    def __init__(self, meter: MarshalMeter, port: int, host: str, is_closed: Callable[[], bool]) -> None:
        """is_closed: whether the Marshal was closed, or closes. Raises ConfigurationError for an address in use."""
        self._meter = meter
        self._lag = GroupLag(meter)
        self._is_closed = is_closed
        self._is_over = False
        self._http = _listening(host, port, self._answer)
        self.port: int = self._http.server_address[1]
        self.url: str = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        _SERVERS.add(self)
        if not _is_loopback(host):
            log(
                logging.WARNING,
                "serving_openly",
                "metrics and probes of %s are served on %s: anybody who reaches this address can read the names of "
                "topics, groups and members, and their lag. Nothing can be changed there. Keep it inside your network",
                meter.driver.engine.settings.client_id,
                self.url,
            )
        self._thread = meter.driver.cluster.runtime.start(self._serve, "kafka-marshal-http")

    def __repr__(self) -> str:
        return f"MetricsServer({self.url!r}, {'closed' if self._is_over else 'open'})"

    def _serve(self) -> None:
        """Accept connections until the end (its own thread)."""
        while not self._is_over:
            self._http.handle_request()

    def close(self) -> None:
        """Stop answering. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(OSError), socket.create_connection(_reachable(self._http), END_S):
            pass  # wakes the thread that waits for a connection
        if not self._meter.driver.cluster.runtime.is_current(self._thread):
            self._thread.join(END_S)
        self._http.server_close()

    def abandon(self) -> None:
        """In a forked child: the port is the parent's."""
        self._is_over = True
        self._http.socket.close()

    # Answers, on their own threads.

    def _answer(self, path: str, accept: str) -> Response | None:
        """None: there is no such page."""
        if path == "/livez":
            return self._live()
        if path == "/readyz":
            return self._ready()
        if path == "/metrics":
            return self._metrics(accept)
        if path == "/lag":
            return self._group_lag()
        return None

    def metrics(self) -> Metrics:
        """The Marshal's metrics."""
        return self._meter.read(closed=self._is_closed())

    def _live(self) -> Response:
        health = self._meter.health(closed=self._is_closed())
        status = HTTPStatus.SERVICE_UNAVAILABLE if health.needs_restart else HTTPStatus.OK
        return Response(status, f"{health}\n".encode())

    def _ready(self) -> Response:
        health = self._meter.health(closed=self._is_closed())
        status = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(status, f"{'ready' if health.ready else 'not ready'}; {health}\n".encode())

    def _metrics(self, accept: str) -> Response:
        try:
            from kafka_marshal.metrics.prometheus import exposition
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "prometheus_client":
                raise
            return Response(HTTPStatus.NOT_IMPLEMENTED, NO_EXPORTER.encode())
        return Response(HTTPStatus.OK, *exposition(self, accept))

    def _group_lag(self) -> Response:
        try:
            found = self._lag.read(closed=self._is_closed())
        except MarshalError as error:
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, f"the lag is not known: {error}\n".encode())
        return Response(HTTPStatus.OK, f"{json.dumps(found)}\n".encode(), "application/json")


class _Http(ThreadingHTTPServer):
    """A server with a bounded number of daemon threads, silent on stderr."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], family: socket.AddressFamily, answer: Callable[[str, str], Response | None]
    ) -> None:
        self.address_family = family
        self.answer = answer
        self._free = BoundedSemaphore(MOST_AT_ONCE)
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        """Bind without a look-up of this machine's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, unless there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections: there is no client to answer."""


class _Request(BaseHTTPRequestHandler):
    """One connection."""

    server: _Http
    timeout = CLIENT_TIMEOUT_S

    def version_string(self) -> str:
        """The server's header, without the version of Python."""
        return "kafka-marshal"

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        try:
            answer = self.server.answer(path, self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - the next request is to be answered, too
            log(logging.ERROR, "http_failed", "the request for %s was not answered", path, error=error)
            answer = Response(
                HTTPStatus.INTERNAL_SERVER_ERROR, b"this could not be answered; the worker's log says why\n"
            )
        if answer is None:
            text = "there are: /metrics, /livez, /readyz, /lag\n"
            answer = Response(HTTPStatus.NOT_FOUND, text.encode())
        self._send(answer)

    def _refuse(self) -> None:
        self._send(Response(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n"), ("Allow", "GET, HEAD"))

    def _send(self, answer: Response, *headers: tuple[str, str]) -> None:
        self.send_response(answer.status)
        for name, value in (
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log no requests: there is a probe every few seconds."""


for _method in ("GET", "HEAD"):
    setattr(_Request, f"do_{_method}", _Request._get)
for _method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
    setattr(_Request, f"do_{_method}", _Request._refuse)


class Server:
    """Answers over HTTP with a function of (path, Accept) in threads, until ``close()``; url: where."""

    def __init__(self, port: int, host: str, answer: Callable[[str, str], Response | None], if_refused: str) -> None:
        self._http = _listening(host, port, answer, if_refused)
        self.url: str = f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_address[1]}"
        Thread(target=self._http.serve_forever, name="kafka-marshal-http", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()


def checked_address(port: object, host: object) -> tuple[int, str]:
    """Raises ConfigurationError or TypeError for invalid addresses."""
    return arguments.a_whole("port", port, 0, 65_535), arguments.text("host", host)


def _listening(
    host: str,
    port: int,
    answer: Callable[[str, str], Response | None],
    if_refused: str = "The Marshal works on, without probes and metrics",
) -> _Http:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return _Http((str(address[0]), int(address[1])), family, answer)
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
        raise ConfigurationError(
            f"serve(port={port}, host={host!r}): can't listen there: {why}. {if_refused}. "
            "Choose another port, or port=0 for a free one"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(http: _Http) -> tuple[str, int]:
    """The address at which this process reaches its server."""
    host, port = http.server_address[:2]
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not what is listened on
    return anywhere.get(str(host), str(host)), int(port)


_SERVERS: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _abandon_all() -> None:
    for server in list(_SERVERS):
        server.abandon()


os.register_at_fork(after_in_child=_abandon_all)
