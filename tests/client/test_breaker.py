"""An outage behind the handlers is no reason to set messages aside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

import pytest

from kafka_marshal import Admin, Batches, Group, Marshal, Retry
from kafka_marshal.client.breaker import FAILING, Breaker, Elsewhere
from kafka_marshal.client.tries import RunCall
from kafka_marshal.engine.work.lane import HANGS_MS
from kafka_marshal.types import Key
from tests.client.conftest import wait_until
from tests.engine.lanes_bench import Bench, records
from tests.faults.stories import GROUP, TOPIC, member, memory_cluster

PARTITIONS = 4
T0 = (TOPIC, 0)

#: No good message waits longer (s): two seconds, and what a busy machine needs. With the faults it was a minute.
WAITS_S = 10.0


def failing(breaker: Breaker, tries: int, messages: int = 5) -> None:
    for number in range(tries):
        breaker.failed(number % messages)


def test_it_opens_when_more_than_fifty_tries_in_a_row_have_failed_and_closes_at_the_first_that_succeeds() -> None:
    breaker = Breaker()
    failing(breaker, 50)
    before = breaker.is_open
    failing(breaker, 1)
    assert (before, breaker.is_open) == (False, True)
    breaker.succeeded()
    assert (breaker.in_a_row, breaker.pace_ms) == (0, None)


def test_one_message_alone_opens_nothing() -> None:
    breaker = Breaker()
    failing(breaker, 1_000, messages=1)
    assert not breaker.is_open
    failing(breaker, 2, messages=2)
    assert breaker.is_open


def test_what_fails_while_others_succeed_opens_nothing() -> None:
    breaker = Breaker()
    for _ in range(100):
        failing(breaker, 50)
        assert not breaker.is_open
        breaker.succeeded()


def test_the_longer_it_lasts_the_slower_it_tries_and_never_slower_than_once_a_second() -> None:
    breaker, paces = Breaker(), []
    for _ in range(2_000):
        failing(breaker, 1, messages=7)
        paces.append(breaker.pace_ms)
        breaker.failed("another")
    assert [pace for at, pace in enumerate(paces) if pace != paces[at - 1] and pace] == [
        10,
        20,
        40,
        80,
        160,
        320,
        640,
        1_000,
    ]


def test_while_it_is_open_each_partition_begins_one_try_at_a_time_and_new_messages_first() -> None:
    bench = Bench()
    one = bench.assignment()
    a, b, c = bench.spread(one, records("abc"))
    assert bench.begin(a, 1.0) == 0
    assert not bench.failed(a, due=50.0)
    bench.lanes.pace(100.0, 50.0)
    assert bench.lanes.due(50.0, bench.call) == [a]
    assert [bench.begin(lane, 149.0) for lane in (a, b, c)] == [None] * 3
    assert bench.lanes.reopened(149.0) == []
    assert bench.lanes.reopened(150.0) == [c]
    assert bench.begin(a, 150.0) is None  # its back-off is over, but that is the place of a new one
    assert bench.begin(c, 150.0) == 2
    assert bench.lanes.reopened(1_000.0) == []  # one at a time
    assert not bench.failed(c, due=1_000.0)
    assert bench.lanes.reopened(249.0) == []
    [found] = bench.lanes.reopened(250.0)
    assert (found, bench.begin(b, 250.0)) == (b, 1)
    assert not bench.failed(b, due=1_000.0)
    assert bench.lanes.reopened(350.0) == [a]  # when nothing is new, what was tried the longest ago
    assert bench.begin(a, 350.0) == 0
    bench.lanes.pace(None, 400.0)
    assert bench.lanes.due(1_000.0, bench.call) == [c, b]
    assert bench.begin(c, 1_000.0) == 2


def test_while_it_is_open_a_partition_waits_for_none_of_another_one() -> None:
    bench = Bench()
    bad, good = bench.assignment(0), bench.assignment(1)
    bench.lanes.pace(100.0, 0.0)
    a, b = bench.spread(bad, records("ab"))
    assert [bench.begin(lane, 200.0) for lane in (a, b)] == [None, None]
    assert bench.lanes.reopened(200.0) == [b]
    assert bench.begin(b, 200.0) == 1
    [c] = bench.spread(good, records("c", partition=1))
    assert bench.begin(c, 201.0) is None
    assert bench.lanes.reopened(201.0) == [c]
    assert bench.begin(c, 201.0) == 0


def test_while_it_is_open_a_handler_that_hangs_holds_the_others_up_for_ten_seconds() -> None:
    bench = Bench()
    a, b = bench.spread(bench.assignment(), records("ab"))
    bench.lanes.pace(100.0, 0.0)
    assert [bench.begin(lane, 100.0) for lane in (a, b)] == [None, None]
    assert bench.lanes.reopened(100.0) == [b]
    assert bench.begin(b, 100.0) == 1
    assert bench.lanes.reopened(99.0 + HANGS_MS) == []
    assert bench.lanes.reopened(100.0 + HANGS_MS) == [a]
    assert bench.begin(a, 100.0 + HANGS_MS) == 0


def test_a_message_that_stops_all_others_is_set_aside_though_nothing_succeeds() -> None:
    """With an order, what waits behind it can't show that nothing is away; in an outage that costs next to nothing."""
    breaker = Breaker()
    parks = []
    for number in range(4_500):
        breaker.failed(number)
        if breaker.is_open and breaker.probes():
            parks.append(number + 1)
    assert parks == [51, 91, 171, 331, 651, 1_291, 2_291, 3_291, 4_291]
    breaker.succeeded()
    assert not breaker.is_open


