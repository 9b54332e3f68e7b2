"""Initial scenes of several tests of the engine."""

from __future__ import annotations

from kafka_marshal.engine.effects import Callback
from rationalizer import ClaimingPartition, ReleasingPartition
from tests.engine.harness import HI, FakeMessage, Member, Net

T0 = ("t", 0)
ASSIGN, REVOKE, LOST = (T0, Callback.ASSIGN), (T0, Callback.REVOKE), (T0, Callback.LOST)


def working(end: int = 100, partitions: int = 1, **options: object) -> tuple[Net, Member]:
    net = Net(cps=1)
    net.topic("t", partitions, end=end)
    member = net.member("a")
    member.consumer("t", **options)  # type: ignore[arg-type]
    net.run_until(lambda: len(member.held()) == partitions and member.can_hand_out(T0))
    return net, member


def calls(member: Member) -> list[tuple[object, Callback]]:
    return [(key, callback) for callback, key in member.callbacks]


def evict(net: Net, member: Member) -> None:
    """An operator releases in its name (``kafka-marshal evict``), and another client claims."""
    ids = member.engine.ids
    net.write(ReleasingPartition(*ids, "t", 0, member.lease(T0).epoch, None), 0)
    net.write(ClaimingPartition("z-1", "z", "g", "t", 0, 100 * HI), 0)


def taken(member: Member, count: int) -> list[FakeMessage]:
    member.fetch(count)
    found: list[FakeMessage] = []
    while len(found) < count and (run := member.take(1)) is not None:
        found.extend(run.messages)  # type: ignore[arg-type]
    return found


def reposition(net: Net, offset: int) -> None:
    """As an admin does: pause, claim, release with the new position (C11)."""
    net.pause(10 * HI)
    net.run(2.5 * HI)
    epoch = net.write(ClaimingPartition("admin-1", "admin", "g", "t", 0, HI), 0)
    net.write(ReleasingPartition("admin-1", "admin", "g", "t", 0, epoch, offset), 0)
    net.pause(0)
