"""Where a Kafka comes from, what the command runs, and the fixtures in a user's project."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.testing import (
    ExternalKafka,
    LocalBrokerError,
    RunningKafka,
    layout,
    open_kafka,
    run_broker,
    select_broker,
)
from kafka_marshal.testing.plugin import pytest_report_header
from tests.broker.helpers import alive, eventually, run_python


def test_the_kafka_that_is_named_is_used_but_never_controlled(
    kafka_broker: RunningKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", kafka_broker.bootstrap_servers)
    kafka = open_kafka()
    assert isinstance(kafka, ExternalKafka)
    assert (kafka.bootstrap_servers, kafka.broker_ids) == (kafka_broker.bootstrap_servers, (1,))
    for control in (kafka.kill, kafka.pause, kafka.resume, kafka.restart):
        with pytest.raises(LocalBrokerError, match="is not ours"):
            control()
    kafka.stop()
    kafka.check()
    kafka_broker.check()


def test_a_named_kafka_that_does_not_answer_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    [closed] = layout.free_ports(1)
    with pytest.raises(
        KafkaUnavailableError, match=f"KAFKA_MARSHAL_TEST_BOOTSTRAP=127.0.0.1:{closed} does not answer within 0 s"
    ):
        ExternalKafka(f"127.0.0.1:{closed}", timeout_s=0.3)


def test_an_invalid_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", raising=False)
    monkeypatch.setenv("KAFKA_MARSHAL_BROKER", "dokcer")
    with pytest.raises(ConfigurationError, match="neither 'native' nor 'container'"):
        open_kafka()


def test_containers_come_before_native_brokers_and_failing_they_are_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    class Container:
        def __init__(self, brokers: int, **_options: object) -> None:
            assert brokers == 3

        def start(self) -> Container:
            started.append("container")
            if len(started) > 2:
                raise LocalBrokerError("no such image.")
            return self

    class Native:
        def __init__(self, brokers: int, **_options: object) -> None:
            assert brokers == 3

        def start(self) -> Native:
            started.append("native")
            return self

    monkeypatch.delenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", raising=False)
    monkeypatch.delenv("KAFKA_MARSHAL_BROKER", raising=False)
    monkeypatch.setattr(select_broker, "engine_answers", lambda: True)
    monkeypatch.setattr(select_broker, "ContainerCluster", Container)
    monkeypatch.setattr("kafka_marshal.testing.select_broker.LocalCluster", Native)
    assert isinstance(open_kafka(3), Container)
    assert isinstance(open_kafka(3, keep="/somewhere"), Native), "a container can't keep its data in a folder"
    assert isinstance(open_kafka(3), Native)
    assert "no such image. A native broker is started instead." in capsys.readouterr().err
    assert started == ["container", "native", "container", "native"]
    monkeypatch.setenv("KAFKA_MARSHAL_BROKER", "native")
    open_kafka(3)
    assert started[4:] == ["native"]
    monkeypatch.setenv("KAFKA_MARSHAL_BROKER", "container")
    monkeypatch.setattr(select_broker, "engine_answers", lambda: False)
    with pytest.raises(LocalBrokerError, match="no such image"):
        open_kafka(3)


def test_the_operators_kafka_is_not_used_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        def __init__(self, _brokers: int, **_options: object) -> None: ...

        def start(self) -> Native:
            return self

    monkeypatch.delenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", raising=False)
    monkeypatch.setenv("KAFKA_MARSHAL_BOOTSTRAP", "production:9092")
    monkeypatch.setenv("KAFKA_MARSHAL_BROKER", "native")
    monkeypatch.setattr("kafka_marshal.testing.select_broker.LocalCluster", Native)
    assert isinstance(open_kafka(), Native)
    header = pytest_report_header()
    assert header is not None
    assert "leave production:9092 alone" in header


#: The command and the demo start their own Kafka, whatever tests use.
NOBODY = "127.0.0.1:1"

COMMAND = """
from pathlib import Path
from kafka_marshal.testing import run_broker
def announce(kafka):
    print(kafka.bootstrap_servers, kafka.pid_of(1), kafka.folder, flush=True)
