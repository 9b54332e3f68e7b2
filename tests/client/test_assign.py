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
    Admin,
    Balanced,
    ConfigurationError,
    Consumer,
    KeyRangeError,
    Marshal,
    Message,
    Retry,
    aio,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.shared_reads import kept_bytes
from kafka_marshal.errors import ForkedError
from kafka_marshal.node.coordination_topic import required_settings
from rationalizer import Upgrade, encode, key_hash
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.marker import marker
from tests.client.conftest import HI, Scene, Worker, wait_until
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


def test_t4_a_pod_that_was_stopped_for_long_starts_nothing_that_others_have(scene: Scene, tmp_path: Path) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 2_000)
    zombie = scene.worker("zombie", topic, tmp_path, spans=[LOW], pause_s=0.004)
    wait_until(lambda: len(offsets(zombie)) > 20)
    zombie.stop()
    stopped = time.time()
    standby = scene.worker("standby", topic, tmp_path, spans=[LOW], pause_s=0.001)
    wait_until(lambda: set(offsets(zombie, standby)) >= set(of([LOW], 2_000)))
    zombie.go_on()
    stays(lambda: set(offsets(zombie, standby)) >= set(of([LOW], 2_000)), 3 * HI)
    publish(scene, topic, 2_000, 100)
    wait_until(lambda: set(offsets(zombie, standby)) >= set(of([LOW], 2_100)))
    late = [line for line in zombie.lines() if line["what"] == "handled" and line["at"] > stopped + 2 * HI / 1000]
    assert len(late) <= 1, "the message in its hand, at most, is said to be handled after the stop"
    assert "lost" in {line["what"] for line in zombie.lines()}