def test_what_another_member_has_done_speaks_against_an_outage_and_what_it_has_opened_does_not() -> None:
    before = {T0: (100, 0), ("t", 1): (50, 10)}

    def has_succeeded(before: dict[Key, tuple[int, int]], now: dict[Key, tuple[int, int]]) -> bool:
        others = Elsewhere()
        earlier = {key: (done - 5, opened) for key, (done, opened) in before.items()}
        assert [others.has_succeeded(each) for each in ({}, earlier, before)] == [False] * 3, "it may be older"
        return others.has_succeeded(now)

    assert not has_succeeded({}, before)
    assert not has_succeeded(before, before)
    assert has_succeeded(before, {T0: (101, 0), ("t", 1): (50, 10)})
    assert not has_succeeded(before, {T0: (104, 2), ("t", 1): (50, 10)})  # markers, passed beside open messages
    assert has_succeeded(before, {T0: (105, 2), ("t", 1): (50, 10)})
    assert has_succeeded(before, {T0: (100, 0), ("t", 1): (59, 1)})  # a batch was handled
    assert not has_succeeded(before, {("t", 2): (900, 0)})


def test_the_next_run_is_not_slowed_down() -> None:
    bench = Bench()
    bench.lanes.pace(100.0, 0.0)
    bench.lanes.close(bench.call)
    bench.lanes.open(RunCall())
    assert bench.lanes.pace_ms is None


def test_health_and_metrics_say_so_until_it_closes() -> None:
    """The log shows nothing of it, so this is where it is seen."""
    cluster, is_mended = memory_cluster(1, 400), threading.Event()

    def handle(message: Any) -> None:
        if not is_mended.is_set():
            raise ValueError("what it needs is away")

    with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        options: dict[str, Any] = {"retry": Retry(3, (0.001, 0.01)), "park": True, "order": "none"}
        running = threading.Thread(target=consumer.run, args=(handle,), kwargs=options)
        assert marshal.metrics().runs_failing == 0
        running.start()
        wait_until(lambda: FAILING in marshal.health().problems)
        assert not marshal.health().ok  # after two seconds: a burst of bad messages is no outage
        assert marshal.metrics().runs_failing == 1
        is_mended.set()
        wait_until(lambda: marshal.health().ok)
        assert marshal.metrics().runs_failing == 0
        consumer.stop()
        running.join()


BAD = b"bad"


