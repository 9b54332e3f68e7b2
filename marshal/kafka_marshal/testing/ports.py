"""Ports for local brokers.

Chosen below the system's range for outgoing connections, where a free port may belong to a client socket a moment
later.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from kafka_marshal.testing.errors import LocalBrokerError

#: The only address on which local brokers listen.
LOOPBACK = "127.0.0.1"

_LOWEST = 15_000
_DEFAULT_EPHEMERAL = 32_768


def free_ports(count: int) -> list[int]:
    """Distinct ports that are free now. Another program may still be faster: retry if a bind fails."""
    low, high = _range()
    # The system's random source, not a test's seeded one: concurrent test runs must not draw the same ports.
    candidates = random.SystemRandom().sample(range(low, high), min(high - low, 50 * count + 200))
    found: list[int] = []
    for port in candidates:
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise LocalBrokerError(
        f"Found only {len(found)} of {count} free ports between {low} and {high} on {LOOPBACK}. Nothing was started. "
        "End other programs that listen there, or name a port."
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback interface now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As in Java: connections in TIME_WAIT don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _range() -> tuple[int, int]:
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = _DEFAULT_EPHEMERAL
    # A system tuned to use nearly all ports leaves no room below: then any port will do.
    high = first_ephemeral if first_ephemeral > _LOWEST + 1_000 else _DEFAULT_EPHEMERAL
    return _LOWEST, high
