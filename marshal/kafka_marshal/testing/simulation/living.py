"""A simulated process, as those see it who do not make it; and what troubles it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Protocol

from kafka_marshal.node.driver import Driver

__all__ = ["End", "Host", "Living", "Trouble"]


@dataclass(slots=True)
class Trouble:
    """How bad the network is for one process at the moment."""

    #: One way, on the average (ms).
    latency_ms: float = 0.4
    #: Share of appends that never arrive, and of acknowledgements that do not come back.
    loss: float = 0.0
    ack_loss: float = 0.0
    #: Share of appends that are written twice, and of those that arrive long after the client has given them up.
    duplicates: float = 0.0
    late: float = 0.0
    #: No broker can be reached.
    is_cut_off: bool = False
    #: Until when (virtual ms) a partition of the coordination topic does not reach this client.
    deaf_until: dict[int, float] = field(default_factory=dict)
    #: Share of a worker's calls that an exception ends, and of reads that raise with messages in hand.
    interrupts: float = 0.0
    torn_reads: float = 0.0


@dataclass(slots=True)
class Host:
    """Where a client's processes run, one after the other."""

    name: str
    rate: float = 1.0
    is_admin: bool = False
    #: Its worker handles message after message, as `for message in consumer` does.
    is_iterating: bool = False
    #: Its worker has many handlers (``consumer.run``).
    in_lanes: bool = False
    #: Its worker sets messages aside, and says that others are done as soon as they are handled.
    defers: bool = False
    #: What a broker sends reaches it every so many ms; 0: at once.
    fetch_ms: float = 0.0
    #: Its worker's calls, or its reads, raise now and then, and it goes on: what it has handled may come again.
    is_interrupted: bool = False
    trouble: Trouble = field(default_factory=Trouble)

    @property
    def begins_at_once(self) -> bool:
        """Whether it handles each message as soon as it gets it: what is begun late was handed out late."""
        return self.is_iterating or self.in_lanes


@dataclass(slots=True)
class End:
    """How a process ends."""

    #: When (virtual ms) it was first asked to, by SIGTERM.
    asked_at: float = inf
    #: Its function has returned, or raised.
    ended: bool = False
    error: BaseException | None = None
    #: Another process of the same client was started while this one was stopped.
    replaced: bool = False


class Living(Protocol):
    """A process of its own; see :class:`~kafka_marshal.testing.simulation.process.Process`."""

    #: Unique for ever.
    name: str
    client_id: str
    host: Host
    heartbeat_interval_ms: int
    dead: bool
    stopped_until: float
    end: End
    rng: Random
    drivers: list[Driver]
    #: The parts that the network and the runtime make for it.
    runtime: Any
    interrupting: Any
    links: Any

    @property
    def is_running(self) -> bool: ...

    def travel_ms(self) -> float: ...

    def reaches_at(self) -> float: ...

    def next_ack(self) -> float: ...

    def next_due(self, tail: Any) -> float: ...

    def joined(self, driver: Driver) -> None: ...
