"""Which partitions are no longer fetched for lack of memory, so that others continue; fetched again once there is room.

What librdkafka had fetched ahead of that is fetched again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kafka_marshal.engine.effects import Key
from kafka_marshal.engine.work.hand import Delivers

__all__ = ["hold_up", "hold_up_stuck"]


def hold_up(
    consumer: Delivers, fetched: Collection[Key], held_up: Collection[Key], room: int, now: float
) -> dict[Key, int | None]:
    """What changes now that this many more messages may be fetched: the offset to fetch from; None: no more."""
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
    return {x.key: x.buffer.fetch_next for x in ready}


def hold_up_stuck(consumer: Delivers, fetched: Collection[Key], now: float) -> dict[Key, int | None]:
    """Fetch no more of partitions that wait for messages in lanes, so that a read can wait for the others."""
    full = [
        key
        for key in fetched
        if (x := consumer.assignments.get(key)) is not None and x.buffer.size and consumer.delivery.in_lanes.holds_up(x)
    ]
    _give_up(consumer, full)
    return dict.fromkeys(full)


def _give_up(consumer: Delivers, keys: Iterable[Key]) -> None:
    """Forget what waits of partitions that wait for messages in lanes: it is fetched again when their turn comes."""
    for key in keys:
        assignment = consumer.assignments[key]
        if consumer.delivery.in_lanes.holds_up(assignment):
            assignment.buffer.give_up(assignment.tracker.in_hand_to)
