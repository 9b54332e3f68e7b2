"""The marker: the first record of every CP, which says how many CPs there are, for ever (L2)."""

from __future__ import annotations

from rationalizer.wire.codec import RejectedValueError, decode
from rationalizer.wire.records import Record, Tick

_PREFIX = "partitions="


def marker(instance_id: str, partitions: int) -> Tick:
    """The record that `init` appends to each CP before anything else."""
    return Tick(instance_id, "kafka-marshal-init", f"{_PREFIX}{partitions}")


def said_by(record: Record) -> str | None:
    """The count that a marker says, as it is written there, number or not; None where the record is no marker."""
    if not isinstance(record, Tick) or not record.group_id.startswith(_PREFIX):
        return None
    return record.group_id.removeprefix(_PREFIX)


def said_in(value: bytes | None) -> str | None:
    """What the first record of a CP says about the count, as it is written there; None where it is no marker."""
    try:
        return said_by(decode(value))
    except RejectedValueError:
        return None


def count_of(value: bytes | None) -> int | None:
    """How many CPs the first record of one says there are; None where it is no marker, or no number."""
    said = said_in(value)
    return int(said) if said and said.isascii() and said.isdigit() else None
