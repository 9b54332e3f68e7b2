"""Partitions, and keys of them, that the program names (U12), on a real broker: who works on what, who takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from select import select
from threading import Thread
from typing import Any, cast

import pytest
from confluent_kafka import Producer

from kafka_marshal import (
    Batches,
    CheckpointPolicy,
    ConfigurationError,
    Consumer,
    Group,
    KeyRangeError,
    Keys,
    Marshal,
    Message,
    Transactions,
    aio,
)
from kafka_marshal.client.shared_reads import kept_bytes
from kafka_marshal.errors import ForkedError
from kafka_marshal.types import SharedEpoch
from rationalizer import key_hash
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import HI, Scene, Worker, wait_until
from tests.client.plant import IN, Plant
from tests.faults.stories import member

KEYS = 40
HALF = MAX_KEY_HASH // 2
LOW, HIGH = (0, HALF), (HALF + 1, MAX_KEY_HASH)
Span = tuple[int, int]


def publish(scene: Scene, topic: str, first: int, count: int) -> None:
    """Messages with the keys k0 … k39, in turn."""
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for number in range(first, first + count):
        producer.produce(topic, str(number).encode(), key=f"k{number % KEYS}", partition=0)
    assert producer.flush(20) == 0


def of(spans: Iterable[Span], count: int, first: int = 0) -> list[int]:
    """The offsets with keys in these ranges."""
    hashes = {number: key_hash(f"k{number}".encode(), 0) for number in range(KEYS)}
    return [x for x in range(first, count) if any(lo <= hashes[x % KEYS] <= hi for lo, hi in spans)]


def offsets(*workers: Worker) -> list[int]:
    return [offset for worker in workers for _, offset in worker.offsets()]


def begun(worker: Worker) -> list[float]:
    return [line["at"] for line in worker.lines() if line["what"] == "handled"]


def stays(condition: Callable[[], bool], ms: float) -> None:
    """It is true all this time."""
    until = time.monotonic() + ms / 1000
    while time.monotonic() < until:
        assert condition()
        time.sleep(0.02)


def take(consumer: Consumer, count: int, timeout_s: float = 60.0) -> list[int]:
    found: list[int] = []
    until = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count}"
        if (message := consumer.poll(0.2)) is not None:
            found.append(message.offset() or 0)
            consumer.done(message)
    return found


def test_two_halves_do_all_once_and_a_standby_takes_over_after_a_kill_and_after_a_close(
    scene: Scene, tmp_path: Path
) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 200)
    high = scene.worker("high", topic, tmp_path, spans=[HIGH], pause_s=0.002)
    low = scene.worker("low", topic, tmp_path, spans=[LOW], pause_s=0.002)
    wait_until(lambda: set(offsets(high, low)) == set(range(200)))
    assert Counter(offsets(high, low)) == Counter(range(200))
    assert sorted(offsets(low)) == of([LOW], 200)

    standby = scene.worker("standby", topic, tmp_path, spans=[LOW], pause_s=0.002)
    wait_until(lambda: standby.lines())
    publish(scene, topic, 200, 100)
    wait_until(lambda: set(offsets(high, low)) == set(range(300)))
    stays(lambda: not offsets(standby), 2.5 * HI)  # what was done is in the log by then

    low.kill()
    publish(scene, topic, 300, 100)
    killed = time.time()
    wait_until(lambda: set(offsets(high, low, standby)) == set(range(400)))
    assert min(begun(standby)) - killed > HI / 1000
    assert Counter(offsets(high, low, standby)) == Counter(range(400))
    stays(lambda: len(offsets(high, low, standby)) == 400, 2.5 * HI)

    second = scene.worker("second", topic, tmp_path, spans=[LOW], pause_s=0.002)
    wait_until(lambda: second.lines())
    stays(lambda: not offsets(second), HI)
    assert standby.terminate() == 0
    publish(scene, topic, 400, 100)
    wait_until(lambda: set(offsets(high, low, standby, second)) == set(range(500)))
    assert Counter(offsets(high, low, standby, second)) == Counter(range(500))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_members_read_together_leaves_the_parent_its_messages_and_the_child_new_readers(
    scene: Scene,
) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 400)
    found: list[list[int]] = [[], []]
    marshals = [scene.member(name, max_bytes_shared_reads=2**20) for name in ("low", "high")]
    consumers = [
        each.consumer(mode=Keys({(topic, 0): [span]})) for each, span in zip(marshals, (LOW, HIGH), strict=True)
    ]

    def work(number: int) -> None:
        for message in consumers[number]:
            found[number].append(message.offset() or 0)
            time.sleep(0.002)

    threads = [Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()

    def in_a_child(other: str) -> str:
        with pytest.raises(ForkedError):
            consumers[0].poll(5)
        for each in marshals:
            each.metrics()
            each.close()
        options: dict[str, Any] = {"topic": scene.coordination, "max_bytes_shared_reads": 2**20}
        pair = [
            Marshal(scene.bootstrap, group_id=scene.group, **options) for _ in range(2)
        ]  # they read in the same way
        own = [each.consumer(mode=Keys({(other, 0): [span]})) for each, span in zip(pair, (LOW, HIGH), strict=True)]
        counts = [len(take(each, len(of([span], 400)))) for each, span in zip(own, (LOW, HIGH), strict=True)]
        return f"{sum(counts)} {kept_bytes() > 0 or bool(pair[1].metrics().shared_reads)}"

    for count in (5, 20, 35):
        publish(scene, other := scene.topic(1), 0, 400)
        wait_until(partial(lambda least: len(found[0]) > least, count))
        assert in_a_fork(partial(in_a_child, other)) == "400 True"
    publish(scene, topic, 400, 100)
    wait_until(lambda: sum(map(len, found)) >= 500)
    for each in marshals:
        each.stop()
    for thread in threads:
        thread.join(10)
    assert [sorted(each) for each in found] == [of([LOW], 500), of([HIGH], 500)]


def in_a_fork(call: Callable[[], str]) -> str:
    """What it returns in a forked child, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001 - passed to the parent
            answer = repr(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        answer = told.read() if select([told], [], [], 30)[0] else "it hangs"
    if answer == "it hangs":
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer


def test_two_pods_of_an_event_loop_do_all_once(scene: Scene) -> None:
    """One iterates, the others run handlers by key; what one leaves at its close the standby takes."""
    topic, got = scene.topic(1), Counter[int]()
    publish(scene, topic, 0, 200)
    made: dict[str, Any] = {"group_id": scene.group, "topic": scene.coordination, "heartbeat_interval": HI / 1000}

    async def low() -> None:
        async with (
            aio.Marshal(scene.bootstrap, client_id="low", **made) as marshal,
            marshal.consumer(mode=Keys({(topic, 0): [LOW]})) as consumer,
        ):
            async for message in consumer:
                begun.set()
                got[message.offset()] += 1
                if got.total() >= 40:
                    break  # this one is not done
        got[message.offset()] -= 1

    async def others(client_id: str, span: Span) -> None:
        await begun.wait()
        async with (
            aio.Marshal(scene.bootstrap, client_id=client_id, **made) as marshal,
            marshal.consumer(mode=Keys({(topic, 0): [span]})) as consumer,
        ):

            async def handle(message: Message) -> None:
                await asyncio.sleep(0.001)
                got[message.offset()] += 1
                assert lo <= key_hash(message.key(), message.offset()) <= hi

            lo, hi = span
            running = asyncio.ensure_future(consumer.run(handle, order="key"))
            while +got != Counter(range(200)):
                await asyncio.sleep(0.01)
            consumer.stop()
            await running

    begun = asyncio.Event()

    async def main() -> None:
        await asyncio.gather(low(), others("high", HIGH), others("standby", LOW))

    asyncio.run(asyncio.wait_for(main(), 30))
    assert +got == Counter(range(200))


# -- what is refused ----------------------------------------------------------------------------------------------


def test_what_contradicts_assign_is_refused_with_the_right_form(scene: Scene) -> None:
    made, topic = scene.member("m"), scene.topic(1)
    wanted = {(topic, 0): [LOW]}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"topics": [topic]}, "left out with mode=Keys"),
        ({"exactly_once": Transactions()}, r"Use mode=Claims\(\)"),
        ({"checkpoints": CheckpointPolicy()}, r"Use mode=Group\("),
        ({"delivery": "at-most-once"}, r"Use mode=Claims\(\)"),
    ]
    for more, form in refused:
        with pytest.raises(ConfigurationError, match=form):
            made.consumer(mode=Keys(wanted), **more)
    with pytest.raises(TypeError, match="unexpected keyword argument 'polcy'"):
        made.consumer(mode=Keys(wanted), polcy=1)  # type: ignore[call-overload]
    spans: list[Any] = [[(5, 4)], [(0, 2**63)], [7], [("a", "b")], 7]
    for wrong in ({}, [], {topic: [LOW]}, *({(topic, 0): each} for each in spans)):
        with pytest.raises(ConfigurationError):
            made.consumer(mode=Keys(cast("Any", wrong)))
    with pytest.raises(ConfigurationError, match="have keys in common"):
        made.consumer(mode=Keys({(topic, 0): [(0, 10), (10, 20)]}))
    with pytest.raises(ConfigurationError, match=r"\[3\] does not exist"):
        made.consumer(mode=Keys({(topic, 3): []}))
    made.consumer(mode=Keys(wanted)).close()


