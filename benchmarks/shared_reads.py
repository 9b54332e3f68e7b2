"""Members of one process with different keys of one partition: read once for all, or by each (U13).

python -m benchmarks.shared_reads [--members N] [--messages N] [--rounds N] [--json FILE]

rate     messages a second that all members have handled, with shared reads ÷ each by itself; handlers only count
traffic  bytes over the loopback interface meanwhile, the same ÷; so nothing else may use it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.common import bench_kafka, in_turns, new_log, paired, report
from kafka_marshal import Keys, Marshal
from rationalizer.routing import key_range

VALUE_BYTES, KEYS = 1_000, 1_000
SHARED_BYTES = 200 * 2**20


def traffic() -> int:
    """Bytes that the loopback interface has passed on."""
    (line,) = [each for each in Path("/proc/net/dev").read_text().splitlines() if each.strip().startswith("lo:")]
    return int(line.split()[1])


def work(about: dict[str, Any]) -> None:
    """The process: it writes the messages a second, the bytes that passed, and what another member had read."""
    members, ready, ended = about["members"], threading.Barrier(about["members"] + 1), list[float]()
    counts, hits = [0] * members, [0.0] * members

    def member(number: int) -> None:
        with (
            Marshal(
                about["bootstrap"],
                group_id=about["group"],
                client_id=f"m{number}",
                topic=about["log"],
                max_bytes_shared_reads=about["shared"],
            ) as marshal,
            marshal.consumer(mode=Keys({(about["topic"], 0): [key_range(number, members)]})) as consumer,
        ):
            ready.wait()
            for batch in consumer.batches(max_messages=1_000):
                counts[number] += len(batch)
                batch.done()
                if sum(counts) >= about["messages"]:
                    break
            ended.append(time.monotonic())
            hits[number] = sum(each.count for each in marshal.metrics().shared_reads if each.outcome == "hit")
            stop.wait()

    stop = threading.Event()
    threads = [threading.Thread(target=member, args=(number,), daemon=True) for number in range(members)]
    for thread in threads:
        thread.start()
    ready.wait()
    began, before, cpu = time.monotonic(), traffic(), time.process_time()
    while sum(counts) < about["messages"]:
        time.sleep(0.01)
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    print(json.dumps([about["messages"] / seconds, traffic() - before, used, counts, hits]), flush=True)


def run(bootstrap: str, topic: str, messages: int, members: int, shared: int) -> tuple[float, float]:
    """(messages a second, bytes) of one process."""
    about = {"bootstrap": bootstrap, "topic": topic, "messages": messages, "members": members, "shared": shared}
    about |= {"group": uuid.uuid4().hex, "log": new_log(bootstrap, 1)}
    command = [sys.executable, "-m", "benchmarks.shared_reads", "--worker", json.dumps(about)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    sys.stderr.write(f"shared {shared}: {output.decode()}")
    rate, passed, *_ = json.loads(output)
    return rate, passed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_reads", description=__doc__)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--worker")
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        work(json.loads(chosen.worker))
        return 0
    with bench_kafka() as bootstrap:
        topic = f"t-{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
        producer = Producer(
            {"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 2_000_000}
        )
        for number in range(chosen.messages):
            producer.produce(topic, b"x" * VALUE_BYTES, b"k%d" % (number % KEYS))
            producer.poll(0)
        producer.flush(60)
        one = partial(run, bootstrap, topic, chosen.messages, chosen.members)
        pairs = in_turns(chosen.rounds, partial(one, SHARED_BYTES), partial(one, 0))
    rows = [
        paired("messages a second, read once ÷ by each", [(a[0], b[0]) for a, b in pairs], 1.0, "/s"),
        paired("bytes passed, the same ÷", [(a[1], b[1]) for a, b in pairs], None, "bytes", at_most=True),
    ]
    report("shared reads", rows, chosen.json, members=chosen.members, messages=chosen.messages)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
