"""A native broker: start, faults, and every kind of end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing import (
    BrokerDiedError,
    Direction,
    LocalBroker,
    LocalBrokerError,
    PortTakenError,
    TcpProxy,
    broker,
    layout,
    open_kafka,
)
from kafka_marshal.testing.jars import broker_jars, find_java
from kafka_marshal.testing.layout import LOOPBACK, free_ports
from tests.broker.helpers import alive, children_of, consume, eventually, produce, run_python
from tests.secured import broker_properties, login

pytestmark = [pytest.mark.broker, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

STARTS_AND_WAITS = """
import sys
from kafka_marshal.testing import LocalBroker
broker = LocalBroker().start()
{then}
print(broker.pid_of(1), broker.folder, flush=True)
{last}
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def local() -> Iterator[LocalBroker]:
    with LocalBroker() as local:
        yield local


def make_topic(kafka: LocalBroker, name: str) -> str:
    Probe(kafka.bootstrap_servers, kafka.client_config).create_topic(name, 1, 1, {})
    return name


def test_classes_that_were_made_ready_are_used(local: LocalBroker) -> None:
    ready = layout.ready_classes(find_java(), broker_jars())
    if not ready.exists():
        pytest.skip("python -m kafka_marshal.testing (make setup) makes them ready")
    assert str(ready) in Path(f"/proc/{local.pid_of(1)}/maps").read_text()


def test_one_that_never_answers_is_ended_and_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare: Any = broker._format

    def prepare_however_long_it_takes(*given: Any) -> None:
        prepare(*given[:-1], 60.0)

    monkeypatch.setattr(broker, "_format", prepare_however_long_it_takes)
    monkeypatch.setattr(broker, "_knows", lambda probe, wanted: False)
    hanging = LocalBroker(start_timeout_s=8.0)
    with pytest.raises(BrokerDiedError, match=r"did not answer on .* within 8 s") as found:
        hanging.start()
    assert "\tat kafka." in str(found.value)
    with pytest.raises(LocalBrokerError):
        hanging.pid_of(1)


def test_a_folder_that_is_not_prepared_in_time_is_reported_as_such() -> None:
    hanging = LocalBroker(start_timeout_s=0.01)
    with pytest.raises(BrokerDiedError, match=r"did not prepare its data folder within 0\.01 s\. Nothing was started"):
        hanging.start()
    with pytest.raises(LocalBrokerError):
        hanging.pid_of(1)


def test_data_survives_kill_9_and_an_orderly_restart_on_the_same_port(local: LocalBroker) -> None:
    topic, address, first_pid = make_topic(local, "survives"), local.bootstrap_servers, local.pid_of(1)
    produce(local, topic, b"before")
    local.kill()
    assert not alive(first_pid)
    local.restart()
    assert local.pid_of(1) != first_pid
    produce(local, topic, b"between")
    local.restart()
    assert local.bootstrap_servers == address
    assert consume(local, topic, 2) == [b"before", b"between"]


