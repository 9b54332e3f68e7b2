"""Sinks in handlers of lists (``run(…, batch=…)``): each message's rows once; no last offset hides one that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kafka_marshal import Attempt, MessagesFailedError
from kafka_marshal.client.attempt import Handling, in_batch
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ConfigurationError, LeaseLostError
from kafka_marshal.sinks import Written
from kafka_marshal.types import BatchToken
from tests.sinks.conftest import Kind
from tests.sinks.test_done_records import T0, message, offsets


@contextmanager
def handler_of(found: Sequence[Any], epoch: int = 7, order: Order = "key") -> Iterator[list[Attempt]]:
    """A handler that has these messages in a list."""
    made = [Attempt(Handling(5, "group", "claimed", order), each, 1, epoch) for each in found]
    token = in_batch.set({id(each): one for each, one in zip(found, made, strict=True)})
    try:
        yield made
    finally:
        in_batch.reset(token)


def test_records_of_a_list_are_written_in_one_transaction_and_each_once(kind: Kind) -> None:
    sink, found = kind.sink(), [message(x) for x in (0, 2, 3)]
    for expected in ([0, 2, 3], []):
        with handler_of(found), sink.records(found) as tx:
            assert [each.offset() for each in tx.new] == expected
            for each in tx.new:
                tx.execute(kind.insert(), (each.offset(), "x"))
    assert offsets(kind) == [0, 2, 3]
    assert sink.progress("group") == {T0: Written(0, 7, ranges=((2, 3),))}


def test_nothing_of_a_list_is_written_if_the_block_raises_or_a_lease_is_lost(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, found = kind.sink(), [message(x) for x in range(3)]
    with pytest.raises(ZeroDivisionError), handler_of(found), sink.records(found) as tx:
        tx.execute(kind.insert(), (tx.new[0].offset(), "x"))
        raise ZeroDivisionError
    monkeypatch.setattr(Attempt, "is_held", property(lambda self: self.message is not found[2]))
    with pytest.raises(LeaseLostError), handler_of(found), sink.records(found) as tx:
        tx.execute(kind.insert(), (tx.new[0].offset(), "x"))
    assert offsets(kind) == []


def test_a_record_of_a_list_is_written_by_itself(kind: Kind) -> None:
    sink, found = kind.sink(), [message(x) for x in range(3)]
    with handler_of(found):
        for each in (*found[1:], found[1]):
            with sink.record(each) as tx:
                if not tx.is_done:
                    tx.execute(kind.insert(), (each.offset(), "x"))
    assert offsets(kind) == [1, 2]
    assert sink.progress("group") == {T0: Written(-1, 7, ranges=((1, 2),))}


def test_what_is_refused_in_a_handler_of_lists(kind: Kind) -> None:
    sink, found = kind.sink(), [message(0), message(1), message(0, partition=1)]
    with handler_of(found, order="partition"):
        with pytest.raises(ConfigurationError, match="has several messages"), sink.record():
            pass
        with pytest.raises(ConfigurationError, match="no attempt of this message"), sink.record(message(0)):
            pass
        with pytest.raises(ConfigurationError, match="no attempt of this message"), sink.records([message(0)]):
            pass
        with pytest.raises(ConfigurationError, match="takes messages of one partition"), sink.records(found):
            pass
        claims = [("flights", 0, 7, 1)]
        with (
            pytest.raises(ConfigurationError, match=r"hide those that fail.*records"),
            sink.transaction("group", claims),
        ):
            pass
    assert offsets(kind) == []


def test_what_has_failed_is_not_named_inside_of_a_block(kind: Kind) -> None:
    """The others would be done, and their rows taken back."""
    sink, found = kind.sink(), [message(x) for x in range(3)]
    with (
        pytest.raises(ConfigurationError, match=r"would be done without their rows.*after the COMMIT"),
        handler_of(found),
        sink.records(found) as tx,
    ):
        tx.execute(kind.insert(), (0, "x"))
        raise MessagesFailedError({1: ValueError("refused")})
    assert offsets(kind) == []
    assert sink.progress("group").get(T0, Written(-1, -1)).ranges == ()


def test_messages_of_two_batches_of_a_share_have_different_tokens(kind: Kind) -> None:
    sink, found = kind.sink(), [message(0), message(1)]
    with handler_of(found) as attempts:
        for number, each in enumerate(attempts):
            each.epoch = BatchToken(5 + number)
        with pytest.raises(ConfigurationError, match=r"different tokens.*record\(message\)"), sink.records(found):
            pass
