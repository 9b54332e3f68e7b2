"""Records about shares and open messages in words: what they say, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_marshal.observe.text import span
from rationalizer import ClaimingShare, Lease, Outcome, SettleOffsets, SettlingMessages, codes
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import Done, Opened, Parked

#: The most entries that are listed.
_LISTED = 5


def claim_share(record: ClaimingShare) -> str:
    """A ClaimingShare."""
    at = f"{record.topic}/{record.partition}"
    beats = f"(beats every {span(record.heartbeat_interval_ms)} or sooner)"
    if record.lo is None or record.hi is None:
        return f"claims a share of {at}, by batches {beats}"
    keys = "all keys" if (record.lo, record.hi) == (0, MAX_KEY_HASH) else f"key hashes {record.lo} to {record.hi}"
    return f"claims a share of {at}, {keys} {beats}"


def settling(record: SettlingMessages) -> str:
    """A SettlingMessages."""
    parts = _settled(record.done, record.open, record.parked, record.epoch is None)
    if record.take is not None:
        count, _, at_most_once = record.take
        parts.append(f"takes up to {count} messages{', at most once' if at_most_once else ''}")
    at = f"{record.topic}/{record.partition}"
    return f"{'as an operator, ' if record.epoch is None else ''}of {at}: {'; '.join(parts) or 'beats'}"


def settle_offsets(record: SettleOffsets) -> str:
    """A SettleOffsets."""
    parts = _settled(record.done, record.open, record.parked, not record.member_id)
    at = f"{record.topic}/{record.partition}"
    return f"{'' if record.member_id else 'as an operator, '}of {at}: {'; '.join(parts) or 'beats'}"


def reason_of_settling(outcome: Outcome, record: SettlingMessages | SettleOffsets) -> str:
    """What came of the entries, and of the take."""
    offsets = [*map(_span, record.done), *map(_span, record.open), *(str(entry[0]) for entry in record.parked)]
    refused = [
        f"{at} {code}" for at, code in zip(offsets, outcome.entries or (), strict=False) if code not in codes.ACCEPTED
    ]
    parts = [_some(refused)] if refused else []
    if outcome.taken is not None:
        parts.append(f"took {_span(outcome.taken)}")
    elif outcome.accepted and isinstance(record, SettlingMessages) and record.take is not None:
        parts.append("nothing was free to take")
    return "; ".join(parts)


def holders_of(lease: Lease) -> str:
    """Whose shares a lease has."""
    names = list(dict.fromkeys(share.client_id for share in lease.shares or ()))
    return f"{_some(names)} {'share' if len(names) > 1 else 'shares'} it" if names else "it is free"


def _settled(done: Done, opened: Opened, parked: Parked, by_operator: bool) -> list[str]:
    parts = [f"{'discards' if by_operator else 'has done'} {_some([*map(_span, done)])}"] if done else []
    for attempts in dict.fromkeys(entry[3] for entry in opened):
        spans = _some([_span(entry) for entry in opened if entry[3] == attempts])
        tried = "again" if attempts == 0 else f"after {attempts} deliver{'y' if attempts == 1 else 'ies'}"
        parts.append(f"redrives {spans}" if by_operator and attempts == 0 else f"opens {spans} {tried}")
    by_reason: dict[str, list[str]] = {}
    for offset, _, _, reason in parked:
        by_reason.setdefault(reason, []).append(str(offset))
    return [*parts, *(f"parks {_some(offsets)} ({reason})" for reason, offsets in by_reason.items())]


def _span(entry: Sequence[object]) -> str:
    return str(entry[0]) if entry[0] == entry[1] else f"{entry[0]}-{entry[1]}"


def _some(items: list[str]) -> str:
    more = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")
