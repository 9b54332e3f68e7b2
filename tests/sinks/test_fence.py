"""Fencing: epochs, last offsets, all or nothing; the same for both databases."""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kafka_marshal.errors import ClosedError, ConfigurationError, SinkError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks import FencedSink, Written
from tests.sinks.conftest import Kind


def write(kind: Kind, sink: FencedSink[Any], epoch: int, first: int, last: int, partition: int = 0) -> int:
    """Handle a batch as a worker does; returns the number of rows written."""
    with sink.transaction("group", [("flights", partition, epoch, last)]) as tx:
        done = tx.last_offset("flights", partition)
        rows = [(offset, f"{partition}:{epoch}") for offset in range(first, last + 1) if offset > done]
        if rows:
            tx.executemany(kind.insert(), rows)
    return len(rows)


def test_rows_and_offset_are_stored_together(kind: Kind) -> None:
    sink = kind.sink()
    assert sink.progress("group") == {}
    assert write(kind, sink, 7, 0, 2) == 3
    assert kind.rows() == [(0, "0:7"), (1, "0:7"), (2, "0:7")]
    assert sink.progress("group") == {("flights", 0): Written(2, 7)}
    assert kind.sink().progress("other group") == {}


def test_a_batch_that_comes_again_is_written_once(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 7, 0, 4)
    assert write(kind, sink, 9, 2, 6) == 2, "the new holder reads from what the log knew, which was less"
    assert [offset for offset, _ in kind.rows()] == list(range(7))
    assert write(kind, sink, 9, 0, 3) == 0
    assert sink.progress("group") == {("flights", 0): Written(6, 9)}, "a shorter one takes nothing back"


def test_an_older_epoch_is_refused_and_writes_nothing(kind: Kind) -> None:
    old, new = kind.sink(), kind.sink()
    write(kind, old, 7, 0, 2)
    write(kind, new, 9, 3, 3)
    with pytest.raises(StaleEpochError) as caught:
        write(kind, old, 7, 3, 5)
    assert (caught.value.topic, caught.value.partition) == ("flights", 0)
    assert (caught.value.epoch, caught.value.stored_epoch) == (7, 9)
    assert not caught.value.retry
    for part in ("flights [0]", "newer than ours", "Nothing of this transaction was written", "Stop working"):
        assert part in str(caught.value)
    assert kind.rows() == [(0, "0:7"), (1, "0:7"), (2, "0:7"), (3, "0:9")]
    assert new.progress("group") == {("flights", 0): Written(3, 9)}
    assert write(kind, new, 9, 4, 4) == 1, "the refused one left no lock behind"


def test_one_stale_partition_refuses_the_whole_transaction(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 9, 0, 0, partition=1)
    with pytest.raises(StaleEpochError), sink.transaction("group", [("flights", 0, 5, 3), ("flights", 1, 5, 3)]):
        pytest.fail("it may not get here")
    assert sink.progress("group")[("flights", 1)] == Written(0, 9)
    assert sink.progress("group").get(("flights", 0), Written(-1, -1)) == Written(-1, -1)


def test_partitions_groups_and_topics_are_fenced_each_for_itself(kind: Kind) -> None:
    sink = kind.sink()
    with sink.transaction("a", [("flights", 0, 100, 5), ("flights", 1, 3, 8), ("weather", 0, 4, 1)]):
        pass
    with sink.transaction("b", [("flights", 0, 1, 0)]) as tx:
        assert tx.last_offset("flights", 0) == -1
    assert sink.progress("a") == {
        ("flights", 0): Written(5, 100),
        ("flights", 1): Written(8, 3),
        ("weather", 0): Written(1, 4),
    }
    assert sink.progress("b") == {("flights", 0): Written(0, 1)}


def test_an_exception_writes_nothing_and_reaches_the_caller(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 7, 0, 0)
    with pytest.raises(KeyError, match="mine"), sink.transaction("group", [("flights", 0, 8, 9)]) as tx:
        tx.execute(kind.insert(), (9, "lost"))
        raise KeyError("mine")
    assert kind.rows() == [(0, "0:7")]
    assert sink.progress("group") == {("flights", 0): Written(0, 7)}, "the epoch as well"
    assert write(kind, sink, 7, 1, 1) == 1


def test_a_statement_that_fails_writes_nothing(kind: Kind) -> None:
    sink = kind.sink()
    with (
        pytest.raises(SinkError, match="Nothing of this transaction was written") as caught,
        sink.transaction("group", [("flights", 0, 8, 9)]) as tx,
    ):
        tx.execute(kind.insert(), (9, "lost"))
        tx.execute("INSERT INTO nowhere VALUES (1)")
    assert "nowhere" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert kind.rows() == []


def test_the_drivers_own_connection_is_inside_the_transaction(kind: Kind) -> None:
    sink = kind.sink()
    with pytest.raises(ZeroDivisionError), sink.transaction("group", [("flights", 0, 8, 9)]) as tx:
        tx.connection.execute("INSERT INTO results VALUES (1, 'x')")
        assert tx.execute("SELECT count(*) FROM results").fetchone()[0] == 1
        1 / 0  # noqa: B018
    assert kind.rows() == []


