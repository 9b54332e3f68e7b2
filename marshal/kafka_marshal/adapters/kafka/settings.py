"""Which librdkafka properties each of our clients runs with, and which of them a user may not set.

A user's configuration goes to librdkafka as it is: TLS, SASL, client.id, fetch sizes, callbacks. Three kinds of
property are not the user's:

- *fixed* ones carry a promise of the protocol. Setting one of them to another value is an error, never ignored:
  a user that asks for ``acks=1`` must learn that it has no effect.
- *own* ones tune the two clients of the coordination log, which only the library uses (latency, memory). They win
  silently, so that one properties file can serve a whole application.
- *defaults* are better than librdkafka's for our use, and the user's own value wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.guard import Guard, report


def guarded(name: str, value: object) -> object:
    """A value of a configuration as librdkafka may get it."""
    if name == "logger" and hasattr(value, "log"):
        return _Log(value.log)
    if not callable(value) or isinstance(value, Guard):
        return value
    return _Token(value) if name == "oauth_cb" else Guard(name, value)


class _Log:
    """A logger whose handlers and filters may raise."""

    def __init__(self, log: Callable[..., object]) -> None:
        self.log = Guard("the log of librdkafka's lines", log)


class _Token:
    """An ``oauth_cb``: what it raises is logged and raised again, since confluent-kafka drops all but the fact."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, config: object) -> object:
        try:
            answer = self._call(config)
            _check(answer)
        except BaseException as error:
            report("oauth_cb", error)
            raise
        return answer


def _check(answer: object) -> None:
    """Raise for what confluent-kafka can't read: librdkafka would not learn of it, and never ask for a token again."""
    if isinstance(answer, tuple) and 2 <= len(answer) <= 4:
        extensions = answer[3] if len(answer) == 4 else {}
        texts = (answer[0], *answer[2:3], *(extensions.values() if isinstance(extensions, dict) else (None,)))
        if hasattr(answer[1], "__float__") and all(isinstance(text, str) for text in texts):
            return
    raise TypeError(
        "oauth_cb must return (token, expiry in seconds since 1970[, principal[, extensions]]), with text in all but "
        f"the second; this was a {type(answer).__name__}. No token was set, and no connection is made with it"
    )


#: How long a fetch may rest at the broker when there is nothing new. A long poll is answered the moment a record
#: arrives, so it costs no latency; it only delays the report of an end that lies behind transaction markers, for
#: which a start has to wait. Longer than the time between two beats (a third of 3 s): where beats come, none is empty.
TAIL_FETCH_WAIT_MS = 1_000

#: librdkafka keeps one fetch in flight per broker, and a newly assigned partition has to wait for its return. If
#: nothing comes in any other partition that takes up to this long, and for a new topic once more. An empty fetch of 100
#: partitions costs a quarter of a millisecond, so at this wait a fifth of a percent of a core.
DATA_FETCH_WAIT_MS = 120


