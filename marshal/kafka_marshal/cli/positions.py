"""Positions from --to and --partition, or from a file."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.failures import WRONG_USE, CommandError
from kafka_marshal.cli.options import Options, read_text, read_time

if TYPE_CHECKING:
    from kafka_marshal.admin import Target

_PLACE = re.compile(r"(?P<topic>[^:]+):(?P<partition>[0-9]{1,10}):(?P<offset>[0-9]{1,19})")
_TOPIC_PARTITION = re.compile(r"(?P<topic>[^:]+):(?P<partition>[0-9]{1,10})")

_PARTITION = re.compile(r"(?P<topic>[^:=]+)(?::(?P<partition>[0-9]+))?(?:=(?P<position>.+))?")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def place_option(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, int, int]:
    """The callback of a message: its topic, partition and offset."""
    found = _PLACE.fullmatch(value)
    if found is None:
        raise click.BadParameter(
            f"{value!r} is not of the form TOPIC:PARTITION:OFFSET, such as flights:3:1200", context, parameter
        )
    return found["topic"], int(found["partition"]), int(found["offset"])


def places_option(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, int, int], ...]:
    """The callback of several messages."""
    return tuple(place_option(context, parameter, value) for value in values)


def topic_partitions(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, int], ...]:
    """The callback of several partitions."""
    return tuple(map(topic_partition, values))


def topic_partition(value: str) -> tuple[str, int]:
    """A partition. Raises click.BadParameter."""
    match = _TOPIC_PARTITION.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not of the form TOPIC:PARTITION, such as flights:3")
    return match["topic"], int(match["partition"])


@dataclass(frozen=True, slots=True)
class PartitionTarget:
    """One --partition. partition None: all of the topic; position None: that of --to."""

    topic: str
    partition: int | None
    position: Target | None


#: The broker's clock may be ahead of this machine's by this much.
_AHEAD_MS = 60_000


def _position(options: Options, option: str, text: str) -> Target:
    """earliest, latest, readable, an offset, or a time. Raises ValueError."""
    if text in ("earliest", "latest", "readable"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    now_ms = int(time.time() * 1000)
    moment = read_time(options, option, text, moves=True)
    if moment > now_ms + _AHEAD_MS:
        raise ValueError(f"{text!r} is in the future: no message is as young as that, and all would be skipped")
    return _EPOCH + timedelta(milliseconds=moment)


def to_option(context: click.Context, parameter: click.Parameter, value: str | None) -> Target | None:
    """The callback of --to."""
    if value is None:
        return None
    try:
        return _position(context.ensure_object(Options), parameter.opts[0], value)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"{error} (or earliest, latest, readable, an offset)", context, parameter) from None


def targets_option(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> list[PartitionTarget]:
    """The callback of --partition."""
    partitions = []
    for value in values:
        found = _PARTITION.fullmatch(value)
        if found is None:
            raise click.BadParameter(
                f"{value!r} is not of the form TOPIC:PARTITION=POSITION, such as flights:3=1200", context, parameter
            )
        number, position = found["partition"], found["position"]
        target = None if position is None else to_option(context, parameter, position)
        partitions.append(PartitionTarget(found["topic"], None if number is None else int(number), target))
    return partitions


def targets_in_file(options: Options, path: str, group: str) -> list[PartitionTarget]:
    """The positions in a file: CSV as of kafka-consumer-groups, or JSON. Raises CommandError, which names the line.

    CSV: topic,partition,offset or group,topic,partition,offset (lines of other groups are ignored). JSON: a list of
    objects with topic, partition and offset (or "after"), by itself or as "partitions", "positions" or "moves" of an
    object. An offset may be any value of --to.
    """
    text = read_text(path, "--from-file")
    found: dict[tuple[str, int], PartitionTarget] = {}
    rows = _json_rows(path, text) if text.lstrip()[:1] in ("[", "{") else _csv_rows(path, text)
    for place, of_group, topic, number, position in rows:
        if of_group not in (None, group):
            continue
        try:
            partition = int(str(number).strip())
            each = PartitionTarget(
                str(topic).strip(), partition, _position(options, "--from-file", str(position).strip())
            )
            if partition < 0 or not each.topic or topic is None:
                raise ValueError("a topic and a partition from 0 on are wanted")
        except (ValueError, OverflowError) as error:
            raise _wrong(path, place, str(error)) from None
        before = found.setdefault((each.topic, partition), each)
        if before != each:
            raise _wrong(path, place, f"{each.topic} [{partition}] stands there twice, with different positions")
    if not found:
        raise _wrong(path, "", f"it has no positions of group {group!r}")
    return list(found.values())


def _wrong(path: str, place: str, why: str) -> CommandError:
    return CommandError(f"--from-file {path}{place and ', ' + place}: {why}. Nothing was changed.", WRONG_USE)


_Row = tuple[str, str | None, Any, Any, Any]


def _csv_rows(path: str, text: str) -> Iterator[_Row]:
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or (number == 1 and cells[-1].lower() == "offset"):
            continue
        if len(cells) not in (3, 4):
            raise _wrong(path, f"line {number}", "topic,partition,offset or group,topic,partition,offset are wanted")
        topic, partition, offset = cells[-3:]
        yield f"line {number}", cells[0] if len(cells) == 4 else None, topic, partition, offset


def _json_rows(path: str, text: str) -> Iterator[_Row]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "", f"it is no JSON ({error})") from None
    of_all = found.get("group") if isinstance(found, dict) else None
    if isinstance(found, dict):
        found = next((found[name] for name in ("partitions", "positions", "moves") if name in found), None)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _wrong(path, "", 'a list of objects with "topic", "partition" and "offset" is wanted')
    for number, each in enumerate(found, start=1):
        position = each.get("offset", each.get("after"))
        if position is None:
            raise _wrong(path, f"object {number}", "it has no offset")
        yield f"object {number}", each.get("group", of_all), each.get("topic"), each.get("partition"), position
