"""F10: done messages that are written again, just these; for both databases, and on connections of programs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.sinks import FencedSink, PostgresSink, SqliteSink, Written
from tests.sinks.conftest import Kind
from tests.sinks.programs import AsSink, Program
from tests.sinks.test_connections import program, several
from tests.sinks.test_done_records import T0, attempt, handle, message, offsets
from tests.sinks.test_open import at_once, handled, of_batch, write

__all__ = ["at_once", "program"]  # fixtures

GROUP = "group"
AGAIN = {T0: [2, 5]}


def filled(kind: Kind, last: int = 9) -> FencedSink[Any]:
    """A sink that has the rows of 0 … last."""
    sink = kind.sink()
    assert write_all(kind, sink, range(last + 1)) == [*range(last + 1)]
    return sink


def write_all(kind: Kind, sink: FencedSink[Any], wanted: Sequence[int], epoch: int = 7) -> list[int]:
    """In one transaction; which were new."""
    with sink.records([message(x) for x in wanted], group_id=GROUP, epoch=epoch, kind="claimed") as tx:
        new = [each.offset() for each in tx.new]
        tx.executemany(kind.insert(), [(offset, str(epoch)) for offset in new])
    return new


def redone(kind: Kind) -> list[int]:
    """What is yet to be written again."""
    found = kind.ask("SELECT first_offset FROM kafka_marshal_done WHERE group_id LIKE 'group_%' ORDER BY 1")
    return [offset for (offset,) in found]


def test_just_these_offsets_are_new_once(kind: Kind) -> None:
    """By one record, or in a batch, with the old epoch: nothing else is opened, and no writer is refused."""
    sink = filled(kind)
    kind.sink().rewind(GROUP, redone={T0: [5, 2, 2, 7]})
    assert sink.progress(GROUP)[T0] == Written(1, 7, ranges=((3, 4), (6, 6), (8, 9)))
    assert redone(kind) == [2, 5, 7]
    assert len(kind.rows()) == 10, "the rows are the program's"
    assert [offset for offset in range(4) if handle(kind, sink, offset)] == [2]
    assert redone(kind) == [5, 7]
    assert write_all(kind, sink, range(12)) == [5, 7, 10, 11]
    assert redone(kind) == []
    assert write_all(kind, sink, range(12), epoch=8) == []
    assert sink.progress(GROUP)[T0] == Written(11, 8)
    assert [offsets(kind).count(offset) for offset in (1, 2, 5, 7, 8)] == [1, 2, 2, 2, 1]


def test_the_first_offset_and_the_last_one_and_all(kind: Kind) -> None:
    sink = filled(kind)
    sink.rewind(GROUP, redone={T0: range(10)})
    assert sink.progress(GROUP)[T0] == Written(-1, 7)
    assert write_all(kind, sink, [*range(9, -1, -1)]) == [*range(9, -1, -1)]
    sink.rewind(GROUP, redone={T0: [9]})
    assert sink.progress(GROUP)[T0].last_offset == 8
    assert handle(kind, sink, 9)


def test_without_it_a_redone_message_is_left_out(kind: Kind) -> None:
    sink = filled(kind)
    assert not handled(kind, sink, 5, ((0, 4), (6, 9)))
    assert offsets(kind) == [*range(10)]


@pytest.mark.usefixtures("at_once")
def test_who_has_not_seen_the_record_yet_does_not_count_them_as_stored(kind: Kind) -> None:
    """F4 leaves them out, whether they were stored before or not; all else that is done is stored."""
    sink = filled(kind, 5)
    sink.rewind(GROUP, redone={T0: [2, 5, 7]})
    for offset in (10, 11, 12):
        assert handled(kind, sink, offset, ((0, 9),), epoch=7 if offset < 12 else 8)
    assert sink.progress(GROUP)[T0] == Written(1, 8, ranges=((3, 4), (6, 6), (8, 12)))
    assert redone(kind) == [2, 5, 7]
    assert [offset for offset in range(13) if handled(kind, sink, offset, ((0, 9),), epoch=8)] == [2, 5, 7]
    assert handled(kind, sink, 13, ((0, 12),), epoch=8)
    assert sink.progress(GROUP)[T0] == Written(13, 8)


@pytest.mark.usefixtures("at_once")
def test_one_that_was_stored_nowhere_is_left_out_too(kind: Kind) -> None:
    """A dead letter, for example, or a partition that no writer has written."""
    sink = kind.sink()
    sink.rewind(GROUP, redone={T0: [3]})
    assert handled(kind, sink, 9, ((0, 8),))
    assert handled(kind, sink, 10, ((0, 9),))
    assert sink.progress(GROUP)[T0] == Written(2, 7, ranges=((4, 10),))
    assert handle(kind, sink, 3)
    assert sink.progress(GROUP)[T0] == Written(10, 7)


def test_a_block_that_fails_leaves_it_open(kind: Kind) -> None:
    sink = filled(kind)
    sink.rewind(GROUP, redone=AGAIN)
    with pytest.raises(ZeroDivisionError), attempt(5), sink.record() as tx:
        assert not tx.is_done
        raise ZeroDivisionError
    assert redone(kind) == [2, 5]
    assert handle(kind, sink, 5)
    assert redone(kind) == [2]


def test_one_that_is_set_aside_within_the_block_stays_open(kind: Kind) -> None:
    sink = filled(kind)
    sink.rewind(GROUP, redone={T0: [4, 5]})
    with of_batch(71, tuple) as batch, sink.records(batch) as tx:
        assert [each.offset() for each in tx.new] == [4, 5]
        batch._look.aside_of = lambda _: {5}
    assert redone(kind) == [5]
    assert sink.progress(GROUP)[T0] == Written(4, 7, ranges=((6, 9),))
    assert write(kind, sink, 72, [4, 5]) == [5]


def test_of_two_takers_of_one_the_first_writes_it(kind: Kind) -> None:
    """Also side by side: the second one waits, and finds it done."""
    a, b = filled(kind), kind.sink()
    a.rewind(GROUP, redone=AGAIN)
    second: list[bool] = []
    other = threading.Thread(target=lambda: second.append(handle(kind, b, 5)))
    with attempt(5), a.record() as tx:
        assert not tx.is_done
        tx.execute(kind.insert(), (5, "a"))
        other.start()
    other.join(30)
    assert second == [False]
    assert offsets(kind).count(5) == 2
    assert redone(kind) == [2]


def test_a_rewind_waits_for_writers_that_run(kind: Kind) -> None:
    """So that what they write is opened with the rest."""
    sink, over = kind.sink(), threading.Event()

    def rewind() -> None:
        kind.sink().rewind(GROUP, redone={T0: [1]})
        over.set()

    other = threading.Thread(target=rewind)
    with attempt(1), sink.record() as tx:
        tx.execute(kind.insert(), (1, "7"))
        other.start()
        assert not over.wait(0.2)
    other.join(30)
    assert over.is_set()
    assert sink.progress(GROUP)[T0] == Written(-1, 7)
    assert handle(kind, sink, 1)


@pytest.mark.parametrize("by_epoch", [False, True])
def test_undone_what_was_not_written_again_counts_as_written(kind: Kind, by_epoch: bool) -> None:
    sink = filled(kind)
    sink.rewind(GROUP, redone={T0: [0, 2, 5, 9]})
    assert handle(kind, sink, 5)
    kind.sink().rewind(GROUP, undone={T0: [0, 2, 5, 9], ("flights", 4): [1]})
    assert redone(kind) == []
    assert sink.progress(GROUP) == {T0: Written(9, 7)}
    assert write_all(kind, sink, range(11), epoch=8 if by_epoch else 7) == [10]
    assert offsets(kind).count(5) == 2
    sink.rewind(GROUP, undone={T0: [3, 40]})
    assert sink.progress(GROUP)[T0] == Written(10, 8 if by_epoch else 7), "what was not opened is left"


def test_f6_a_last_offset_would_hide_them_and_is_refused(kind: Kind) -> None:
    sink = kind.sink()
    with sink.transaction(GROUP, [(*T0, 7, 9)]):
        pass
    sink.rewind(GROUP, redone={T0: [9]})
    with (
        pytest.raises(ConfigurationError, match=r"to be written again.*sink\.rewind\('group', undone=…\)"),
        sink.transaction(GROUP, [(*T0, 7, 12)]),
    ):
        pytest.fail("it may not get here")
    with sink.transaction(GROUP, [("flights", 1, 7, 3)]):
        pass
    sink.rewind(GROUP, undone={T0: [9]})
    with sink.transaction(GROUP, [(*T0, 7, 12)]) as tx:
        assert tx.last_offset(*T0) == 9


def test_a_reposition_and_forget_end_it(kind: Kind) -> None:
    sink = filled(kind)
    sink.rewind(GROUP, redone=AGAIN)
    sink.rewind(GROUP, {T0: 4}, parked={T0: [2]})
    assert redone(kind) == []
    assert sink.progress(GROUP)[T0] == Written(1, 7, ranges=((3, 4),))
    sink.rewind(GROUP, redone=AGAIN)
    sink.forget(GROUP)
    assert kind.ask("SELECT * FROM kafka_marshal_done") == []


def test_a_named_sink_has_its_own(kind: Kind) -> None:
    named: Any = (SqliteSink if kind.name == "sqlite" else PostgresSink)(kind.where, name="b")
    kind.opened.append(named)
    plain = filled(kind)
    write_all(kind, named, range(4))
    named.rewind(GROUP, redone={T0: [1]})
    assert write_all(kind, plain, range(4)) == []
    assert write_all(kind, named, range(4)) == [1]


@pytest.mark.parametrize("given", [{T0: ["3"]}, {T0: [-1]}, [3], {"flights": [3]}])
def test_wrong_arguments(kind: Kind, given: Any) -> None:
    sink = filled(kind)
    for name in ("redone", "undone"):
        with pytest.raises(ConfigurationError, match=name):
            sink.rewind(GROUP, **{name: given})
    with pytest.raises(ConfigurationError, match="Call it once for each"):
        sink.rewind(GROUP, {T0: 3}, redone=AGAIN)
    assert sink.progress(GROUP)[T0] == Written(9, 7)


# -- on the program's own connection ----------------------------------------------------------------------------------


def test_a_fence_writes_them_again_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It merges each time, with what the log calls done."""
    monkeypatch.setattr("kafka_marshal.sinks.connection._is_time", lambda *_: True)
    about: dict[str, Any] = {"group_id": GROUP, "epoch": 7, "kind": "claimed"}
    assert program.write(several(*range(6)), "a", stable=5, **about) == [*range(6)]
    rewind = partial(AsSink(program).rewind, GROUP)
    if not program.is_async:
        rewind(redone={("flights", 0): [1, 3, 4]})
    else:
        other = Program("psycopg" if program.database == "postgres" else "sqlite3", program.where)
        rewind = partial(AsSink(other).rewind, GROUP)
        rewind(redone={("flights", 0): [1, 3, 4]})
    assert program.write(several(6), "b", stable=6, **about) == [6]
    covered = program.progress()["flights", 0]
    assert (covered.last_offset, covered.ranges) == (0, ((2, 2), (5, 6)))

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        program.write(several(3), "lost", after=fail, **about)
    assert program.write(several(*range(4)), "b", stable=6, **about) == [1, 3]
    assert program.write(several(*range(4)), "b", stable=6, **about) == []
    assert program.progress()["flights", 0].last_offset == 3
    rewind(undone={("flights", 0): [1, 3, 4]})
    assert program.write(several(4), "b", **about) == []
    assert program.progress()["flights", 0].last_offset == 6
    assert [(at, value) for _, at, value in program.rows() if value == "b"] == [(1, "b"), (3, "b"), (6, "b")]
