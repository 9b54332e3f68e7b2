"""The Python API: wrong arguments, calls after stop() and close(), messages that are never done."""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

import kafka_marshal
from kafka_marshal import (
    Admin,
    Balanced,
    Batches,
    Claims,
    ClosedError,
    ConfigurationError,
    Consumer,
    Group,
    Keys,
    Marshal,
    MaxClaims,
    Policy,
    ReleaseIfBehind,
    Transactions,
    aio,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.fetching import MANY
from kafka_marshal.instance import Instance, new_instance_id, release
from kafka_marshal.pipeline.claimed import ClaimedBatches
from kafka_marshal.pipeline.source import KafkaMarshalSource, leases_of, register
from kafka_marshal.sinks import PostgresSink, SqliteSink
from kafka_marshal.testing import LocalBroker, LocalCluster, TcpProxy
from kafka_marshal.testing.simulation import Client, Job, Scenario, simulate, simulate_one
from tests.client.conftest import wait_until
from tests.faults.endings import Background
from tests.faults.stories import GROUP, TOPIC, member, memory_cluster

NAN = math.nan

#: Passes the check for a Spark session.
SPARK: Any = SimpleNamespace(readStream=None)
NONE: Any = None


@pytest.fixture
def cluster() -> MemoryCluster:
    made = memory_cluster()
    made.broker.create_topic("other", 1)
    made.broker.produce("other", 0, b"x")
    return made


@pytest.fixture
def marshal(cluster: MemoryCluster) -> Iterator[Marshal]:
    with member(cluster) as made:
        yield made


# -- arguments ----------------------------------------------------------------------------------------------------

#: Argument and value → the call that takes it.
MADE: list[tuple[str, object, Callable[[Any], object]]] = [
    *(("bootstrap_servers", x, lambda x: Marshal(x, group_id="g")) for x in (["h:1"], "", None, 5, " , ")),
    *(("bootstrap_servers", x, lambda x: Admin(x)) for x in (["h:1"], "", None)),
    *(("group_id", x, lambda x: Marshal("h:1", group_id=x)) for x in ("", " ", 5, None, "x" * 256)),
    *(("client_id", x, lambda x: Marshal("h:1", group_id="g", client_id=x)) for x in ("", 5)),
    *(
        ("topic", x, lambda x: Marshal("h:1", group_id="g", topic=x))
        for x in ("", 5, None, "a b", "é", "..", "a\0b", "x" * 250, "__marshal_snapshots")
    ),
    *(
        ("heartbeat_interval", x, lambda x: Marshal("h:1", group_id="g", heartbeat_interval=x))
        for x in ("3", True, NAN, -1, 3000.0, 0.099, 600.001)
    ),
    *(("config", x, lambda x: Marshal("h:1", group_id="g", config=x)) for x in (5, ["a"], {5: 5})),
    *(("watchdog", x, lambda x: Marshal("h:1", group_id="g", watchdog=x)) for x in ("yes", 1)),
    *(
        ("timeout", x, lambda x: Marshal("h:1", group_id="g", timeout=x))
        for x in ("5", True, NAN, 0, -1, math.inf, 3_600, 1e308)
    ),
    ("cluster", 5, lambda x: Marshal.on_cluster(x, group_id="g")),
    *(("timeout", x, lambda x: Admin("h:1", timeout=x)) for x in ("5", True, NAN, 0)),
    *(("config", x, lambda x: Admin("h:1", config=x)) for x in (5, ["a"])),
    *(("limit", x, lambda x: MaxClaims(x)) for x in (0, "4", True, 1.5)),
    *(("cycles", x, lambda x: ReleaseIfBehind(cycles=x)) for x in (0, "4")),
    ("&", 5, lambda x: Balanced() & x),
    *(("policy", x, lambda x: Claims(policy=x)) for x in (5, Balanced, type("Empty", (Policy,), {}))),
    *(("claim_ahead", x, lambda x: Claims(claim_ahead=x)) for x in (1, "no", None)),
    *(("strategy", x, lambda x: Group(strategy=x)) for x in ("fair", 5, None)),
    *(("session_timeout", x, lambda x: Group(session_timeout=x)) for x in ("10", True, NAN, 0.09, 2_147_484)),
    *(("beats", x, lambda x: Group(beats=x)) for x in ("3", 2.5, True, 1, 21)),
    *(("allow_key_share", x, lambda x: Group(allow_key_share=x)) for x in (1, "no", None)),
    *(("mirror_offsets", x, lambda x: Group(mirror_offsets=x)) for x in (1, "no", None)),
    *(("max_shares", x, lambda x: Batches(max_shares=x)) for x in (0, "5", True, 1.5)),
    ("partitions", [], lambda x: Keys(x)),
    ("partitions", {"t": []}, lambda x: Keys(x)),
    *(("timeout", x, lambda x: Transactions(timeout=x)) for x in (0.5, "5", True, NAN)),
    *(("max_producers", x, lambda x: Transactions(max_producers=x)) for x in (0, "5", True)),
    *(("path", x, lambda x: SqliteSink(x)) for x in (5, None)),
    *(("busy_timeout_s", x, lambda x: SqliteSink("x", busy_timeout_s=x)) for x in ("5", -1, NAN)),
    ("dsn", 5, lambda x: PostgresSink(x)),
    ("lock_timeout_s", -1, lambda x: PostgresSink("", lock_timeout_s=x)),
    *(("expires_in", x, lambda x: Admin("h:1").pause("g", x)) for x in ("5", NAN, 0, True, 1e12)),
    *(("group_id", x, lambda x: Admin("h:1").progress(x)) for x in ("", 5, None)),
    *(("timeout", x, lambda x: Admin("h:1").forget("g", x)) for x in ("5", NAN, -1)),
    *(("positions", x, lambda x: Admin("h:1").plan("g", x)) for x in ([1], None, "x")),
    *(("keep", x, lambda x: Admin("h:1").prune(keep=x)) for x in ("3", True)),
    ("client_id", 5, lambda x: Admin("h:1").resume("g", x)),
    *(("timeout", x, lambda x: Admin("h:1", timeout=x)) for x in ("5", 0, 1e308)),
    *(("topic", x, lambda x: Admin("h:1", topic=x)) for x in ("a b", "..", "__marshal_snapshots")),
    *(("spark", x, lambda x: ClaimedBatches(x, NONE, ["t"])) for x in (None, 5)),
    *(("marshal", x, lambda x: ClaimedBatches(SPARK, x, ["t"])) for x in (None, "h:1")),
    ("options", 5, lambda x: ClaimedBatches(SPARK, NONE, ["t"], options=x)),
    ("spark", None, register),
    ("df", None, leases_of),
    *(("brokers", x, lambda x: LocalCluster(x)) for x in (0, "3", True)),
    *(("port", x, lambda x: LocalBroker(port=x)) for x in ("1", 0, 70_000)),
    ("properties", 5, lambda x: LocalBroker(properties=x)),
    ("keep", 5, lambda x: LocalBroker(keep=x)),
    ("start_timeout_s", "5", lambda x: LocalBroker(start_timeout_s=x)),
    ("port", "1", lambda x: TcpProxy(port=x)),
    *(("delivery", x, lambda x: simulate(None, 1, delivery=x)) for x in ("at_most_once", 5)),
]


async def is_async(*_: object) -> None:
    """A coroutine that would never be awaited."""


def yields(*_: object) -> Iterator[None]:
    yield


class IsAsync:
    async def __call__(self, *_: object) -> None:
        """As is_async."""


NO_CALLBACKS: tuple[object, ...] = (5, "x", object(), is_async, partial(is_async, 1), IsAsync(), yields, lambda: None)

OF_A_CONSUMER: list[tuple[str, object]] = [
    *(("topics", x) for x in ("t", None, 5, {"t": [0]}, [], [5], [""], ["__marshal"], ["__marshal_snapshots"], ["^("])),
    *(("delivery", x) for x in ("at_most_once", "At-Least-Once", None, 5)),
    *(("mode", x) for x in (5, Group, None)),
    ("checkpoints", 30),
    *(("start", x) for x in ("earlier", 5, None, datetime(2020, 1, 1))),  # noqa: DTZ001
    *(("handler_timeout", x) for x in ("5", NAN, 0, -1, True)),
    *((name, x) for name in ("on_assign", "on_revoke", "on_lost") for x in NO_CALLBACKS),
    ("config", [1]),
]
OF_MESSAGES: list[tuple[str, object]] = [
    *((name, x) for name in ("batch_size", "max_bytes_in_flight") for x in ("5", 0, True, 1.5, NAN)),
    *((name, x) for name in ("auto_done",) for x in (1, "no", None)),
    *(("exactly_once", x) for x in (True, 1, Transactions)),
]


#: Of a class that decides nothing.
EMPTY = type("Empty", (Policy,), {})()


def said(name: str, value: object, call: Callable[[], object]) -> str:
    """Rejected by an error that names the argument, and the value if it is short."""
    with pytest.raises(ConfigurationError) as caught:
        call()
    text = str(caught.value)
    assert name in text
    assert repr(value)[:40] in text or isinstance(value, list | datetime | dict | int)
    return text


@pytest.mark.parametrize(("name", "value", "call"), MADE, ids=lambda x: None if callable(x) else repr(x))
def test_what_is_made_with_wrong_arguments(name: str, value: object, call: Callable[[Any], object]) -> None:
    said(name, value, lambda: call(value))


def test_an_option_of_sparks_that_is_nearly_one_is_named() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'minPartitions'"):
        ClaimedBatches(SPARK, None, ["t"], options={"minPartition": "5"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="did you mean 'min_partitions'"):
        KafkaMarshalSource({"min_partition": "5"})


def test_consumers_made_with_wrong_arguments(marshal: Marshal) -> None:
    calls: list[tuple[Callable[..., object], list[tuple[str, object]]]] = [
        (marshal.consumer, OF_A_CONSUMER + OF_MESSAGES),
        (marshal.ranges, OF_A_CONSUMER),
    ]
    for make, wrong in calls:
        for name, value in wrong:
            given = {"topics": [TOPIC], name: value}
            said(name, value, lambda make=make, given=given: make(**given))  # type: ignore[misc]
    said("policy", Policy(), lambda: Claims(policy=Policy()))
    said("policy", EMPTY, lambda: Claims(policy=EMPTY))
    assert "did you mean 'at-most-once'?" in said(
        "delivery",
        "at_most_once",
        lambda: marshal.consumer([TOPIC], delivery="at_most_once"),  # type: ignore[call-overload]
    )
    assert marshal._ending.consumers == []


def test_an_old_name_says_the_new_one(marshal: Marshal) -> None:
    made: Any = marshal
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: made.consumer([TOPIC], policy=Balanced()), TypeError, r"'policy'; it is mode=Claims\(policy=…\) now"),
        (lambda: made.consumer([TOPIC], shared_batches=True), TypeError, r"it is mode=Batches\(\) now"),
        (lambda: made.ranges([TOPIC], group=True), TypeError, r"it is mode=Group\(…\) now"),
        (lambda: made.consumer([TOPIC], transactions=True), TypeError, r"it is exactly_once=Transactions\(\)"),
        (lambda: made.consumer([TOPIC], auto_offset_reset="latest"), TypeError, "it is start=… now"),
        (lambda: made.consumer([TOPIC]).run(print, transactions=True), TypeError, "exactly_once="),
        (lambda: made.consumer(["other"]).position(), AttributeError, r"it is assignment\(\) now"),
        (lambda: made.group_consumer([TOPIC]), AttributeError, r"it is consumer\(topics, mode=Group\(…\)\) now"),
        (lambda: made.group_ranges([TOPIC]), AttributeError, r"it is ranges\(topics, mode=Group\(…\)\) now"),
        (lambda: made.assign({(TOPIC, 0): []}), AttributeError, r"it is consumer\(mode=Keys\({…}\)\) now"),
        (lambda: made.heartbeat_interval_ms, AttributeError, "it is heartbeat_interval=…, in seconds now"),
        *(
            (lambda make=make: make("h:1", heartbeat_interval_ms=3_000), TypeError, "heartbeat_interval=…, in seconds")
            for make in (Marshal, Admin, aio.Marshal)
        ),
        (lambda: ClaimedBatches(SPARK, NONE, ["t"], strategy="range"), TypeError, r"mode=Group\(strategy=…\)"),  # type: ignore[call-arg]
        (lambda: made.consumer([TOPIC], polcy=1), TypeError, "'polcy'$"),
        (lambda: made.consumers, AttributeError, "'consumers'$"),
    ]
    for call, kind, text in calls:
        with pytest.raises(kind, match=text):
            call()


