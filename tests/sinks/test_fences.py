"""Writers that share a partition by key: a fence for each key range, one table of offsets (rules F1 to F8)."""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal import Message
from kafka_marshal.client.batch import Batch
from kafka_marshal.errors import ConfigurationError, LeaseLostError, SinkError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks import FencedSink, PostgresSink, Written
from kafka_marshal.sinks.claims import SPLIT, all_keys, covers_all, entered, epoch_at
from kafka_marshal.types import SharedEpoch
from rationalizer import key_hash
from rationalizer.limits import MAX_KEY_HASH
from tests.sinks.conftest import Kind, Postgres
from tests.sinks.test_done_records import T0, attempt, handle, intervals, offsets, waits
from tests.sinks.test_done_records import message as of_partition

MIDDLE = 2**62
LOW, HIGH = (0, MIDDLE - 1), (MIDDLE, MAX_KEY_HASH)
COORDINATED = 2**62


def low(epoch: int) -> SharedEpoch:
    return SharedEpoch(epoch, *LOW)


def high(epoch: int) -> SharedEpoch:
    return SharedEpoch(epoch, *HIGH)


def both(of_low: int, of_high: int) -> SharedEpoch:
    """A member whose share grew: a token for each part."""
    return SharedEpoch(max(of_low, of_high), 0, MAX_KEY_HASH, [(*LOW, of_low), (*HIGH, of_high)])


def keyed(offset: int, key: bytes) -> Message:
    return of_partition(offset, key=key)


def with_hash(lo: int, hi: int, offset: int = 0) -> bytes:
    return next(key for n in range(10_000) if lo <= key_hash(key := b"%d" % n, offset) <= hi)


_KEYS = {LOW: with_hash(*LOW), HIGH: with_hash(*HIGH)}


def message(offset: int, of: tuple[int, int] = LOW) -> Message:
    return keyed(offset, _KEYS[of])


def mixed(*offsets_: int) -> list[Message]:
    """Even offsets have low keys, odd ones high keys."""
    return [message(offset, HIGH if offset % 2 else LOW) for offset in offsets_]


def write(
    kind: Kind,
    sink: FencedSink[Any],
    epoch: int,
    messages: Sequence[Message],
    value: str | None = None,
    stable: int | None = None,
) -> list[int]:
    """Write a batch; returns the offsets that were new."""
    with sink.records(messages, group_id="group", epoch=epoch, kind="coordinated", stable=stable) as tx:
        for each in tx.new:
            tx.execute(kind.insert(), (each.offset(), value or str(int(epoch))))
        return [each.offset() for each in tx.new]


def lows(*offsets_: int) -> list[Message]:
    return [message(offset, LOW) for offset in offsets_]


def highs(*offsets_: int) -> list[Message]:
    return [message(offset, HIGH) for offset in offsets_]


def fences(kind: Kind) -> list[tuple[int, int, int]]:
    found = kind.ask("SELECT lo, hi, epoch FROM kafka_marshal_fences ORDER BY lo")
    return [(lo, hi, epoch - COORDINATED if epoch >= 0 else epoch) for lo, hi, epoch in found]


def stored_epoch(kind: Kind) -> int:
    [[epoch]] = kind.ask("SELECT epoch FROM kafka_marshal_progress")
    return int(epoch)


# -- F1, F2: fences ---------------------------------------------------------------------------------------------------


