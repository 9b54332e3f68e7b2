"""A simulated process as the network, the runtime and the checks see it, and its present trouble."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Protocol

from kafka_marshal.node.driver import Driver


@dataclass(slots=True)
class Trouble:
    """The present network conditions of one process."""

    #: Mean latency, one way (ms).
    latency_ms: float = 0.4
    #: Share of appends that are lost, and of acknowledgements that are.
    loss: float = 0.0
    ack_loss: float = 0.0
    #: Share of appends that are written twice, and of those that arrive long after the client gave them up.
    duplicates: float = 0.0
    late: float = 0.0
    #: No broker is reachable.
    is_cut_off: bool = False
    #: Partition of the coordination topic → virtual time (ms) until which this client receives nothing of it.
    deaf_until: dict[int, float] = field(default_factory=dict)
    #: Share of a worker's calls that an exception ends, and of reads that raise after taking messages.
    interrupts: float = 0.0
    torn_reads: float = 0.0


@dataclass(slots=True)
class Host:
    """The host of a client's processes."""

    name: str
    rate: float = 1.0
    is_admin: bool = False
    #: Its worker handles message after message, as `for message in consumer` does.
    is_iterating: bool = False
    #: Its worker has many handlers (``consumer.run``).
    in_lanes: bool = False
    #: Its worker shares partitions by batches.
    shares: bool = False
    #: Its worker defers some messages and marks others as done meanwhile.
    defers: bool = False
    #: Interval (ms) at which what a broker sends reaches it; 0: at once.
    fetch_ms: float = 0.0
    #: Its worker's calls or reads sometimes raise and it continues: handled messages may be delivered again.
    is_interrupted: bool = False
    trouble: Trouble = field(default_factory=Trouble)

    @property
    def begins_at_once(self) -> bool:
        """Whether it handles each message at once: what begins late was delivered late."""
        return self.is_iterating or self.in_lanes


@dataclass(slots=True)
class ProcessEnd:
    """How a process ends."""

    #: Virtual time (ms) of the first SIGTERM.
    asked_at: float = inf
    #: Its function has returned, or raised.
    ended: bool = False
    error: BaseException | None = None
    #: Another process of this client was started while this one was stopped.
    replaced: bool = False


class Living(Protocol):
    """A simulated process; see :class:`~kafka_marshal.testing.simulation.process.Process`."""

    #: Unique in a story.
    name: str
    client_id: str
    host: Host
    heartbeat_interval_ms: int
    dead: bool
    stopped_until: float
    end: ProcessEnd
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
