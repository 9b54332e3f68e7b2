"""Claimed batches as members of a coordinated group that takes checkpoints, on a cluster in memory and without a JVM.

Spark, a broker and a fenced sink are in test_claimed_checkpoints.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kafka_marshal import Batches, CheckpointPolicy, Claims, ConfigurationError, Group, OffsetRange
from kafka_marshal.pipeline import claimed
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from tests.client.conftest import wait_until
from tests.client.counting import Ledger, Memory, counted
from tests.client.test_group_ranges import At
from tests.faults.stories import TOPIC, member, memory_cluster

PARTITIONS = 2
SESSION = 600


class Context:
    """A SparkContext, as far as rounds need it."""

    _jsc = object()

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self.cancelled: set[str] = set()
        self.addJobTag, self.removeJobTag = self.tags.add, self.tags.discard

    def cancelJobsWithTag(self, tag: str) -> None:
        self.cancelled.add(tag)

    def setInterruptOnCancel(self, on: bool) -> None:
        pass

    def getLocalProperty(self, name: str) -> None:
        return None

    def setLocalProperty(self, name: str, value: object) -> None:
        pass

    def run_a_job(self) -> None:
        """One that ends only when it is cancelled."""
        [tag] = self.tags
        wait_until(lambda: tag in self.cancelled)
        raise RuntimeError("[SPARK_JOB_CANCELLED]")


class Session:
    """A SparkSession, as far as rounds need it."""

    readStream = None

    def __init__(self) -> None:
        self.sparkContext = Context()


def rows_of(ranges: Sequence[OffsetRange]) -> list[At]:
    return [At(each.partition, offset) for each in ranges for offset in range(each.first, each.last + 1)]


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed, "check_session", lambda spark: None)
    monkeypatch.setattr(claimed, "java_properties", lambda spark: [])
    monkeypatch.setattr(claimed, "read_ranges", lambda spark, ranges, options: ranges)
    monkeypatch.setattr(claimed, "without_done", lambda df, ranges: rows_of(ranges))


class Team:
    """Drivers on one cluster and one store."""

    def __init__(self) -> None:
        self.cluster = memory_cluster(PARTITIONS, 0)
        self.store = Memory()
        self.messages = 0

    def produce(self, count: int) -> None:
        for _ in range(count * PARTITIONS):
            self.cluster.broker.produce(TOPIC, _ % PARTITIONS, b"x")
        self.messages += count

    @property
    def everything(self) -> Counter[tuple[int, int]]:
        return Counter((partition, offset) for partition in range(PARTITIONS) for offset in range(self.messages))


class Driver:
    """A driver that counts."""

    def __init__(self, team: Team, name: str) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.ledger = Ledger(team.store, lambda what, **more: self.said.append((what, more)))
        self.spark = Session()
        self.marshal = member(team.cluster, name)
        self.marshal.bootstrap_servers = "in memory"
        #: Called with each round, after its rows are counted.
        self.after: Callable[[], object] = lambda: None
        self.rounds = 0

    @contextmanager
    def batches(self, **options: Any) -> Iterator[ClaimedBatches]:
        given: dict[str, Any] = {
            "mode": Group(session_timeout=SESSION / 1000),
            "checkpoints": CheckpointPolicy(
                every=None, timeout=20, on_checkpoint=self.ledger.save, on_restore=self.ledger.restore
            ),
            "on_revoke": self.ledger.drop,
            "on_lost": self.ledger.drop,
        }
        spark: Any = self.spark
        with self.marshal, ClaimedBatches(spark, self.marshal, [TOPIC], **given | options) as made:
            yield made

    def fn(self, df: Any, batch: ClaimedBatch) -> None:
        self.rounds += 1
        assert batch.kind == "coordinated"
        for row in df:
            self.ledger.handle(row)
        self.after()

    def whys(self) -> list[str]:
        return [more["why"] for what, more in self.said if what == "restored"]

    def next_round(self, then: Callable[[], object]) -> None:
        """Call this after the rows of one more round."""

        def once() -> None:
            self.after = lambda: None
            then()

        self.after = once


def test_a_rollback_cancels_the_jobs_of_the_round_and_the_next_begins_at_the_checkpoint() -> None:
    team = Team()
    a = Driver(team, "a")
    with a.batches() as batches:
        team.produce(10)
        batches.foreach_batch(a.fn, available_now=True)
        tens = batches.checkpoints.newest
        team.produce(5)
        batches.foreach_batch(a.fn, available_now=True)
        assert batches.checkpoints.newest != tens
        team.produce(5)

        def back() -> None:
            batches.rollback(tens)
            a.spark.sparkContext.run_a_job()

        a.next_round(back)
        batches.foreach_batch(a.fn, available_now=True)
        assert counted([a.ledger]) == team.everything
        assert a.whys() == ["joined"] * PARTITIONS + ["rollback"] * PARTITIONS
        assert len(a.spark.sparkContext.cancelled) == 1
        assert a.spark.sparkContext.tags == set()


def test_a_partition_moves_at_the_end_of_the_round_and_a_driver_leaves_at_a_checkpoint() -> None:
    team = Team()
    a, b = Driver(team, "a"), Driver(team, "b")
    reached, go_on = threading.Event(), threading.Event()
    with b.batches() as others, a.batches() as batches:
        wait_until(lambda: len(a.ledger.counts) == len(b.ledger.counts) == 1)

        def wait() -> None:
            reached.set()
            go_on.wait(20)

        a.next_round(wait)
        team.produce(10)
        threads = [
            threading.Thread(target=each.foreach_batch, args=(driver.fn,), daemon=True)
            for each, driver in ((batches, a), (others, b))
        ]
        for thread in threads:
            thread.start()
        assert reached.wait(20)
        a.marshal.stop()
        closing = threading.Thread(target=batches.close, daemon=True)
        closing.start()
        wait_until(lambda: others.checkpoints.state in ("REACHED", "POLLING", "RESET_COMPLETE"))
        assert len(b.ledger.counts) == 1, "the other partition waits for the round"
        go_on.set()
        for each in (closing, threads[0]):
            each.join(20)
        wait_until(lambda: counted([b.ledger]) == team.everything)
        assert b.whys()[-1] == "handed_over"
        b.marshal.stop()
        threads[1].join(20)
    assert Counter((m["partition"], m["offset"]) for w, m in a.said + b.said if w == "handled") == team.everything


def test_state_that_has_what_comes_again_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the round is lost when fn has returned: nothing of it counts, though some partitions are still held."""
    team = Team()
    a = Driver(team, "a")
    with a.batches() as batches:
        done, refused = batches._consumer.done, [True]
        monkeypatch.setattr(
            batches._consumer, "done", lambda *of, **how: [] if refused and refused.pop() else done(*of, **how)
        )
        team.produce(10)
        batches.foreach_batch(a.fn, available_now=True)
        assert a.whys() == ["joined"] * PARTITIONS + ["rollback"] * PARTITIONS
        assert counted([a.ledger]) == team.everything


