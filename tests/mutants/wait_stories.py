"""Fixed stories of messages that wait for a time, and planted bugs that they expose (U2)."""

from __future__ import annotations

from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.testing.simulation import Client, Fault, Scenario
from tests.mutants.mutation import Mutation

_TWO = (Client("c0", "parks"), Client("c1", "parks"))


def _waits(seed: int, *faults: Fault, order: Order = "key") -> Scenario:
    return Scenario(
        seed,
        _TWO,
        faults,
        heartbeat_interval_ms=300,
        data_partitions=2,
        messages=16.0,
        intervals=18,
        order=order,
        parks=True,
        later=True,
    )


def _owners_die(seed: int, order: Order = "key") -> Scenario:
    """Each in turn; the other one has the partitions, and all that waits in them."""
    return _waits(seed, *(Fault(4.0 + 4.3 * n, "crash", f"c{n % 2}", 2.6) for n in range(3)), order=order)


def _owners_leave(seed: int, order: Order = "key") -> Scenario:
    """Each in turn, in order: what waits is in the log before the partition is another's."""
    return _waits(seed, *(Fault(3.0 + 2.3 * n, "term", f"c{n % 2}", 0.5) for n in range(6)), order=order)


#: Nothing goes wrong: what waits lets others pass.
QUIET, QUIET_IN_ORDER = _waits(1), _waits(1, order="partition")

WAIT_STORIES: tuple[Scenario, ...] = (
    QUIET,
    _owners_leave(1),
    _owners_leave(2, "partition"),
    _owners_die(1),
    _owners_die(2, "partition"),
)

_IN_ORDER = "insort(self._open, (message, covers_from), key=lambda each: offset_of(each[0]))"

WAITS: tuple[Mutation, ...] = (
    Mutation(
        "wait: half of what the handler asks for",
        "Tries.failed",
        "due = self.runtime.now_ms() + delay_ms",
        "due = self.runtime.now_ms() + delay_ms / 2",
        "U2",
    ),
    Mutation(
        "wait: none at the next owner",
        "InLanes._due_times",
        "found[offset] = now + until - log_time",
        "found[offset] = now",
        "U2",
    ),
    Mutation(
        "wait: the log has the tries before it alone",
        "OpenOffsets.later",
        "self.settling.want(Request(offset, offset, Goal.PARKED, hashed, attempts, reason))",
        "self.settling.want(Request(offset, offset, Goal.OPEN, hashed, attempts))",
        "U2",
    ),
    Mutation(
        "wait: for ever, once the owner has gone",
        "OpenOffsets._meet",
        "if hole.is_parked:",
        "if hole.reason is not None:",
        "U2",
    ),
    Mutation(
        "wait: later open messages of its key come first",
        "Buffer.put_open",
        _IN_ORDER,
        "self._open.append((message, covers_from))",
        "U3",
    ),
    Mutation(
        "wait: the log has none of the tries before it",
        "Tries.failed",
        "waiting.log_it(self.consumer, lane, attempt.message, delay_ms, attempt.number)",
        "waiting.log_it(self.consumer, lane, attempt.message, delay_ms, 0)",
        "U2",
    ),
)
