"""Stops fetching partitions when memory runs out, so that others continue, and resumes them once there is room.

Messages that librdkafka had fetched ahead are dropped, and fetched again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.work.hand import Delivers
from kafka_marshal.types import Key


@given
def hold_up(
    consumer: Delivers, fetched: Collection[Key], held_up: Collection[Key], room: int, now: float
) -> dict[Key, int | None]:
    """Partitions to change when ``room`` more messages may be fetched: the offset to fetch from; None: stop."""
    assignments, delivery = consumer.assignments, consumer.delivery
    if room <= 0:
        full = [key for key in fetched if (x := assignments.get(key)) is not None and x.buffer.size]
        if full and delivery.is_full:
            consumer.warn(
                f"max_bytes_in_flight ({consumer.settings.max_bytes_in_flight} bytes) is reached: nothing more is "
                "handed out of partitions of which messages are in hand, until some of those are done"
            )
        _give_up(consumer, full)
        return dict.fromkeys(full)
    ready = [
        x
        for key in held_up
        if (x := assignments.get(key)) is not None
        and (not x.buffer.size or room >= delivery.memory.half / 2)
        and not delivery.in_lanes.holds_up(x)
    ]
    for assignment in ready:
        assignment.buffer.is_given_up = False
    return {x.key: x.fetch_from for x in ready}


@given
def hold_up_stuck(consumer: Delivers, fetched: Collection[Key], now: float) -> dict[Key, int | None]:
    """Stop fetching partitions that wait for messages in lanes, so that a read can wait for the others."""
    full = [
        key
        for key in fetched
        if (x := consumer.assignments.get(key)) is not None and x.buffer.size and consumer.delivery.in_lanes.holds_up(x)
    ]
    _give_up(consumer, full)
    return dict.fromkeys(full)


def _give_up(consumer: Delivers, keys: Iterable[Key]) -> None:
    """Drop the buffers of partitions that wait for messages in lanes: they are fetched again in their turn."""
    for key in keys:
        assignment = consumer.assignments[key]
        if consumer.delivery.in_lanes.holds_up(assignment):
            assignment.buffer.give_up(assignment.tracker.in_hand_to)
