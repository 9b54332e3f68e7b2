"""consumer.run(): side "threads" or "coroutines"."""

from __future__ import annotations

import threading

from benchmarks.lane_peers.work import Order, Work
from kafka_marshal import Marshal, Retry
from kafka_marshal.adapters.message import Message


def main() -> None:
    """Until it is over."""
    order = Order.given()
    work = Work(order)

    def handle(message: Message) -> None:
        work.handle(message.offset(), message.key() or b"", message.value() or b"")

    async def handle_async(message: Message) -> None:
        await work.handle_async(message.offset(), message.key() or b"", message.value() or b"")

    marshal = Marshal(order.bootstrap, group_id=order.group, topic=order.coordination)
    consumer = marshal.consumer([order.topic])
    chosen = handle if order.side == "threads" else handle_async
    threading.Thread(
        target=lambda: consumer.run(chosen, concurrency=order.concurrency, retry=Retry(backoff=(0.002, 0.002))),
        daemon=True,
    ).start()
    work.wait()
    work.tell_and_end()


if __name__ == "__main__":
    main()
