"""The state of an engine as sorted text: two runs with the same inputs must agree on it."""

from __future__ import annotations

from collections.abc import Iterator

from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.work.consumer import ConsumerEngine


def state_of(engine: Engine) -> list[str]:
    """A line for each CP, lease, consumer and partition; it contains nothing that user threads change."""
    return sorted(_lines(engine))


def _lines(engine: Engine) -> Iterator[str]:
    if engine.failure is not None:
        yield f"failed: {type(engine.failure).__name__}"
    for cp, world in engine.worlds.items():
        yield f"CP {cp}: next offset {world.next_offset}, level {world.level}"
    for key, lease in engine.book.leases.items():
        yield f"lease {key}: {lease.state}, epoch {lease.epoch}, proven until {lease.valid_until}, {lease.proven_until}"
    for number, member in engine.groups.items():
        yield f"member of consumer {number}: {member.member.member_id!r}, generation {member.member.generation}"
        for key, piece in member.pieces.items():
            yield f"piece {key} of consumer {number}: {piece.span}, epoch {piece.epoch}, until {piece.proven_until}"
            if member.takes_checkpoints:
                yield f"piece {key}: restored {piece.is_restored}, held up {piece.is_held_up}, cut at {piece.cut_at}"
        if (found := member.checkpoints) is not None:
            outcomes = sorted(found.figures.outcomes.items())
            yield f"checkpoints of consumer {number}: {found.state}, newest {found.newest}, {outcomes}"
    for number, consumer in engine.consumers.items():
        yield f"consumer {number}: {', '.join(_of(consumer))}"
        for key, x in consumer.assignments.items():
            tracker, grant = x.tracker, x.grant
            yield (
                f"partition {key} of consumer {number}: {x.stage}, {x.releasing or 'kept'}, next offset "
                f"{x.buffer.fetch_next}, {x.buffer.size} buffered, {tracker.in_hand} in flight from "
                f"{sorted(tracker.runs)}, done to {tracker.done.stable}, {list(tracker.done.ranges)}, grant "
                f"{None if grant is None else (grant.last_offset, grant.accepted)}, {x.callbacks_running} callbacks"
            )


def _of(consumer: ConsumerEngine) -> Iterator[str]:
    delivery = consumer.delivery
    yield f"{len(consumer.errors)} errors"
    yield f"callbacks {consumer.callbacks_running}"
    yield f"closing {consumer.closing}"
    yield f"buffered {delivery.buffered}"
    yield f"not committed {sorted(delivery.ignored_done.items())}"
    yield f"unprocessed {delivery.grants.unprocessed}"
    yield f"blocked {sorted(consumer.blocked)}"
    yield f"stuck {[one[:4] for one in consumer.positions.stuck.found]}"
    yield f"topics {sorted(consumer.subscription.counts())}"
