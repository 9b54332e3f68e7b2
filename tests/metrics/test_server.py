"""Marshal.serve(): probes, metrics and lag over HTTP."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import urllib.error
from collections.abc import Iterator

import pytest

from kafka_marshal import ClosedError, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.metrics import MetricsServer
from kafka_marshal.metrics import measure as lag_module
from kafka_marshal.metrics.measure import MarshalMeter
from tests.client.conftest import wait_until
from tests.faults.stories import TOPIC, member
from tests.metrics.conftest import MESSAGES, PARTITIONS, get

PAGES = ("/metrics", "/livez", "/readyz", "/lag")


@pytest.fixture
def server(marshal: Marshal) -> MetricsServer:
    return marshal.serve(0)


def test_a_free_port_on_loopback(server: MetricsServer, caplog: pytest.LogCaptureFixture) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert repr(server) == f"MetricsServer({server.url!r}, open)"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("path", PAGES)
def test_get_and_head(server: MetricsServer, path: str) -> None:
    found, head = get(server, path), get(server, path, "HEAD")
    assert (found.status, head.status, head.text) == (200, 200, "")
    assert found.text
    assert head.headers["Content-Type"] == found.headers["Content-Type"]
    assert found.headers["Cache-Control"] == "no-store"
    assert "ython" not in found.headers["Server"]
    assert get(server, f"{path}?verbose=1").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: MetricsServer, method: str) -> None:
    found = get(server, "/metrics", method)
    assert (found.status, found.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/metricsx", "/metrics/", "/../etc/passwd", "/livez/x"])
def test_there_is_nothing_else(server: MetricsServer, path: str) -> None:
    assert get(server, path).status == 404


def test_ready_before_it_holds_anything_and_not_once_it_closes(cluster: MemoryCluster) -> None:
    marshal = member(cluster)
    server = marshal.serve(0)
    assert marshal.metrics().leases == 0
    assert get(server, "/readyz").text.startswith("ready; ok: 0 leases held")
    marshal._closed = True
    assert get(server, "/readyz").status == 503
    assert get(server, "/livez").status == 200
    marshal._closed = False
    marshal.close()


def test_what_ends_a_member_makes_it_not_live(marshal: Marshal, server: MetricsServer) -> None:
    marshal._driver.lock.fail(KafkaUnavailableError("nothing goes on"))
    live, ready = get(server, "/livez"), get(server, "/readyz")
    assert (live.status, ready.status) == (503, 503)
    assert "nothing goes on" in live.text


def test_it_answers_while_the_engine_s_lock_is_kept(marshal: Marshal, server: MetricsServer) -> None:
    with marshal.consumer([TOPIC]):
        wait_until(lambda: marshal.metrics().leases == PARTITIONS)
        with marshal._driver.condition:
            assert [get(server, path).status for path in ("/metrics", "/readyz")] == [200, 200]
            assert get(server, "/livez").status in (200, 503)


def test_the_lag_of_the_whole_group(cluster: MemoryCluster) -> None:
    first, second = member(cluster, "a"), member(cluster, "b")
    with first, second, first.consumer([TOPIC]) as one, second.consumer([TOPIC]):
        server = second.serve(0)
        wait_until(lambda: (first.metrics().leases, second.metrics().leases) == (1, 1))

        def lags() -> dict[int, int]:
            found = json.loads(get(server, "/lag").text)
            assert found["lag"] == sum(each["lag"] for each in found["partitions"])
            return {each["partition"]: each["lag"] for each in found["partitions"]}

        assert lags() == {0: MESSAGES, 1: MESSAGES}
        (held,) = [key.partition for key in one.assignment()]
        for _ in range(10):
            message = one.poll(10)
            assert message is not None
            one.done(message)
        wait_until(lambda: lags()[held] == MESSAGES - 10)
        assert lags()[1 - held] == MESSAGES


def test_a_group_that_begins_at_the_end_has_no_lag_before(marshal: Marshal, server: MetricsServer) -> None:
    with marshal.consumer([TOPIC], start="latest"):
        wait_until(lambda: marshal.metrics().leases == PARTITIONS)
        wait_until(lambda: json.loads(get(server, "/lag").text)["lag"] == 0)


def test_the_lag_is_not_known_while_kafka_is_away(
    marshal: Marshal, server: MetricsServer, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag_module, "ASK_TIMEOUT_S", 0.2)
    with marshal.consumer([TOPIC]):
        wait_until(lambda: marshal.metrics().leases == PARTITIONS)
        cluster.broker.set_reachable("a", False)
        found = get(server, "/lag")
        assert found.status == 503
        assert "the lag is not known" in found.text
        cluster.broker.set_reachable("a", True)
        wait_until(lambda: get(server, "/lag").status == 200)


def test_without_prometheus_client_it_says_what_to_install(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kafka_marshal.metrics.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    found = get(server, "/metrics")
    assert found.status == 501
    assert "pip install 'kafka-marshal[prometheus]'" in found.text
    assert [get(server, path).status for path in ("/livez", "/readyz", "/lag")] == [200, 200, 200]


def test_what_goes_wrong_is_logged_and_not_shown(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: MarshalMeter, *, closed: bool) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(MarshalMeter, "read", fail)
    found = get(server, "/metrics")
    assert found.status == 500
    assert "secret" not in found.text
    assert "Traceback" not in found.text
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "a secret" in str(record.exc_info[1] if record.exc_info else "")
    assert get(server, "/livez").status == 200


def test_a_silent_client_delays_no_other(server: MetricsServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
        assert get(server, "/livez").status == 200


def test_nonsense_gets_an_answer_without_a_trace(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as client:
        client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        text = client.recv(10_000)
    assert b"400" in text
    assert b"Traceback" not in text
    assert get(server, "/livez").status == 200
    assert capfd.readouterr().err == ""


def test_another_address_is_reported_in_the_log(marshal: Marshal, caplog: pytest.LogCaptureFixture) -> None:
    server = marshal.serve(0, host="0.0.0.0")
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "0.0.0.0" in record.getMessage()
    assert get(f"http://127.0.0.1:{server.port}", "/livez").status == 200


def test_a_port_in_use(marshal: Marshal, server: MetricsServer) -> None:
    with pytest.raises(ConfigurationError, match="the port is in use"):
        marshal.serve(server.port)


@pytest.mark.parametrize(("port", "host"), [(-1, "127.0.0.1"), (70_000, "127.0.0.1"), ("80", "127.0.0.1"), (0, "")])
def test_arguments_are_checked(marshal: Marshal, port: int, host: str) -> None:
    with pytest.raises((ConfigurationError, TypeError)):
        marshal.serve(port, host)


@pytest.fixture
def threads() -> Iterator[None]:
    """Check that no thread is left behind."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not [t for t in threading.enumerate() if t not in before and t.name == "kafka-marshal-http"])


@pytest.mark.usefixtures("threads")
def test_it_ends_with_its_marshal_or_before(cluster: MemoryCluster) -> None:
    marshal = member(cluster)
    first, second = marshal.serve(0), marshal.serve(0)
    first.close()
    first.close()
    with pytest.raises(urllib.error.URLError):
        get(first, "/livez")
    assert get(second, "/livez").status == 200
    marshal.close()
    with pytest.raises(urllib.error.URLError):
        get(second, "/livez")
    with pytest.raises(ClosedError):
        marshal.serve(0)


def test_the_port_of_a_parent_is_not_kept_by_its_forks(marshal: Marshal) -> None:
    server = marshal.serve(0)
    told, tell = os.pipe()
    is_there, say = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.write(say, b".")  # the forked child has finished
        os.read(told, 1)  # until it is asked to end, or the other side has ended
        os._exit(0)
    try:
        os.read(is_there, 1)
        server.close()
        again = marshal.serve(server.port)
        assert get(again, "/livez").status == 200
    finally:
        os.close(tell)
        os.waitpid(child, 0)
        for end in (told, is_there, say):
            os.close(end)
