# pyright: reportUnnecessaryTypeIgnoreComment=error, reportUnusedExpression=false
"""Calls that type checkers must accept or reject: they report an unnecessary ignore as an error."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from kafka_marshal import Consumer, Group, GroupConsumer, Marshal, Message, Retry, TopicPartition, aio


@dataclass
class Order:
    number: int


def parse(message: Message) -> Order:
    return Order(int(message.value() or b""))


def handle(message: Message) -> None: ...
def handle_order(order: Order) -> None: ...
async def ahandle(message: Message) -> None: ...
async def ahandle_order(order: Order) -> None: ...
def awaits(order: Order) -> Awaitable[None]:
    return ahandle_order(order)


def handle_text(text: str) -> None: ...


def plain(marshal: Marshal, consumer: Consumer, group: GroupConsumer) -> None:
    marshal.consumer(["t"], delivery="at-most-once", on_assign=lambda c, found: c.stop())
    marshal.consumer(["t"], delivery="nope")  # type: ignore[call-overload]
    marshal.consumer(["t"], handler_timout=3.0)  # type: ignore[call-overload]
    marshal.consumer(["t"], mode=Group(strategy="nope"))  # type: ignore[arg-type]
    for each in (consumer, group):
        each.run(handle, concurrency=4, order="key", retry=Retry(attempts=3), dead_letters="dead")
        each.run(ahandle)
        each.run(handle_order, deserialize=parse)
        each.run(ahandle_order, deserialize=parse)
        each.run(awaits, deserialize=parse, retry=None)
        each.run(lambda order: order.number, deserialize=parse)
    consumer.run(handle_order)  # type: ignore[arg-type]
    consumer.run(handle_text, deserialize=parse)  # type: ignore[misc]
    group.run(ahandle_order)  # type: ignore[arg-type]
    group.run(handle, order="nope")  # type: ignore[call-overload]
    consumer.run(handle, concurency=3)  # type: ignore[call-overload]
    consumer.stop()


async def assigned(consumer: aio.Consumer[Consumer], found: list[TopicPartition]) -> None:
    await consumer.pause(found)


async def awaited() -> None:
    async with aio.Marshal("localhost", group_id="g", watchdog=True) as marshal:
        marshal.consumer(["t"], delivery="nope")  # type: ignore[call-overload]
        marshal.consumer(["t"], handler_timout=3.0)  # type: ignore[call-overload]
        marshal.consumer(["t"], mode=Group(strategy="nope"))  # type: ignore[arg-type]
        async with marshal.consumer(["t"], mode=Group(strategy="range")) as group:
            await group.run(ahandle_order, deserialize=parse)
            group.stop()
        async with marshal.consumer(["t"], delivery="at-least-once", on_assign=assigned) as consumer:
            await consumer.run(ahandle, concurrency=4)
            await consumer.run(handle_order, deserialize=parse)
            await consumer.run(ahandle_order)  # type: ignore[arg-type]
            await consumer.run(handle_text, deserialize=parse)  # type: ignore[misc]
    aio.Marshal("localhost", group_id="g", watchdogs=True)  # type: ignore[call-arg]