def test_calls_with_wrong_arguments(marshal: Marshal, tmp_path: Path) -> None:
    consumer, other = marshal.consumer([TOPIC]), marshal.consumer(["other"])
    theirs, batch = other.poll(5), next(consumer.batches(1))
    lease, sink = marshal.claim("by-hand", 0), SqliteSink(tmp_path / "s.db")
    calls: list[tuple[str, Callable[[Any], object], tuple[object, ...]]] = [
        ("timeout", consumer.poll, ("5", -1, NAN, True, math.inf)),
        ("num_messages", consumer.consume, (0, "5", True, 1.5)),
        ("timeout", lambda x: consumer.consume(1, x), ("5", -1, NAN)),
        ("max_messages", consumer.batches, (0, "5", True)),
        ("timeout", lambda x: consumer.batches(1, x), ("5", -1, None)),
        ("message", consumer.done, (None, 5, "x", batch)),
        ("partitions", consumer.pause, (5, "t", [TOPIC], [(TOPIC,)], [(TOPIC, "1")], [(TOPIC, True)], [(5, 1)])),
        ("partitions", consumer.resume, ([TOPIC],)),
        ("topic", lambda x: consumer.seek(x, 0, 1), (5, "")),
        ("partition", lambda x: consumer.seek(TOPIC, x, 1), ("1", -1, True)),
        ("offset", lambda x: consumer.seek(TOPIC, 0, x), ("1", -1, True)),
        ("timeout", consumer.close, ("5", -1, NAN)),
        ("timeout", marshal.close, ("5", -1, NAN, 1e10)),
        ("topic", lambda x: marshal.claim(x, 0), (5, "", None)),
        ("partition", lambda x: marshal.claim(TOPIC, x), ("1", -1, True, NAN)),
        ("timeout", lambda x: marshal.claim(TOPIC, 0, x), ("1", -1, NAN)),
        ("last_offset", lease.heartbeat, ("1", -1, True)),
        ("last_offset", lease.grant, ("1", -1, True, None)),
        ("last_offset", lease.release, ("1", -1, True)),
        ("predicate", marshal.world.wait_for, (5, None, is_async, yields, lambda: None)),
        ("predicate", lambda x: marshal.world.wait_for(lambda world: is_async(world, x)), ([],)),
        ("timeout", lambda x: marshal.world.wait_for(bool, x), ("5", NAN, 1e10)),
        ("topic", lambda x: marshal.world.lease(x, 0), (5, "")),
        ("partition", lambda x: marshal.world.lease(TOPIC, x), ("5", -1)),
        ("claims", lambda x: sink.transaction("g", x).__enter__(), ("t", 5, [5], [("t", 1)], [("t", "1", 1, 1)])),
        ("group", lambda x: sink.transaction(x, [("t", 1, 1, 1)]).__enter__(), (5,)),
        ("group_id", sink.progress, (5, "")),
        ("group_id", sink.forget, (None,)),
        ("positions", lambda x: sink.rewind("g", x), ([5], {"t": 1}, {("t", 1): "x"}, {("t", 1): -2})),
    ]
    for name, call, values in calls:
        for value in values:
            said(name, value, lambda call=call, value=value: call(value))  # type: ignore[misc]
    assert theirs is not None
    assert "not handed out this message" in said("other [0]", 0, lambda: consumer.done(theirs))
    other.done(theirs)


