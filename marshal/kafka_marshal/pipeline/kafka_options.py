"""Translates librdkafka's configuration for Spark's Kafka connector, which uses the Java client.

One configuration serves the marshal and Spark. Security settings (TLS, SASL) are translated or refused, never dropped;
settings that only tune librdkafka (queues, logging, statistics) are omitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kafka_marshal.errors import ConfigurationError

_NOTHING: Mapping[str, str] = MappingProxyType({})

#: Settings with the same meaning → Java's name.
_NAMES = {
    "check.crcs": "check.crcs",
    "client.dns.lookup": "client.dns.lookup",
    "client.id": "client.id",
    "client.rack": "client.rack",
    "connections.max.idle.ms": "connections.max.idle.ms",
    "fetch.max.bytes": "fetch.max.bytes",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "fetch.min.bytes": "fetch.min.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "isolation.level": "isolation.level",
    "max.partition.fetch.bytes": "max.partition.fetch.bytes",
    "metadata.max.age.ms": "metadata.max.age.ms",
    "reconnect.backoff.max.ms": "reconnect.backoff.max.ms",
    "reconnect.backoff.ms": "reconnect.backoff.ms",
    "retry.backoff.ms": "retry.backoff.ms",
    "socket.connection.setup.timeout.ms": "socket.connection.setup.timeout.ms",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.timeout.ms": "request.timeout.ms",
    "ssl.key.password": "ssl.key.password",
    "ssl.keystore.password": "ssl.keystore.password",
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
