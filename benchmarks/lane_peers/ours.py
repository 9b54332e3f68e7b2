"""consumer.run(): side "threads" or "coroutines"; and "shared": as many members that share the partition by batches."""

from __future__ import annotations

import threading
from functools import partial

from benchmarks.lane_peers.work import Order, Work
from kafka_marshal import Batches, Claims, Marshal, Retry
from kafka_marshal.adapters.message import Message


def main() -> None:
    """Until it is over."""
    order = Order.given()
    work = Work(order)

    def handle(message: Message) -> None:
        work.handle(message.offset(), message.key() or b"", message.value() or b"")

    async def handle_async(message: Message) -> None:
        await work.handle_async(message.offset(), message.key() or b"", message.value() or b"")

    is_shared, retry = order.side == "shared", Retry(backoff=(0.002, 0.002))
    chosen = handle_async if order.side == "coroutines" else handle
    for number in range(order.concurrency if is_shared else 1):
        marshal = Marshal(order.bootstrap, group_id=order.group, client_id=f"worker-{number}", topic=order.coordination)
        consumer = marshal.consumer([order.topic], mode=Batches() if is_shared else Claims())
        run = partial(consumer.run, chosen, concurrency=1 if is_shared else order.concurrency, retry=retry)
        threading.Thread(target=run, daemon=True).start()
    work.wait()
    work.tell_and_end()


if __name__ == "__main__":
    main()