class Role(StrEnum):
    """What a client is for."""

    ADMIN = "admin"
    APPENDER = "appender"
    TAIL = "tail"
    DATA = "data"
    PRODUCER = "producer"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A property that carries a promise."""

    #: The values that agree with ours, as librdkafka spells them; empty: may not be set at all.
    allowed: tuple[str, ...]
    #: Why, and what to use instead.
    why: str


_GIVEN = _Fixed((), "the brokers are named by the argument bootstrap_servers")
_ACKS = _Fixed(("all", "-1"), "a record that not all in-sync replicas have could vanish, and a lease with it")
_TIMEOUT = _Fixed((), "a record is given up within the heartbeat interval: set heartbeat_interval")
_CODEC = _Fixed(("none",), "every reader of the log must be able to read every record")
_GROUP = _Fixed((), "no Kafka consumer group takes part: set group_id")
_RESET = _Fixed(
    ("error",),
    "where reading starts is decided by the log and never guessed: use start= of the consumer",
)
_COMMIT = _Fixed(("false",), "progress is kept in the coordination log, not in Kafka's offsets")

#: Properties under every name that librdkafka knows them by.
FIXED: Mapping[str, _Fixed] = {
    "bootstrap.servers": _GIVEN,
    "metadata.broker.list": _GIVEN,
    "acks": _ACKS,
    "request.required.acks": _ACKS,
    "enable.idempotence": _Fixed(("true",), "a retry may not write a record twice or out of order"),
    "enable.gapless.guarantee": _Fixed(("false",), "one record given up must not end the whole appender"),
    "transactional.id": _Fixed((), "it names the input partition: use exactly_once= of the consumer"),
    "transaction.timeout.ms": _Fixed((), "use exactly_once=Transactions(timeout=…) of the consumer"),
    "message.timeout.ms": _TIMEOUT,
    "delivery.timeout.ms": _TIMEOUT,
    "compression.type": _CODEC,
    "compression.codec": _CODEC,
    "group.id": _GROUP,
    "group.instance.id": _GROUP,
    "auto.offset.reset": _RESET,
    "enable.auto.commit": _COMMIT,
    "auto.commit.enable": _COMMIT,
    "enable.partition.eof": _Fixed((), "the adapters ask for it where they need it"),
}

#: The largest TCP port.
MAX_PORT = 65_535

_DEFAULTS: Mapping[str, object] = {
    "client.id": "kafka-marshal",
    # Nothing here may wait to fill a packet: a heartbeat that is late can cost a lease.
    "socket.nagle.disable": True,
    "socket.keepalive.enable": True,
    # A broker that hangs without closing its sockets is given up after this (60 s by default: longer than a lease).
    "socket.timeout.ms": 10_000,
    # Half of this is also how often a client without any broker tries again, however long the outage: at 10, each
    # member took 18 % of a core. At 400, each start takes 70 ms longer: the first broker is met after half of it.
    "reconnect.backoff.ms": 200,
    # 10 s by default: after a broker's restart that alone would outlast a lease of 2 * 3 s.
    "reconnect.backoff.max.ms": 1_000,
    # A connection that a frozen broker never took up may look open, or open late: TCP doubles its waits. Behind a
    # thaw, a new one is there at once (10 s and 30 s by default).
    "api.version.request.timeout.ms": 5_000,
    "socket.connection.setup.timeout.ms": 10_000,
}

#: Producers and AdminClients allow it by default: a look-up by name, or a record for a deleted topic, would create one.
_CREATES_NOTHING: Mapping[str, object] = {"allow.auto.create.topics": False}

_PRODUCES: Mapping[str, object] = {"acks": "all", "enable.idempotence": True}

_OWN: Mapping[Role, Mapping[str, object]] = {
    Role.ADMIN: {},
    Role.APPENDER: {
        "acks": "all",
        "enable.idempotence": True,
        "compression.type": "none",
        "linger.ms": 0,
        # Writers stay below 900,000 bytes (L1); this is the client's own upper bound.
        "message.max.bytes": 1_000_000,
    },
    Role.TAIL: {
        "isolation.level": "read_uncommitted",
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "fetch.min.bytes": 1,
        "fetch.wait.max.ms": TAIL_FETCH_WAIT_MS,
        "fetch.queue.backoff.ms": 1,
    },
    Role.DATA: {
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        # Reports what lies behind the last record: transaction markers, aborted records, a compacted tail (P6).
        "enable.partition.eof": True,
    },
    Role.PRODUCER: _PRODUCES,
    Role.TRANSACTION: _PRODUCES,
}

#: Bytes in a batch: librdkafka's default, which topics with the default of max.message.bytes take; and Java's default.
LARGE_BATCH, SMALL_BATCH = 1_000_000, 16_384

_PRODUCER_DEFAULTS: Mapping[str, object] = {
    # The partition that Java's producer chooses for the key, and any for none.
    "partitioner": "murmur2_random",
    # Sources hold compressed batches: a value that fits there must fit here.
    "compression.type": "lz4",
    # The broker refuses a batch as a whole. As small as Java's, so that a record too large fails alone.
    "batch.size": SMALL_BATCH,
    # The topic decides what is too large; this is what a broker reads at all.
    "message.max.bytes": 100_000_000,
    # A topic that is not known to the brokers is given up after this (30 s by default).
    "topic.metadata.propagation.max.ms": 3_000,
}

#: librdkafka from 2.5 on dies of an answer in which one partition has a new leader and another has none (its issue
#: 5280), if it takes it up; it drops it where its cache does not have the topic. The leaders are asked for anyway.
_FORGETS_TOPICS: Mapping[str, object] = {"metadata.max.age.ms": 1}

_ROLE_DEFAULTS: Mapping[Role, Mapping[str, object]] = {
    Role.ADMIN: {},
    Role.APPENDER: {},
    # With one message fetched ahead, rests would cost fewer fetches, but one of several partitions may bring nothing
    # for TAIL_FETCH_WAIT_MS (docs/groups.md).
    Role.TAIL: _FORGETS_TOPICS,
    Role.DATA: {
        **_FORGETS_TOPICS,
        "isolation.level": "read_committed",
        "fetch.min.bytes": 1,
        "fetch.wait.max.ms": DATA_FETCH_WAIT_MS,
        # The default of 1,000 ms throttles every reader of a backlog to a fraction of its speed.
        "fetch.queue.backoff.ms": 1,
        # Fetched ahead: at a million small messages a second good for 20 ms. Five times as many (the default) are
        # slower, by a tenth: they fall out of the processor's caches before their turn comes.
        "queued.min.messages": 20_000,
    },
    Role.PRODUCER: {**_PRODUCER_DEFAULTS, "linger.ms": 0},
    # Records wait for their commit anyway, which sends at once what still lingers. Large batches: five times as fast.
    Role.TRANSACTION: {**_PRODUCER_DEFAULTS, "linger.ms": 5, "batch.size": LARGE_BATCH},
}


def addresses(bootstrap_servers: str) -> list[str]:
    """The bootstrap addresses, each once."""
    return list(dict.fromkeys(part.strip() for part in bootstrap_servers.split(",") if part.strip()))


def check_addresses(bootstrap_servers: str) -> None:
    """Refuse an invalid port: librdkafka would take it modulo 65,536, and connect to another address.

    Raises:
        ConfigurationError: it names the address.
    """
    for address in addresses(bootstrap_servers):
        if "@" in address:
            raise ConfigurationError(
                "bootstrap_servers: one address has an '@' in it. Kafka knows no user and password there; they would "
                "stand in every error and log. Nothing was sent; put them into config: sasl.username, sasl.password."
            )
        _, *ports = address.rpartition("://")[2].rpartition("]")[2].split(":")
        if len(ports) != 1:  # none, or an IPv6 address without brackets
            continue
        (port,) = ports
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
            raise ConfigurationError(
                f"bootstrap_servers: {address!r} has the port {port!r}; a port is a number from 1 to {MAX_PORT}. "
                "Nothing was sent."
            )


def check(config: Mapping[str, object]) -> None:
    """Refuse a configuration that contradicts the protocol.

    Raises:
        ConfigurationError: it names the property, our value and the reason.
    """
    for name, value in config.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"config has a key that is no string: {name!r}. Nothing was sent.")
        fixed = FIXED.get(name)
        if fixed is None or str(value).strip().lower() in fixed.allowed:
            continue
        ours = f" It is always {fixed.allowed[0]!r} here." if fixed.allowed else ""
        raise ConfigurationError(
            f"config may not set {name!r} (to {value!r}): {fixed.why}.{ours} Nothing was sent; remove the setting."
        )


def properties(
    role: Role, bootstrap_servers: str, config: Mapping[str, object], extra: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Everything for librdkafka: our defaults, then the user's config, then what only the library may set, then extra.

    All that goes to librdkafka comes from here, so this is where the user's functions are guarded.
    """
    return {
        **_DEFAULTS,
        **_ROLE_DEFAULTS[role],
        **{name: guarded(name, value) for name, value in config.items() if name not in FIXED},
        **_OWN[role],
        **_CREATES_NOTHING,
        **(extra or {}),
        "bootstrap.servers": bootstrap_servers,
    }