def test_f2_entering_cuts_what_is_older_and_leaves_what_is_newer() -> None:
    """Compared with a plain list of the epoch of each key."""
    draw, width = random.Random(3), MAX_KEY_HASH // 8
    for _ in range(300):
        now: tuple[tuple[int, int, int], ...] = all_keys(-1)
        plain = [-1] * 8
        for _ in range(draw.randint(1, 8)):
            first = draw.randrange(8)
            last = draw.randrange(first, 8)
            hi = MAX_KEY_HASH if last == 7 else (last + 1) * width - 1
            epoch = draw.randrange(6)
            now = entered(now, [(first * width, hi, epoch)])
            plain = [max(old, epoch) if first <= place <= last else old for place, old in enumerate(plain)]
            assert covers_all(now)
            assert [epoch_at(now, place * width + width // 2) for place in range(8)] == plain
            assert all(left[2] != right[2] for left, right in itertools.pairwise(now)), "neighbours are merged"


def test_f1_rows_of_fences_exist_only_while_keys_have_different_epochs(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, 5, mixed(0, 1))
    assert (fences(kind), stored_epoch(kind)) == ([], COORDINATED + 5)
    write(kind, sink, high(9), highs(3))
    assert (fences(kind), stored_epoch(kind)) == ([(*LOW, 5), (*HIGH, 9)], SPLIT)
    assert sink.progress("group") == {
        T0: Written(1, 9, coordinated=True, ranges=((3, 3),), fences=((*LOW, 5), (*HIGH, 9)))
    }
    write(kind, sink, low(9), lows(2))
    assert (fences(kind), stored_epoch(kind)) == ([], COORDINATED + 9)
    assert sink.progress("group") == {T0: Written(3, 9, coordinated=True)}


def test_f1_while_split_every_older_release_is_refused(kind: Kind) -> None:
    """It compares its epoch with that of the partition's row, and knows no other."""
    sink = kind.sink()
    write(kind, sink, low(5), lows(0))
    assert all(stored_epoch(kind) > each for each in (COORDINATED + 2**61, 2**62 - 2, COORDINATED * 2 - 2))


def test_f2_neighbours_of_one_epoch_become_one_fence(kind: Kind) -> None:
    sink, third = kind.sink(), MAX_KEY_HASH // 3
    parts = [(0, third), (third + 1, 2 * third), (2 * third + 1, MAX_KEY_HASH)]
    for epoch, (lo, hi) in zip((5, 7, 9), parts, strict=True):
        made = keyed(epoch, with_hash(lo, hi))
        write(kind, sink, SharedEpoch(epoch, lo, hi), [made])
    assert [epoch for _, _, epoch in fences(kind)] == [5, 7, 9]
    lo, hi = parts[1]
    made = keyed(20, with_hash(lo, hi))
    write(kind, sink, SharedEpoch(9, lo, hi), [made])
    assert fences(kind) == [(*parts[0], 5), (third + 1, MAX_KEY_HASH, 9)]


def test_f2_a_token_of_a_share_says_nothing_of_other_keys(kind: Kind) -> None:
    a, b = kind.sink(), kind.sink()
    write(kind, a, 5, mixed(0, 1))
    write(kind, b, high(9), highs(3))
    assert write(kind, a, low(5), lows(2, 4)) == [2, 4], "the first owner keeps its keys, and its token"
    with pytest.raises(StaleEpochError) as caught:
        write(kind, a, 5, highs(5))
    assert (caught.value.epoch, caught.value.stored_epoch) == (5, 9)
    assert write(kind, a, both(5, 12), mixed(6, 7)) == [6, 7], "it gets the other keys back, with a new token"
    with pytest.raises(StaleEpochError):
        write(kind, b, high(9), highs(9))
    assert write(kind, a, low(5), lows(8)) == [8], "and gives them away again"


def test_f2_a_whole_token_leaves_what_is_newer(kind: Kind) -> None:
    """A late owner of all keys may still write those that no one has entered since; no more."""
    late, b = kind.sink(), kind.sink()
    write(kind, b, high(9), highs(1))
    assert write(kind, late, 7, lows(0), stable=50) == [0]
    assert fences(kind) == [(*LOW, 7), (*HIGH, 9)]
    assert late.progress("group")[T0].last_offset == 1, "what it takes for done does not count"
    with pytest.raises(StaleEpochError):
        write(kind, late, 7, mixed(2, 3))
    assert offsets(kind) == [0, 1], "a batch is written as a whole or not at all"
    assert write(kind, b, high(9), highs(3)) == [3]


def test_f2_shares_that_are_cut_again(kind: Kind) -> None:
    sink, quarter = kind.sink(), 2**61
    write(kind, sink, low(5), lows(0))
    write(kind, sink, high(5), highs(1))
    assert fences(kind) == []
    lo, hi = quarter, 3 * quarter - 1
    made = keyed(2, with_hash(lo, hi))
    write(kind, sink, SharedEpoch(8, lo, hi), [made])
    assert fences(kind) == [(0, lo - 1, 5), (lo, hi, 8), (hi + 1, MAX_KEY_HASH, 5)]
    inside = keyed(3, with_hash(lo, MIDDLE - 1))
    outside = keyed(4, with_hash(0, lo - 1))
    with pytest.raises(StaleEpochError):
        write(kind, sink, low(5), [inside])
    assert write(kind, sink, low(5), [outside]) == [4]


def test_f2_epochs_of_the_other_kind_are_refused(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, low(5), lows(0))
    for form in (handle, handle):
        with pytest.raises(WrongEpochKindError):
            form(kind, sink, 1, epoch=2**40)
    with pytest.raises(WrongEpochKindError), sink.transaction("group", [(*T0, 2**40, 1)]):
        pytest.fail("it may not get here")
    sink.convert("group", "claimed")
    assert (fences(kind), stored_epoch(kind)) == ([], -2)
    assert handle(kind, sink, 1, epoch=3)
    with pytest.raises(WrongEpochKindError):
        write(kind, sink, low(9), lows(2))


# -- F3: records ------------------------------------------------------------------------------------------------------


def test_f3_a_batch_that_comes_again_has_only_what_is_new(kind: Kind) -> None:
    sink = kind.sink()
    assert write(kind, sink, low(5), lows(0, 2, 4)) == [0, 2, 4]
    assert write(kind, sink, high(5), highs(1, 3)) == [1, 3]
    assert write(kind, kind.sink(), both(6, 6), [*mixed(7, 3, 4, 6), *lows(6), *mixed(5)]) == [7, 6, 5]
    assert write(kind, sink, both(6, 6), mixed(*range(8))) == []
    assert offsets(kind) == list(range(8))
    assert sink.progress("group")[T0].last_offset == 7


def test_f3_a_block_that_does_not_look_at_what_is_new_is_rolled_back(kind: Kind) -> None:
    sink = kind.sink()
    batch = mixed(0, 1, 2)
    write(kind, sink, 5, batch[:1])
    given: Any = {"group_id": "group", "epoch": 5, "kind": "coordinated"}
    for again in (batch, batch[:1]):
        with pytest.raises(ConfigurationError, match=r"did not read tx\.new"), sink.records(again, **given) as tx:
            tx.executemany(kind.insert(), [(each.offset(), "double") for each in again])
    with (
        pytest.raises(ConfigurationError, match=r"3 messages.*did not read"),
        sink.records([*batch, *batch[1:]], **given),
    ):
        pass
    assert offsets(kind) == [0]
    with sink.records(batch[1:], **given) as tx:
        tx.executemany(kind.insert(), [(each.offset(), "all new") for each in batch[1:]])
    with sink.records(batch, **given) as tx:
        assert tx.is_done
        tx.execute(kind.insert(), (9, "rolled back"))
    assert offsets(kind) == [0, 1, 2]


def test_f3_an_exception_leaves_nothing(kind: Kind) -> None:
    sink = kind.sink()
    given: Any = {"group_id": "group", "epoch": 5, "kind": "coordinated"}
    with pytest.raises(KeyError), sink.records(mixed(0, 1), **given) as tx:
        tx.execute(kind.insert(), (0, "x"))
        raise KeyError
    assert kind.rows() == []
    assert write(kind, sink, 5, mixed(0, 1)) == [0, 1]


def test_f3_record_and_records_are_one_mechanism(kind: Kind) -> None:
    sink = kind.sink()
    of: Any = {"kind": "coordinated"}
    assert handle(kind, sink, 1, low(5), key=_KEYS[LOW], **of)
    assert write(kind, sink, low(5), lows(0, 1, 2)) == [0, 2]
    assert not handle(kind, sink, 2, low(5), key=_KEYS[LOW], **of)
    assert handle(kind, sink, 3, high(9), key=_KEYS[HIGH], **of)
    with pytest.raises(StaleEpochError):
        handle(kind, sink, 5, high(7), key=_KEYS[HIGH], **of)
    with sink.transaction("group", [(*T0, 11, 9)], kind="coordinated") as tx:
        assert tx.last_offset(*T0) == 3
    assert write(kind, sink, 11, mixed(9, 10)) == [10]


def test_f3_the_key_is_that_of_kafka_whatever_a_handler_does_to_it(kind: Kind) -> None:
    sink = kind.sink()
    with attempt(4, low(5), kind="coordinated", key=_KEYS[LOW]) as made:
        changed: Any = made.message
        changed._key = _KEYS[HIGH]
        with sink.record() as tx:
            assert not tx.is_done


def test_f3_what_is_refused(kind: Kind) -> None:
    sink = kind.sink()
    given: Any = {"group_id": "group", "epoch": low(5), "kind": "coordinated"}

    def refused(match: str, *args: Any, **of: Any) -> None:
        with pytest.raises(ConfigurationError, match=match) as caught, sink.records(*args, **of):
            pytest.fail("it may not get here")
        assert "Nothing" in str(caught.value)

    refused("another member's share", highs(1), **given)
    refused("another member's share", mixed(0, 1), **given)
    refused("at least one", [], **given)
    refused("one partition", [*lows(0), of_partition(1, partition=1)], **given)
    refused("takes a batch", lows(0))
    refused("takes a batch", lows(0), **{name: each for name, each in given.items() if name != "kind"})
    refused("epoch must be", lows(0), **(given | {"epoch": 2**62}))
    refused("a message of Kafka", [object()], **given)
    assert sink.progress("group") == {}


@pytest.fixture
def batch() -> Batch:
    """A batch of a member with two parts of a partition."""
    lease = SimpleNamespace(proven_until=1_000.0)
    assignment = SimpleNamespace(key=T0, epoch=both(5, 9), over=False, at_most_once=False, lease=lease)
    run: Any = SimpleNamespace(assignment=assignment, is_open=False)
    look: Any = SimpleNamespace(done_of=lambda _: ((0, 3),), aside_of=lambda _: ())
    messages: Any = mixed(4, 5, 6)
    return Batch(lambda _: None, run, messages, "group", "coordinated", lambda: 0.0, look)


def test_f3_a_batch_of_a_consumer_says_by_which_tokens(kind: Kind, batch: Batch) -> None:
    sink = kind.sink()
    with sink.records(batch) as tx:
        tx.executemany(kind.insert(), [(each.offset(), "x") for each in tx.new])
    assert offsets(kind) == [4, 5, 6]
    assert sink.progress("group")[T0] == Written(6, 9, coordinated=True, fences=((*LOW, 5), (*HIGH, 9)))
    with sink.records(batch, group_id="other", epoch=3, kind="claimed") as tx:
        assert len(tx.new) == 3


def test_f3_a_batch_whose_lease_is_not_proven_by_the_own_clock_is_not_stored(kind: Kind, batch: Batch) -> None:
    """As after SIGSTOP: another member has the partition, and has written nothing yet."""
    lease: Any = batch._run.assignment.lease
    sink = kind.sink()
    with pytest.raises(LeaseLostError, match="offsets 4 to 6"), sink.records(batch) as tx:
        tx.executemany(kind.insert(), [(each.offset(), "x") for each in tx.new])
        lease.proven_until = 0.0
    assert (offsets(kind), batch.is_held) == ([], False)
    lease.proven_until = 1_000.0
    with sink.records(batch) as tx:
        assert len(tx.new) == 3


def test_a_token_goes_along_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(both(5, 9)))
    assert (again, again.lo, again.hi, again.parts) == (9, 0, MAX_KEY_HASH, ((*LOW, 5), (*HIGH, 9)))
    assert low(5).parts == ((*LOW, 5),)


def test_f3_postgres_an_old_token_that_waited_at_the_gate_is_refused(postgres: Postgres, database: str) -> None:
    """The database's default is repeatable read: with it, the gate's statement would see the epoch before its wait."""
    kind = Kind("postgres", database)
    kind.setup()
    kind.ask(f"ALTER DATABASE {database.rpartition('=')[2]} SET default_transaction_isolation = 'repeatable read'")
    old, new = kind.sink(), kind.sink()
    write(kind, old, low(5), lows(0))
    write(kind, new, high(5), highs(1))
    with ThreadPoolExecutor(1) as pool:
        with new._work() as work:  # an entry, as far as the gate
            new._row(work.connection, "group", T0, "exclusive")
            waiting = pool.submit(write, kind, old, low(5), lows(2))
            waits(postgres)
            new._set_fences(
                work.connection, "group", T0, COORDINATED + 5, [(*LOW, COORDINATED + 9), (*HIGH, COORDINATED + 5)]
            )
        with pytest.raises(StaleEpochError):
            waiting.result(30)
    assert offsets(kind) == [0, 1]
    for each in kind.opened:
        each.close()


def test_f3_writers_of_the_same_offsets_wait_in_one_order(kind: Kind) -> None:
    """Whatever the order of messages in their batches: no deadlock, each row once."""
    sink, together = kind.sink(), threading.Barrier(4)
    write(kind, sink, 5, mixed(1000))

    def writer(seed: int) -> None:
        draw = random.Random(seed)
        together.wait(30)
        for start in range(0, 200, 20):
            some = draw.sample(range(start, start + 20), 15)
            write(kind, sink, 5, mixed(*some))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writer, range(4), timeout=60))
    found = offsets(kind)
    assert len(found) == len(set(found)) > 190
    assert sink.progress("group")[T0].last_offset >= 0


