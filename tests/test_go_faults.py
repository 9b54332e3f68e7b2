"""The faults found in the public Go Marshal (B1 … B23): what prevents each of them here.

Either tests that would catch it, here or elsewhere (which are checked to exist), or why it can't occur.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from kafka_marshal import Marshal
from kafka_marshal.engine import effects
from kafka_marshal.engine.policies import Greedy, WholeTopic
from kafka_marshal.errors import KafkaUnavailableError, TopicMissingError
from kafka_marshal.ports import TopicConfig
from kafka_marshal.runtime import THREADS
from rationalizer import ClaimingPartition, Heartbeat, HeartbeatBatch, ReleasingPartition, World, encode, route_lease
from tests.engine.harness import HI, Net

ROOT = Path(__file__).parents[1]
HERE = "tests/test_go_faults.py"
T0 = ("t", 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the list."""

    what: str
    #: "path::test", or a script, relative to the repository.
    caught_by: tuple[str, ...] = ()
    #: Why it can't occur, if there is nothing to test.
    because: str = ""


def of(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{path}::{name}" for name in names)


def scripts(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/scripts/{name}.txt" for name in names)


CORE = "tests/rationalizer"
ENGINE = "tests/engine"

FAULTS: Mapping[str, Fault] = {
    "B1": Fault(
        "staleness by the reader's wall clock at replay time",
        of(HERE, "test_b1_whenever_the_log_is_read_the_holder_is_the_same")
        + of(f"{CORE}/test_purity.py", "test_nothing_opens_prints_or_hashes")
        + of(f"{CORE}/test_oracle_logs.py", "test_however_the_log_is_cut"),
    ),
    "B2": Fault(
        "a negative age is stale, and so is exactly 2 · HI",
        of(HERE, "test_b2_ages_at_the_borders") + scripts("c01_age", "t02_expiry_by_log_time"),
    ),
    "B3": Fault(
        "any heartbeat takes ownership and may rewind the offset",
        scripts("c05_heartbeats"),
    ),
    "B4": Fault(
        "a reader that rewinds closes a channel it still sends on, and one that jumps forgets what lay before",
        of(
            "tests/contract/test_tail.py",
            "test_a_position_outside_of_the_log_is_reported_once_and_stops_no_other",
            "test_a_log_start_that_overtakes_a_reader_is_reported",
        )
        + of(f"{CORE}/test_world.py", "test_a_callers_mistake_raises_whatever_the_value"),
        because="A replica never rewinds nor jumps: a world takes ascending offsets only, and a cut log ends it (L2).",
    ),
    "B5": Fault(
        "a record that can't be decoded ends the catch-up early; one that ends in a marker never ends it",
        of(
            "tests/contract/test_tail.py",
            "test_the_end_lies_behind_transaction_markers",
            "test_the_end_of_full_and_empty_partitions_is_reported",
        )
        + scripts("e03_rejected_values"),
    ),
    "B6": Fault(
        "ClaimingMessages does nothing; unknown types and versions pass unnoticed",
        scripts("c12_grants", "e04_levels", "engine/c13_at_most_once"),
    ),
    "B7": Fault(
        "a slash in an id, an unchecked version, or a partition of −1 breaks every reader",
        of(HERE, "test_b7_slashes_in_names_and_the_largest_partition")
        + of(f"{CORE}/test_codec.py", "test_e2_bombs_are_malformed_and_cost_no_memory")
        + of(f"{CORE}/test_oracle_bytes.py", "test_every_odd_value_in_every_place", "test_any_bytes"),
    ),
    "B8": Fault(
        "all partitions of a topic are coordinated in one place",
        of(HERE, "test_b8_the_partitions_of_one_topic_are_spread_over_the_log")
        + of(f"{CORE}/test_world.py", "test_l3_a_lease_hashes_topic_nul_and_the_partition_in_ascii"),
    ),
    "B9": Fault(
        "a claim without a record, an answer waited for without an end, a claim given up that wins later",
        scripts("engine/c15_state_of_the_world", "engine/c17_unwanted_grants")
        + of("tests/client/test_consumer.py", "test_the_same_lease_twice_is_refused"),
    ),
    "B10": Fault(
        "twins with one client id both own",
        of(
            f"{ENGINE}/test_claims.py",
            "test_c7_an_older_instance_ends_and_answers_nothing",
            "test_c7_a_releasing_instance_is_replaced_too",
        ),
    ),
    "B11": Fault(
        "what could not be started is dereferenced, and what could be is leaked",
        of(HERE, "test_b11_a_marshal_that_can_not_start_frees_the_cluster_and_says_why"),
    ),
    "B12": Fault(
        "offsets are committed to Kafka before the heartbeat, without a generation: a zombie overwrites",
        of(HERE, "test_b12_a_zombie_s_offsets_are_refused_and_change_nothing"),
        because="There is one place for offsets, the lease in the log, and it takes them from its epoch's holder only.",
    ),
    "B13": Fault(
        "the offset is read before the claim is won, and an offset of 0 is none",
        of(HERE, "test_b13_the_position_is_that_of_the_grant", "test_b13_offset_0_is_an_offset"),
    ),
    "B14": Fault(
        "a failure while starting a claim makes its release hang for ever",
        of(f"{ENGINE}/test_positions.py", "test_p9_closing_waits_for_the_start_no_longer_than_hi")
        + scripts("engine/c17_unwanted_grants")
        + of(f"{ENGINE}/test_consumer.py", "test_a_lease_lost_during_on_revoke_is_reported_and_not_released")
        + of(f"{ENGINE}/test_pause.py", "test_e4_a_consumer_closes_though_a_cp_has_stopped"),
    ),
    "B15": Fault(
        "a position beyond the log end is claimed and released in a loop",
        scripts("engine/p09_start", "engine/p11_lost_positions")
        + of("tests/client/test_consumer.py", "test_p11_a_position_beyond_the_log_is_reported_not_looped_on"),
    ),
    "B16": Fault(
        "a heartbeat that failed counts as sent; a lock is held during a network call",
        scripts("engine/t04_own_clock"),
        because="Appending returns at once (adapters' contract), and the engine does no I/O.",
    ),
    "B17": Fault(
        "a second commit of a message counts twice; a rewinding one is logged and applied",
        of(
            f"{ENGINE}/test_consumer.py",
            "test_done_twice_and_done_of_what_was_never_in_flight_is_ignored_and_counted",
            "test_a_batch_of_which_some_messages_were_done_alone",
        )
        + scripts("p02_done"),
    ),
    "B18": Fault(
        "speed per jittered sample, zero offsets skipped, equal speeds are behind",
        of(
            f"{ENGINE}/test_policies.py",
            "test_equal_speeds_are_healthy",
            "test_speeds_are_per_second_whatever_the_interval",
            "test_standing_still_counts",
        )
        + of(f"{ENGINE}/test_placement.py", "test_cycles_hold_lag_speed_and_growth_per_second"),
    ),
    "B19": Fault(
        "queued messages of a released claim are still delivered",
        of(
            f"{ENGINE}/test_consumer.py",
            "test_a_lost_lease_purges_the_buffer",
            "test_messages_fetched_before_a_loss_and_delivered_after_it_are_dropped",
        )
        + scripts("engine/c14_at_least_once"),
    ),
    "B20": Fault(
        "a fast restart stops after the first topic, and takes what is no longer fresh",
        of(HERE, "test_b20_a_restart_takes_back_all_topics")
        + of(f"{ENGINE}/test_claims.py", "test_c7_not_fresh_falls_back_to_a_claim_when_the_lease_opens"),
    ),
    "B21": Fault(
        "a notification that never blocks blocks",
        of(HERE, "test_b21_the_engine_has_nothing_to_block_on")
        + of(f"{ENGINE}/test_consumer.py", "test_beats_continue_while_on_revoke_runs"),
    ),
    "B22": Fault(
        "a gap in the metadata or growth of the coordination topic ends everything",
        of(f"{ENGINE}/test_positions.py", "test_p9_a_transient_gap_in_the_metadata_costs_nothing_but_time"),
        because="Growth of the coordination topic has to end a replica, for its hashes change (L2); it says so.",
    ),
    "B23": Fault(
        "an admin's pause is advisory, never fails, waits for nothing and belongs to the wrong group",
        scripts("c10_pause")
        + of(
            "tests/admin/test_pause.py",
            "test_waiting_has_an_end_that_names_working_members",
            "test_a_pause_that_runs_out_is_noticed_and_nothing_is_moved",
            "test_the_second_admin_is_refused_by_name",
        )
        + of("tests/admin/test_repositioning.py", "test_a_claim_that_does_not_come_leaves_everything_as_it_was"),
    ),
}


# -- the list itself ----------------------------------------------------------------------------------------------


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_no_fault_is_left_out() -> None:
    assert list(FAULTS) == [f"B{number}" for number in range(1, 24)]


@pytest.mark.parametrize("number", FAULTS)
def test_every_fault_is_caught_by_tests_that_exist_or_can_t_occur(number: str) -> None:
    fault = FAULTS[number]
    assert fault.caught_by or len(fault.because) > 20
    for reference in fault.caught_by:
        path, _, name = reference.partition("::")
        if path.endswith(".txt"):
            assert (ROOT / path).exists(), f"{number}: there is no {reference}"
            continue
        assert name.startswith("test_")
        assert name in names_in(path), f"{number}: there is no {reference}"


# -- not covered explicitly elsewhere ------------------------------------------------------------------------------


def test_b1_whenever_the_log_is_read_the_holder_is_the_same() -> None:
    """A claims at 1000 and beats at 1060, B claims at 1090, HI is 60: at 1091, at 1185 and a year later it is A."""
    log = [
        (1_000, encode(ClaimingPartition("a-1", "A", "g", "t", 0, 100))),
        (1_060, encode(Heartbeat("a-1", "A", "g", "t", 0, 0, None))),
        (1_090, encode(ClaimingPartition("b-1", "B", "g", "t", 0, 100))),
    ]
    live = World(0, 1)
    codes = [live.apply(offset, *entry).code for offset, entry in enumerate(log)]
    later = World(0, 1)
    later.apply_many((offset, *entry) for offset, entry in enumerate(log))
    assert codes == ["OK", "OK", "HELD"]
    assert live.digest() == later.digest()
    assert [x.client_id for x in later.leases()] == ["A"]


def test_b1_a_member_that_starts_long_after_agrees_with_those_that_saw_it() -> None:
    """The engine, too: the log decides a claim's outcome, not a clock."""
    net = Net(cps=1)
    net.topic("t", 1)
    first, second = net.member("a"), net.member("b")
    first.consumer("t")
    second.consumer("t")
    net.run(100)
    first.paused = second.paused = True
    net.now += 100 * HI
    third = net.member("c")
    assert {m.engine.peers.lease(T0).client_id for m in (first, second, third)} == {"a"}  # type: ignore[union-attr]


def test_b2_ages_at_the_borders() -> None:
    """A timestamp before the last heartbeat is no age, and at exactly 2 · HI the holder stays."""
    world = World(0, 1)
    world.apply(0, 1_000, encode(ClaimingPartition("a-1", "A", "g", "t", 0, 100)))
    behind = world.apply(1, 0, encode(ClaimingPartition("b-1", "B", "g", "t", 0, 100)))
    at_two_intervals = world.apply(2, 1_200, encode(ClaimingPartition("b-1", "B", "g", "t", 0, 100)))
    above = world.apply(3, 1_201, encode(ClaimingPartition("b-1", "B", "g", "t", 0, 100)))
    assert [behind.code, at_two_intervals.code, above.code] == ["HELD", "HELD", "OK"]


def test_b7_slashes_in_names_and_the_largest_partition() -> None:
    """Names are separate fields, so nothing in them has a meaning; no partition number allocates anything."""
    partition = 2**31 - 1
    cp = route_lease("a/b/c", partition, 8)
    world = World(cp, 8)
    assert world.apply(0, 1, encode(ClaimingPartition("i/1", "c/d", "g/h", "a/b/c", partition, 100))).accepted
    [lease] = world.leases()
    assert (lease.client_id, lease.group_id, lease.topic, lease.partition) == ("c/d", "g/h", "a/b/c", partition)


def test_b8_the_partitions_of_one_topic_are_spread_over_the_log() -> None:
    spread = Counter(route_lease("flights", partition, 8) for partition in range(400))
    assert len(spread) == 8
    assert max(spread.values()) < 2 * min(spread.values())


class DeadCluster:
    """A cluster that answers nothing; any other call fails."""

    runtime = THREADS

    def __init__(self, found: TopicConfig | Exception | None) -> None:
        self.found = found
        self.closed = 0

    def cluster_ids(self, wait_s: float) -> dict[str, str]:
        return {}

    def expect(self, topic: str, *, delivery_timeout_ms: int | None = None) -> None:
        pass

    def topic_config(self, name: str, timeout_s: float) -> TopicConfig | None:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("found", "error"), [(KafkaUnavailableError("no broker answers"), KafkaUnavailableError), (None, TopicMissingError)]
)
def test_b11_a_marshal_that_can_not_start_frees_the_cluster_and_says_why(
    found: Exception | None, error: type[Exception]
) -> None:
    cluster = DeadCluster(found)
    with pytest.raises(error):
        Marshal.on_cluster(cluster, group_id="g", client_id="c")  # type: ignore[arg-type]
    assert cluster.closed >= 1


def test_b12_a_zombie_s_offsets_are_refused_and_change_nothing() -> None:
    """A stopped member reports progress under an old epoch, with a heartbeat and with a release."""
    net = Net(cps=1)
    net.topic("t", 1, end=50)
    zombie = net.member("a")
    zombie.consumer("t")
    net.run(50)
    old_epoch = zombie.lease(T0).epoch
    zombie.paused = True
    other = net.member("b")
    other.consumer("t")
    net.run_until(lambda: other.can_hand_out(T0))
    other.work()
    net.run(HI)
    before = net.world(T0)
    net.write(Heartbeat(*zombie.engine.ids, "t", 0, old_epoch, 49), 0)
    net.write(ReleasingPartition(*zombie.engine.ids, "t", 0, old_epoch, 49), 0)
    net.run(20)
    after = net.world(T0)
    assert (after.client_id, after.epoch, after.progress.stable) == ("b", before.epoch, before.progress.stable)
    assert other.worlds[0].rejected["FENCED"] == 2


def test_b13_the_position_is_that_of_the_grant() -> None:
    """Between a claim and its grant the old holder reports more: the new one starts behind that."""
    net = Net(cps=1)
    net.topic("t", 1, end=50)
    first, second = net.member("a"), net.member("b")
    first.consumer("t")
    net.run(50)
    first.work()
    first.close()  # its release, with offset 4, is in the log but not seen by the second
    second.stalled = True
    second.consumer("t")
    second.stalled = False
    net.run_until(lambda: second.can_hand_out(T0))
    assert second.assignment(T0).buffer.fetch_next == 5


def test_b13_offset_0_is_an_offset() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=1)
    first = net.member("a")
    first.consumer("t")
    net.run(50)
    assert [m.at for m in first.work()] == [0]
    first.close()
    net.run(50)
    second = net.member("b")
    second.consumer("t")
    net.run_until(lambda: second.can_hand_out(T0))
    net.data[T0].end = 2
    assert [m.at for m in second.work()] == [1]