run_broker({port}, 1, {keep!r} and Path({keep!r}), announce)
print("ended in order", flush=True)
"""


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_runs_until_it_is_asked_to_end(number: signal.Signals, tmp_path: Path) -> None:
    [port] = layout.free_ports(1)
    keep = str(tmp_path / "kept") if number == signal.SIGTERM else None
    process = run_python(
        COMMAND.format(port=port, keep=keep), KAFKA_MARSHAL_BROKER="native", KAFKA_MARSHAL_TEST_BOOTSTRAP=NOBODY
    )
    assert process.stdout is not None
    address, pid, folder = process.stdout.readline().split()
    assert address == f"127.0.0.1:{port}"
    assert alive(int(pid))
    process.send_signal(number)
    output, _ = process.communicate(timeout=180)
    assert (process.returncode, output) == (0, "ended in order\n")
    assert not alive(int(pid))
    assert Path(folder).exists() == (keep is not None)
    assert layout.is_free(port)


@pytest.mark.broker
@pytest.mark.campaign
def test_the_command_ends_with_an_error_when_its_broker_dies() -> None:
    program = COMMAND.format(port=None, keep=None)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KAFKA_MARSHAL_BROKER": "native", "KAFKA_MARSHAL_TEST_BOOTSTRAP": NOBODY},
    )
    assert process.stdout is not None
    _, pid, folder = process.stdout.readline().split()
    os.kill(int(pid), signal.SIGKILL)
    _, complaint = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "BrokerDiedError: Broker 1 of the local Kafka ended by signal 9" in complaint
    assert not Path(folder).exists()


@pytest.mark.broker
@pytest.mark.campaign
def test_the_command_can_be_ended_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_MARSHAL_BROKER", "native")
    monkeypatch.setenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", NOBODY)
    stop, announced = threading.Event(), list[RunningKafka]()
    thread = threading.Thread(target=run_broker, args=(None, 1, None, announced.append), kwargs={"stop": stop})
    thread.start()
    eventually(lambda: announced, 180, "the start")
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


# -- the plugin in a user's own project --------------------------------------------------------------------------


def run_users_tests(folder: Path, source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_plugin_starts_nothing_that_is_not_used(tmp_path: Path) -> None:
    # Nothing can be started: any attempt would fail.
    broken = {"KAFKA_MARSHAL_BROKER": "native", "KAFKA_MARSHAL_JARS": str(tmp_path), "KAFKA_MARSHAL_TEST_BOOTSTRAP": ""}
    unused = run_users_tests(tmp_path, "def test_without_kafka(): pass\n", **broken)
    assert unused.returncode == 0, unused.stdout
    used = run_users_tests(tmp_path, "def test_with_kafka(kafka_bootstrap): pass\n", **broken)
    assert used.returncode == 1
    assert "JarsMissingError" in used.stdout


def topics_of(kafka: RunningKafka) -> set[str]:
    return set(AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=10).topics)


@pytest.mark.broker
def test_a_users_test_has_its_own_topic_and_leaves_none_behind(kafka_broker: RunningKafka, tmp_path: Path) -> None:
    source = """
from confluent_kafka import Producer
from kafka_marshal import Marshal

def test_mine(kafka_broker, kafka_bootstrap, topic_factory):
    topic = topic_factory(4, prefix="users")
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    assert len(producer.list_topics(timeout=10).topics[topic].partitions) == 4

def test_workers(coordination_topic, topic_factory):
    topic = topic_factory()
    with Marshal(coordination_topic.bootstrap, group_id="users", topic=coordination_topic.name) as marshal:
        lease = marshal.claim(topic, 0)
        assert lease.valid
        lease.release()
"""
    before = topics_of(kafka_broker)
    done = run_users_tests(tmp_path, source, KAFKA_MARSHAL_TEST_BOOTSTRAP=kafka_broker.bootstrap_servers)
    assert done.returncode == 0, done.stdout
    named = f"tests create and delete topics on {kafka_broker.bootstrap_servers} (KAFKA_MARSHAL_TEST_BOOTSTRAP)"
    assert named in done.stdout
    eventually(lambda: topics_of(kafka_broker) <= before | {"__consumer_offsets"})
