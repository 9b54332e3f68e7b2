"""A broker with authentication and ACLs: the command and a member with insufficient rights."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import AuthenticationError, AuthorizationError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import LocalBroker
from tests.cli.harness import Command
from tests.secured import MEMBER, READER, allow, broker_properties, login

pytestmark = [pytest.mark.broker, pytest.mark.slow]

TOLD = READER[:2]


@pytest.fixture(scope="module")
def secured() -> Iterator[str]:
    """ann has all rights of a member, bob may only read; both may read the topic t."""
    root = login("root")
    with LocalBroker(properties=broker_properties("ann", "bob"), client_config=root) as broker:
        allow(broker.bootstrap_servers, root, "ann", {"__marshal": MEMBER, "t": TOLD})
        allow(broker.bootstrap_servers, root, "bob", {"__marshal": READER, "t": TOLD})
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **root})
        for answer in admin.create_topics([NewTopic("t", 3, 1)]).values():
            answer.result(30)
        yield broker.bootstrap_servers


As = Callable[..., tuple[str, ...]]


@pytest.fixture
def coordination() -> str:
    """A new name for every attempt, so that one attempt does not affect the next."""
    return f"__marshal-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def log_in(secured: str, coordination: str, tmp_path: Path) -> As:
    def options(user: str, password: str | None = None) -> tuple[str, ...]:
        path = tmp_path / f"{user}.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in login(user, password).items()))
        return ("--bootstrap", secured, "--config", str(path), "--topic", coordination)

    return options


def ann_holds(secured: str, coordination: str) -> None:
    """The log has a group g, whose only lease belongs to a dead holder."""
    ann = Marshal(
        secured, group_id="g", client_id="ann", topic=coordination, heartbeat_interval=60.0, config=login("ann")
    )
    ann.claim("t", 0, timeout=5)
    ann.terminate()


def test_what_is_forbidden_is_named_with_what_it_takes(
    command: Command, log_in: As, secured: str, coordination: str
) -> None:
    ann, bob = log_in("ann"), log_in("bob")
    ran = command("init", *bob)
    assert (ran.status, ran.out) == (3, "")
    assert f"creating topic {coordination}: the cluster forbids it" in ran.err
    assert command("init", *log_in("root")).status == 0
    for reading in ("status", "log", "lag"):
        assert command(reading, *bob).status == 0
    ann_holds(secured, coordination)
    for changing in (
        ["status", "--tick"],
        ["release-group", "g", "--yes"],
        ["evict", "g", "t", "0", "--yes", "--force"],
    ):
        ran = command(*changing, *bob)
        assert ran.status in (1, 3), ran.err
        assert ran.out == ""
        assert "authorization failed" in ran.err
        assert "WRITE" in ran.err
        assert "report it" not in ran.err
    assert command("status", "--tick", *ann).status == 0


def test_a_wrong_password(command: Command, log_in: As) -> None:
    ran = command("status", *log_in("bob", "wrong"))
    assert (ran.status, ran.out) == (3, "")
    assert "Invalid username or password" in ran.err
    assert "sasl.* settings" in ran.err


def test_members(secured: str, coordination: str) -> None:
    create_topic(KafkaCluster(secured, login("root")), coordination, 2, 10)
    ids = {"group_id": "g", "heartbeat_interval": 0.6, "topic": coordination}
    with pytest.raises(AuthenticationError, match="Invalid username or password"):
        Marshal(secured, config=login("ann", "wrong"), **ids)  # type: ignore[arg-type]
    with Marshal(secured, client_id="ann", config=login("ann"), **ids) as ann:  # type: ignore[arg-type]
        assert ann.claim("t", 1, timeout=5).epoch >= 0
        with pytest.raises(AuthorizationError, match="forbids it"):
            ann.consumer(["untold"])
    # A client that may read but not write claims nothing, and gets the reason.
    with (
        Marshal(secured, client_id="bob", config=login("bob"), **ids) as bob,  # type: ignore[arg-type]
        pytest.raises(AuthorizationError, match="WRITE"),
    ):
        bob.claim("t", 2, timeout=5)
