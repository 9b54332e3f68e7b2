"""The TCP proxy in front of a small echo server: what passes, when, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal.testing import Direction, LocalBrokerError, TcpProxy
from kafka_marshal.testing.layout import LOOPBACK


class Echo:
    """Sends back what it receives, and counts it."""

    def __init__(self) -> None:
        self.server = socket.create_server((LOOPBACK, 0))
        self.port = self.server.getsockname()[1]
        self.received = 0
        self.ends = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while chunk := connection.recv(65536):
                self.received += len(chunk)
                connection.sendall(chunk)
        self.ends += 1


def eventually(met: object, timeout_s: float = 10.0) -> None:
    assert callable(met)
    until = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy(echo.port) as proxy:
        yield proxy


def connect(proxy: TcpProxy, timeout_s: float = 10.0) -> socket.socket:
    return socket.create_connection((LOOPBACK, proxy.port), timeout_s)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        chunk = connection.recv(count - len(got))
        assert chunk, f"ended after {len(got)} of {count} bytes"
        got += chunk
    return got


def silent(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return not connection.recv(1) and False
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)


def test_forwards_much_more_than_it_holds_in_both_directions(proxy: TcpProxy) -> None:
    sent = bytes(range(256)) * 40_000  # 10 MB
    with connect(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        assert read_exactly(connection, len(sent)) == sent
        sender.join()
    assert proxy.accepted == 1
    eventually(lambda: proxy.connections == 0)


def test_passes_on_the_end_of_one_side_after_its_last_byte(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert read_exactly(connection, 10) == b"last words"
        assert connection.recv(1) == b""
    eventually(lambda: echo.ends == 1)


def test_cut_breaks_what_is_there_and_refuses_what_comes_until_restored(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert read_exactly(connection, 1) == b"a"
        proxy.cut()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with contextlib.suppress(ConnectionResetError), connect(proxy) as refused:
        assert refused.recv(1) == b""
    assert proxy.accepted == 1
    proxy.restore()
    with connect(proxy) as connection:
        connection.sendall(b"b")
        assert read_exactly(connection, 1) == b"b"


def test_cut_breaks_a_connection_that_is_on_its_way_to_the_broker(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_its_way, go_on = threading.Event(), threading.Event()
    really = asyncio.open_connection

    async def slowly(*where: Any, **options: Any) -> Any:
        on_its_way.set()
        await asyncio.get_running_loop().run_in_executor(None, go_on.wait, 10)
        return await really(*where, **options)

    monkeypatch.setattr(asyncio, "open_connection", slowly)
    with connect(proxy) as connection:
        assert on_its_way.wait(10)
        proxy.cut()
        go_on.set()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert proxy.accepted == 0


def test_cut_also_ends_connections_that_were_held_in_a_black_hole(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert read_exactly(connection, 1) == b"a"
        proxy.black_hole()
        connection.sendall(b"lost")
        proxy.cut()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    eventually(lambda: proxy.connections == 0)


def test_black_hole_holds_everything_and_restore_delivers_it(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert read_exactly(connection, 1) == b"a"
        proxy.black_hole()
        connection.sendall(b"held")
        assert silent(connection, 0.3)
        assert echo.received == 1
        proxy.restore()
        assert read_exactly(connection, 4) == b"held"


def test_a_black_hole_one_way_lets_requests_arrive_and_loses_the_answers(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as connection:
        proxy.black_hole(Direction.TO_CLIENT)
        connection.sendall(b"request")
        eventually(lambda: echo.received == 7)
        assert silent(connection, 0.2)
        proxy.restore()
        assert read_exactly(connection, 7) == b"request"


def test_delay_is_added_once_and_keeps_order(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        proxy.delay(0.3, Direction.TO_BROKER)
        began = time.monotonic()
        for letter in b"abcdef":
            connection.sendall(bytes([letter]))
            time.sleep(0.02)
        assert read_exactly(connection, 6) == b"abcdef"
        took = time.monotonic() - began
        # Each byte is late by 0.3 s; the delays run in parallel, not in sequence (that would be 1.8 s).
        assert 0.3 <= took < 1.5
        proxy.delay(0)
        began = time.monotonic()
        connection.sendall(b"x")
        assert read_exactly(connection, 1) == b"x"
        assert time.monotonic() - began < 0.3


def test_refuses_while_no_one_listens_behind_it() -> None:
    with TcpProxy() as proxy:
        with contextlib.suppress(ConnectionResetError), connect(proxy) as refused:
            assert refused.recv(1) == b""
        assert proxy.accepted == 0


def test_close_ends_connections_and_frees_the_port(echo: Echo) -> None:
    proxy = TcpProxy(echo.port)
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert read_exactly(connection, 1) == b"a"
        proxy.close()
        proxy.close()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    with pytest.raises(LocalBrokerError, match="closed"):
        proxy.cut()
    TcpProxy(echo.port, port=proxy.port).close()


def test_a_port_that_is_taken_is_said_so(echo: Echo) -> None:
    with pytest.raises(LocalBrokerError, match=f"Port {echo.port} .* taken"):
        TcpProxy(port=echo.port)


def test_a_cut_is_no_error_of_the_proxy(proxy: TcpProxy, echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    """Python 3.11's asyncio reports a cancelled connection task with a traceback."""
    with socket.create_connection((LOOPBACK, proxy.port)) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        proxy.cut()
        with contextlib.suppress(OSError):
            assert client.recv(1) == b""
    eventually(lambda: proxy.connections == 0)
    eventually(lambda: echo.ends == 1)
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
