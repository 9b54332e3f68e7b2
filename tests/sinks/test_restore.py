"""A sink goes back with its group: rows beyond the position go, and writers of before are refused; both databases."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, Restore
from kafka_marshal.checkpoints import RestorePiece
from kafka_marshal.errors import SinkError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks import FencedSink, PostgresSink, SqliteSink, Written
from kafka_marshal.types import SharedEpoch
from rationalizer.limits import MAX_KEY_HASH
from tests.sinks.conftest import Kind, sink_of
from tests.sinks.test_done_records import T0, message, waits

Intervals = tuple[tuple[int, int], ...]


def going_back(epoch: int, position: int, ranges: Intervals = (), **more: Any) -> Restore:
    """What on_restore is given, of flights [0]."""
    of: dict[str, Any] = {"lo": 0, "hi": MAX_KEY_HASH, "epoch": epoch, "position": position, "ranges": ranges}
    of |= {"topic": "flights", "partition": 0, "group_id": "group", "states": (), "done_through": (), "initial": -1}
    return Restore(48213, "lost", (RestorePiece(**(of | more)),), {})


def undoing(database: Kind, table: str = "results") -> Callable[..., None]:
    """Deletes rows as a program would; offsets are those of one partition."""

    def undo(tx: Any, piece: RestorePiece, position: int, ranges: Intervals) -> None:
        kept = "".join(f" AND offset_ NOT BETWEEN {first} AND {last}" for first, last in ranges)
        tx.execute(f"DELETE FROM {table} WHERE offset_ >= {database.mark}{kept}", (position,))

    return undo


def wrote(database: Kind, sink: FencedSink[Any], epoch: int, *offsets: int, table: str = "results") -> list[int]:
    """Write these as single records; returns those that were new."""
    with sink.records([message(each) for each in offsets], group_id="group", epoch=epoch, kind="coordinated") as tx:
        new = [each.offset() for each in tx.new]
        insert = database.insert().replace("results", table)
        tx.executemany(insert, [(each, f"by {epoch}") for each in new])
    return new


def appended(database: Kind, sink: FencedSink[Any], epoch: int, last: int) -> None:
    """Write all up to this offset that is not there, in the form of last offsets."""
    with sink.transaction("group", [(*T0, epoch, last)], kind="coordinated") as tx:
        rows = [(each, f"by {epoch}") for each in range(tx.last_offset(*T0) + 1, last + 1)]
        tx.executemany(database.insert(), rows)


def offsets(database: Kind, table: str = "results") -> list[int]:
    return [offset for [offset] in database.ask(f"SELECT offset_ FROM {table} ORDER BY 1")]


def test_rows_beyond_the_position_go_and_come_again_once(kind: Kind) -> None:
    sink = kind.sink()
    appended(kind, sink, 70, 9)
    sink.restore(going_back(90, 5), undoing(kind))
    assert offsets(kind) == [0, 1, 2, 3, 4]
    assert sink.progress("group") == {T0: Written(4, 90, True)}
    appended(kind, sink, 90, 9)
    assert kind.rows() == [*((each, "by 70") for each in range(5)), *((each, "by 90") for each in range(5, 10))]


def test_a_writer_of_before_is_refused_at_once(kind: Kind) -> None:
    """Not only after the next one has written."""
    old, new = kind.sink(), kind.sink()
    wrote(kind, old, 70, 0, 1, 2)
    new.restore(going_back(90, 2), undoing(kind))
    with pytest.raises(StaleEpochError):
        wrote(kind, old, 70, 3)
    with pytest.raises(StaleEpochError):
        appended(kind, old, 70, 4)
    with pytest.raises(StaleEpochError) as raised:
        old.restore(going_back(80, 1), undoing(kind))
    assert (raised.value.epoch, raised.value.stored_epoch) == (80, 90)
    assert offsets(kind) == [0, 1]


def test_a_second_time_it_does_nothing(kind: Kind) -> None:
    """What was written since stays: the program begins its on_restore again after a crash, or another module calls."""
    sink = kind.sink()
    wrote(kind, sink, 70, *range(6))
    sink.restore(going_back(90, 2), undoing(kind))
    assert wrote(kind, sink, 90, 2, 3) == [2, 3]
    sink.restore(going_back(90, 2), undoing(kind))
    assert wrote(kind, sink, 90, 2, 3) == []
    assert kind.rows() == [(0, "by 70"), (1, "by 70"), (2, "by 90"), (3, "by 90")]


def test_what_is_done_beyond_the_position_stays(kind: Kind) -> None:
    """Single records; and 6 is done in the group and not in the sink, as a dead letter."""
    sink = kind.sink()
    wrote(kind, sink, 70, 0, 1, 3, 4, 5, 8, 9, 10)
    sink.restore(going_back(90, 2, ((4, 6), (9, 9))), undoing(kind))
    assert offsets(kind) == [0, 1, 4, 5, 9]
    [at] = sink.progress("group").values()
    assert (at.last_offset, at.ranges) in [(1, ((4, 5), (9, 9))), (-1, ((0, 1), (4, 5), (9, 9)))]
    assert wrote(kind, sink, 90, *range(11)) == [2, 3, 6, 7, 8, 10]
    assert offsets(kind) == list(range(11))


def test_what_is_done_below_the_last_offset_stays(kind: Kind) -> None:
    sink = kind.sink()
    appended(kind, sink, 70, 9)
    sink.restore(going_back(90, 3, ((5, 6), (9, 12))), undoing(kind))
    assert sink.progress("group")[T0] == Written(2, 90, True, ((5, 6), (9, 9)))
    assert wrote(kind, sink, 90, *range(13)) == [3, 4, 7, 8, 10, 11, 12]
    assert offsets(kind) == list(range(13))


def test_an_interval_that_reaches_over_the_position_is_cut(kind: Kind) -> None:
    """2 is done without the sink, so that 3 … 7 are an interval."""
    sink = kind.sink()
    wrote(kind, sink, 70, 0, 1, 3, 4, 5, 6)
    wrote(kind, sink, 80, 7)
    sink.restore(going_back(90, 5, ((7, 9),)), undoing(kind))
    assert sink.progress("group")[T0].ranges == ((3, 4), (7, 7))
    assert wrote(kind, sink, 90, 3, 4, 5, 6, 7) == [5, 6]


def test_a_position_beyond_all_that_is_stored_takes_nothing(kind: Kind) -> None:
    sink = kind.sink()
    wrote(kind, sink, 70, 0, 1, 5)
    sink.restore(going_back(90, 4), undoing(kind))
    sink.restore(going_back(95, 100), undoing(kind))
    assert offsets(kind) == [0, 1]
    assert wrote(kind, sink, 95, 0, 1, 2) == [2]


def test_a_partition_without_a_row_gets_one(kind: Kind) -> None:
    sink = kind.sink()
    sink.restore(going_back(90, 0), undoing(kind))
    assert sink.progress("group") == {T0: Written(-1, 90, True)}
    with pytest.raises(StaleEpochError):
        wrote(kind, sink, 70, 0)


def test_an_undo_that_raises_changes_nothing(kind: Kind) -> None:
    sink = kind.sink()
    wrote(kind, sink, 70, *range(4))
    before = sink.progress("group")

    def undo(tx: Any, *_: object) -> None:
        tx.execute("DELETE FROM results")
        raise RuntimeError("mistake of the program")

    with pytest.raises(RuntimeError):
        sink.restore(going_back(90, 2), undo)
    with pytest.raises(SinkError):
        sink.restore(going_back(90, 2), lambda tx, piece, position, ranges: tx.execute("DELETE FROM absent"))
    assert sink.progress("group") == before
    assert offsets(kind) == [0, 1, 2, 3]
    sink.restore(going_back(90, 2), undoing(kind))
    assert offsets(kind) == [0, 1]


def test_it_waits_for_a_writer_of_before_and_takes_its_rows(kind: Kind, request: pytest.FixtureRequest) -> None:
    old, new = kind.sink(), kind.sink()
    wrote(kind, old, 70, 0, 1)
    inside, leave = threading.Event(), threading.Event()

    def late() -> None:
        with old.records([message(5)], group_id="group", epoch=70, kind="coordinated") as tx:
            tx.execute(kind.insert(), (5, "late"))
            inside.set()
            assert leave.wait(20)

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(late)
        assert inside.wait(20)
        restoring = pool.submit(new.restore, going_back(90, 1), undoing(kind))
        if kind.name == "postgres":
            waits(request.getfixturevalue("postgres"))
        assert not restoring.done()
        leave.set()
        writer.result(20)
        restoring.result(20)
    assert offsets(kind) == [0]
    assert wrote(kind, new, 90, 0, 1, 5) == [1, 5]


def test_sinks_with_names_go_back_each_with_its_own_tables(kind: Kind) -> None:
    kind.ask("CREATE TABLE others (offset_ bigint, value text)")
    modules = {table: named(kind, name) for table, name in (("results", "a"), ("others", "b"))}
    for table, sink in modules.items():
        wrote(kind, sink, 70, *range(4), table=table)
    for table, sink in modules.items():
        sink.restore(going_back(90, 2), undoing(kind, table))
        assert offsets(kind, table) == [0, 1]
        assert sink.progress("group") == {T0: Written(1, 90, True)}
        with pytest.raises(StaleEpochError):
            wrote(kind, sink, 70, 3, table=table)
    assert kind.sink().progress("group") == {}
    assert set(kind.ask("SELECT group_id FROM kafka_marshal_progress")) == {("group\x1fa",), ("group\x1fb",)}
    modules["results"].forget("group")
    assert modules["results"].progress("group") == {} != modules["others"].progress("group")


def test_a_sink_with_a_name_does_all_that_others_do(kind: Kind) -> None:
    sink = pickle.loads(pickle.dumps(named(kind, "a")))
    kind.opened.append(sink)
    appended(kind, sink, 70, 3)
    assert wrote(kind, sink, 70, 3, 4) == [4]
    says = r"group 'group' as a coordinated.*sink.convert\('group', 'claimed'\)"
    with pytest.raises(WrongEpochKindError, match=says), sink.transaction("group", [(*T0, 1, 9)]):
        pass
    sink.rewind("group", {T0: 1}, epochs={T0: 80}, kind="coordinated")
    assert sink.progress("group") == {T0: Written(1, 80, True)}
    sink.convert("group", "claimed")
    assert sink.progress("group")[T0].epoch == -1


def named(database: Kind, name: str) -> FencedSink[Any]:
    made: FencedSink[Any] = (
        SqliteSink(database.where, name=name) if database.name == "sqlite" else PostgresSink(database.where, name=name)
    )
    database.opened.append(made)
    return made


def test_what_is_refused(kind: Kind) -> None:
    sink = kind.sink()
    wrote(kind, sink, 70, *range(4))
    before = sink.progress("group")
    some = going_back(90, 2, lo=0, hi=2**62 - 1)
    both = Restore(48213, "lost", (*going_back(90, 2).pieces, *some.pieces), {})
    for restore in (some, both, going_back(SharedEpoch(90, 0, 5), 2, lo=0, hi=5)):
        with pytest.raises(ConfigurationError, match=r"some keys of flights \[0\].*allow_key_share=False"):
            sink.restore(restore, undoing(kind))
    uneven = going_back(90, 2, done_through=((0, 2**62 - 1, 1), (2**62, MAX_KEY_HASH, 3)))
    with pytest.raises(ConfigurationError, match=r"keys of flights \[0\] are done up to different offsets"):
        sink.restore(uneven, undoing(kind))
    with pytest.raises(ConfigurationError, match=r"undo must be a function that takes \(tx, piece, position, ranges\)"):
        sink.restore(going_back(90, 2), lambda tx, piece: None)  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigurationError, match="restore must be what on_restore is given"):
        sink.restore(some.pieces[0], undoing(kind))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="undo has returned a coroutine"):
        sink.restore(going_back(90, 2), lambda tx, piece, position, ranges: later())
    assert sink.progress("group") == before
    for name in ("", 5, "a\x1fb"):
        with pytest.raises(ConfigurationError, match="name must be a string"):
            SqliteSink("results.db", name=name)  # type: ignore[arg-type]


async def later() -> None: ...


def test_a_group_of_claims_does_not_go_back(kind: Kind) -> None:
    sink = kind.sink()
    with sink.transaction("group", [(*T0, 7, 3)]) as tx:
        tx.executemany(kind.insert(), [(0, "a")])
    with pytest.raises(WrongEpochKindError):
        sink.restore(going_back(90, 2), undoing(kind))
    assert offsets(kind) == [0]


@pytest.mark.parametrize("seed", range(4))
def test_after_each_restore_the_sink_has_what_the_group_counts_as_done(kind: Kind, seed: int) -> None:
    """Records in any order, some done without the sink; losses and rollbacks, writers of before at any moment."""
    rng, sinks = random.Random(seed), [kind.sink(), kind.sink()]
    epoch, done, stored, kept = 1, set[int](), set[int](), [frozenset[int]()]
    for _ in range(60):
        match rng.choice(["write", "write", "write", "skip", "checkpoint", "late", "go back"]):
            case "write":
                some = sorted(rng.sample(range(40), rng.randrange(1, 8)))
                assert set(wrote(kind, rng.choice(sinks), epoch, *some)) == set(some) - stored
                done |= set(some)
                stored |= set(some)
            case "skip":
                done.add(rng.randrange(40))
            case "checkpoint":
                kept.append(frozenset(done))
            case "late" if epoch > 1:
                with pytest.raises(StaleEpochError):
                    wrote(kind, rng.choice(sinks), epoch - 1, rng.randrange(40))
            case "go back":
                epoch += rng.randrange(1, 4)
                del kept[rng.randrange(max(0, len(kept) - 2), len(kept)) + 1 :]
                position = next(each for each in range(41) if each not in kept[-1])
                ranges = tuple((each, each) for each in sorted(kept[-1]) if each > position)
                rng.choice(sinks).restore(going_back(epoch, position, ranges), undoing(kind))
                done, stored = set(kept[-1]), stored & kept[-1]
        assert offsets(kind) == sorted(stored)


def test_a_user_that_may_not_make_the_table_of_records(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older database: it goes back by last offsets."""
    database = Kind("sqlite", str(tmp_path / "results.db"))
    database.setup()
    sink = sink_of("sqlite", database.where)
    appended(database, sink, 70, 9)
    monkeypatch.setattr(sink._pool, "has", lambda table: False)
    sink.restore(going_back(90, 5), undoing(database))
    assert offsets(database) == [0, 1, 2, 3, 4]
    assert database.ask("SELECT last_offset, epoch FROM kafka_marshal_progress") == [(4, 2**62 + 90)]
    sink.close()
