"""What parks, shares and `assign` refuse: each text says what is wrong, what that means for the data, and what to do.

90 to 92 need a log that brings them about: tests/engine/test_failure_plan.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import pytest

from kafka_marshal import (
    Admin,
    Batches,
    CheckpointPolicy,
    ConfigurationError,
    Group,
    KeyRangeError,
    Keys,
    Marshal,
    Retry,
    Transactions,
    aio,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.pipeline.source import SourceOptions
from rationalizer import ConfigureGroup, SettleOffsets, SettlingMessages, Upgrade, decode, encode
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.marker import marker
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, TOPIC

LOW = (0, MAX_KEY_HASH // 2)
DURABLE = Retry(durable=True)
#: A coordinated group in which no message is settled by itself.
OFF = "off"


class Refusal(NamedTuple):
    """A call, and what its error says besides what it means for the data."""

    what: str
    call: Callable[[Marshal], object]
    says: str
    do: str
    kip_number: int | None = None

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


def cluster_at(level: int) -> MemoryCluster:
    cluster = MemoryCluster()
    cluster.create_topic("__marshal", 1, 1, required_settings(1), 10)
    for record in (marker("init-1", 1), Upgrade("x", "admin", "any", level)):
        cluster.broker.produce("__marshal", 0, encode(record))
    cluster.broker.create_topic(TOPIC, 1)
    for number in range(3):
        cluster.broker.produce(TOPIC, 0, b"%d" % number)
    return cluster


def run(retry: Retry | None = None, **options: Any) -> Callable[[Marshal], object]:
    """A call of `run` by a consumer made with the other options."""
    of_run = {name: options.pop(name) for name in list(options) if name in ("park", "dead_letters", "order")}

    def call(marshal: Marshal) -> None:
        with marshal.consumer([TOPIC], **options) as consumer:
            consumer.run(print, retry=retry, **of_run)

    return call


def run_in_group(retry: Retry | None = None, park: bool = False, **options: Any) -> Callable[[Marshal], object]:
    def call(marshal: Marshal) -> None:
        with marshal.consumer([TOPIC], mode=Group(), **options) as consumer:
            wait_until(lambda: consumer.member_id)
            consumer.run(print, retry=retry, park=park)

    return call


def park_one(**options: Any) -> Callable[[Marshal], object]:
    """`park` of a message that was delivered."""

    def call(marshal: Marshal) -> None:
        with marshal.consumer([TOPIC], **options) as consumer:
            if "exactly_once" in options:
                consumer.park(next(iter(next(consumer.batches()))), "bad")
            consumer.park(wait_until(lambda: consumer.poll(0.5)), "bad")

    return call


def shared(act: Callable[[Any], object] = lambda consumer: None, **options: Any) -> Callable[[Marshal], object]:
    def call(marshal: Marshal) -> None:
        with marshal.consumer([TOPIC], mode=Batches(), **options) as consumer:
            act(consumer)

    return call


def assign(spans: Any = (LOW,), **options: Any) -> Callable[[Marshal], object]:
    return lambda marshal: marshal.consumer(mode=Keys({(TOPIC, 0): list(spans)}), **options).close()


def in_asyncio(act: Callable[[aio.Marshal], Coroutine[Any, Any, object]]) -> Callable[[Marshal], object]:
    """The same of the asyncio client, on the same log."""

    async def work(cluster: Any) -> None:
        async with aio.Marshal.on_cluster(cluster.connect("b"), group_id=GROUP, client_id="b") as marshal:
            await act(marshal)

    return lambda marshal: asyncio.run(work(marshal.cluster))  # type: ignore[attr-defined]


async def _aio_run(marshal: aio.Marshal) -> None:
    async with marshal.consumer([TOPIC]) as consumer:
        await consumer.run(print, park=True)


async def _aio_shared(marshal: aio.Marshal) -> None:
    async with marshal.consumer([TOPIC], mode=Batches()):
        pass


async def _aio_assign(marshal: aio.Marshal) -> None:
    async with marshal.consumer(mode=Keys({(TOPIC, 0): [LOW]})):
        pass


def operate(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC]) as consumer:
        consumer.done(wait_until(lambda: consumer.poll(0.5)))
    Admin.on_cluster(lambda: marshal.cluster.connect("operator")).park(GROUP, [(TOPIC, 0, 1)])  # type: ignore[attr-defined]


AT = rf"level {SHARING_LEVEL} of the coordination topic.* at level {SHARING_LEVEL - 1}"
RAISE = "kafka-marshal upgrade"

BELOW = [
    Refusal("run park", run(park=True), AT, RAISE),
    Refusal("run durable", run(DURABLE), AT, RAISE),
    Refusal("run park in a group", run_in_group(park=True), AT, RAISE),
    Refusal("run durable in a group", run_in_group(DURABLE), AT, RAISE),
    Refusal("park", park_one(), rf"park\(…\): {AT}", RAISE),
    Refusal("park in a group", park_one(mode=Group()), rf"park\(…\): {AT}", RAISE),
    Refusal("shared batches", shared(), AT, RAISE),
    Refusal("assign ranges", assign(), rf"mode=Keys\(…\): {AT}", RAISE),
    Refusal("assign whole", assign(()), rf"mode=Keys\(…\): {AT}", RAISE),
    Refusal("aio run park", in_asyncio(_aio_run), AT, RAISE),
    Refusal("aio shared batches", in_asyncio(_aio_shared), AT, RAISE),
    Refusal("aio assign", in_asyncio(_aio_assign), AT, RAISE),
    Refusal("operator's park", operate, rf"park: {AT}", RAISE),
]

CHECKPOINTS: dict[str, Any] = {"checkpoints": CheckpointPolicy(every=None, on_checkpoint=lambda _: b"")}
ONCE: dict[str, Any] = {"delivery": "at-most-once"}
EXACTLY: dict[str, Any] = {"exactly_once": Transactions()}
IS_ONCE = "is for delivery='at-least-once'"
LETTERS = "Use dead_letters=…"

TOGETHER = [
    Refusal("park letters", run(park=True, dead_letters="dead"), "exclude each other", "Leave one of them out"),
    Refusal("park transactions", run(park=True, **EXACTLY), "not work with exactly_once=", LETTERS),
    Refusal("durable transactions", run(DURABLE, **EXACTLY), "not work with exactly_once=", LETTERS),
    Refusal("park by hand transactions", park_one(**EXACTLY), "not work with exactly_once=", LETTERS),
    Refusal("park at most once", run(park=True, **ONCE), IS_ONCE, "or take batches"),
    Refusal("durable at most once", run(DURABLE, **ONCE), IS_ONCE, "or take batches"),
    Refusal("park by hand at most once", park_one(**ONCE), IS_ONCE, "Leave it out, or"),
    Refusal("park checkpoints", run_in_group(park=True, **CHECKPOINTS), "takes checkpoints", LETTERS),
    Refusal("durable checkpoints", run_in_group(DURABLE, **CHECKPOINTS), "takes checkpoints", LETTERS),
    Refusal(
        "park of Spark's source",
        lambda _: SourceOptions.parse({"bootstrap_servers": "x", "group_id": "g", "topics": "t", "park": "true"}),
        "has no option 'park'",
        "It has: ",
    ),
    Refusal("shared by key", shared(lambda x: x.run(print, order="key")), "order='key' is not", "Use order='none'"),
    Refusal(
        "shared by partition",
        shared(lambda x: x.run(print, order="partition")),
        "order='partition' is not",
        "Use order",
    ),
    Refusal("shared durable", shared(lambda x: x.run(print, retry=DURABLE)), "durable=True", "Leave it out"),
    Refusal("shared run at most once", shared(lambda x: x.run(print), **ONCE), IS_ONCE, r"Take batches\(\)"),
    Refusal("shared transactions", shared(**EXACTLY), "exactly_once= is not", "Leave it out"),
    Refusal("shared checkpoints", shared(**CHECKPOINTS), "checkpoints= is not", r"Use mode=Group\("),
    Refusal("shared poll", shared(lambda x: x.poll()), r"poll\(\) is not", r"Use batches\(\)"),
    Refusal("shared consume", shared(lambda x: x.consume()), r"consume\(\) is not", r"Use batches\(\)"),
    Refusal("shared loop", shared(iter), "iterating is not", r"Use batches\(\)"),
    Refusal("shared seek", shared(lambda x: x.seek(TOPIC, 0, 1)), r"seek\(\) is not", r"Use batches\(\)"),
    Refusal("assign at most once", assign(**ONCE), "delivery='at-most-once' is not", r"Use mode=Claims\(\)"),
    Refusal("assign transactions", assign(**EXACTLY), "exactly_once= is not", r"Use mode=Claims\(\)"),
    Refusal("assign checkpoints", assign(**CHECKPOINTS), "checkpoints= is not", r"Use mode=Group\("),
    Refusal(
        "claims with checkpoints",
        lambda marshal: marshal.consumer([TOPIC], **CHECKPOINTS),
        "checkpoints= is not",
        r"Use mode=Group\(",
    ),
    Refusal(
        "ranges of shared keys",
        lambda marshal: marshal.ranges([TOPIC], mode=Group(allow_key_share=True)),
        "allow_key_share=True is not",
        "Leave it out",
    ),
    Refusal("assign overlaps", assign([(0, 10), (10, 20)]), "have keys in common", "Both ends of a range"),
]

SWITCH = f"kafka-marshal group {OFF} --set accept_individual_commit=true"

SETTING_OFF = [
    Refusal("run park", run_in_group(park=True), "accept_individual_commit of group 'off' is off", SWITCH, 88),
    Refusal("run durable", run_in_group(DURABLE), "accept_individual_commit of group 'off' is off", SWITCH, 88),
    Refusal("park", park_one(mode=Group()), "accept_individual_commit of group 'off' is off", SWITCH, 88),
]

WHOLE = r"Hold partitions whole \(consumer\(topics\)\)"

ORDERED = [
    Refusal("assign", assign(), rf"not possible for {TOPIC}", WHOLE, 89),
    Refusal("shared batches", shared(), rf"not possible for {TOPIC}", WHOLE, 89),
    Refusal(
        "key share",
        lambda marshal: marshal.consumer([TOPIC], mode=Group(allow_key_share=True)),
        rf"not possible for {TOPIC}",
        WHOLE,
        89,
    ),
]


def refuses(marshal: Marshal, refusal: Refusal) -> None:
    log = marshal.cluster.broker.log("__marshal", 0)  # type: ignore[attr-defined]
    with pytest.raises((ConfigurationError, KeyRangeError)) as raised:
        refusal.call(marshal)
    text = str(raised.value)
    assert re.search(refusal.says, text)
    assert re.search(r"[Nn]othing (of it )?was (changed|claimed|delivered|handed out|set aside)", text)
    assert re.search(refusal.do, text)
    assert getattr(raised.value, "kip_number", None) == refusal.kip_number
    written = [decode(message.value(), SHARING_LEVEL) for message in log.messages]
    assert not [each for each in written if isinstance(each, SettlingMessages | SettleOffsets)]


def on(cluster: MemoryCluster, **options: Any) -> Iterator[Marshal]:
    options = {"group_id": GROUP, "client_id": "a", "heartbeat_interval": 0.3, **options}
    with Marshal.on_cluster(cluster.connect("a"), **options) as marshal:
        marshal.cluster = cluster  # type: ignore[attr-defined]
        yield marshal


@pytest.mark.parametrize("refusal", BELOW, ids=str)
def test_u6_below_level_4_the_command_is_named(refusal: Refusal) -> None:
    for marshal in on(cluster_at(SHARING_LEVEL - 1)):
        refuses(marshal, refusal)


@pytest.mark.parametrize("refusal", TOGETHER, ids=str)
def test_u6_what_is_not_together_is_refused_with_the_right_form(refusal: Refusal) -> None:
    for marshal in on(cluster_at(SHARING_LEVEL)):
        refuses(marshal, refusal)


@pytest.mark.parametrize("refusal", SETTING_OFF, ids=str)
def test_kip_error_88_names_the_setting(refusal: Refusal) -> None:
    cluster = cluster_at(SHARING_LEVEL)
    setting = ("accept_individual_commit", False)
    cluster.broker.produce("__marshal", 0, encode(ConfigureGroup("i", "o", OFF, (setting,))))
    for marshal in on(cluster, group_id=OFF):
        refuses(marshal, refusal)


@pytest.mark.parametrize("refusal", ORDERED, ids=str)
def test_kip_error_89_names_the_ordered_topic(refusal: Refusal) -> None:
    for marshal in on(cluster_at(SHARING_LEVEL), ordered_topics=[TOPIC]):
        refuses(marshal, refusal)


def test_a_topic_of_ordered_topics_may_be_held_whole() -> None:
    for marshal in on(cluster_at(SHARING_LEVEL), ordered_topics=[TOPIC]):
        marshal.consumer(mode=Keys({(TOPIC, 0): []})).close()
        marshal.consumer([TOPIC]).close()
