"""An order service: each customer's orders in turn, each order's row once, and a discount that survives crashes.

    python examples/order_service.py localhost:9092 orders.db /mnt/shared/spent service-1

The topic `orders` has the customer as key and the price in cents as value. Start it several times, kill some with -9.
What every customer has spent is kept in memory, and moves with the position (docs/checkpoints.md); rows are written
once by a fenced sink (docs/sinks.md). tests/client/test_order_service.py tests it without a broker (docs/testing.md).
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable

from kafka_marshal import Checkpoint, CheckpointPolicy, Group, Marshal, Message, Restore, Retry
from kafka_marshal.checkpoints import Folder
from kafka_marshal.sinks import SqliteSink

TABLE = "CREATE TABLE IF NOT EXISTS orders (place INTEGER, at INTEGER, customer TEXT, cents INTEGER)"

#: Who has spent this much (cents) pays a tenth less.
REGULAR = 10_000


class Orders:
    """What this process knows, by partition, and where it writes."""

    def __init__(self, sink: SqliteSink, folder: str) -> None:
        self.sink = sink
        self.states = Folder(folder)
        #: Partition → customer → what the customer's orders so far cost (cents).
        self.spent: dict[int, dict[str, int]] = {}

    def handle(self, message: Message) -> None:
        """One order. No other of this customer is handled meanwhile; the last line changes the state."""
        customer, cents = (message.key() or b"").decode(), int(message.value() or b"")
        spent = self.spent[message.partition()]
        before = spent.get(customer, 0)
        with self.sink.record() as tx:
            if not tx.is_done:  # else the row is there: the order comes again after a crash
                tx.execute(TABLE)
                row = message.partition(), message.offset(), customer, cents * 9 // 10 if before >= REGULAR else cents
                tx.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", row)
        spent[customer] = before + cents

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing of these pieces is in flight."""
        for piece in checkpoint.pieces:
            self.states.save(checkpoint.id, piece, json.dumps(self.spent[piece.partition]).encode())
        self.states.collect(checkpoint)

    def restore(self, restore: Restore) -> None:
        """These pieces come, or go back; what was in memory for them is void."""
        for piece in restore.pieces:
            self.spent[piece.partition] = json.loads(self.states.load(piece) or b"{}")


def work(
    servers: str, database: str, folder: str, name: str, opened: Callable[[Marshal], object] = lambda _: None
) -> None:
    """Work until ``stop()`` of the Marshal, which ``opened`` is given."""
    with Marshal(servers, group_id="orders", client_id=name) as marshal, SqliteSink(database) as sink:
        opened(marshal)
        orders = Orders(sink, folder)
        policy = CheckpointPolicy(every=30, on_checkpoint=orders.save, on_restore=orders.restore)
        with marshal.consumer(["orders"], mode=Group(), checkpoints=policy) as consumer:
            consumer.run(orders.handle, concurrency=8, order="key", retry=Retry(attempts=5))


def main(servers: str, database: str, folder: str, name: str) -> None:
    """Work until SIGTERM or Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # while it starts it holds nothing

    def opened(marshal: Marshal) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: marshal.stop())

    work(servers, database, folder, name, opened)


if __name__ == "__main__":
    main(*sys.argv[1:5])
