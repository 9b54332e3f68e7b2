"""Fixed stories of lanes (``consumer.run``): combinations that seeds produce too rarely, repeated."""

from __future__ import annotations

from kafka_marshal.testing.simulation import Client, Fault, Scenario
from kafka_marshal.types import Strategy

HI = 300


def _leases_come_back_to_slow_handlers() -> Scenario:
    """Two members are cut off in turn; messages that their handlers still have are delivered to them again."""
    clients = (Client("c0", "lanes"), Client("c1", "lanes"))
    faults = tuple(Fault(3 + 4.1 * i, "cut off", f"c{i // 2 % 2}", 2.2) for i in range(14))
    return Scenario(
        0, clients, faults, heartbeat_interval_ms=HI, messages=10.0, handling_ms=HI, intervals=65, order="key"
    )


def _clocks_jump(seed: int) -> Scenario:
    """On a slow network, log time repeatedly runs ahead of a clock: leases are in doubt for a while."""
    jumps = tuple(Fault(3 + 0.9 * i, "clock", "", 0.5, 0.6, i % 2) for i in range(36))
    slow = Fault(2.0, "slow network", "c0", 40.0, 0.1)
    return Scenario(
        seed,
        (Client("c0", "lanes"),),
        (slow, *jumps),
        heartbeat_interval_ms=HI,
        messages=20.0,
        handling_ms=30.0,
        intervals=40,
        order="key",
    )


def _runs_end_while_handlers_work(seed: int) -> Scenario:
    """Runs end by failures and interrupts, leave handlers behind, and restart with the same consumer."""
    clients = (Client("c0", "lanes"), Client("c1", "lanes"))
    faults = tuple(Fault(1.0, "interrupts", client.name, 40.0, 0.5) for client in clients)
    return Scenario(
        seed,
        clients,
        faults,
        heartbeat_interval_ms=HI,
        messages=20.0,
        handling_ms=80.0,
        intervals=40,
        order=("partition", "key")[seed % 2],
    )


def _members_come_and_go(seed: int) -> Scenario:
    """Partitions are released while handlers work, some of which fail."""
    clients = tuple(Client(f"c{i}", "lanes") for i in range(3))
    ends = tuple(Fault(3 + 1.5 * i, "term", f"c{1 + i % 2}", 1.5) for i in range(24))
    return Scenario(
        seed, clients, ends, heartbeat_interval_ms=HI, messages=30.0, handling_ms=20.0, intervals=42, order="key"
    )


def _stopped_with_much_in_hand() -> Scenario:
    """Processes are stopped for longer than their leases last, with messages ready for all handlers."""
    clients = (Client("c0", "lanes"), Client("c1", "lanes"))
    stops = tuple(Fault(3 + 3.1 * i, "stop", f"c{i % 2}", 2.7) for i in range(12))
    return Scenario(
        0, clients, stops, heartbeat_interval_ms=HI, messages=80.0, handling_ms=30.0, intervals=42, order="key"
    )


def _hangs_while(strategy: Strategy | None, seed: int, joins: float, *faults: Fault) -> Scenario:
    """A handler hangs until all else is handled, and its partition is released meanwhile."""
    clients = (Client("c0", "lanes"), Client("c1", "lanes", joins=joins))
    return Scenario(
        seed,
        clients,
        (Fault(4.0, "hang", "c0"), *faults),
        heartbeat_interval_ms=200,
        messages=10.0,
        handling_ms=10.0,
        intervals=20,
        strategy=strategy,
        order="key",
    )


def _hangs_while_the_group_is_paused(strategy: Strategy | None) -> Scenario:
    """Without a handler_timeout: partitions continue after the pause, without the hanging key."""
    return _hangs_while(strategy, 2, 0.0, *(Fault(at, "brief pause") for at in (5.0, 11.5)))


def _hangs_while_another_joins(strategy: Strategy | None, seed: int) -> Scenario:
    """With a handler_timeout: a joining member waits no longer than that for its share."""
    return _hangs_while(strategy, seed, 4.6)


def _a_run_ends_as_its_group_is_paused() -> Scenario:
    """Of seed 812400004: a handler has its message for as long as it has worked on it, also when its run has ended."""
    return Scenario(
        812400004,
        tuple(Client(name, "lanes", claims_ahead=True) for name in ("c0", "c2", "c3")),
        (
            Fault(48.43, "term", "c2", intervals=8.81, size=0.776),
            Fault(52.62, "forget", intervals=3.76, size=0.346),
            Fault(60.01, "stop", "c2", intervals=1.93, size=0.638, partition=1),
            Fault(65.53, "pause", intervals=1.33, size=0.069),
            Fault(66.54, "torn reads", "c2", intervals=28.51, size=0.137),
            Fault(73.53, "interrupts", "c3", intervals=29.26, size=0.933),
        ),
        heartbeat_interval_ms=200,
        coordination_partitions=2,
        data_partitions=1,
        messages=13.2,
        handling_ms=4.0,
        intervals=88,
        snapshots=150,
        order="none",
    )


LANE_STORIES: tuple[Scenario, ...] = (
    _a_run_ends_as_its_group_is_paused(),
    _leases_come_back_to_slow_handlers(),
    *map(_clocks_jump, (2, 3)),
    *map(_runs_end_while_handlers_work, (1, 3, 8, 13)),
    *map(_members_come_and_go, (0, 2)),
    _stopped_with_much_in_hand(),
    *map(_hangs_while_the_group_is_paused, (None, "sticky")),
    _hangs_while_another_joins(None, 13),
    _hangs_while_another_joins("sticky", 8),
)