def test_f3_sharers_write_side_by_side_while_shares_are_cut_again(kind: Kind) -> None:
    """Four threads with grants that go stale at any moment: each row once, the rightful owners are never refused."""
    cut, lock = {"epoch": 1, "at": MIDDLE}, threading.Lock()
    sink, todo = kind.sink(), iter(range(240))
    refused: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            with lock:
                batch = [offset for _, offset in zip(range(8), todo, strict=False)]
                if draw.random() < 0.3:
                    cut["epoch"] += 1
                    cut["at"] = draw.randrange(1, 2**63 - 1)
            if not batch:
                return
            left: list[Message] = [keyed(offset, b"%d" % draw.randrange(1000)) for offset in batch]
            while left:
                with lock:
                    epoch, at = cut["epoch"], cut["at"]
                for lo, hi in ((0, at - 1), (at, MAX_KEY_HASH)):
                    ours = [each for each in left if lo <= key_hash(each.key(), 0) <= hi]
                    try:
                        if ours:
                            write(kind, sink, SharedEpoch(epoch, lo, hi), ours)
                        left = [each for each in left if each not in ours]
                    except StaleEpochError as error:
                        refused.append((epoch, error.stored_epoch))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=100))
    assert offsets(kind) == list(range(240))
    assert all(ours < theirs for ours, theirs in refused)


