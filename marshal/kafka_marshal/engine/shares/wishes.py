"""What an operator wants to be done with messages that a member has in its batches: their owner does it (H2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kafka_marshal.engine.shares.consumer import SharedAssignment, SharedConsumer
from kafka_marshal.engine.work.settling import Kind
from kafka_marshal.types import Key
from rationalizer import SettlingMessages, codes


def settle_for(
    consumer: SharedConsumer, key: Key, record: SettlingMessages, answers: Sequence[str], now: float
) -> None:
    """Settle what the log has refused, as it is in our batches. answers: its codes, entry by entry.

    A handler that has such a message may finish, without effect. What has not begun is left: the operator asks again.
    """
    share = cast("SharedAssignment | None", consumer.assignments.get(key))
    wanted: list[tuple[int, Kind, int | None, str]] = [(last, Kind.DONE, None, "") for _, last in record.done]
    wanted += [(last, Kind.OPEN, None, "") for _, last, _, _ in record.open]
    wanted += [(offset, Kind.PARKED, hashed, reason) for offset, hashed, _, reason in record.parked]
    for (offset, kind, hashed, reason), code in zip(wanted, answers, strict=False):
        run = None if share is None or share.over else share.tracker.run_at(offset)
        if share is not None and run is not None and code == codes.FENCED and kind is not Kind.OPEN:
            consumer.delivery.in_lanes.skip(share, offset)
            consumer.delivery.park(run, offset, hashed, reason, now, kind)
            share.report(now)