def test_a_callback_that_returns_a_coroutine_is_reported(marshal: Marshal, caplog: pytest.LogCaptureFixture) -> None:
    with marshal.consumer([TOPIC], on_assign=lambda consumer, partitions: is_async(consumer, partitions)) as consumer:
        assert consumer.poll(5) is not None
    assert "on_assign has returned a coroutine, which must be awaited" in caplog.text


def test_members_that_have_read_as_far_have_the_same_digest(marshal: Marshal, cluster: MemoryCluster) -> None:
    marshal.claim("other", 0)
    with Marshal.on_cluster(cluster.connect("beside"), group_id="beside", client_id="beside") as beside:
        wait_until(lambda: marshal.world.digests() == beside.world.digests())
        assert {len(digest) for _, digest in beside.world.digests().values()} == {32}


def test_a_pattern_that_matches_nothing_is_reported(marshal: Marshal, caplog: pytest.LogCaptureFixture) -> None:
    _kept = marshal.consumer(["^__marshal$", f"^{TOPIC}$"])
    assert [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING] == [
        "no topic matches ^__marshal$ (yet); this consumer waits for one. (Internal topics never do.)"
    ]


@pytest.mark.parametrize("call", ["pause", "resume", "seek", "claim"])
def test_a_partition_that_does_not_exist_is_refused_with_what_exists(marshal: Marshal, call: str) -> None:
    consumer = marshal.consumer([TOPIC])
    calls: dict[str, Callable[[], object]] = {
        "pause": lambda: consumer.pause([(TOPIC, 99)]),
        "resume": lambda: consumer.resume([(TOPIC, 99)]),
        "seek": lambda: consumer.seek(TOPIC, 99, 0),
        "claim": lambda: marshal.claim(TOPIC, 99),
    }
    assert f"'{TOPIC}' has 2 partition(s), 0 to 1" in said(f"{TOPIC} [99]", 99, calls[call])
    assert all(lease.partition < 2 for lease in marshal.world.leases())
    if call in ("pause", "resume"):
        assert "it reads t" in said("other", 0, lambda: getattr(consumer, call)([("other", 0)]))
    if call == "seek":  # before the end offset is looked up
        for name in ("other", "never", "a\0b"):
            assert "it reads t" in said(name, 0, lambda name=name: consumer.seek(name, 0, 99))  # type: ignore[misc]