def test_kip_error_89_an_ordered_topic_is_shared_in_no_way(scene: Scene) -> None:
    topic = scene.topic(1)
    made = scene.member("m", ordered_topics=[topic])
    calls: list[Callable[[], object]] = [
        lambda: made.consumer(mode=Keys({(topic, 0): [LOW]})),
        lambda: made.consumer([topic], mode=Batches()),
        lambda: made.consumer([topic], mode=Group(allow_key_share=True)),
        lambda: made.consumer([f"^{topic}$"], mode=Batches()),
        lambda: made.consumer(["other", f"^{topic[:3]}"], mode=Group(allow_key_share=True)),
    ]
    for call in calls:
        with pytest.raises(KeyRangeError, match="ordered_topics") as raised:
            call()
        assert raised.value.kip_number == 89
    made.consumer(mode=Keys({(topic, 0): []})).close()
    made.consumer(["^other-"], mode=Batches()).close()


def test_callbacks_are_told_each_range_of_keys_and_its_token(plant: Plant) -> None:
    """All keys of a partition have one epoch, a plain number."""
    told: dict[str, list[Any]] = {"assign": [], "revoke": []}
    marshal = member(plant.cluster, "a", 1_000)
    consumer = marshal.consumer(
        mode=Keys({(IN, 0): [(0, 10), (100, 200)], (IN, 1): []}),
        on_assign=lambda _, found: told["assign"].extend(found),
        on_revoke=lambda _, found: told["revoke"].extend(found),
    )
    wait_until(lambda: consumer.poll(0.1) or len(told["assign"]) == 2)
    marshal.close()
    for found in told.values():
        some, whole = sorted(found)
        assert (some[:3], whole[:3]) == ((IN, 0, 0), (IN, 1, 0))
        assert type(some.epoch) is SharedEpoch
        assert [part[:2] for part in some.epoch.parts] == [(0, 10), (100, 200)]
        assert max(token for *_, token in some.epoch.parts) == some.epoch
        assert type(whole.epoch) is int
