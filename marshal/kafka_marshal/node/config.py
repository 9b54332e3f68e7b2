"""The arguments of a Marshal, checked before anything is sent."""

from __future__ import annotations

import os
import socket
import sys

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError
from rationalizer import ClaimingPartition, InvalidRecordError
from rationalizer.limits import MAX_HEARTBEAT_INTERVAL_MS, MIN_HEARTBEAT_INTERVAL_MS

#: How long a start waits for Kafka by default, and what librdkafka no longer accepts.
START_TIMEOUT_S = 15.0
MOST_START_S = 3_600.0


def new_client_id() -> str:
    """The default client_id: readable, and unique. It can't be taken over after a restart (C7)."""
    return f"{host_name()}-{os.getpid()}-{os.urandom(4).hex()}"


def host_name() -> str:
    """This machine's name, as a part of a client_id."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in socket.gethostname())[:60] or "host"


def check_bootstrap(bootstrap_servers: str) -> None:
    """Raises ConfigurationError if it names no broker."""
    wanted = "a string such as 'host:9092' or 'host-1:9092,host-2:9092'"
    if not arguments.text("bootstrap_servers", bootstrap_servers, wanted).strip(" ,"):
        raise arguments.wrong("bootstrap_servers", wanted, bootstrap_servers)


def check_ids(group_id: str, client_id: str, heartbeat_interval: float) -> int:
    """Refuse what no replica would accept (E2); raises ConfigurationError. Returns the heartbeat interval in ms."""
    for name, value in (("group_id", group_id), ("client_id", client_id)):
        arguments.text(name, value)
    least, most = MIN_HEARTBEAT_INTERVAL_MS / 1000, MAX_HEARTBEAT_INTERVAL_MS / 1000
    heartbeat_ms = round(arguments.seconds_within("heartbeat_interval", heartbeat_interval, least, most) * 1000)
    try:
        ClaimingPartition("instance", client_id, group_id, "topic", 0, heartbeat_ms)
    except InvalidRecordError as error:
        shown = f"group_id={group_id!r:.60}, client_id={client_id!r:.60}"
        raise ConfigurationError(f"no member would accept records with {shown}: {error}") from error
    return heartbeat_ms


def check_threads() -> None:
    """Refuse to work on green threads; raises ConfigurationError.

    librdkafka waits outside of Python: it would block every greenlet, and with them the one that sends heartbeats.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        patched = "gevent", "gevent.monkey.patch_all(thread=False)"
    elif eventlet is not None and eventlet.is_monkey_patched("thread"):
        patched = "eventlet", "eventlet.monkey_patch(thread=False)"
    else:
        return
    raise ConfigurationError(
        f"{patched[0]} has replaced the threads of this process by greenlets. A wait for Kafka stops all of them, the "
        "heartbeats too, and every lease would be lost. Nothing was sent. Use a process without monkey-patching, or "
        f"leave the threads as they are: {patched[1]}"
    )
