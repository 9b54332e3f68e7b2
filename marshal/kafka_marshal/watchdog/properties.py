"""What the watchdog's process needs of the worker's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kafka_marshal.errors import ConfigurationError

#: Only for callbacks that the watchdog does not have.
_LISTENING = frozenset(
    {"debug", "error_cb", "log_level", "logger", "stats_cb", "statistics.interval.ms", "throttle_cb"}
)

_OWN: Mapping[str, object] = {
    # Connected to every broker at all times, so that the leader of each CP can be reached at once.
    "enable.sparse.connections": False,
    # Its lines would mix with those of the worker. What matters comes with the records' answers.
    "log_level": 0,
}

#: Of the worker's environment: where libraries, certificates, tickets and proxies are found.
_INHERITED = frozenset({"HOME", "LANG", "PATH", "TMPDIR", "TZ"})
_INHERITED_PREFIXES = ("DYLD_", "KRB5", "LD_", "LC_", "OPENSSL_", "SSL_")
_INHERITED_SUFFIXES = ("_PROXY",)


def producer_properties(
    bootstrap_servers: str, config: Mapping[str, object], heartbeat_interval_ms: int
) -> dict[str, object]:
    """librdkafka's properties for the watchdog's producer; records are given up within HI, as the worker's are (L1).

    Raises ConfigurationError where config has something that another process can't be given, such as ``oauth_cb``.
    """
    # Imported here: reading a dump needs no Kafka client.
    from kafka_marshal.adapters.kafka.settings import Role, properties

    found = {
        **{k: v for k, v in properties(Role.APPENDER, bootstrap_servers, config).items() if k not in _LISTENING},
        **_OWN,
        "message.timeout.ms": heartbeat_interval_ms,
    }
    for name, value in found.items():
        if not isinstance(value, str | int | float):
            raise ConfigurationError(
                f"watchdog=True can't be used with {name!r} in config: a {_kind(value)} of this process can't be given "
                "to the watchdog, another process. Nothing was sent; leave watchdog out (a worker that dies is then "
                "replaced after 2 · HI), or use properties of text and numbers only"
            )
    return found


def _kind(value: object) -> str:
    return "function" if callable(value) else type(value).__name__


def environment() -> dict[str, str]:
    """The few variables of this process that the watchdog's gets: secrets often lie in the others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED
        or name.upper().startswith(_INHERITED_PREFIXES)
        or name.upper().endswith(_INHERITED_SUFFIXES)
    }
    # glibc would give each of librdkafka's threads a separate heap.
    return {**kept, "MALLOC_ARENA_MAX": "1"}
