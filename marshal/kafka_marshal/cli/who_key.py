"""`who --key`: who has a key of a partition now, how far it is done, and which of its messages are open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.connection import connected, view_of
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.output import Column, is_terminal, print_json, print_table, progress, say
from kafka_marshal.cli.positions import topic_partition
from kafka_marshal.observe.names import no_group
from kafka_marshal.observe.text import number

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.view import View
    from kafka_marshal.types import LeaseInfo
    from rationalizer import Progress

_COLUMNS = (
    Column("group", fold=True, least=6),
    Column("owner", fold=True, least=6),
    Column("epoch", right=True),
    Column("done to", right=True),
    Column("open", fold=True, least=12),
)


def who_has(options: Options, place: str, key: str, group: str | None) -> int:
    """Print it. place: TOPIC:PARTITION."""
    from rationalizer import key_hash

    topic, partition = topic_partition(place)
    hashed = key_hash(_bytes(key), 0)
    with connected(options) as cluster:
        view = view_of(cluster, options)
        try:
            with progress("reading the log") as progressed:
                view.catch_up(progressed)
            found = list(_found(view, topic, partition, hashed, group))
            known = view.names()
        finally:
            view.replica.close()
    if not found:
        if group is not None and group not in known:
            raise CommandError(no_group(group, known), NO)
        raise CommandError(f"no group has had {topic} partition {partition}. kafka-marshal groups lists all.", NO)
    if options.json:
        print_json({"topic": topic, "topic_partition": partition, "key": key, "key_hash": hashed, "groups": found})
        return DONE
    if is_terminal():
        say(f"key {key!r} of {topic} partition {partition}: hash {hashed}")
    print_table(_COLUMNS, [_cells(each) for each in found])
    return DONE


def _bytes(key: str) -> bytes:
    if key.startswith("0x"):
        try:
            return bytes.fromhex(key[2:])
        except ValueError:
            raise click.BadParameter(f"{key!r} is no hexadecimal number", param_hint="'--key'") from None
    return key.encode("utf-8", "surrogateescape")


def _found(view: View, topic: str, partition: int, hashed: int, group: str | None) -> Iterator[dict[str, Any]]:
    from kafka_marshal.client.view import holdings

    found = [
        (info, done)
        for world in view.worlds.values()
        for info, done in holdings(world, group)
        if (info.topic, info.partition) == (topic, partition) and info.lo <= hashed <= info.hi
    ]
    for info, done in sorted(found, key=lambda each: each[0].group_id):
        yield _json(info, done, hashed)


def _json(info: LeaseInfo, done: Progress, hashed: int) -> dict[str, Any]:
    sharers = [each for each in info.sharers if each.keys is None or each.keys[0] <= hashed <= each.keys[1]]
    owners = [(each.client_id, each.epoch) for each in sharers]
    if not info.sharers and info.client_id is not None:
        owners = [(info.client_id, info.epoch)]
    return {
        "group": info.group_id,
        "kind": info.kind,
        "owners": [{"client": client, "epoch": epoch} for client, epoch in owners],
        "done_through": done.floor([(hashed, hashed)]),
        "open": [
            {
                "offset": each.first,
                "state": "parked" if each.is_parked else "acquired" if each.holder is not None else "waiting",
                "delivery_count": each.delivery_count,
                "reason": each.parked,
            }
            for each in info.open
            if each.key_hash == hashed
        ],
    }


def _cells(each: dict[str, Any]) -> list[str]:
    owners, still_open = each["owners"], each["open"]
    listed = ", ".join(f"{one['offset']} {one['reason'] or one['state']}" for one in still_open[:10])
    return [
        each["group"],
        ", ".join(owner["client"] for owner in owners) or "nobody",
        number(owners[0]["epoch"]) if len(owners) == 1 else "-",
        number(each["done_through"] if each["done_through"] >= 0 else None),
        listed + (", …" if len(still_open) > 10 else "") or "-",
    ]
