"""U15: batches of a share, parked and redriven messages: each row once, none lost; the same for both databases."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafka_marshal import Attempt, Batches, Retry
from kafka_marshal.client.batch import Batch
from kafka_marshal.errors import ConfigurationError, LeaseLostError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks import FencedSink, SqliteSink, Written
from kafka_marshal.sinks.claims import checked
from kafka_marshal.types import BatchToken, OpenEpoch
from rationalizer import SettlingMessages, encode
from tests.broker.helpers import eventually
from tests.client.test_shared_run import Team, open_in
from tests.faults.stories import GROUP, TOPIC, member, memory_cluster
from tests.sinks.conftest import Kind
from tests.sinks.test_done_records import T0, attempt, handle, message, offsets

Intervals = Sequence[tuple[int, int]]


def write(kind: Kind, sink: FencedSink[Any], token: int, wanted: Sequence[int]) -> list[int]:
    """Write these with the token of a batch; which were new."""
    with sink.records([message(x) for x in wanted], group_id="group", epoch=BatchToken(token), kind="claimed") as tx:
        new = [each.offset() for each in tx.new]
        tx.executemany(kind.insert(), [(offset, str(token)) for offset in new])
    return new


# -- batches of a share -----------------------------------------------------------------------------------------------


def test_f3_of_two_takers_of_one_offset_the_first_writes_it_whichever_that_is(kind: Kind) -> None:
    """The token is compared, and stored nowhere: neither refuses the other, nor sharers with older batches."""
    a, b = kind.sink(), kind.sink()
    assert write(kind, a, 71, [200, 201]) == [200, 201]
    assert write(kind, b, 140, [201, 202]) == [202]
    assert write(kind, a, 71, [201, 203]) == [203]
    assert write(kind, b, 150, [301]) == [301]
    assert write(kind, a, 72, [300, 301]) == [300]
    assert offsets(kind) == [200, 201, 202, 203, 300, 301]
    assert a.progress("group")[T0] == Written(-1, -1, ranges=((200, 203), (300, 301)))


def test_f3_a_holder_after_the_sharers_refuses_their_batches_and_one_before_them_none(kind: Kind) -> None:
    sink = kind.sink()
    assert handle(kind, sink, 0, epoch=50)
    assert write(kind, sink, 71, [1, 2]) == [1, 2]
    assert handle(kind, sink, 3, epoch=50), "a zombie: its row is there once"
    assert write(kind, sink, 80, [3, 4]) == [4]
    assert handle(kind, sink, 5, epoch=500)
    with pytest.raises(StaleEpochError, match="epoch 500, newer than ours"):
        write(kind, sink, 71, [6])
    with pytest.raises(StaleEpochError):
        handle(kind, sink, 6, epoch=50)
    assert write(kind, sink, 600, [6]) == [6]
    assert handle(kind, sink, 7, epoch=500), "a batch refuses no holder"
    assert sink.progress("group")[T0] == Written(7, 500)
    assert offsets(kind) == [*range(8)]


def test_f3_a_sharer_by_keys_refuses_older_batches_of_its_keys(kind: Kind) -> None:
    sink = kind.sink()
    sink.rewind("group", {T0: -1}, epochs={T0: 100})
    with pytest.raises(StaleEpochError):
        write(kind, sink, 71, [0])
    assert write(kind, sink, 101, [0]) == [0]
    sink.convert("group", "coordinated")
    with pytest.raises(WrongEpochKindError):
        write(kind, sink, 102, [1])


@contextmanager
def of_batch(token: int, done: Callable[[], Intervals]) -> Iterator[Any]:
    """A batch of a share with the offsets 4 and 5."""
    lease = SimpleNamespace(proven_until=1_000.0)
    assignment: Any = SimpleNamespace(key=T0, epoch=BatchToken(token), over=False, at_most_once=False, lease=lease)
    run: Any = SimpleNamespace(assignment=assignment, is_open=False)
    look: Any = SimpleNamespace(done_of=lambda _: done(), aside_of=lambda _: ())
    messages: Any = [message(4), message(5)]
    yield Batch(lambda _: None, run, messages, "group", "claimed", lambda: 0.0, look)


def test_f4_what_members_have_in_their_batches_is_not_taken_for_done(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position has passed it: stable is 9, and 2, 4, 5 and 8 are open."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 1)
    monkeypatch.setattr("kafka_marshal.sinks.base.BATCHES", 0)
    sink, done = kind.sink(), ((0, 1), (3, 3), (6, 7), (9, 9))
    with of_batch(71, lambda: done) as batch, sink.records(batch) as tx:
        tx.executemany(kind.insert(), [(each.offset(), "x") for each in tx.new])
    assert write(kind, sink, 72, [2, 3, 8, 9]) == [2, 8], "3 and 9 were done without the sink"
    write(kind, sink, 73, [10])
    assert sink.progress("group")[T0] == Written(10, -1)
    assert offsets(kind) == [2, 4, 5, 8, 10]


def test_a_batch_whose_share_is_over_by_the_own_clock_is_not_stored(kind: Kind) -> None:
    sink = kind.sink()
    with (
        of_batch(71, tuple) as batch,
        pytest.raises(LeaseLostError, match="offsets 4 to 5"),
        sink.records(batch) as tx,
    ):
        tx.executemany(kind.insert(), [(each.offset(), "x") for each in tx.new])
        batch._run.assignment.over = True
    assert offsets(kind) == []


# -- parked messages --------------------------------------------------------------------------------------------------


def handled(kind: Kind, sink: FencedSink[Any], offset: int, done: Intervals, epoch: int = 7) -> bool:
    """Handle a record while the log shows these as done, and not open."""
    with attempt(offset, epoch) as made:
        made._assignment = cast("Any", object())
        made._handling = made._handling._replace(done_of=lambda _: done)
        with sink.record() as tx:
            if not tx.is_done:
                tx.execute(kind.insert(), (offset, str(epoch)))
            return not tx.is_done


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge before every transaction."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 1)


@pytest.mark.usefixtures("at_once")
def test_f4_a_redriven_message_writes_its_row_once(kind: Kind) -> None:
    """148 was parked, and the position is beyond it. 3 never reached the sink, and is done."""
    sink = kind.sink()
    for offset in (*range(3), *range(4, 10)):
        if offset != 5:
            handled(kind, sink, offset, ())
    parked = ((0, 4), (6, 9))
    assert handled(kind, sink, 10, parked)
    assert handled(kind, sink, 11, parked)
    assert sink.progress("group")[T0] == Written(4, 7, ranges=((6, 11),))
    assert handled(kind, sink, 5, parked, epoch=8), "its row is lost"
    assert not handled(kind, sink, 5, parked, epoch=8)
    assert handled(kind, sink, 12, ((0, 11),), epoch=8)
    assert sink.progress("group")[T0] == Written(12, 8)
    assert offsets(kind).count(5) == 1


@pytest.mark.usefixtures("at_once")
def test_f4_a_parked_message_that_is_discarded_is_done(kind: Kind) -> None:
    """A handler that still has it writes nothing then."""
    sink = kind.sink()
    handled(kind, sink, 0, ())
    handled(kind, sink, 2, ((0, 0),))
    handled(kind, sink, 3, ((0, 0), (2, 2)))
    assert sink.progress("group")[T0].ranges == ((2, 3),)
    handled(kind, sink, 4, ((0, 3),))
    assert sink.progress("group")[T0].last_offset == 4
    assert not handled(kind, sink, 1, ((0, 4),))
    assert offsets(kind) == [0, 2, 3, 4]


def test_f8_a_rewind_takes_the_parked_offsets_that_stay(kind: Kind) -> None:
    """Those that are not stored stay so, below the new position; the rest up to it counts as stored."""
    sink = kind.sink()
    for offset in (0, 1, 4, 5, 6, 9):
        handle(kind, sink, offset)
    sink.rewind("group", {T0: 7}, epochs={T0: 20}, parked={T0: [3, 5, 7, 9]})
    assert sink.progress("group")[T0] == Written(2, 20, ranges=((4, 6),))
    assert [offset for offset in range(10) if handle(kind, sink, offset, epoch=21)] == [3, 7, 8, 9]
    sink.rewind("group", {T0: 3}, epochs={T0: 30}, parked={T0: [3]})
    assert sink.progress("group")[T0] == Written(3, 30), "the row of 3 is there by now"
    sink.rewind("group", {T0: -1}, epochs={T0: 40}, parked={})
    assert sink.progress("group")[T0] == Written(-1, 40)
    with pytest.raises(ConfigurationError, match="parked"):
        sink.rewind("group", {T0: 3}, parked={T0: ["3"]})  # type: ignore[list-item]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "why"),
    [(BatchToken(71), "offset 5 is of a batch of a share"), (OpenEpoch(7), "offset 5 is of a message that was open")],
)
def test_f6_a_last_offset_is_refused_for_batches_and_for_messages_that_were_open(
    kind: Kind, epoch: int, why: str
) -> None:
    """In Delta as well: it checks its claims by the same function."""
    with (
        pytest.raises(ConfigurationError, match=f"{why}.*left out for good.*sink.records"),
        kind.sink().transaction("group", [(*T0, epoch, 5)]),
    ):
        pytest.fail("it may not get here")
    with pytest.raises(ConfigurationError, match=why):
        checked("group", [(*T0, epoch, 5)], "claimed")


def test_f6_a_last_offset_is_refused_in_a_run_that_sets_messages_aside(kind: Kind) -> None:
    with (
        attempt(5, order="partition") as made,
        pytest.raises(ConfigurationError, match=r"park=True.*sink.record\(\)"),
    ):
        made._handling = made._handling._replace(leaves_open=True)
        with kind.sink().transaction("group", [(*T0, 7, 5)]):
            pytest.fail("it may not get here")


def test_the_token_of_a_batch_is_of_a_claimed_group(kind: Kind) -> None:
    with (
        pytest.raises(ConfigurationError, match="kind must be 'claimed'"),
        kind.sink().record(message(1), group_id="group", epoch=BatchToken(7), kind="coordinated"),
    ):
        pytest.fail("it may not get here")


# -- with real clients ------------------------------------------------------------------------------------------------


class Rows:
    """A SQLite database with rows, and a sink that merges all the time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 3)
        monkeypatch.setattr("kafka_marshal.sinks.base.BATCHES", 0)
        self.sink = SqliteSink(folder / "rows.db")
        self._database = sqlite3.connect(folder / "rows.db", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE rows (offset_ integer)")
        self._lock = threading.Lock()

    def handle(self, each: Any) -> None:
        with self.sink.record() as tx:
            if not tx.is_done:
                tx.execute("INSERT INTO rows VALUES (?)", (each.offset(),))

    @property
    def offsets(self) -> list[int]:
        with self._lock:
            return [offset for (offset,) in self._database.execute("SELECT offset_ FROM rows ORDER BY 1")]

    def has(self, wanted: Sequence[int]) -> None:
        eventually(lambda: self.offsets == sorted(wanted), what="each row once")

    def close(self) -> None:
        self.sink.close()
        self._database.close()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    made = Rows(tmp_path, monkeypatch)
    yield made
    made.close()


def redrive(cluster: Any, marshal: Any, offset: int) -> None:
    """As an operator does."""
    seen = marshal._driver.replica.worlds[0].next_offset
    opened = ((offset, offset, None, 0),)
    cluster.broker.produce("__marshal", 0, encode(SettlingMessages("o", "o", GROUP, TOPIC, 0, None, seen, open=opened)))


@pytest.mark.parametrize("by_batches", [False, True])
def test_members_that_set_messages_aside_write_each_row_once_and_the_redriven_ones_too(
    rows: Rows, by_batches: bool
) -> None:
    cluster, bad, epochs = memory_cluster(1, 60), {7, 31}, set[type[int]]()

    def act(each: Any) -> None:
        epochs.add(type(Attempt.current().epoch))
        if each.offset() in bad:
            raise ValueError("bad")
        rows.handle(each)

    options: dict[str, Any] = {"concurrency": 4, "order": "none", "retry": Retry(attempts=2, backoff=(0.0, 0.0))}
    if by_batches:
        team = Team(cluster, "ab", act, park=True, **options)
        marshal, close = team.members[0], team.close
    else:
        marshal = member(cluster)
        consumer = marshal.consumer([TOPIC])
        thread = threading.Thread(target=consumer.run, args=(act,), kwargs={"park": True, **options})
        thread.start()

        def close() -> None:
            consumer.stop()
            thread.join(20)
            marshal.close()

    try:
        eventually(
            lambda: {hole.first for hole in open_in(marshal) if hole.is_parked} == {7, 31}, what="both are parked"
        )
        for number in range(60, 90):
            cluster.broker.produce(TOPIC, 0, b"%d" % number)
        rows.has([x for x in range(90) if x not in (7, 31)])
        bad.clear()
        redrive(cluster, marshal, 7)
        rows.has([x for x in range(90) if x != 31])
        redrive(cluster, marshal, 31)
        for number in range(90, 100):
            cluster.broker.produce(TOPIC, 0, b"%d" % number)
        rows.has(range(100))
        eventually(lambda: open_in(marshal) == [], what="nothing is open")
    finally:
        close()
    assert epochs == {BatchToken if by_batches else int}


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_batches_of_two_members_write_each_row_once(rows: Rows, delivery: Any) -> None:
    """Their tokens are in no order, and the sink knows none of them. At most once all that is taken is done at once."""
    cluster, tokens = memory_cluster(1, 300), list[int]()
    members = [member(cluster, name) for name in "ab"]

    def work(consumer: Any) -> None:
        for batch in consumer.batches(max_messages=10):
            with rows.sink.records(batch) as tx:
                tx.executemany("INSERT INTO rows VALUES (?)", [(each.offset(),) for each in tx.new])
            assert batch.epoch == batch.token
            tokens.append(batch.token)
            batch.done()

    consumers = [each.consumer([TOPIC], mode=Batches(), delivery=delivery) for each in members]
    threads = [threading.Thread(target=work, args=(each,)) for each in consumers]
    for thread in threads:
        thread.start()
    try:
        rows.has(range(300))
        assert len(set(tokens)) > 1
        assert rows.sink.progress(GROUP)[TOPIC, 0].epoch == -1
        with (
            pytest.raises(ConfigurationError, match=r"batch of a share.*sink.records"),
            rows.sink.transaction(GROUP, [(TOPIC, 0, BatchToken(tokens[0]), 5)]),
        ):
            pytest.fail("it may not get here")
    finally:
        for each in members:
            each.stop()
        for thread in threads:
            thread.join(20)
        for each in members:
            each.close()


@pytest.mark.parametrize("by_batches", [False, True])
def test_what_a_batch_sets_aside_is_not_stored_with_it(rows: Rows, by_batches: bool) -> None:
    """Before its transaction or within: its row comes when it is redriven."""
    cluster, before, within = memory_cluster(1, 6), {1}, {3}
    options: Any = {"mode": Batches()} if by_batches else {}
    with member(cluster) as marshal, marshal.consumer([TOPIC], **options) as consumer:

        def park(batch: Any, each: Any) -> None:
            batch.park(each, "why") if by_batches and each.offset() == 1 else consumer.park(each, "why")

        def work() -> None:
            for batch in consumer.batches(timeout=0.3):
                for each in batch:
                    if each.offset() in before:
                        park(batch, each)
                with rows.sink.records(batch) as tx:
                    for each in tx.new:
                        if each.offset() in within:
                            park(batch, each)
                        elif each.offset() not in before:
                            tx.execute("INSERT INTO rows VALUES (?)", (each.offset(),))
                batch.done()

        thread = threading.Thread(target=work)
        thread.start()
        rows.has([0, 2, 4, 5])
        eventually(
            lambda: [hole.first for hole in open_in(marshal) if hole.is_parked] == [1, 3], what="they are parked"
        )
        before.clear()
        within.clear()
        redrive(cluster, marshal, 1)
        redrive(cluster, marshal, 3)
        rows.has(range(6))
        eventually(lambda: open_in(marshal) == [], what="nothing is open")
        marshal.stop()
        thread.join(20)


def test_a_message_that_was_open_has_an_epoch_that_says_so() -> None:
    """As a batch by itself."""
    cluster = memory_cluster(1, 6)
    with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        batches = consumer.batches(timeout=0.2)
        batch = next(batches)
        assert type(batch.epoch) is int
        consumer.park(batch.messages[2], "why")
        eventually(lambda: [hole.first for hole in open_in(marshal)] == [2], what="it is parked")
        redrive(cluster, marshal, 2)
        batch.done()
        again = next(batches)
        assert (again.open, type(again.epoch), [each.offset() for each in again.messages]) == (True, OpenEpoch, [2])
        again.done()
