"""Stories written down, not drawn: each brings together, again and again, what meets by chance too seldom."""

from __future__ import annotations

from kafka_marshal.testing.simulation import Client, Fault, Scenario

__all__ = ["STORIES"]

HI = 300
#: So many messages that somebody always has some in hand, or claims some.
MESSAGES = 60.0


def _pauses_meet_claims() -> Scenario:
    """At most once, on a slow network, an admin pauses the group every third HI: claims of messages are refused."""
    workers = ("iterate", "poll", "consume", "batches")
    clients = tuple(Client(f"c{i}", worker, claims_ahead=i % 2 == 0) for i, worker in enumerate(workers))
    slow = tuple(Fault(2.0, "slow network", client.name, 60.0, 0.15) for client in clients)
    pauses = tuple(Fault(at + 0.37 * i, "pause", "", 0.6, 0.2) for i, at in enumerate(range(4, 76, 3)))
    return Scenario(0, clients, slow + pauses, "at-most-once", HI, messages=MESSAGES, handling_ms=1.0)


def _stopped_with_a_batch_in_hand(seed: int) -> Scenario:
    """At most once, each process is stopped for longer than its leases last, over and over, amid a batch."""
    workers = ("iterate", "poll", "poll", "poll")
    clients = tuple(Client(f"c{i}", worker, claims_ahead=i % 2 == 0) for i, worker in enumerate(workers))
    stops = tuple(Fault(3 + 1.7 * i, "stop", f"c{i % 4}", 3.0) for i in range(42))
    return Scenario(seed, clients, stops, "at-most-once", HI, messages=MESSAGES, handling_ms=8.0)


STORIES: tuple[Scenario, ...] = (_pauses_meet_claims(), *map(_stopped_with_a_batch_in_hand, range(2)))
