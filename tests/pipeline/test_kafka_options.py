"""librdkafka's configuration for Spark's connector: translated or refused, never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.pipeline.reading import check_options, check_properties
from kafka_marshal.pipeline.session import kafka_options
from kafka_marshal.pipeline.source import SourceOptions

KEY = "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\n"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIC\n-----END CERTIFICATE-----\n"


def test_brokers_and_committed_records_only_and_no_topic_is_created() -> None:
    assert kafka_options("a:1,b:2", {}) == {
        "kafka.allow.auto.create.topics": "false",
        "kafka.bootstrap.servers": "a:1,b:2",
        "kafka.isolation.level": "read_committed",
    }


def test_isolation_is_the_users_to_choose() -> None:
    assert kafka_options("a:1", {"isolation.level": "read_uncommitted"})["kafka.isolation.level"] == "read_uncommitted"


def test_names_that_java_spells_otherwise() -> None:
    options = kafka_options("a:1", {"fetch.wait.max.ms": 50, "socket.timeout.ms": "7000", "client.id": "me"})
    assert options["kafka.fetch.max.wait.ms"] == "50"
    assert options["kafka.request.timeout.ms"] == "7000"
    assert options["kafka.client.id"] == "me"


def test_what_tunes_librdkafka_alone_is_left_out() -> None:
    config = {"queued.min.messages": 5, "statistics.interval.ms": 1, "error_cb": print, "socket.nagle.disable": True}
    assert kafka_options("a:1", config) == kafka_options("a:1", {})


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule"),
        ("SCRAM-SHA-256", "org.apache.kafka.common.security.scram.ScramLoginModule"),
        ("SCRAM-SHA-512", "org.apache.kafka.common.security.scram.ScramLoginModule"),
    ],
)
def test_name_and_password(mechanism: str, module: str) -> None:
    config = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanisms": mechanism,
        "sasl.username": "me",
        "sasl.password": 'a"b\\c',
    }
    options = kafka_options("a:1", config)
    assert options["kafka.security.protocol"] == "SASL_SSL"
    assert options["kafka.sasl.mechanism"] == mechanism
    assert options["kafka.sasl.jaas.config"] == f'{module} required username="me" password="a\\"b\\\\c";'


def test_certificates_go_along_as_text(tmp_path: Path) -> None:
    ca, certificate, key = tmp_path / "ca.pem", tmp_path / "me.pem", tmp_path / "me.key"
    ca.write_text(CERTIFICATE)
    certificate.write_text(CERTIFICATE)
    key.write_text(KEY)
    options = kafka_options(
        "a:1",
        {
            "security.protocol": "ssl",
            "ssl.ca.location": str(ca),
            "ssl.certificate.location": str(certificate),
            "ssl.key.location": str(key),
            "ssl.key.password": "secret",
            "ssl.endpoint.identification.algorithm": "none",
        },
    )
    assert options["kafka.security.protocol"] == "SSL"
    assert (options["kafka.ssl.truststore.type"], options["kafka.ssl.truststore.certificates"]) == ("PEM", CERTIFICATE)
    assert (options["kafka.ssl.keystore.type"], options["kafka.ssl.keystore.key"]) == ("PEM", KEY)
    assert options["kafka.ssl.keystore.certificate.chain"] == CERTIFICATE
    assert options["kafka.ssl.key.password"] == "secret"
    assert options["kafka.ssl.endpoint.identification.algorithm"] == ""


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"enable.ssl.certificate.verification": False}, "always checks certificates"),
        ({"ssl.crl.location": "revoked.pem"}, "ssl.crl.location"),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER"}, "OAUTHBEARER"),
        ({"security.protocol": "SASL_PLAINTEXT"}, "GSSAPI"),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN"}, r"without sasl\.username"),
        ({"oauth_cb": print}, "oauth_cb"),
        ({"sasl.oauthbearer.method": "oidc"}, "sasl.oauthbearer.method"),
        ({"ssl.ca.location": "not/there.pem"}, "can't be read as PEM"),
        ({"ssl.ca.location": "."}, "is a folder"),
        ({"ssl.key.pem": KEY}, "without its key, or the other way round"),
        ({"ssl.key.pem": KEY.replace("PRIVATE", "RSA PRIVATE"), "ssl.certificate.pem": CERTIFICATE}, "openssl pkcs8"),
    ],
)
def test_what_guards_the_connection_is_never_dropped(config: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        kafka_options("a:1", config)
    assert "Nothing was read" in str(caught.value)


def test_sparks_own_words_cover_what_cannot_be_translated() -> None:
    config = {"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER", "oauth_cb": print}
    own = {"kafka.sasl.jaas.config": "org.example.Login required;", "kafka.sasl.mechanism": "OAUTHBEARER"}
    options = kafka_options("a:1", config, own)
    assert options["kafka.sasl.jaas.config"] == own["kafka.sasl.jaas.config"]
    assert options["kafka.security.protocol"] == "SASL_SSL"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kafka.bootstrap.servers": "other:9092"}, "the Marshal's bootstrap_servers"),
        ({"Kafka.Bootstrap.Servers": "other:9092"}, "the Marshal's bootstrap_servers"),
        ({"minPartition": "4"}, "did you mean 'minPartitions'"),
        ({"maxOffsetsPerTrigger": "4"}, "max_records_per_batch="),
        ({"startingOffset": "earliest"}, "start="),
        ({"minPartitions": "4", "minpartitions": "8"}, "one option for Spark"),
        ({"minPartitions": "many"}, "'minPartitions' must be a whole number from 1"),
        ({"MINPARTITIONS": "0"}, "'MINPARTITIONS' must be a whole number from 1"),
        ({"minPartitions": True}, "'minPartitions' must be a whole number"),
        ({"fetchOffset.numRetries": "-1"}, "must be a whole number from 0"),
        ({"includeHeaders": "1"}, "'includeHeaders' must be true or false"),
        ({"includeHeaders": None}, "'includeHeaders' must be a string"),
        ({1: "x"}, "a name must be a string"),
    ],
)
def test_options_of_claimed_batches_that_cannot_be_meant(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Nothing was claimed") as caught:
        check_options(options)
    assert says in str(caught.value)


def test_options_go_to_spark_as_text() -> None:
    given: dict[str, Any] = {"minPartitions": 4, "INCLUDEHEADERS": True, "kafka.fetch.min.bytes": 1}
    assert check_options(given) == {"minPartitions": "4", "INCLUDEHEADERS": "true", "kafka.fetch.min.bytes": "1"}


def test_a_misspelt_property_of_the_consumer_is_refused_and_one_of_a_plugins_is_not() -> None:
    known = ["fetch.max.bytes", "ssl.protocol"]
    with pytest.raises(ConfigurationError, match=r"no property 'fetch.max.bytez'; did you mean 'fetch.max.bytes'"):
        check_properties({"kafka.fetch.max.bytez": "1"}, known)
    check_properties({"kafka.fetch.max.bytes": "1", "kafka.vault.token": "x", "minPartitions": "2"}, known)
    check_properties({"kafka.fetch.max.bytez": "1"}, [])


@pytest.mark.parametrize("topics", ["^(", "__marshal", ",", "a b"])
def test_the_source_refuses_topics_that_cannot_be_read_before_a_query_starts(topics: str) -> None:
    with pytest.raises(ConfigurationError, match="topics"):
        SourceOptions.parse({"bootstrap_servers": "a:1", "group_id": "g", "topics": topics})


@pytest.mark.parametrize("option", ["checkpoints", "group"])
def test_the_source_takes_no_part_in_checkpoints_and_names_what_does(option: str) -> None:
    given = {"bootstrap_servers": "a:1", "group_id": "g", "topics": "t", option: "true"}
    with pytest.raises(ConfigurationError, match=r"takes no checkpoints.* Use ClaimedBatches\(.*group=True"):
        SourceOptions.parse(given)


def test_the_source_is_reported_one_cluster_only() -> None:
    needed = {"group_id": "g", "topics": "t", "kafka.bootstrap.servers": "a:1"}
    assert SourceOptions.parse(needed).bootstrap_servers == "a:1"
    assert SourceOptions.parse({**needed, "bootstrap_servers": "a:1"}).bootstrap_servers == "a:1"
    with pytest.raises(ConfigurationError, match="leave one out"):
        SourceOptions.parse({**needed, "bootstrap_servers": "b:1"})