def test_a_paused_broker_says_nothing_and_continues_when_resumed(local: LocalBroker) -> None:
    probe = Probe(local.bootstrap_servers)
    assert probe.broker_ids(10) == {1}
    local.pause()
    try:
        eventually(lambda: Path(f"/proc/{local.pid_of(1)}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        assert probe.broker_ids(0.5) is None
        with socket.create_connection((LOOPBACK, local.port), 5):
            pass  # the system still accepts connections for it
    finally:
        local.resume()
    assert probe.broker_ids(30) == {1}


def test_a_broker_that_ends_by_itself_is_reported_with_what_it_said(local: LocalBroker) -> None:
    local.check()
    os.kill(local.pid_of(1), signal.SIGKILL)
    try:

        def died() -> bool:
            try:
                local.check()
            except BrokerDiedError as error:
                assert "signal 9" in str(error)
                assert "QuorumController" in str(error), "its log is told"
                return True
            return False

        eventually(died)
    finally:
        local.restart()
    local.check()


def test_its_port_lies_below_those_of_outgoing_connections(local: LocalBroker) -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert local.port < first_ephemeral
    assert local.bootstrap_servers == f"{LOOPBACK}:{local.port}"


def test_a_port_in_use_is_said_so_before_anything_is_started(local: LocalBroker) -> None:
    with pytest.raises(PortTakenError, match=rf"Port {local.port} .* in use .* Nothing was started"):
        LocalBroker(port=local.port).start()


def test_a_forked_child_may_use_but_not_end_it(local: LocalBroker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: fork while threads run
        child = os.fork()
    if child == 0:
        # Nothing here may run pytest's own exit a second time.
        with contextlib.suppress(BaseException):
            local.stop()
            try:
                local.kill()
            except LocalBrokerError:
                os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert Probe(local.bootstrap_servers).broker_ids(10) == {1}


@pytest.mark.campaign
def test_answers_are_lost_behind_a_proxy_but_requests_are_done() -> None:
    with TcpProxy() as proxy, LocalBroker(advertised_port=proxy.port) as local:
        proxy.target_port = local.port
        assert local.bootstrap_servers == f"{LOOPBACK}:{proxy.port}"
        topic = make_topic(local, "proxied")
        produce(local, topic, b"1")
        assert proxy.accepted >= 1
        seen = proxy.accepted
        proxy.cut()
        assert Probe(local.bootstrap_servers).broker_ids(0.5) is None
        assert proxy.accepted == seen
        proxy.restore()
        produce(local, topic, b"2")
        probe = Probe(local.bootstrap_servers)
        assert probe.broker_ids(10) == {1}
        proxy.black_hole(Direction.TO_CLIENT)
        assert probe.broker_ids(0.5) is None
        proxy.restore()
        assert consume(local, topic, 2) == [b"1", b"2"]


@pytest.mark.campaign
def test_users_and_acls_by_the_users_settings() -> None:
    with LocalBroker(properties=broker_properties(), client_config=login("root")) as local:
        topic = make_topic(local, "guarded")
        produce(local, topic, b"x")
        stranger = Probe(local.bootstrap_servers, login("root", "wrong"))
        assert stranger.broker_ids(1.0) is None


@pytest.mark.campaign
def test_a_port_lost_to_a_faster_program_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server((LOOPBACK, 0))
    asked: list[int] = []

    def sometimes_too_late(count: int) -> list[int]:
        asked.append(count)
        found = free_ports(count)
        return [taken.getsockname()[1], *found[1:]] if len(asked) == 1 else found

    monkeypatch.setattr(layout, "free_ports", sometimes_too_late)
    with taken, LocalBroker() as local:
        assert len(asked) == 2
        assert local.port != taken.getsockname()[1]
        assert Probe(local.bootstrap_servers).broker_ids(10) == {1}


def test_a_setting_that_kafka_refuses_is_reported_in_kafkas_words_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests start brokers meanwhile
    folders: list[str] = []

    def noted(prefix: str) -> str:
        folders.append(mkdtemp(prefix=prefix))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    local = LocalBroker(properties={"log.segment.bytes": "many"})
    with pytest.raises(BrokerDiedError, match=r"log\.segment\.bytes") as caught:
        local.start()
    assert "Nothing was started" in str(caught.value)
    assert [Path(folder).parent for folder in folders] == [tmp_path]
    assert not list(tmp_path.glob(f"{layout.FOLDER_PREFIX}*"))


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("", id="alone"),
        # A forked child holds a copy of the pipe that shows the supervisor its parent's end.
        pytest.param(
            "import os, time\nif os.fork() == 0: time.sleep(30); os._exit(0)",
            id="with-a-forked-child",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_kill_9_of_the_parent_ends_the_broker_and_removes_its_data(then: str) -> None:
    parent = run_python(STARTS_AND_WAITS.format(then=then, last=""))
    assert parent.stdout is not None
    pid, _, folder = parent.stdout.readline().strip().partition(" ")
    others = [child for child in children_of(parent.pid) if int(pid) not in children_of(child)]
    assert alive(int(pid))
    assert Path(folder).is_dir()
    parent.kill()
    parent.wait()
    try:
        eventually(lambda: not alive(int(pid)), what="the broker's end")
        eventually(lambda: not Path(folder).exists(), what="removal of its data")
    finally:
        for child in others:
            os.kill(child, signal.SIGKILL)
        assert parent.stdin is not None
        parent.stdout.close()
        parent.stdin.close()
    assert len(others) == bool(then)


@pytest.mark.campaign
def test_an_unhandled_exception_and_an_ordinary_exit_end_it_too() -> None:
    for last, status in (("sys.exit(0)", 0), ("sys.stderr.close(); raise RuntimeError", 1)):
        parent = run_python(STARTS_AND_WAITS.format(then="", last=last))
        output, _ = parent.communicate(timeout=180)
        pid, _, folder = output.strip().partition(" ")
        assert parent.returncode == status
        assert not alive(int(pid))
        assert not Path(folder).exists()


def test_a_killed_supervisor_takes_the_broker_with_it_and_the_next_start_tidies_up() -> None:
    parent = run_python(STARTS_AND_WAITS.format(then="", last=""))
    assert parent.stdout is not None
    pid, _, folder = parent.stdout.readline().strip().partition(" ")
    layout.sweep()
    assert Path(folder).is_dir(), "in use, and young"
    [supervisor] = children_of(parent.pid)
    old = time.time() - 3600
    os.utime(folder, (old, old))
    layout.sweep()
    assert Path(folder).is_dir(), "in use"
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not alive(int(pid)), what="the broker's end")
    parent.communicate(input="", timeout=180)
    assert Path(folder).is_dir(), "nobody was left to remove it"
    os.utime(folder, (old, old))
    layout.sweep()
    assert not Path(folder).exists()


@pytest.mark.campaign
def test_keep_keeps_the_data_also_after_kill_9_and_continues_with_it(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    program = f"""
import sys
from kafka_marshal.testing import LocalBroker
broker = LocalBroker(keep={str(keep)!r}).start()
print(broker.pid_of(1), flush=True)
sys.stdin.read()
"""
    parent = run_python(program)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    with pytest.raises(LocalBrokerError, match="another broker is using it"):
        LocalBroker(keep=keep).start()
    parent.kill()
    parent.communicate()
    eventually(lambda: not alive(pid), what="the broker's end")
    with LocalBroker(keep=keep) as local:
        topic = make_topic(local, "kept")
        produce(local, topic, b"x")
    assert keep.is_dir()
    with LocalBroker(keep=keep) as local:
        assert consume(local, "kept", 1) == [b"x"]
    with pytest.raises(LocalBrokerError, match=r"cluster of 1 broker\(s\), not 3"):
        open_kafka(3, keep=keep)
    assert (keep / "broker-1" / "data" / "kept-0").is_dir()


def test_what_is_not_running_says_so() -> None:
    local = LocalBroker()
    for use in (local.kill, local.pause, local.restart, local.check, local.log_tail):
        with pytest.raises(LocalBrokerError, match=r"does not run"):
            use()
    with pytest.raises(LocalBrokerError, match="call start"):
        _ = local.bootstrap_servers
    local.stop()
