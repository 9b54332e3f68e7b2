"""Orders, billed by worker processes: ``kafka-marshal work --app orders:worker``."""

import os

from kafka_marshal import Message, Retry, Worker


def handle(message: Message) -> None:
    """One order. No other of its customer (the key) is handled meanwhile."""
    customer, cents = (message.key() or b"").decode(), int(message.value() or b"")
    print(f"{customer} owes {cents / 100:.2f}", flush=True)


worker = Worker(
    bootstrap_servers=os.environ.get("KAFKA_MARSHAL_BOOTSTRAP", "localhost:9092"),
    handler="orders:handle",
    group="billing",
    topics=["orders"],
    processes=int(os.environ.get("PROCESSES", "2")),
    port=9400,
    host="0.0.0.0",  # noqa: S104 - the kubelet and Prometheus are on other machines
    settings={"order": "key", "retry": Retry(attempts=5), "park": True},
)
