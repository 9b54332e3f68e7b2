"""The settings of worker processes that call one handler."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.client.handling import DRAIN_TIMEOUT_S
from kafka_marshal.client.options import check_log_name, checked_topics
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.metrics.server import checked_address
from kafka_marshal.node.config import check_bootstrap, check_ids, host_name
from kafka_marshal.topic_names import DEFAULT_TOPIC

#: The most processes of one Worker.
MOST_PROCESSES = 256

_OWN = {
    "marshal": "bootstrap_servers group_id client_id topic config watchdog",
    "settings": "concurrency drain_timeout",
}


def named(option: str, value: str) -> Any:
    """The object that ``module:name`` means. Raises ConfigurationError, also for whatever its module raises."""
    if ":" not in value:
        raise arguments.wrong(option, "module:name, such as app:handle", value, "Nothing was started")
    try:
        return resolve_name(value)
    except Exception as error:
        text = f"{option} {value!r} can't be imported: {type(error).__name__}: {error}. No message is handled"
        raise ConfigurationError(text) from error


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a :class:`Worker` is given, as any process reads it."""

    bootstrap_servers: str
    handler: str | Callable[..., object]
    group: str
    topics: Sequence[str]
    name: str = field(default_factory=host_name)
    processes: int = 1
    concurrency: int = 16
    drain: float = DRAIN_TIMEOUT_S
    topic: str = DEFAULT_TOPIC
    config: Mapping[str, object] = field(default_factory=dict, repr=False)
    marshal: Mapping[str, Any] = field(default_factory=dict)
    consumer: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    watchdog: bool | None = None
    port: int | None = None
    host: str = "127.0.0.1"
    json_logs: bool = False
    reload: bool = False

    @property
    def members(self) -> list[str]:
        """The names of the processes."""
        return [f"{self.name}-{number}" for number in range(1, self.processes + 1)]

    def check(self) -> None:
        """Raise ConfigurationError for settings that can't work."""
        if sys.platform == "win32":
            raise ConfigurationError("a Worker needs Linux or macOS. Nothing was started. Run a Marshal of your own")
        check_bootstrap(self.bootstrap_servers)
        arguments.a_whole("processes", self.processes, 1, MOST_PROCESSES)
        arguments.a_whole("concurrency", self.concurrency, 1)
        arguments.seconds("drain", self.drain)
        check_ids(self.group, self.members[-1], self.marshal.get("heartbeat_interval", 3.0))
        checked_topics(self.topics, check_log_name(self.topic))
        if self.port is not None:
            checked_address(self.port, self.host)
        for name, own in _OWN.items():
            if twice := sorted(getattr(self, name).keys() & own.split()):
                raise ConfigurationError(f"{name} has {twice[0]!r}: the Worker has that itself. Nothing was started")
        self.packed()

    def packed(self) -> bytes:
        """The settings for another process. Raises ConfigurationError if they can't be sent there."""
        if getattr(self.handler, "__module__", None) == "__main__":
            raise ConfigurationError(
                "the handler is defined in the program itself, which a new process does not import. Nothing was "
                "started. Move it into a module, and name it there: handler='app:handle'"
            )
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"the settings can't be sent to another process: {error}. Nothing was started. Define the handler, and "
                "other functions, at the top of a module (no lambda, no function within a function)"
            ) from error

    def handle(self) -> Callable[..., object]:
        """The handler, imported."""
        found = named("handler", self.handler) if isinstance(self.handler, str) else self.handler
        if not callable(found):
            raise arguments.wrong("handler", "a function that takes (message)", found, "No message is handled")
        return found