def test_seek_says_why_not(cluster: MemoryCluster) -> None:
    with member(cluster) as a, member(cluster, "b") as b:
        consumer = a.consumer([TOPIC], mode=Claims(policy=MaxClaims(1)))
        wait_until(lambda: len(consumer.assignment()) == 1)
        [held] = consumer.assignment()
        consumer.seek(TOPIC, held.partition, 3)
        assert "its position is 3 already" in said("2", 2, lambda: consumer.seek(TOPIC, held.partition, 2))
        assert "not assigned to this consumer" in said("5", 5, lambda: consumer.seek(TOPIC, 1 - held.partition, 5))
        other = b.consumer([TOPIC])
        wait_until(lambda: len(other.assignment()) == 1)
        assert "not assigned to this consumer" in said("3", 3, lambda: other.seek(TOPIC, held.partition, 3))


def test_ranges_with_wrong_arguments(marshal: Marshal) -> None:
    ranges = marshal.ranges([TOPIC])
    calls: list[tuple[str, Callable[[Any], object], tuple[object, ...]]] = [
        ("max_records", ranges.take, (0, "5", True)),
        ("ends", lambda x: ranges.take(1, x, 0), ([5], {"t": 1}, {(TOPIC, 0): "x"})),
        ("timeout", lambda x: ranges.take(1, None, x), ("5", -1, NAN)),
        ("ranges", ranges.done, (5, [5], "x")),
        ("ranges", ranges.give_back, (5, [5])),
        ("ranges", ranges.is_valid, (5,)),
        ("timeout", lambda x: ranges.wait_lost([], x), ("5", 1e10)),
        ("flush", lambda x: ranges.done([], flush=x), (1, "no")),
        ("together", lambda x: ranges.done([], together=x), (1, "no")),
        ("ends", ranges.is_done, (5, None, [5], {"t": 1}, {(TOPIC, 0): "x"})),
        ("ends", lambda x: ranges.wait_done(x, 0), (5, [5], {"t": 1})),
        ("keys", ranges.starts, (5, None, "x", [5], [(TOPIC, "0")])),
    ]
    for name, call, values in calls:
        for value in values:
            said(name, value, lambda call=call, value=value: call(value))  # type: ignore[misc]


