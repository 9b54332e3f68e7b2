"""Brokers with authentication and ACLs: settings for LocalBroker, logins, rights."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kafka_marshal.testing.jars import find_java

Config = dict[str, str | int | float]

#: A member's rights on the coordination topic, and a reader's on a topic.
MEMBER = (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
READER = (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def password_of(user: str) -> str:
    """A password with characters that break wrong quoting."""
    return f"{user}'s"


def broker_properties(*users: str, protocol: str = "SASL_PLAINTEXT") -> dict[str, str]:
    """These users may log in; root has all rights, the others those of :func:`allow`."""
    logins = " ".join(f'user_{user}="{password_of(user)}"' for user in ("root", *users))
    return {
        "listener.security.protocol.map": f"CLIENT:{protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": f"{_PLAIN} {logins};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:root;User:ANONYMOUS",
    }


def login(user: str, password: str | None = None, protocol: str = "SASL_PLAINTEXT") -> Config:
    """What a client says."""
    return {
        "security.protocol": protocol,
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": password_of(user) if password is None else password,
    }


def allow(bootstrap: str, root: Config, user: str, topics: Mapping[str, tuple[AclOperation, ...]]) -> None:
    """Grant a user operations on topics by prefix; returns when in force (within 30 s)."""
    admin = AdminClient({**root, "bootstrap.servers": bootstrap})
    wanted = [
        AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.PREFIXED, f"User:{user}", "*", each, AclPermissionType.ALLOW
        )
        for topic, operations in topics.items()
        for each in operations
    ]
    for answer in admin.create_acls(wanted).values():
        answer.result(30)


def certified(folder: Path) -> tuple[Path, Path]:
    """A key store for a broker on this machine, and its certificate as PEM; made with Java's keytool."""
    keytool = find_java().path.with_name("keytool")
    store, ca = folder / "broker.p12", folder / "ca.pem"
    common = [str(keytool), "-keystore", str(store), "-storepass", "changeit", "-alias", "broker"]
    make = ["-genkeypair", "-keyalg", "RSA", "-storetype", "PKCS12", "-dname", "CN=localhost", "-validity", "2"]
    subprocess.run([*common, *make, "-ext", "SAN=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True)
    subprocess.run([*common, "-exportcert", "-rfc", "-file", str(ca)], check=True, capture_output=True)
    return store, ca


def key_store(store: Path) -> dict[str, str]:
    """Settings for a broker's CLIENT listener to use the files of :func:`certified`."""
    return {
        "listener.name.client.ssl.keystore.type": "PKCS12",
        "listener.name.client.ssl.keystore.location": str(store),
        "listener.name.client.ssl.keystore.password": "changeit",
    }
