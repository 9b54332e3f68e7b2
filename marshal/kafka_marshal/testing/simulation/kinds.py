"""What a story has: its clients, their checkpoints, and its faults."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of faults and their weights.
FAULTS: dict[str, float] = {
    "crash": 5,  # kill -9; started again after ``intervals``
    "term": 4,  # SIGTERM; started again after ``intervals``
    "stop": 4,  # SIGSTOP for ``intervals``
    "zombie": 1,  # SIGSTOP, and a successor is started; it continues after ``intervals``
    "lost": 3,  # appends do not arrive; ``size`` of them
    "unacknowledged": 3,  # they arrive, but their acknowledgements do not
    "duplicated": 2,  # they are written twice
    "late": 2,  # they arrive long after they were given up
    "slow network": 2,  # the latency is ``size`` HI
    "deaf": 3,  # a part of the coordination topic does not reach this client
    "cut off": 2,  # this client reaches no broker
    "outage": 1,  # no client does
    "slow handler": 2,  # the work takes ``size`` times as long
    "grow": 1,  # the topic gets another partition
    "pause": 2,  # an admin pauses the group for ``intervals``, and moves positions where size > 0.5
    "forget": 0,  # an admin pauses the group and forgets it; only in some seeds, see _forgotten
    "retention": 0,  # the first ``size`` of a partition's messages are gone; only in stories that are written down
    "markers": 0,  # three offsets of a partition hold no message, as transactions leave them; only in written stories
    "prune": 0,  # an admin removes old log and old snapshots; only in seeds that have snapshots, see _prunes
    "interrupts": 0,  # ``size`` / 4 of a worker's calls are ended by an exception; only in seeds that have it
    "torn reads": 0,  # ``size`` / 2 of its reads raise, with messages taken already; only in seeds that have it
    "clock": 0,  # a broker's clock is set, by ``size`` HI; only in seeds that have it
    "evict": 0,  # an operator removes a member of a coordinated group; only in stories that have one
    "brief pause": 0,  # an admin pauses the group, and waits for no release; only in written stories, and of sharers
    "foreign commit": 0,  # another program commits an offset for the group in Kafka; only in stories of transactions
    "dropped offset": 0,  # Kafka's offset of the group is deleted; only in stories of transactions
    "deploy": 0,  # SIGTERM for one client after the other, ``intervals`` apart; only in stories with checkpoints
    "go back": 0,  # a member rolls the group back; only in stories with checkpoints
    "rollback": 0,  # an operator does; only in stories with checkpoints
    "late rollback": 0,  # one of ``intervals`` ago arrives now; only in stories with checkpoints
    "settles": 0,  # an operator redrives, discards or sets aside; only in stories of sharers and of parks
    "hang": 0,  # its next handler hangs until all else is handled; only in written stories with lanes
}


@dataclass(frozen=True, slots=True)
class Client:
    """One member: its worker is restarted whenever it ends."""

    name: str
    #: The name of a built-in worker, or "yours" for the one under test.
    worker: str = "iterate"
    policy: str = "balanced"
    #: Rate of its clock relative to the brokers'.
    rate: float = 1.0
    #: At most once: requests the next batch while one is handled.
    claims_ahead: bool = False
    #: Interval of its fetches (HI), each with several records; 0: records arrive at once.
    fetches_every: float = 0.0
    #: Time of its first start (HI).
    joins: float = 0.0
    #: The only data topic that it reads; "": all.
    reads: str = ""
    #: Its heartbeat interval (HI) by start; (): that of the story.
    paces: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    #: When it begins, in HI from the start.
    at: float
    kind: str
    #: The client concerned; "" for none in particular.
    client: str = ""
    #: How long it lasts, in HI.
    intervals: float = 1.0
    #: Severity; its meaning depends on the kind.
    size: float = 0.5
    #: The partition of the coordination topic, if it matters.
    partition: int = 0


@dataclass(frozen=True, slots=True)
class Counting:
    """How a story's group takes checkpoints; times in HI."""

    hold: bool = False
    every: float = 5.0
    keep: int = 2
    drain: float = 2.0
    timeout: float = 8.0
    #: Partitions are shared by key.
    shares: bool = False
    #: Some saves fail or are slow, and some handlers hang.
    fails: bool = True