def test_committing_by_oneself_is_refused(kind: Kind) -> None:
    sink = kind.sink()
    with (
        pytest.raises(SinkError, match="Leave COMMIT and ROLLBACK to the sink"),
        sink.transaction("group", [("flights", 0, 8, 9)]) as tx,
    ):
        tx.execute("COMMIT")
    assert sink.progress("group").get(("flights", 0), Written(-1, -1)).last_offset == -1
    assert write(kind, sink, 8, 0, 0) == 1


def test_what_is_no_claim_is_refused(kind: Kind) -> None:
    sink = kind.sink()
    wrong: list[list[tuple[str, int, int, int]]] = [
        [],
        [("flights", 0, -1, 5)],
        [("flights", 0, 3, -2)],
        [("flights", -1, 3, 2)],
        [("flights", 0, 3, 5), ("flights", 0, 4, 6)],
    ]
    for claims in wrong:
        with pytest.raises(ConfigurationError, match="Nothing was"), sink.transaction("group", claims):
            pytest.fail("it may not get here")
    with (
        pytest.raises(ConfigurationError, match="not one of this transaction's"),
        sink.transaction("group", [("flights", 0, 3, 5)]) as tx,
    ):
        tx.last_offset("flights", 1)
    assert write(kind, sink, 3, 0, 0) == 1


def test_several_ranges_of_one_partition_are_one(kind: Kind) -> None:
    sink = kind.sink()
    with sink.transaction("group", [("flights", 0, 3, 5), ("flights", 0, 3, 2)]):
        pass
    assert sink.progress("group") == {("flights", 0): Written(5, 3)}


def test_rewind_and_forget(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 3, 0, 5)
    sink.rewind("group", {("flights", 0): 2})
    assert sink.progress("group") == {("flights", 0): Written(2, 3)}
    assert write(kind, sink, 3, 0, 5) == 3
    with pytest.raises(StaleEpochError):
        write(kind, sink, 1, 6, 6)
    sink.forget("group")
    assert sink.progress("group") == {}
    assert write(kind, kind.sink(), 1, 6, 6) == 1
    if kind.name == "postgres":
        with pytest.raises(SinkError, match="forget") as caught:
            sink2 = kind.sink()
            write(kind, sink2, 1, 7, 7)
            sink.forget("group")
            write(kind, sink2, 1, 8, 8)
        assert caught.value.retry
        assert write(kind, sink2, 1, 8, 8) == 1


def test_a_closed_sink_says_so(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 3, 0, 0)
    sink.close()
    sink.close()
    with pytest.raises(ClosedError):
        write(kind, sink, 3, 1, 1)


def test_it_goes_along_to_an_executor(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 3, 0, 0)
    again: FencedSink[Any] = pickle.loads(pickle.dumps(sink))
    kind.opened.append(again)
    assert write(kind, again, 3, 0, 1) == 1


# -- races --------------------------------------------------------------------------------------------------------


def test_a_new_holder_waits_for_the_old_ones_transaction_and_continues_after_it(kind: Kind) -> None:
    """The old one is in its transaction when the new one begins: its rows count and are not written twice."""
    old, new = kind.sink(), kind.sink()
    write(kind, old, 7, 0, 0)
    with ThreadPoolExecutor(1) as pool:
        with old.transaction("group", [("flights", 0, 7, 3)]) as tx:
            tx.executemany(kind.insert(), [(offset, "0:7") for offset in (1, 2, 3)])
            later = pool.submit(write, kind, new, 9, 1, 5)
            assert not later.done()
        assert later.result(30) == 2
    assert [offset for offset, _ in kind.rows()] == list(range(6))
    with pytest.raises(StaleEpochError):
        write(kind, old, 7, 4, 6)


class Writer:
    """A worker that continues from its own state, and claims again if it is rejected."""

    def __init__(self, kind: Kind, epochs: Iterator[int], total: int) -> None:
        self.kind, self.sink, self.epochs, self.total = kind, kind.sink(), epochs, total
        self.epoch, self.at, self.refused = next(epochs), 0, 0

    def step(self, size: int) -> None:
        """One batch."""
        last = min(self.at + size, self.total) - 1
        try:
            with self.sink.transaction("group", [("flights", 0, self.epoch, last)]) as tx:
                done = tx.last_offset("flights", 0)
                rows = [(offset, "x") for offset in range(self.at, last + 1) if offset > done]
                if rows:
                    assert rows[0][0] == done + 1, "nothing is left out"
                    tx.executemany(self.kind.insert(), rows)
            self.at = last + 1
        except StaleEpochError:
            self.refused += 1
            self.epoch = next(self.epochs)
            # The log may be behind the sink: some rows are repeated.
            self.at = max(0, self.sink.progress("group")[("flights", 0)].last_offset + 1 - size)