# -- after stop() and close() -------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_after_stop_calls_wait_their_timeout_out(marshal: Marshal, delivery: Any) -> None:
    consumer, ranges = marshal.consumer([TOPIC], delivery=delivery), marshal.ranges(["other"])
    marshal.stop()
    calls: list[tuple[Callable[[], object], object, float]] = [
        (lambda: consumer.poll(0.3), None, 0.3),
        (lambda: consumer.consume(5, 0.3), [], 0.3),
        (lambda: ranges.take(5, timeout=0.3), [], 0.3),
        (consumer.poll, None, 0.1),  # without one, a loop must not spin either
        (consumer.consume, [], 0.1),
        (lambda: ranges.take(5), [], 0.1),
    ]
    for call, wanted, least_s in calls:
        began = time.monotonic()
        assert call() == wanted
        assert least_s - 0.01 <= time.monotonic() - began < least_s + 2
    assert not list(consumer)
    assert not list(consumer.batches())
    waiting = Background(lambda: consumer.poll(60))
    consumer.close()  # ends a wait that stop() does not end
    waiting.end()


def test_stop_ends_a_wait(marshal: Marshal) -> None:
    consumer = marshal.consumer(["nothing-yet"])
    waiting = [Background(lambda: consumer.poll(60)), Background(lambda: consumer.consume(5, 60))]
    marshal.stop()
    for each in waiting:
        each.end()


