"""Threads that share a consumer, and tasks that cancel waits: nothing lost or repeated, each partition in order."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kafka_marshal import Consumer, Delivery
from kafka_marshal.adapters.memory import MemoryCluster
from tests.client.conftest import Scene
from tests.faults.crew import WAYS, WITHIN_S, Crew, share
from tests.faults.stories import AGAIN_S, TOPIC, answer, member, memory_cluster, offsets
from tests.interrupts import run_within

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["BrokerDiedError"])


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("ways", WAYS, ids="+".join)
def test_threads_share_a_consumer(ways: tuple[str, ...], delivery: Delivery) -> None:
    share(ways, delivery)


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_share_a_consumer_of_a_broker(scene: Scene, threads: int, delivery: Delivery) -> None:
    messages = 3_000
    topic = scene.topic(2, messages)
    marshal = scene.member("a")
    consumer = marshal.consumer([topic], delivery=delivery, batch_size=200)
    expected = {(partition, offset) for partition in range(2) for offset in range(messages)}
    crew = Crew(consumer, expected, quiet_s=20.0)
    run_within(WITHIN_S, lambda: crew.work(["poll"] * threads), "the threads' work")
    crew.check(marshal, topic, 2, at_most_once=delivery == "at-most-once")


# asyncio: a cancelled task leaves its thread in poll(), whose result is dropped.


async def give_up_again_and_again(cluster: MemoryCluster, consumer: Consumer, messages: int) -> set[int]:
    seen: set[int] = set()
    until = time.monotonic() + 8 * AGAIN_S
    sent = cancelled = 0
    while len(seen) < messages and time.monotonic() < until:
        if sent < messages:
            cluster.broker.produce(TOPIC, 0, str(sent).encode())
            sent += 1
        # The last ones are received without cancelling, so that the test ends.
        patience_s = 0.05 if cancelled < messages else 6.0
        try:
            message = await asyncio.wait_for(asyncio.to_thread(consumer.poll, 5), patience_s)
        except TimeoutError:
            cancelled += 1
            continue
        if message is not None:
            seen.add(message.offset() or 0)
            consumer.done(message)
        if sent > 3:
            await asyncio.sleep(0.06)
    return seen


def test_q42_what_a_cancelled_task_dropped_comes_again() -> None:
    messages = 12
    cluster = memory_cluster(1, 0)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC])

    def run() -> set[int]:
        async def main() -> set[int]:
            with ThreadPoolExecutor(4) as pool:
                asyncio.get_running_loop().set_default_executor(pool)
                # One thread is already polling, and its result will be dropped.
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(consumer.poll, 5), 0.05)
                return await give_up_again_and_again(cluster, consumer, messages)

        return asyncio.run(main())

    seen = run_within(2 * WITHIN_S, run, "the tasks")
    answer("Consumer.close()", consumer.close)
    lease = marshal.world.lease(TOPIC, 0)
    answer("Marshal.close()", marshal.close)
    done = set(range(-1 if lease is None or lease.stable is None else lease.stable + 1))
    assert not done - seen, f"done in the log and never seen: {offsets((0, x) for x in done - seen)}"
    missing = set(range(messages)) - seen
    assert not missing, f"dropped, and not handed out again: {offsets((0, x) for x in missing)}"