@pytest.mark.parametrize("seed", range(3))
def test_writers_that_take_turns_never_lose_or_double(kind: Kind, seed: int) -> None:
    draw = random.Random(seed)
    epochs = itertools.count(1)
    writers = [Writer(kind, epochs, 60) for _ in range(3)]
    while any(writer.at < 60 for writer in writers):
        draw.choice(writers).step(draw.randint(1, 5))
    assert [offset for offset, _ in kind.rows()] == list(range(60))
    assert sum(writer.refused for writer in writers) >= 2


def test_writers_at_the_same_time_never_lose_or_double(kind: Kind) -> None:
    epochs = itertools.count(1)  # its next() is atomic in the interpreter: threads may share it
    writers = [Writer(kind, epochs, 120) for _ in range(3)]

    def run(writer: Writer) -> None:
        while writer.at < 120:
            writer.step(4)

    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(run, writer) for writer in writers]:
            each.result(60)
    assert [offset for offset, _ in kind.rows()] == list(range(120))


def test_many_writers_of_many_partitions_do_not_deadlock(kind: Kind) -> None:
    """Each names its partitions in a different order."""
    sink = kind.sink()
    claims = [("flights", partition, 5, 1) for partition in range(8)]

    def worker(turn: int) -> None:
        for step in range(15):
            mine = claims[turn:] + claims[:turn]
            with sink.transaction("group", [(t, p, e, step) for t, p, e, _ in (mine if turn % 2 else mine[::-1])]):
                pass

    with ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(worker, turn) for turn in range(6)]:
            each.result(60)
    assert sink.progress("group") == {("flights", partition): Written(14, 5) for partition in range(8)}


def test_sinks_that_start_together_make_the_table_once(kind: Kind) -> None:
    barrier = threading.Barrier(6)

    def first_write(partition: int) -> None:
        sink = kind.sink()
        barrier.wait(30)
        write(kind, sink, 1, 0, 0, partition)

    with ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(first_write, partition) for partition in range(6)]:
            each.result(60)
    assert len(kind.sink().progress("group")) == 6


# -- coordinated groups ------------------------------------------------------------------------------------------------


def write_as(kind: Kind, sink: FencedSink[Any], group_kind: Any, epoch: int, offset: int) -> None:
    with sink.transaction("group", [("flights", 0, epoch, offset)], kind=group_kind) as tx:
        tx.executemany(kind.insert(), [(offset, f"{group_kind}:{epoch}")])


def test_tokens_of_a_coordinated_group_fence_as_epochs_do(kind: Kind) -> None:
    sink = kind.sink()
    write_as(kind, sink, "coordinated", 7, 0)
    write_as(kind, sink, "coordinated", 9, 1)
    with pytest.raises(StaleEpochError) as caught:
        write_as(kind, sink, "coordinated", 7, 2)
    assert (caught.value.epoch, caught.value.stored_epoch) == (7, 9)
    assert sink.progress("group") == {("flights", 0): Written(1, 9, coordinated=True)}


@pytest.mark.parametrize(("before", "after"), [("claimed", "coordinated"), ("coordinated", "claimed")])
def test_epochs_of_the_other_kind_are_refused_until_the_sink_is_converted(kind: Kind, before: Any, after: Any) -> None:
    """Whatever the numbers: they are offsets of different partitions of the log."""
    sink = kind.sink()
    write_as(kind, sink, before, 50, 0)
    for epoch in (0, 49, 50, 51, 2**40):
        with pytest.raises(WrongEpochKindError, match=f"sink.convert\\('group', '{after}'\\)") as caught:
            write_as(kind, sink, after, epoch, 1)
        assert (caught.value.kind, caught.value.stored_kind) == (after, before)
        assert "Nothing of this transaction was written" in str(caught.value)
    sink.convert("group", after)
    sink.convert("group", after)
    assert sink.progress("group") == {("flights", 0): Written(0, -1, coordinated=after == "coordinated")}
    with pytest.raises(WrongEpochKindError):
        write_as(kind, sink, before, 2**40, 1)
    write_as(kind, sink, after, 3, 1)
    with pytest.raises(StaleEpochError):
        write_as(kind, sink, after, 2, 2)
    assert [offset for offset, _ in kind.rows()] == [0, 1]
    assert sink.progress("group") == {("flights", 0): Written(1, 3, coordinated=after == "coordinated")}


def test_a_sink_of_an_older_release_refuses_its_writers_once_the_group_is_coordinated(kind: Kind) -> None:
    """It knows no kinds: it takes a token for an epoch newer than any."""
    sink = kind.sink()
    write_as(kind, sink, "claimed", 50, 0)
    sink.convert("group", "coordinated")
    with sink._work() as work:
        stored = sink._stored(work.connection, "group")["flights", 0].epoch
    assert stored > 2**61


def test_an_invalid_kind(kind: Kind) -> None:
    with pytest.raises(ConfigurationError, match="kind"):
        write_as(kind, kind.sink(), "coordinate", 1, 0)
    with pytest.raises(ConfigurationError, match="kind"):
        kind.sink().convert("group", "claims")  # type: ignore[arg-type]