def test_pods_that_overlap_never_both_work_and_ranges_change_by_closing(scene: Scene) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 100)
    one, two = (scene.member(name, max_bytes_shared_reads=2**20) for name in ("one", "two"))
    left = one.assign({(topic, 0): [(0, HALF)]})
    assert sorted(take(left, len(of([(0, HALF)], 100)))) == of([(0, HALF)], 100)
    right = two.assign({(topic, 0): [(HALF // 2, MAX_KEY_HASH)]})
    assert right.poll(3 * HI / 1000) is None
    assert right.assignment() == []
    left.close()
    third, rest = (0, HALF // 2 - 1), (HALF // 2, MAX_KEY_HASH)
    left = one.assign({(topic, 0): [third]})
    publish(scene, topic, 100, 100)
    found = take(right, len(of([HIGH], 100)) + len(of([rest], 200, 100)))
    assert sorted(found) == sorted(of([HIGH], 100) + of([rest], 200, 100)), "what was done of other keys is known"
    assert sorted(take(left, len(of([third], 200, 100)))) == of([third], 200, 100)
    wait_until(lambda: left.committed([(topic, 0)], ranges=True)[0].stable == 199, 30)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_members_read_together_leaves_the_parent_its_messages_and_the_child_new_readers(
    scene: Scene,
) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 400)
    found: list[list[int]] = [[], []]
    marshals = [scene.member(name, max_bytes_shared_reads=2**20) for name in ("low", "high")]
    consumers = [each.assign({(topic, 0): [span]}) for each, span in zip(marshals, (LOW, HIGH), strict=True)]

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
        own = [each.assign({(other, 0): [span]}) for each, span in zip(pair, (LOW, HIGH), strict=True)]
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


def test_a_lease_goes_whole_by_keys_by_batches_and_whole_again(scene: Scene) -> None:
    topic = scene.topic(1)
    worker = scene.member("m")
    done: list[int] = []
    published = 0

    def more() -> int:
        nonlocal published
        publish(scene, topic, published, 80)
        published += 80
        return published

    end = more()
    with worker.consumer([topic]) as whole:
        done += take(whole, end)
    more()
    with worker.assign({(topic, 0): [LOW]}) as low:  # the other keys are behind now
        done += take(low, len(of([LOW], 160, 80)))
    with worker.consumer([topic], shared_batches=True) as shared:
        assert list(_first(shared, 2 * HI / 1000)) == [], "keys at different places can't be shared by batches"
    with worker.assign({(topic, 0): [HIGH]}) as high:
        done += take(high, len(of([HIGH], 160, 80)))
    end = more()
    with worker.consumer([topic], shared_batches=True) as shared:
        for batch in shared.batches(max_messages=10):
            done += [message.offset() or 0 for message in batch]
            if len(done) >= end:
                batch.done()
                break
            batch.done()
    end = more()
    with worker.consumer([topic]) as whole:
        done += take(whole, 80)
    assert Counter(done) == Counter(range(end))


def _first(shared: Any, seconds: float) -> Iterable[int]:
    """The offsets of the first batch within some time."""
    marshal_stop = time.monotonic() + seconds
    while time.monotonic() < marshal_stop:
        if shared.assignment():
            yield from (message.offset() for message in next(shared.batches(timeout=0.1)))
            return
        time.sleep(0.05)


def test_open_messages_of_a_batch_are_named_and_a_worker_that_holds_it_whole_clears_the_way(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 40)
    sharer, other = scene.member("m"), scene.member("other")
    with sharer.consumer([topic], shared_batches=True) as shared:
        batch = next(iter(shared.batches(max_messages=10)))
        batch.give_back()
    low = other.assign({(topic, 0): [LOW]})
    wait_until(lambda: "shared it by batches" in caplog.text)
    assert low.poll(HI / 1000) is None
    with sharer.consumer([topic]) as whole:
        assert sorted(take(whole, 40)) == list(range(40))
    publish(scene, topic, 40, 40)
    assert sorted(take(low, len(of([LOW], 80, 40)))) == of([LOW], 80, 40)


def test_run_by_key_parks_and_a_redriven_message_goes_to_the_pod_with_its_key(scene: Scene) -> None:
    topic = scene.topic(1)
    publish(scene, topic, 0, 80)
    bad = {of([LOW], 80)[3], of([HIGH], 80)[3]}
    pods = [scene.member("low"), scene.member("high")]
    consumers = [pod.assign({(topic, 0): [span]}) for pod, span in zip(pods, (LOW, HIGH), strict=True)]
    handled: list[tuple[int, int]] = []
    is_mended = False

    def handle_of(number: int) -> Any:
        def handle(message: Any) -> None:
            if message.offset() in bad and not is_mended:
                raise ValueError("poison")
            handled.append((number, message.offset()))

        return handle

    threads = [
        Thread(target=consumer.run, args=(handle_of(number),), kwargs={"retry": Retry(2, (0.01, 0.01)), "park": True})
        for number, consumer in enumerate(consumers)
    ]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(handled) == 78)
        admin = Admin(scene.bootstrap, topic=scene.coordination)
        wait_until(lambda: {each.offset for each in admin.open_messages(scene.group) if each.state == "parked"} == bad)
        is_mended = True
        admin.redrive(scene.group, [(topic, 0, offset) for offset in bad])
        wait_until(lambda: len(handled) == 80)
    finally:
        for consumer in consumers:
            consumer.stop()
        for thread in threads:
            thread.join()
    assert Counter(offset for _, offset in handled) == Counter(range(80))
    assert sorted(offset for number, offset in handled if number == 0) == of([LOW], 80)
    wait_until(lambda: not admin.open_messages(scene.group))


def test_two_pods_of_an_event_loop_do_all_once(scene: Scene) -> None:
    """One iterates, the others run handlers by key; what one leaves at its close the standby takes."""
    topic, got = scene.topic(1), Counter[int]()
    publish(scene, topic, 0, 200)
    made: dict[str, Any] = {"group_id": scene.group, "topic": scene.coordination, "heartbeat_interval_ms": HI}

    async def low() -> None:
        async with (
            aio.Marshal(scene.bootstrap, client_id="low", **made) as marshal,
            marshal.assign({(topic, 0): [LOW]}) as consumer,
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
            marshal.assign({(topic, 0): [span]}) as consumer,
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
    for more, form in (
        ({"policy": Balanced()}, r"consumer\(topics, policy=…\)"),
        ({"transactions": True}, r"consumer\(topics, transactions=True\)"),
        ({"shared_batches": True}, r"consumer\(topics, shared_batches=True\)"),
        ({"delivery": "at-most-once"}, r"consumer\(topics\)"),
    ):
        with pytest.raises(ConfigurationError, match=form):
            made.assign(wanted, **more)
    with pytest.raises(TypeError, match="unexpected keyword argument 'polcy'"):
        made.assign(wanted, polcy=1)
    spans: list[Any] = [[(5, 4)], [(0, 2**63)], [7], [("a", "b")], 7]
    for wrong in ({}, [], {topic: [LOW]}, *({(topic, 0): each} for each in spans)):
        with pytest.raises(ConfigurationError):
            made.assign(cast("Any", wrong))
    with pytest.raises(ConfigurationError, match="have keys in common"):
        made.assign({(topic, 0): [(0, 10), (10, 20)]})
    with pytest.raises(ConfigurationError, match=r"\[3\] does not exist"):
        made.assign({(topic, 3): []})
    made.assign(wanted).close()


def test_below_level_4_the_command_is_named() -> None:
    cluster = MemoryCluster()
    cluster.create_topic("__marshal", 1, 1, required_settings(1), 10)
    for record in (marker("init-1", 1), Upgrade("x", "admin", "any", 3)):
        cluster.broker.produce("__marshal", 0, encode(record))
    with (
        member(cluster) as made,
        pytest.raises(ConfigurationError, match="kafka-marshal upgrade"),
    ):
        made.assign({("t", 0): [LOW]})


def test_kip_error_89_an_ordered_topic_is_shared_in_no_way(scene: Scene) -> None:
    topic = scene.topic(1)
    made = scene.member("m", ordered_topics=[topic])
    calls: list[Callable[[], object]] = [
        lambda: made.assign({(topic, 0): [LOW]}),
        lambda: made.consumer([topic], shared_batches=True),
        lambda: made.group_consumer([topic], allow_key_share=True),
        lambda: made.consumer([f"^{topic}$"], shared_batches=True),
        lambda: made.group_consumer(["other", f"^{topic[:3]}"], allow_key_share=True),
    ]
    for call in calls:
        with pytest.raises(KeyRangeError, match="ordered_topics") as raised:
            call()
        assert raised.value.kip_number == 89
    made.assign({(topic, 0): []}).close()
    made.consumer(["^other-"], shared_batches=True).close()
