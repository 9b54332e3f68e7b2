"""pyrallel-consumer, asynchronous, ordered by key. Runs in an environment with it and without this package."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pyrallel_consumer.config import ExecutionConfig, KafkaConfig, ParallelConsumerConfig  # type: ignore[import-not-found]
from pyrallel_consumer.consumer import PyrallelConsumer  # type: ignore[import-not-found]
from pyrallel_consumer.dto import ExecutionMode, OrderingMode  # type: ignore[import-not-found]

from benchmarks.lane_peers.work import Order, Work


async def run(order: Order, work: Work) -> None:
    """Until it is over."""
    execution = ExecutionConfig(
        mode=ExecutionMode.ASYNC,
        max_in_flight=order.concurrency,
        max_retries=5,
        retry_backoff_ms=2,
        exponential_backoff=False,
        retry_jitter_ms=0,
        # Else the stuck handler would fail after 30 s.
        async_config={"task_timeout_ms": 3_600_000},
    )
    config = KafkaConfig(
        BOOTSTRAP_SERVERS=[order.bootstrap],
        CONSUMER_GROUP=order.group,
        dlq_enabled=False,
        parallel_consumer=ParallelConsumerConfig(
            ordering_mode=OrderingMode.KEY_HASH, poll_batch_size=1000, queue_max_messages=50_000, execution=execution
        ),
    )

    async def handle(item: Any) -> None:
        key, value = (x.encode() if isinstance(x, str) else bytes(x) for x in (item.key, item.payload))
        await work.handle_async(item.offset, key, value)

    consumer = PyrallelConsumer(config, handle, order.topic)
    await consumer.start()
    await asyncio.to_thread(work.wait)
    work.tell_and_end()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    given = Order.given()
    asyncio.run(run(given, Work(given)))