def test_state_of_a_round_that_raised_out_of_the_block_is_in_no_checkpoint() -> None:
    team = Team()
    a = Driver(team, "a")
    team.produce(10)

    def first() -> None:  # done, but in no checkpoint
        team.produce(1)
        a.next_round(second)

    def second() -> None:
        raise ZeroDivisionError

    a.next_round(first)
    with pytest.raises(ZeroDivisionError), a.batches() as batches:
        batches.foreach_batch(a.fn)
    assert team.store.states == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": Claims()}, r"checkpoints= is not possible with mode=Claims.*mode=Group\("),
        ({"mode": Batches()}, r"mode must be Claims\(…\) or Group\(…\)"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words), Driver(Team(), "a").batches(**options):
        pass


def test_claims_have_no_checkpoints_and_an_unknown_argument_is_one() -> None:
    driver = Driver(Team(), "a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'cheeckpoints'"):
        ClaimedBatches(driver.spark, driver.marshal, [TOPIC], cheeckpoints=1)  # type: ignore[arg-type,call-arg]
    with driver.batches(mode=Claims(), checkpoints=None) as batches:
        for call in (batches.checkpoint, batches.rollback, lambda: batches.checkpoints):
            with pytest.raises(ConfigurationError, match=r"Use mode=Group\(\) and checkpoints="):
                call()
