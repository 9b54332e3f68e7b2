"""Holds a real `rationalizer.World` against the oracle's, field by field, so that failures name the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rationalizer import Lease, Outcome, World
from tests.rationalizer.oracle.world import OracleLease, OracleOutcome, OracleWorld

OUTCOME_FIELDS = ("accepted", "code", "type", "epoch", "log_time", "entries")
#: Of records about coordinated groups; None in all others, and in a release that knows level 1 only.
GROUP_FIELDS = ("generation", "member", "checkpoint", "barrier", "share", "taken")


def outcome_fields(outcome: Outcome | OracleOutcome) -> dict[str, Any]:
    """What D2 prints of an outcome."""
    fields = {name: getattr(outcome, name) for name in OUTCOME_FIELDS}
    return {**fields, **{name: getattr(outcome, name, None) for name in GROUP_FIELDS}}


def same_outcome(real: Outcome, wanted: OracleOutcome) -> None:
    """The outcome of one record; the record is given exactly where its own fields were well formed."""
    if wanted.stopped:
        assert (real.accepted, real.code) == (False, "UPGRADE_REQUIRED")
        assert real.log_time == wanted.log_time
        return
    assert outcome_fields(real) == outcome_fields(wanted)
    named = wanted.type is not None and wanted.code != "MALFORMED"
    assert (real.record is not None) == named
    if real.record is not None:
        assert type(real.record).__name__ == wanted.type


def _lease(lease: Lease | OracleLease, now: int) -> dict[str, Any]:
    if isinstance(lease, OracleLease):
        client, instance = lease.holder or (None, None)
        group, topic, partition = lease.key
        done = lease.done_through
        ranges = list(lease.progress.ranges)
    else:
        client, instance = lease.client_id, lease.instance_id
        group, topic, partition = lease.group_id, lease.topic, lease.partition
        done = [tuple(piece) for piece in lease.progress.done_through]  # type: ignore[misc]
        ranges = [tuple(span) for span in lease.progress.ranges]  # type: ignore[misc]
        assert lease.held == (client is not None)
        assert lease.age(now) == now - lease.last_beat
    return {
        "key": (group, topic, partition),
        "holder": (client, instance),
        "epoch": lease.epoch,
        "heartbeat_interval_ms": lease.heartbeat_interval_ms,
        "last_beat": lease.last_beat,
        "freshness": lease.freshness(now),
        "stable": lease.progress.stable,
        "done_through": done,
        "ranges": ranges,
        "granted": lease.progress.granted,
    }


def same_state(real: World, wanted: OracleWorld) -> None:
    """Everything a world shows, the bytes of its state and its digest included; not its counts."""
    now = wanted.log_time
    assert (real.partition, real.partitions) == (wanted.partition, wanted.partitions)
    assert (real.log_time, real.next_offset) == (now, wanted.next_offset)
    assert (real.level, real.required_level) == (wanted.level, wanted.required_level)
    assert [_lease(lease, now) for lease in real.leases()] == [_lease(lease, now) for lease in wanted.leases()]
    pauses = [(pause.group_id, pause.client_id, pause.expires) for pause in real.pauses()]
    assert pauses == [(pause.group, pause.client, pause.expires) for pause in wanted.pauses()]
    same_lookups(real, wanted)
    assert real.snapshot() == wanted.snapshot()
    assert real.digest() == wanted.digest()


def same_lookups(real: World, wanted: OracleWorld) -> None:
    """`.lease` and `.pause` find exactly what the lists hold."""
    for lease in wanted.leases():
        found = real.lease(*lease.key)
        assert found is not None
        assert _lease(found, wanted.log_time) == _lease(lease, wanted.log_time)
    same_pauses(real, wanted)


def same_pauses(real: World, wanted: OracleWorld) -> None:
    """`.pause` for every group that was ever paused."""
    for group in {pause.group for pause in wanted.pause_records}:
        paused, known = real.pause(group), wanted.pause(group)
        assert (paused is None) == (known is None)
        if paused is not None and known is not None:
            assert (paused.client_id, paused.expires) == (known.client, known.expires)


def same_counts(real: World, wanted: OracleWorld) -> None:
    """Records counted by code; a code that never came up may be there with 0."""
    assert _nonzero(real.accepted) == wanted.accepted
    assert _nonzero(real.rejected) == wanted.rejected


def _nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {code: count for code, count in counts.items() if count}


def same_after(log: Iterable[tuple[int, int, bytes | None]], real: World, wanted: OracleWorld) -> None:
    """Apply `log` to both, comparing each outcome and digest, and everything at the end."""
    for offset, stamp, value in log:
        expected = wanted.apply(offset, stamp, value)
        same_outcome(real.apply(offset, stamp, value), expected)
        assert real.digest() == wanted.digest()
        same_pauses(real, wanted)
    same_state(real, wanted)
    same_counts(real, wanted)