class Scene:
    """Workers of one mode; messages that always fail in partition 0, good ones beside and behind them."""

    def __init__(self, mode: str, members: int, *, is_async: bool = False) -> None:
        self.cluster, self.mode = memory_cluster(PARTITIONS, 0), mode
        #: (partition, offset) → how long a good message has waited (s).
        self.waited: dict[tuple[int, int], float] = {}
        self.is_away = threading.Event()
        self.failed = 0
        self.marshals = [member(self.cluster, name, hi=1_000) for name in "abc"[:members]]
        self.consumers = [self._consumer(marshal) for marshal in self.marshals]
        handler = self.await_handle if is_async else self.handle
        options: dict[str, Any] = {"retry": Retry(4, (0.01, 30.0)), "park": True, "concurrency": 4}
        options["order"] = "none" if mode == "batches" else "key"
        self.threads = [threading.Thread(target=x.run, args=(handler,), kwargs=options) for x in self.consumers]

    def _consumer(self, marshal: Marshal) -> Any:
        if self.mode == "claims":
            return marshal.consumer([TOPIC])
        if self.mode == "batches":
            return marshal.consumer([TOPIC], mode=Batches())
        return marshal.consumer([TOPIC], mode=Group(allow_key_share=self.mode == "keys"))

    def handle(self, message: Any) -> None:
        if message.value() == BAD or self.is_away.is_set():
            self.failed += 1
            raise ValueError("malformed")
        self.waited.setdefault((message.partition(), message.offset()), time.monotonic() - float(message.value()))

    async def await_handle(self, message: Any) -> None:
        self.handle(message)

    def write(self, bad: int = 0, good: int = 0, partitions: Iterable[int] = range(PARTITIONS)) -> None:
        keys = (b"%d" % number for number in count(self.failed))
        for _ in range(bad):
            self.cluster.broker.produce(TOPIC, 0, BAD, next(keys))
        for _ in range(good):
            for partition in partitions:
                self.cluster.broker.produce(TOPIC, partition, b"%r" % time.monotonic(), b"g%r" % time.monotonic())

    def admin(self) -> Admin:
        return Admin.on_cluster(lambda: self.cluster.connect("admin"))

    def aside(self) -> int:
        with self.admin() as admin:
            return len(admin.open_messages(GROUP, parked=True))

    def write_until_aside(self, bad: int, partitions: Iterable[int] = range(PARTITIONS)) -> None:
        """A good message of each of these partitions at a time, until this number of bad ones is set aside."""
        until, written, partitions = time.monotonic() + 120, self.handled(), list(partitions)
        while self.aside() != bad and time.monotonic() < until:
            self.write(good=1, partitions=partitions)
            written += len(partitions)
            wait_until(partial(self.has_handled, written))
        assert self.aside() == bad

    def handled(self) -> int:
        return len(self.waited)

    def has_handled(self, number: int) -> bool:
        return self.handled() == number

    def __enter__(self) -> Scene:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for marshal in self.marshals:
            marshal.stop()
        for thread in self.threads:
            thread.join()
        for marshal in self.marshals:
            marshal.close()


MODES = [("claims", False), ("groups", True), ("keys", False), ("batches", False), ("batches", True)]


@pytest.mark.parametrize(("mode", "is_async"), MODES)
@pytest.mark.parametrize("bad", [20, 300])
def test_a_burst_of_bad_messages_delays_no_good_one_and_is_set_aside(mode: str, is_async: bool, bad: int) -> None:
    with Scene(mode, 2, is_async=is_async) as scene:
        scene.write(good=2)
        wait_until(lambda: scene.handled() == 2 * PARTITIONS)
        scene.write(bad=bad)
        scene.write_until_aside(bad)
        assert max(scene.waited.values()) < WAITS_S
        assert scene.failed < 20 * bad


