"""A worker that serves its metrics: python serving_worker.py '{"bootstrap": …}'. It takes commands on stdin.

consume: start working · go: let the waiting first handler return · stall: block the background thread · end: leave
"""

from __future__ import annotations

import json
import sys
import threading

from kafka_marshal import Balanced, Claims, Marshal, Message, Policy
from kafka_marshal.engine.policies import View, Wishes

arguments = json.loads(sys.argv[1])
go_on, is_free = threading.Event(), threading.Event()
is_free.set()


class Stalling(Policy):
    """Balanced, until it is set to block."""

    def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
        is_free.wait()
        return Balanced().wishes(view, own, now)


def handle(message: Message) -> None:
    go_on.wait()


def work(marshal: Marshal) -> None:
    with marshal.consumer([arguments["topic"]], mode=Claims(policy=Stalling())) as consumer:
        if arguments.get("run"):
            consumer.run(handle, hooks=[marshal.timing()])
        else:
            for message in consumer:
                handle(message)


marshal = Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
)
print(marshal.serve(0).url, flush=True)
for line in sys.stdin:
    order = line.strip()
    if order == "consume":
        threading.Thread(target=work, args=(marshal,), daemon=True).start()
    elif order == "go":
        go_on.set()
    elif order == "stall":
        is_free.clear()
    else:
        break
is_free.set()
go_on.set()
marshal.close(5)
