"""A simulated process, as those see it who do not make it; and what troubles it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kafka_marshal.node.driver import Driver

__all__ = ["Living", "Trouble"]


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


class Living(Protocol):
    """A process of its own; see :class:`~kafka_marshal.testing.simulation.process.Process`."""

    #: Unique for ever.
    name: str
    client_id: str
    is_admin: bool
    is_iterating: bool
    is_interrupted: bool
    defers: bool
    heartbeat_interval_ms: int
    dead: bool
    #: Its function has returned, or raised.
    ended: bool
    replaced: bool
    stopped_until: float
    asked_at: float
    trouble: Trouble
    rng: Random
    drivers: list[Driver]
    #: The parts that the network and the runtime make for it.
    runtime: Any
    interrupting: Any
    appenders: list[Any]
    tails: list[Any]

    @property
    def is_running(self) -> bool: ...

    def travel_ms(self) -> float: ...

    def reaches_at(self) -> float: ...

    def next_ack(self) -> float: ...

    def next_due(self, tail: Any) -> float: ...

    def joined(self, driver: Driver) -> None: ...
