"""A worker that notes what is imported after its Marshal is there, and by which thread: (thread, module) as JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from kafka_marshal import Claims, Delivery, Marshal, Retry

arguments = json.loads(sys.argv[1])
found: list[tuple[str, str]] = []


def note(event: str, detail: tuple[Any, ...]) -> None:
    if event == "import" and detail[0] not in sys.modules:
        found.append((threading.current_thread().name, detail[0]))


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
) as marshal:
    sys.addaudithook(note)
    deliveries: tuple[Delivery, ...] = ("at-least-once", "at-most-once")
    for topic, delivery in zip(arguments["topics"], deliveries, strict=True):
        with marshal.consumer(
            [topic], mode=Claims(claim_ahead=delivery == "at-most-once"), delivery=delivery
        ) as consumer:
            message = consumer.poll(20)
            assert message is not None
            consumer.done(message)
            assert marshal.health().ready
    with marshal.consumer(arguments["topics"][:1]) as consumer:
        tries = iter((ValueError("no"), None))

        def handle(message: Any) -> None:
            if (error := next(tries, None)) is not None:
                raise error
            consumer.stop()

        consumer.run(handle, concurrency=2, order="key", retry=Retry(backoff=(0.01, 0.1)))
    marshal.metrics()
print(json.dumps(found))