@pytest.mark.parametrize("mode", ["claims", "keys", "batches"])
def test_what_is_redriven_before_its_handler_is_mended_delays_no_good_one_and_is_set_aside_again(mode: str) -> None:
    with Scene(mode, 2) as scene:
        scene.write(bad=200)
        scene.write_until_aside(200)
        failed = scene.failed
        with scene.admin() as admin:
            admin.redrive(GROUP, "all")
        wait_until(lambda: scene.failed > failed)
        scene.write_until_aside(200, range(1, PARTITIONS))
        assert max(scene.waited.values()) < WAITS_S


@pytest.mark.parametrize(("mode", "is_async"), MODES)
def test_an_outage_sets_next_to_nothing_aside_and_ends_at_once(mode: str, is_async: bool) -> None:
    with Scene(mode, 2, is_async=is_async) as scene:
        scene.write(good=2)
        wait_until(lambda: scene.handled() == 2 * PARTITIONS)
        scene.is_away.set()
        scene.write(good=300)
        wait_until(lambda: scene.failed > 500)
        aside = scene.aside()
        assert aside < 40, aside  # of each member the first 50 tries, and those that show whether one stops the others
        scene.is_away.clear()
        began = time.monotonic()
        wait_until(lambda: scene.handled() >= 302 * PARTITIONS - 50)
        assert time.monotonic() - began < 10


def test_bad_messages_are_set_aside_by_a_member_that_has_nothing_else_while_another_one_succeeds() -> None:
    with Scene("claims", 2) as scene:
        wait_until(lambda: all(marshal.health().leases for marshal in scene.marshals))
        keys = next(
            x for x in scene.consumers if (TOPIC, 0) in {(each.topic, each.partition) for each in x.assignment()}
        )
        theirs = set(range(PARTITIONS)) - {each.partition for each in keys.assignment()}
        scene.write(bad=100)
        wait_until(lambda: scene.failed > 200)
        until = time.monotonic() + 60
        while scene.aside() < 100 and time.monotonic() < until:
            scene.write(good=1, partitions=theirs)
            time.sleep(0.05)
        assert scene.aside() == 100


@pytest.mark.parametrize("action", ["park", "discard"])
@pytest.mark.parametrize("how", ["waits for its next try", "is with its handler", "is with a loop"])
def test_an_operator_settles_a_message_that_a_member_has_in_its_batch(how: str, action: str) -> None:
    """The log refuses it (H2), so its owner does it; what a handler says of it later has no effect."""
    cluster, may_go_on, tried, done = memory_cluster(1, 3), threading.Event(), threading.Event(), []

    def handle(message: Any) -> None:
        if message.offset() == 1:
            tried.set()
            if how == "waits for its next try":
                raise ValueError
            may_go_on.wait(20)
        done.append(message.offset())

    def loop(consumer: Any) -> None:
        for batch in consumer.batches(3, timeout=0.1):
            tried.set()
            may_go_on.wait(20)
            batch.done()
            done.extend(message.offset() for message in batch)

    with member(cluster) as marshal, marshal.consumer([TOPIC], mode=Batches()) as consumer:
        retry = Retry(None, (600.0, 600.0))
        options: dict[str, Any] = {"retry": retry, "order": "none", "concurrency": 2}
        running = threading.Thread(target=loop, args=(consumer,))
        if how != "is with a loop":
            running = threading.Thread(target=consumer.run, args=(handle,), kwargs=options)
        running.start()
        assert tried.wait(20)
        with Admin.on_cluster(lambda: cluster.connect("admin")) as admin:
            settled = getattr(admin, action)(GROUP, [(TOPIC, 0, 1)])
            assert (settled.messages, settled.left) == (((TOPIC, 0, 1),), {})
            may_go_on.set()
            wait_until(lambda: {0, 2} <= set(done))
            parked = [(1, "parked", "OPERATOR")] * (action == "park")
            wait_until(
                lambda: [(x.offset, x.state, x.reason) for x in admin.open_messages(GROUP)] == parked, what="settled"
            )
            if action == "park":  # a later try of it is one like any other
                tried.clear()
                admin.redrive(GROUP, "all")
                assert tried.wait(20)
        marshal.stop()
        running.join()
