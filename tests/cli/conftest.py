"""Fixtures for the tests of the command."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.harness import ENVIRONMENT, Command, Terminal


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolate the command from its environment; times are UTC; it writes to a temporary folder."""
    monkeypatch.chdir(tmp_path_factory.mktemp("command"))
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environment: None) -> Command:
    return Command(capfd, monkeypatch)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*args: str, **settings: Any) -> Terminal:
        opened.append(Terminal(*args, **settings))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


# -- with a broker ---------------------------------------------------------------------------------------


@pytest.fixture
def log_topic(kafka_bootstrap: str) -> Iterator[str]:
    """A name for this test's coordination topic, which is removed at the end."""
    from kafka_marshal.adapters.probe import Probe

    name = f"__marshal-cli-{uuid.uuid4().hex[:8]}"
    yield name
    Probe(kafka_bootstrap).delete_topics([name, f"{name}_snapshots"])


@pytest.fixture
def kafka(command: Command, kafka_bootstrap: str, log_topic: str) -> Command:
    """The command with options for Kafka and for a coordination topic that does not exist yet."""
    command.before = ("--bootstrap", kafka_bootstrap, "--topic", log_topic)
    return command
