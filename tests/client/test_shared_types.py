"""The types of what is shared by batches: mypy checks this module, and finds a cast that is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, assert_type

from kafka_marshal import Batch, Batches, Claims, Consumer, Marshal, ShareConsumer, SharedBatch, aio
from tests.faults.stories import TOPIC, member, memory_cluster

if TYPE_CHECKING:

    def checked(marshal: Marshal, other: aio.Marshal, is_shared: bool) -> None:
        shared = marshal.consumer(["t"], mode=Batches(max_shares=3))
        assert_type(shared, ShareConsumer)
        assert_type(shared.batches(), Iterator[SharedBatch])
        assert_type(marshal.consumer(["t"]), Consumer)
        assert_type(marshal.consumer(["t"], mode=Batches() if is_shared else Claims()), Consumer)
        assert_type(other.consumer(["t"], mode=Batches()).batches(), AsyncIterator[SharedBatch])
        assert_type(other.consumer(["t"]).batches(), AsyncIterator[Batch])


def test_each_kind_of_consumer_is_of_the_type_that_its_call_promises() -> None:
    cluster = memory_cluster(1, 1)
    with member(cluster) as marshal, marshal.consumer([TOPIC], mode=Batches()) as consumer:
        assert type(consumer) is ShareConsumer
        batch = next(consumer.batches())
        assert (type(batch), batch.delivery_count) == (SharedBatch, 1)
