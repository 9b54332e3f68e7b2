"""If records end in any order: what a sink rejects, and its reasons."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ConfigurationError, SinkError
from kafka_marshal.sinks import RecordTransaction, Written
from tests.sinks.conftest import Kind
from tests.sinks.test_done_records import T0, attempt, handle, intervals, message


@pytest.mark.parametrize("order", ["key", "none"])
def test_a_last_offset_is_refused_where_records_end_in_any_order(kind: Kind, order: Order) -> None:
    sink = kind.sink()
    with (
        attempt(5, order=order),
        pytest.raises(ConfigurationError, match=f"order='{order}'.*left out for good.*sink.record"),
        sink.transaction("group", [(*T0, 7, 5)]),
    ):
        pytest.fail("it may not get here")
    assert sink.progress("group") == {}


def test_with_order_partition_both_forms_are_right(kind: Kind) -> None:
    sink = kind.sink()
    with attempt(5, order="partition"), sink.transaction("group", [(*T0, 7, 5)]):
        pass
    assert handle(kind, sink, 6, order="partition")
    with attempt(7, order="partition"), sink.transaction("group", [(*T0, 7, 7)]) as tx:
        assert tx.last_offset(*T0) == 6
    assert sink.progress("group") == {T0: Written(7, 7)}


def test_a_last_offset_is_refused_where_it_would_write_single_records_again(kind: Kind) -> None:
    sink = kind.sink()
    for offset in (0, 1, 4, 5):
        handle(kind, sink, offset)
    with (
        pytest.raises(ConfigurationError, match=r"last offset 1 .* 4 to 5 .*sink.rewind"),
        sink.transaction("group", [(*T0, 7, 4)]),
    ):
        pytest.fail("it may not get here")
    with sink.transaction("group", [(*T0, 7, 3)]) as tx:
        assert tx.last_offset(*T0) == 1
    with sink.transaction("group", [(*T0, 7, 9)]) as tx:
        assert tx.last_offset(*T0) == 5
    assert intervals(kind) == []


def test_without_an_attempt_all_four_are_given(kind: Kind) -> None:
    sink = kind.sink()
    given: dict[str, Any] = {"group_id": "group", "epoch": 7, "kind": "claimed"}

    def refused(match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ConfigurationError, match=match) as caught, sink.record(*args, **kwargs):
            pytest.fail("it may not get here")
        assert "Nothing was" in str(caught.value)

    refused("outside of a handler")
    refused("outside of a handler", message(1))
    refused("together", **given)
    for missing in given:
        refused("together", message(1), **{name: value for name, value in given.items() if name != missing})
    refused("message must be", object(), **given)
    refused("kind must be", message(1), **(given | {"kind": "x"}))
    refused("epoch must be", message(1), **(given | {"epoch": -1}))
    refused("offset must be", message(-1001), **given)
    refused("stable must be", message(1), **given, stable=-2)
    with sink.record(message(1), **given) as tx:
        assert isinstance(tx, RecordTransaction)
    with attempt(5):
        refused("handler of flights \\[0\\] offset 5", message(6))
        with sink.record(message(5)):
            pass
        with sink.record(message(6), **given):
            pass
    assert sink.progress("group") == {T0: Written(-1, 7, ranges=((1, 1), (5, 6)))}


def test_committing_in_the_block_is_reported(kind: Kind) -> None:
    sink = kind.sink()
    with pytest.raises(SinkError, match="Leave COMMIT"), attempt(5), sink.record() as tx:
        tx.execute(kind.insert(), (5, "x"))
        tx.execute("COMMIT")


def test_committing_by_oneself_does_not_damage_what_is_stored(kind: Kind) -> None:
    sink = kind.sink()
    for offset in (3, 4, 5):
        handle(kind, sink, offset)
    handle(kind, sink, 9, epoch=8)
    assert intervals(kind) == [(3, 5), (9, 9)]
    with pytest.raises(SinkError, match="Leave COMMIT"), attempt(4, 8), sink.record() as tx:
        tx.execute("COMMIT")
    assert intervals(kind) == [(3, 5), (9, 9)]
    assert not handle(kind, sink, 5, epoch=8)