@pytest.mark.parametrize("policy", [Greedy(), WholeTopic()])
def test_b20_a_restart_takes_back_all_topics(policy: Greedy | WholeTopic) -> None:
    net = Net(cps=2)
    for topic in ("t", "u", "v"):
        net.topic(topic, 3)
    first = net.member("a")
    first.consumer("^[tuv]$", policy=policy)
    net.run_until(lambda: len(first.held()) == 9)
    first.kill()
    second = net.member("a")
    second.consumer("^[tuv]$", policy=policy)
    net.run(50)
    assert len(second.held()) == 9
    claims = [r for r in net.records(ClaimingPartition) if r.instance_id == second.engine.settings.instance_id]
    assert claims == []


def test_b21_the_engine_has_nothing_to_block_on() -> None:
    """Effects are plain data that the shell executes; callbacks run elsewhere, and heartbeats don't wait for them."""
    kinds = get_args(effects.Effect)
    assert sum(is_dataclass(kind) for kind in kinds) >= 6
    assert all(field.init for kind in kinds if is_dataclass(kind) for field in fields(kind))
    for path in sorted((ROOT / "marshal/kafka_marshal/engine").glob("*.py")):
        imported = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & {"threading", "queue", "time", "socket", "asyncio", "concurrent", "select"}, path.name
    net = Net(cps=1)
    net.topic("t", 1)
    member = net.member("a")
    member.hold_callbacks = True
    member.consumer("t")
    net.run(5 * HI)
    assert len([r for r in net.records() if isinstance(r, Heartbeat | HeartbeatBatch)]) >= 14