@pytest.mark.parametrize("closes", ["consumer", "marshal"])
def test_what_is_closed_says_so(marshal: Marshal, closes: str) -> None:
    consumer, ranges = marshal.consumer([TOPIC]), marshal.ranges(["other"])
    message = consumer.poll(5)
    assert message is not None
    for each in (consumer, ranges) if closes == "consumer" else (marshal,):
        each.close()
        each.close()
    calls: list[Callable[[], object]] = [
        lambda: consumer.poll(0.1),
        consumer.poll,
        lambda: consumer.consume(5, 0.1),
        consumer.pause,
        consumer.resume,
        lambda: consumer.seek(TOPIC, 0, 5),
        lambda: ranges.take(5, timeout=0.1),
    ]
    if closes == "marshal":
        calls += [lambda: marshal.claim(TOPIC, 0), lambda: marshal.consumer([TOPIC])]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert not [*consumer, *consumer.batches(), *consumer.assignment()]
    consumer.done(message)
    assert consumer.ignored_done == 1
    assert "closed" in repr(consumer)


def test_iterating_without_auto_done_ends_too(marshal: Marshal) -> None:
    consumer = marshal.consumer([TOPIC], auto_done=False)
    user = Background(lambda: list(consumer))
    consumer.close()
    user.end()
    assert list(consumer) == []


# -- in a forked child --------------------------------------------------------------------------------------------


