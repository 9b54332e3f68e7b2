"""A TCP proxy in front of a broker that simulates network faults.

Clients connect to the address that a broker advertises, so the broker must advertise the proxy's::

    with TcpProxy() as proxy, LocalBroker(advertised_port=proxy.port) as broker:
        proxy.target_port = broker.port
        ...                                   # clients use broker.bootstrap_servers, which is the proxy
        proxy.black_hole(Direction.TO_CLIENT) # requests arrive, answers don't
        proxy.restore()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Self

from kafka_marshal import arguments
from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.layout import LOOPBACK, free_ports
from kafka_marshal.types import T

_CHUNK = 65_536
#: Buffer of a stalled direction of one connection before its sender is blocked: about 1 MB.
_CHUNKS_HELD = 16
_ANSWER_S = 10.0


class Direction(Enum):
    """A direction of traffic."""

    TO_BROKER = "to broker"
    TO_CLIENT = "to client"


class _Way:
    """The present behaviour of one direction."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay_s = 0.0


class TcpProxy:
    """Forwards connections on a port of the loopback interface to a broker. Any thread may call any method."""

    def __init__(self, target_port: int | None = None, *, port: int | None = None) -> None:
        """Listen on port (None: a free one) at once; target_port may be set later.

        Raises:
            LocalBrokerError: port is taken, or no free one was found.
        """
        for name, value in (("target_port", target_port), ("port", port)):
            if value is not None:
                arguments.a_whole(name, value, 1, arguments.MAX_PORT)
        #: The broker's port on the loopback interface. Connections made before it is set are refused.
        self.target_port = target_port
        listener = _listen(port)
        #: The proxy's port.
        self.port: int = listener.getsockname()[1]
        self._cut = False
        self._ways = {direction: _Way() for direction in Direction}
        self._connections: set[asyncio.Task[Any]] = set()
        self._accepted = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"tcp-proxy-{self.port}", daemon=True)
        self._thread.start()
        self._server = self._ask(asyncio.start_server(self._accept, sock=listener, limit=_CHUNK))

    def close(self) -> None:
        """Drop all connections and stop listening."""
        if not self._thread.is_alive():
            return
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def accepted(self) -> int:
        """Number of accepted connections (without those refused while cut)."""
        return self._accepted

    @property
    def connections(self) -> int:
        """Number of forwarded connections now."""
        return len(self._connections)

    def cut(self) -> None:
        """Break all connections now, and refuse new ones until :meth:`restore`."""
        self._ask(self._set(self._do_cut))

    def black_hole(self, direction: Direction | None = None) -> None:
        """Block traffic (one way or both) without breaking connections, like a network partition.

        Data sent meanwhile arrives after :meth:`restore`, like TCP's retransmissions.
        """

        def apply() -> None:
            for way in self._chosen(direction):
                way.open.clear()

        self._ask(self._set(apply))

    def delay(self, seconds: float, direction: Direction | None = None) -> None:
        """Delay all traffic from now on (one way or both), in order. 0 ends it."""

        def apply() -> None:
            for way in self._chosen(direction):
                way.delay_s = seconds

        self._ask(self._set(apply))

    def restore(self) -> None:
        """End all faults."""

        def apply() -> None:
            self._cut = False
            for way in self._ways.values():
                way.delay_s = 0.0
                way.open.set()

        self._ask(self._set(apply))

    def _chosen(self, direction: Direction | None) -> list[_Way]:
        return list(self._ways.values()) if direction is None else [self._ways[direction]]

    def _do_cut(self) -> None:
        self._cut = True
        for connection in self._connections:
            connection.cancel()

    async def _set(self, change: Callable[[], object]) -> None:
        change()

    def _ask(self, what: Coroutine[Any, Any, T]) -> T:
        """Run on the proxy's thread and wait."""
        if not self._thread.is_alive():
            what.close()
            raise LocalBrokerError("The proxy is closed. Make a new one.")
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_ANSWER_S)

    def _is_cut(self) -> bool:
        return self._cut

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut() or self.target_port is None:
            writer.transport.abort()
            return
        try:
            broker_reader, broker_writer = await asyncio.open_connection(LOOPBACK, self.target_port, limit=_CHUNK)
        except OSError:
            writer.transport.abort()
            return
        if self._is_cut():  # cut meanwhile, when this connection did not exist yet
            broker_writer.transport.abort()
            writer.transport.abort()
            return
        connection = asyncio.current_task()
        assert connection is not None
        self._accepted += 1
        self._connections.add(connection)
        try:
            await self._forward(reader, writer, broker_reader, broker_writer)
        except asyncio.CancelledError:
            pass  # by cut() or close(). Python 3.11 would report a cancelled connection as an error
        finally:
            self._connections.discard(connection)
            for each in (writer, broker_writer):
                each.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        broker_reader: asyncio.StreamReader,
        broker_writer: asyncio.StreamWriter,
    ) -> None:
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(_pump(reader, broker_writer, self._ways[Direction.TO_BROKER]))
                pumps.create_task(_pump(broker_reader, writer, self._ways[Direction.TO_CLIENT]))
        except* OSError:
            pass  # one side broke the connection: break the other one, too

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: _Way) -> None:
    """Forward one direction of one connection up to and including its end."""
    loop = asyncio.get_running_loop()
    held: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(_CHUNKS_HELD)

    async def read() -> None:
        chunk: bytes | OSError = b"-"
        while isinstance(chunk, bytes) and chunk:
            try:
                chunk = await source.read(_CHUNK)
            except OSError as error:
                chunk = error
            await held.put((loop.time() + way.delay_s, chunk))

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        while True:
            due, chunk = await held.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await way.open.wait()
            if isinstance(chunk, OSError):
                raise chunk
            if not chunk:
                break
            sink.write(chunk)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


def _listen(port: int | None) -> socket.socket:
    for _attempt in range(5):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind((LOOPBACK, port or free_ports(1)[0]))
            return listener
        listener.close()
        if port is not None:
            break
    raise LocalBrokerError(f"Port {port} of {LOOPBACK} is taken: the proxy can't listen there. Name another port.")
