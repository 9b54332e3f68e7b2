"""Whether the addresses of a cluster that did not answer can be reached now: librdkafka knows its last attempt only."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from enum import StrEnum

from kafka_marshal.adapters.kafka.settings import addresses

#: How long an address may take to accept, and then to answer (s); all of them together at most twice as long.
WAIT_S = 0.5

#: Kafka's default port.
_PORT = 9092

#: ApiVersions, version 0: any broker answers it before a login. A TLS listener hangs up, which is an answer, too.
_QUESTION = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class Reached(StrEnum):
    """What an address does, for people."""

    SILENT = "accepts connections and is silent"
    REFUSED = "refuses connections: no process listens there"
    NO_ANSWER = "neither accepts nor refuses connections"
    NO_ROUTE = "has no route: the network says that it can't be reached"
    UNKNOWN = "is a name that can not be resolved"
    ANSWERS = "answers"

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _ADVICE[self]


_ADVICE = {
    Reached.SILENT: "The broker is frozen, overloaded or starting: check its process, its garbage collection and its "
    "disks. More workers make it worse",
    Reached.REFUSED: "Check that the broker runs, and that bootstrap_servers names its listener",
    Reached.NO_ANSWER: "The broker is frozen or overloaded, and accepts no more, or the network or a firewall drops "
    "all: check its process first, then its machine and the way there. More workers make it worse",
    Reached.NO_ROUTE: "Check that the broker's machine runs, and the network and firewalls between",
    Reached.UNKNOWN: "Check bootstrap_servers, and the name service",
    Reached.ANSWERS: "Check that bootstrap_servers names its listener, that its advertised.listeners can be reached "
    "and, if it wants TLS or SASL, that security.protocol says so",
}


def reach(bootstrap_servers: str) -> dict[str, Reached]:
    """What each address does now (*blocking*, for a second at most): in order, as time allows."""
    until, found = time.monotonic() + 2 * WAIT_S, dict[str, Reached]()
    for address in addresses(bootstrap_servers):
        if time.monotonic() < until:
            found[address] = _reach(address)
    return found


def best(found: Sequence[Reached]) -> Reached:
    """What to say of all of them: one that answers, or at least accepts, explains more than one that is down."""
    order = (Reached.ANSWERS, Reached.SILENT, Reached.NO_ANSWER, Reached.REFUSED, Reached.NO_ROUTE, Reached.UNKNOWN)
    return min(found, key=order.index, default=Reached.ANSWERS)


def _reach(address: str) -> Reached:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    host, port = (host, port) if host and port.isdigit() else (address, str(_PORT))
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), WAIT_S)
    except ConnectionRefusedError:
        return Reached.REFUSED
    except (socket.gaierror, UnicodeError):
        return Reached.UNKNOWN
    except TimeoutError:
        return Reached.NO_ANSWER
    except OSError:
        return Reached.NO_ROUTE
    with connection:
        try:
            connection.sendall(_QUESTION)
            connection.recv(1)
        except TimeoutError:
            return Reached.SILENT
        except OSError:
            return Reached.ANSWERS  # it hangs up
    return Reached.ANSWERS