def forked(call: Callable[[], object]) -> str:
    """The error that the call raises in a forked child; "" for none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        raised = ""
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - passed to the parent
            raised = type(error).__name__
        finally:
            os.write(writing, raised.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as told:
        return told.read()


@pytest.mark.parametrize("way", ["poll", "consume", "iterate", "batches", "take"])
@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_a_forked_child_gets_nothing_of_what_the_parent_has_fetched(delivery: Any, way: str) -> None:
    with member(memory_cluster(1, 20)) as marshal:
        if way == "take":
            ranges = marshal.ranges([TOPIC], delivery=delivery)
            assert ranges.take(5)
            assert forked(lambda: ranges.take(5)) == "ForkedError"
            assert ranges.take(5)
            return
        consumer = marshal.consumer([TOPIC], delivery=delivery)
        loop: Iterator[Any] = iter(consumer) if way == "iterate" else consumer.batches(5)
        ways: dict[str, Callable[[], Any]] = {
            "poll": lambda: consumer.poll(5),
            "consume": lambda: consumer.consume(5, 5),
            "iterate": lambda: next(loop),
            "batches": lambda: next(loop),
        }
        assert ways[way]()
        lease = marshal.claim("by-hand", 0)
        assert forked(ways[way]) == forked(lease.require) == forked(consumer.assignment) == "ForkedError"
        assert ways[way]()
        lease.require()


# -- messages that are never done ---------------------------------------------------------------------------------

NEVER_DONE = "none was ever reported as done"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if NEVER_DONE in x.getMessage() and x.name == "kafka_marshal"]


def polls(consumer: Consumer) -> object:
    return [consumer.poll(5) for _ in range(MANY)]


def consumes(consumer: Consumer) -> object:
    return consumer.consume(MANY, 5)


def gets_batches(consumer: Consumer) -> object:
    return next(consumer.batches(MANY))


@pytest.mark.parametrize("way", [polls, consumes, gets_batches])
def test_many_messages_and_none_done_is_said_once(caplog: pytest.LogCaptureFixture, way: Any) -> None:
    with member(memory_cluster(1, MANY), hi=100) as marshal, marshal.consumer([TOPIC]) as consumer:
        kept = way(consumer)
        wait_until(lambda: warnings(caplog), 30)
        [text] = warnings(caplog)
        assert "consumer.done(message)" in text
        assert 'delivery="at-most-once"' in text
        del kept


@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize("done", [True, False])
def test_fewer_are_said_after_a_minute(done: bool) -> None:
    """On virtual time: four of them, and the second call was a minute ago."""
    told: list[tuple[float, str]] = []
    began: list[float] = []
    slept: list[int] = []

    class FetchMonitor(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if NEVER_DONE in record.getMessage():
                told.append((time.monotonic(), record.getMessage()))

    def worker(job: Job) -> None:
        logging.getLogger("kafka_marshal").handlers = [FetchMonitor()]
        logging.getLogger("kafka_marshal").setLevel(logging.WARNING)
        with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
            kept = [consumer.poll() for _ in range(4)]
            began.append(time.monotonic())
            if done and kept[0] is not None:
                job.handle(kept[0])
                consumer.done(kept[0])
            job.sleep(70)
            slept.append(len(kept))

    simulate_one(Scenario(1, (Client("c0", "yours"),), intervals=200), worker)
    assert slept  # else the story ended earlier
    if done:
        assert not told
    else:
        assert 1 <= len(told) <= len(began)  # once in each start of the process
        assert 59 < told[0][0] - began[0] < 63


def test_iterating_is_never_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with member(memory_cluster(1, 3 * MANY), hi=100) as marshal, marshal.consumer([TOPIC]) as consumer:
        list(islice(consumer, 2 * MANY))
        beaten_until = marshal.world.log_time + 300
        assert marshal.world.wait_for(lambda world: world.log_time > beaten_until, 10)
    assert warnings(caplog) == []


# -- small things -------------------------------------------------------------------------------------------------


def test_help_and_reprs_say_what_there_is(marshal: Marshal, cluster: MemoryCluster) -> None:
    consumer, lease = marshal.consumer([TOPIC]), marshal.claim("by-hand", 3)
    admin = Admin.on_cluster(lambda: cluster.connect("admin"), client_id="ann")
    assert repr(marshal) == f"Marshal(group_id={GROUP!r}, client_id='a', topic='__marshal', open)"
    assert repr(consumer) == f"Consumer([{TOPIC}], group_id={GROUP!r}, open)"
    assert repr(lease) == f"ClaimedLease('by-hand', 3, epoch={lease.epoch}, valid)"
    assert repr(admin) == "Admin(topic='__marshal', client_id='ann')"
    assert repr(admin.pause("other-group")) == "Pause('other-group', client_id='ann', not begun)"
    assert "by-hand" in repr(marshal.world.lease("by-hand", 3))
    for kind, names in {
        Marshal: ("world", "watchdog", "instance_id", "group_id"),
        kafka_marshal.Batch: ("epoch",),
    }.items():
        assert all(f"{name}" in (kind.__doc__ or "").partition("Attributes:")[2] for name in names)
    public = {name for name in dir(Consumer) if not name.startswith("_")}
    assert public == {
        *(
            "assignment",
            "batches",
            "close",
            "committed",
            "consume",
            "done",
            "gaps",
            "ignored_done",
            "park",
            "pause",
            "poll",
        ),
        *("lost_positions", "resume", "run", "seek", "stop", "stopping", "stuck", "subscribe", "transaction"),
        "unprocessed",
    }


def test_a_message_is_one(marshal: Marshal) -> None:
    message = marshal.consumer([TOPIC]).poll(5)
    assert isinstance(message, kafka_marshal.Message)
    assert isinstance(confluent_kafka.Message(), kafka_marshal.Message)


def test_the_version_is_the_release_and_the_package_is_the_command() -> None:
    assert kafka_marshal.__version__ == release()
    shown = subprocess.run(
        [sys.executable, "-m", "kafka_marshal", "--version"], capture_output=True, text=True, check=True
    )
    assert release() in shown.stdout


BLOCKED = "import sys\nsys.modules[{module!r}] = None\n{code}\n"


@pytest.mark.parametrize(
    ("module", "code", "extra"),
    [
        ("pyspark", "import kafka_marshal.pipeline.claimed", "spark"),
        ("pyspark", "import kafka_marshal.pipeline.source", "spark"),
        ("pyarrow", "import kafka_marshal.pipeline.audit.audit", "spark"),
        ("psycopg", "from kafka_marshal.sinks import PostgresSink; PostgresSink('')", "postgres"),
        ("deltalake", "from kafka_marshal.sinks import DeltaSink; DeltaSink('x')", "delta"),
        ("pytest", "import kafka_marshal.testing.plugin", "test"),
        ("greenlet", "import kafka_marshal.testing.simulation", "simulation"),
        ("click", "from kafka_marshal.cli import main; sys.exit(main(['status']))", "cli"),
    ],
)
def test_a_missing_extra_is_named(module: str, code: str, extra: str) -> None:
    run = [sys.executable, "-c", BLOCKED.format(module=module, code=code)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    *_, last = done.stderr.strip().splitlines()
    assert f"pip install 'kafka-marshal[{extra}]'" in last


# -- An instance_id names a Marshal's host and release ------------------------------------------------------------


def test_it_is_read_back_and_names_one_run() -> None:
    made = new_instance_id()
    assert Instance.parse(made) == Instance(socket.gethostname(), os.getpid(), release())
    assert str(Instance.parse(made)) == f"{socket.gethostname()}:{os.getpid()}"
    assert made != new_instance_id()


def test_any_host_name_fits_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "wörker/" + 300 * "x")
    made = new_instance_id()
    assert len(made.encode()) <= 255
    assert Instance.parse(made) is not None


@pytest.mark.parametrize("other", [None, "", "8f14e45fceea167a", "a/b/c/d", "a/1/2"])
def test_others_are_left_alone(other: str | None) -> None:
    assert Instance.parse(other) is None