# -- F4: what is done without the sink --------------------------------------------------------------------------------


def test_f4_what_is_stable_waits_for_running_records(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their rows would lie below the last offset; merging alone waits for none of them."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 1)
    monkeypatch.setattr("kafka_marshal.sinks.base.PATIENCE", 2)
    kind = Kind("postgres", database)
    kind.setup()
    sink = kind.sink()
    write(kind, sink, 5, mixed(100))
    with ThreadPoolExecutor(1) as pool:
        with sink.records(mixed(4), group_id="group", epoch=5, kind="coordinated") as tx:
            tx.execute(kind.insert(), (4, "slow"))
            for offset in (101, 102, 103):
                pool.submit(write, kind, sink, 5, mixed(offset), None, 50).result(30)
            assert kind.ask("SELECT last_offset FROM kafka_marshal_progress") == [(-1,)]
            waiting = pool.submit(write, kind, sink, 5, mixed(104), None, 50)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
        assert waiting.result(30) == [104]
    assert kind.ask("SELECT last_offset FROM kafka_marshal_progress") == [(50,)]
    assert intervals(kind)[0][0] >= 100, "no row below the last offset"
    assert offsets(kind) == [4, *range(100, 105)]
    sink.close()


def test_f4_a_stale_writer_does_not_say_what_is_stable(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since its epoch the group may have been repositioned: what it takes for done has to come again."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 1)
    old, new = kind.sink(), kind.sink()
    write(kind, old, low(5), lows(60), stable=50)
    new.rewind("group", {T0: 9}, epochs={T0: 7}, kind="coordinated")
    with pytest.raises(StaleEpochError):
        write(kind, old, low(5), lows(62), stable=55)
    assert new.progress("group") == {T0: Written(9, 7, coordinated=True)}
    assert write(kind, new, low(8), lows(10, 60)) == [10, 60]


def test_f4_rows_of_other_shares_are_not_done_by_a_share(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 2)
    sink = kind.sink()
    for offset in range(0, 40, 2):
        write(kind, sink, low(5), lows(offset))
    assert write(kind, sink, high(5), highs(*range(1, 40, 2))) == list(range(1, 40, 2))
    assert sink.progress("group")[T0].last_offset == 39


# -- F6: a last offset ------------------------------------------------------------------------------------------------


def last_offset(sink: FencedSink[Any], epoch: int, offset: int) -> None:
    with sink.transaction("group", [(*T0, epoch, offset)], kind="coordinated"):
        pass


def test_f6_a_last_offset_is_for_all_keys(kind: Kind) -> None:
    sink = kind.sink()
    with pytest.raises(ConfigurationError, match=r"shared by key.*sink.records\(batch\)"):
        last_offset(sink, low(5), 3)
    write(kind, sink, high(9), highs(1))
    for epoch in (7, both(9, 7)):
        with pytest.raises(StaleEpochError) as caught:
            last_offset(sink, epoch, 3)
        assert (caught.value.epoch, caught.value.stored_epoch) == (7, 9)
    assert fences(kind) == [(*LOW, -1), (*HIGH, 9)], "nothing was changed"
    sink.rewind("group", {T0: 1})
    last_offset(sink, both(7, 9), 3)
    assert sink.progress("group")[T0] == Written(3, 9, coordinated=True, fences=((*LOW, 7), (*HIGH, 9)))
    last_offset(sink, 12, 5)
    assert (fences(kind), stored_epoch(kind)) == ([], COORDINATED + 12)
    with pytest.raises(StaleEpochError):
        write(kind, sink, high(9), highs(7))


# -- F8: rewind, convert, forget --------------------------------------------------------------------------------------


def test_f8_rewind_enters_the_epoch_of_the_reposition_for_all_keys(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, low(5), lows(0, 2))
    write(kind, sink, high(6), highs(1, 3))
    sink.rewind("group", {T0: 0}, epochs={T0: 8}, kind="coordinated")
    assert (fences(kind), stored_epoch(kind)) == ([], COORDINATED + 8)
    for epoch, some in ((low(5), lows(4)), (high(6), highs(5)), (7, mixed(4, 5))):
        with pytest.raises(StaleEpochError):
            write(kind, sink, epoch, some)
    assert write(kind, sink, low(9), lows(0, 2)) == [2]
    assert write(kind, sink, high(9), highs(1, 3)) == [1, 3]


def test_f8_rewind_fences_a_partition_that_has_no_rows_yet(kind: Kind) -> None:
    sink = kind.sink()
    sink.rewind("group", {T0: 4, ("flights", 9): 4}, epochs={T0: 8})
    assert sink.progress("group") == {T0: Written(4, 8)}
    with pytest.raises(StaleEpochError):
        handle(kind, sink, 5, epoch=7)
    assert handle(kind, sink, 5, epoch=9)


def test_f8_rewind_after_a_newer_writer_changes_nothing(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, low(9), lows(0, 2))
    with pytest.raises(ConfigurationError, match=r"repositioned at epoch 8.*with epoch 9, granted after it"):
        sink.rewind("group", {T0: 0}, epochs={T0: 8}, kind="coordinated")
    with pytest.raises(WrongEpochKindError):
        sink.rewind("group", {T0: 0}, epochs={T0: 8})
    assert write(kind, sink, low(9), lows(0, 2)) == []
    assert fences(kind) == [(*LOW, 9), (*HIGH, -1)]


def test_f8_forget_drops_fences(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, low(9), lows(0))
    sink.forget("group")
    assert (fences(kind), intervals(kind), sink.progress("group")) == ([], [], {})
    assert write(kind, sink, low(3), lows(0)) == [0]


def test_fences_that_another_program_has_changed_are_not_trusted(kind: Kind) -> None:
    sink = kind.sink()
    write(kind, sink, low(9), lows(0))
    kind.ask("DELETE FROM kafka_marshal_fences WHERE lo = 0")
    with pytest.raises(SinkError, match=r"kafka_marshal_fences does not have one epoch for each key"):
        write(kind, sink, low(9), lows(2))
    sink.convert("group", "claimed")
    sink.convert("group", "coordinated")
    assert write(kind, sink, low(9), lows(0, 2)) == [2]


# -- older databases --------------------------------------------------------------------------------------------------


@pytest.fixture
def older(postgres: Postgres, database: str) -> Iterator[tuple[Kind, PostgresSink]]:
    """A database of an earlier release, and a sink whose user may not make tables."""
    kind = Kind("postgres", database)
    kind.setup()
    kind.sink().progress("group")
    kind.ask("DROP TABLE kafka_marshal_fences")
    name = f"u{database[-8:]}"
    kind.ask(f"CREATE USER {name}")
    kind.ask("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    kind.ask(f"GRANT SELECT, INSERT, UPDATE, DELETE ON kafka_marshal_progress, kafka_marshal_done, results TO {name}")
    with PostgresSink(f"{database} user={name}") as sink:
        yield kind, sink
    for each in kind.opened:
        each.close()


def test_f1_postgres_an_older_database_works_for_whole_partitions(older: tuple[Kind, PostgresSink]) -> None:
    kind, sink = older
    last_offset(sink, 5, 3)
    assert handle(kind, sink, 5, 5, kind="coordinated")
    assert write(kind, sink, 6, mixed(6, 7)) == [6, 7]
    sink.rewind("group", {T0: 2}, epochs={T0: 7}, kind="coordinated")
    with pytest.raises(SinkError, match=r"no table kafka_marshal_fences.*share by key.*grant it SELECT.*CREATE TABLE"):
        write(kind, sink, low(9), lows(8))
    assert write(kind, sink, 8, mixed(8)) == [8]
    kind.sink().progress("group")
    with pytest.raises(SinkError, match="may not do that"):
        write(kind, sink, low(9), lows(10))
    kind.ask(f"GRANT SELECT, INSERT, UPDATE, DELETE ON kafka_marshal_fences TO u{kind.where[-8:]}")
    assert write(kind, sink, low(9), lows(10)) == [10]
    assert fences(kind) == [(*LOW, 9), (*HIGH, 8)]


def test_f1_a_table_of_another_shape_is_named(kind: Kind) -> None:
    kind.ask("CREATE TABLE kafka_marshal_fences (x integer PRIMARY KEY)")
    with pytest.raises(SinkError, match="table kafka_marshal_fences of another shape here: x;"):
        kind.sink().progress("group")
