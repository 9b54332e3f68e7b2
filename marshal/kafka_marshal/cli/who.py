"""`who`: who owned a partition, since when, until when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.archive import archive_option, checked_dump, is_alone, open_history
from kafka_marshal.cli.connection import catch_up, connected, id_argument, viewing
from kafka_marshal.cli.failures import DONE, NO, WRONG_USE, CommandError
from kafka_marshal.cli.options import (
    Options,
    complete_group,
    complete_topic,
    read_names,
    refuse_name,
    time_option,
    topic_partition,
)
from kafka_marshal.cli.output import (
    Cell,
    Column,
    Field,
    Rows,
    fields_of,
    is_terminal,
    print_json,
    print_table,
    progress,
    say,
)
from kafka_marshal.errors import MarshalError
from kafka_marshal.observe.rows import STATES
from kafka_marshal.observe.text import clock_text, local_ms, names_of, no_group, time_text
from rationalizer import route_group, route_lease
from rationalizer.limits import MAX_PARTITION

if TYPE_CHECKING:
    from kafka_marshal.observe.ownership import Ownership, PieceOwnership
    from kafka_marshal.observe.view import View
    from kafka_marshal.types import LeaseInfo
    from rationalizer import Progress
    from rationalizer.history import LeaseKey, Span

#: The broker's clock may be ahead of this machine's by this much.
_AHEAD_MS = 60_000


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.argument("topic_name", metavar="TOPIC", callback=id_argument, required=False, shell_complete=complete_topic)
@click.argument("partition", type=click.IntRange(0, MAX_PARTITION), required=False)
@click.option("--key", help="Instead, of TOPIC:PARTITION: who has this key (0x… for bytes), and what of it is open.")
@click.option(
    "--group", "of_group", callback=id_argument, help="With --key: only in this group.", shell_complete=complete_group
)
@click.option(
    "--at", callback=time_option, metavar="TIME", help="03:14, yesterday 03:14, 2026-11-21T04:50:12Z, or 10m (ago)."
)
@click.option(
    "--offset", type=click.IntRange(min=0), metavar="CP_OFFSET", help="At this offset of its part of the log."
)
@click.option("--from-dump", metavar="FILE", help="Read a dump instead of Kafka (- is standard input).")
@archive_option
@click.pass_obj
def who(
    options: Options,
    group: str,
    topic_name: str | None,
    partition: int | None,
    key: str | None,
    of_group: str | None,
    at: int | None,
    offset: int | None,
    from_dump: str | None,
    place: str | None,
) -> int:
    r"""Who owned PARTITION of TOPIC for GROUP, since when and until when, with the epochs.

    Without --at and --offset: the present owner, and the whole history. The answer comes from the records alone, so a
    dump gives it a year later. TIME is log time, the broker's; without an offset it is local. In a coordinated group
    the epoch is the generation since which the owner has it. A shared partition has one line per range of keys, or per
    member that shares it by batches.

    who TOPIC:PARTITION --key KEY: who has this key now, in each group; how far it is done, and which of its messages
    are open.

    \b
    Exit status: 0, also if it was free; 1 the log knows no such lease; 2 wrong use; 3 no Kafka.
    """
    if key is not None:
        named = f"{topic_name}:{partition}" if topic_name is not None and partition is not None else group
        return who_has(options, named, key, of_group if named == group else group)
    if topic_name is None or partition is None:
        raise click.UsageError("name a group, a topic and a partition; or TOPIC:PARTITION with --key.")
    from kafka_marshal.cli.log import stopped

    if at is not None and offset is not None:
        raise click.UsageError("--at and --offset both say when: give one of them.")
    if place is not None and from_dump is not None:
        raise click.UsageError("--archive is read beside Kafka, and --from-dump instead of it: give one of them.")
    if at is not None and at > local_ms() + _AHEAD_MS:
        raise click.BadParameter(f"{time_text(at)} is in the future.", param_hint="'--at'")
    lease = (group, topic_name, partition)
    with ExitStack() as stack:
        if from_dump is not None:
            owned = _from_dump(stack, from_dump, lease, at, offset)
        else:
            owned = _from_kafka(stack, options, lease, at, offset, place)
    if options.json:
        print_json(_json(owned))
    elif owned.spans:
        is_now = at is None and offset is None and from_dump is None and not is_alone(options, place)
        _print_answer(owned, _why_lost(options, owned) if is_now else "")
    if not owned.spans:
        is_offline = from_dump is not None or is_alone(options, place)
        known = names_of([owned.world]) if is_offline else read_names(options, options.timeout)
        refuse_name(known, group, topic_name)
        raise CommandError(
            f"the log knows no lease of {group!r} on {topic_name!r} partition {partition}: nobody ever got it (or the "
            f"group was forgotten before the log began). Its place would be partition {owned.cp} of the log "
            f"({route_group(group, owned.partitions)} of a coordinated group).",
            NO,
        )
    return stopped([owned.world]) or DONE


def _both(key: LeaseKey, partitions: int, at: int | None, offset: int | None) -> tuple[Ownership, PieceOwnership]:
    """For both kinds of groups: which it is, is not known yet."""
    from kafka_marshal.observe.ownership import Ownership, PieceOwnership
    from rationalizer.groups.history import Assignments

    claimed = Ownership(key, route_lease(key[1], key[2], partitions), partitions, at, offset)
    pieces = PieceOwnership(key, route_group(key[0], partitions), partitions, at, offset)
    pieces.assignments = Assignments(key[0])
    return claimed, pieces


def _chosen(claimed: Ownership, pieces: PieceOwnership) -> Ownership:
    """The one for the kind of the group, or its last known kind (G1)."""
    for owned in (claimed, pieces):
        owned.end()
    is_coordinated = pieces.world.group(pieces.key[0]) is not None or not claimed.spans
    return pieces if pieces.spans and is_coordinated else claimed


def _from_kafka(
    stack: ExitStack, options: Options, key: LeaseKey, at: int | None, offset: int | None, place: str | None
) -> Ownership:
    source = open_history(stack, options, place, at_ms=at, at_offset=offset)
    both = _both(key, source.partitions, at, offset)
    progressed = stack.enter_context(progress("replaying the log"))
    for owned in both:
        owned.begin(source.first_worlds([owned.cp])[owned.cp])
    for cp, entries in source.read({owned.cp: owned.world.next_offset for owned in both}, progress=progressed):
        source.check_marker(cp, entries[0])
        for owned in both:
            if owned.cp == cp:
                owned.take(entries)
    found = _chosen(*both)
    _check_offset(offset, source.ends[found.cp], found.cp)
    return found


def _from_dump(stack: ExitStack, path: str, key: LeaseKey, at: int | None, offset: int | None) -> Ownership:

    header, records = stack.enter_context(checked_dump(path))
    both = _both(key, header.partitions, at, offset)
    for record in records:
        for owned in both:
            if record.partition == owned.cp:
                owned.take([(record.offset, record.timestamp_ms, record.value)])
    found = _chosen(*both)
    _check_offset(offset, found.world.next_offset, found.cp)
    return found


def _check_offset(offset: int | None, end: int, cp: int) -> None:
    if offset is not None and offset >= end:
        raise CommandError(
            f"--offset {offset}: partition {cp} of the log, where this is kept, ends before {end}.", WRONG_USE
        )


# -- the answer ----------------------------------------------------------------------------------------------


def _moment(at: int | None) -> str | Cell:
    return "" if at is None else Cell(time_text(at), short=clock_text(at, int(local_ms())))


def _spans() -> Rows[Span]:
    from kafka_marshal.observe.ownership import ended_text, keys_text

    return Rows(
        Field("owner", lambda x: x.client_id if x.held else "nobody", Column("owner", fold=True, least=8)),
        Field("instance", lambda x: x.instance_id if x.held else "", Column("instance", pipes_only=True)),
        Field("epoch", lambda x: x.epoch if x.held else "", Column("epoch", right=True, from_width=60)),
        Field("since", column=Column("since"), cell=lambda x: _moment(x.since)),
        Field("until", column=Column("until"), cell=lambda x: _moment(x.until)),
        Field(
            "offsets",
            lambda x: f"{x.since_offset}-{'' if x.until_offset is None else x.until_offset}",
            Column("log offsets", from_width=100),
        ),
        Field("ended", ended_text, Column("ended", fold=True, least=16)),
        Field("keys", lambda x: keys_text(x).removeprefix("keys ") or "all", Column("keys")),
    )


def _why_lost(options: Options, owned: Ownership) -> str:
    """Why its position is not in the topic that there is now; "": it is, or this can't be asked (*blocking*)."""
    from kafka_marshal.client.view import holdings
    from kafka_marshal.engine.work.topic_mark import why_lost

    group, *key = owned.key
    with suppress(MarshalError), connected(options) as cluster:
        info = cluster.topic_info([owned.key[1]], options.timeout).get(owned.key[1])
        for held, progress in holdings(owned.world, group):
            if info is not None and [held.topic, held.partition] == key:
                return why_lost(info, progress, None)
    return ""


def _print_answer(owned: Ownership, lost: str) -> None:

    group, topic, partition = owned.key
    say(f"{group}, {topic} partition {partition} (kept in partition {owned.cp} of the log)")
    say(_answer(owned))
    if lost:
        say(f"But {lost}: nothing is delivered until it is set (kafka-marshal check).")
    if owned.at is not None and owned.at > owned.world.log_time:
        say(f"Its part of the log ends at {time_text(owned.world.log_time)}; what came after is not in it.")
    if owned.at is None and owned.at_offset is None:
        say()
        rows = _spans()
        columns = rows.columns if owned.in_parts else rows.columns[:-1]  # without the keys
        print_table(columns, [rows.cells(each)[: len(columns)] for each in owned.spans])


def _answer(owned: Ownership) -> str:
    """The answer in a sentence."""
    from kafka_marshal.observe.ownership import PieceOwnership, moment_text, next_text
    from rationalizer.history import End
    from rationalizer.holes import NO_KEY

    when = "Now" if owned.at is None else f"At {time_text(owned.at)}"
    if owned.at_offset is not None:
        when = f"After offset {owned.at_offset}"
    if not owned.moments:
        first = owned.spans[0]
        if first.until is not None and owned.spans[-1].ended is End.FORGOTTEN and owned.at is None:
            return f"{when}: nobody; the group was forgotten at {time_text(owned.spans[-1].until or 0)}."
        held = next((span for span in owned.spans if span.held), None)
        if held is None:
            return f"{when}: nobody, as far back as the log goes."
        return f"{when}: nobody. It was first claimed at {time_text(held.since)}, by {held.client_id}."
    is_piece = isinstance(owned, PieceOwnership)
    lines = []
    for moment, after in zip(owned.moments, [*owned.moments[1:], None], strict=True):
        lines.append(moment_text(when, moment, is_piece))
        if after is None or moment.span.lo != NO_KEY:  # sharers by batches have one position
            lines.append(next_text(moment))
    return "\n".join(lines)


def _json(owned: Ownership) -> dict[str, object]:
    from kafka_marshal.observe.ownership import PieceOwnership, span_json

    group, topic, partition = owned.key
    answers = [
        {
            **span_json(each.span),
            "last_beat": each.last_beat,
            "state": STATES[each.freshness],
            **fields_of(each, "next open parked"),
        }
        for each in owned.moments
    ]
    return {
        "group": group,
        "kind": "coordinated" if isinstance(owned, PieceOwnership) else "claimed",
        "topic": topic,
        "topic_partition": partition,
        "partition": owned.cp,
        "log_time": owned.world.log_time,
        "next_offset": owned.world.next_offset,
        "answer": answers[0] if answers else None,
        "answers": answers,
        "history": [span_json(each) for each in owned.spans],
    }


# -- who has a key -------------------------------------------------------------------------------------------

_OF_KEY = Rows[dict[str, Any]](
    Field("group", lambda x: x["group"], Column("group", fold=True, least=6)),
    Field(
        "owners",
        lambda x: ", ".join(owner["client"] for owner in x["owners"]) or "nobody",
        Column("owner", fold=True, least=6),
    ),
    Field("epoch", lambda x: x["owners"][0]["epoch"] if len(x["owners"]) == 1 else None, Column("epoch", right=True)),
    Field(
        "done_through", lambda x: x["done_through"] if x["done_through"] >= 0 else None, Column("done to", right=True)
    ),
    Field("open", lambda x: _open_text(x["open"]), Column("open", fold=True, least=12)),
)


def who_has(options: Options, place: str, key: str, group: str | None) -> int:
    """Print it. place: TOPIC:PARTITION."""
    from rationalizer import key_hash

    topic, partition = topic_partition(place)
    hashed = key_hash(_bytes(key), 0)
    with viewing(options) as view:
        catch_up(view)
        found = list(_found(view, topic, partition, hashed, group))
        known = view.names()
    if not found:
        if group is not None and group not in known:
            raise CommandError(no_group(group, known), NO)
        raise CommandError(f"no group has had {topic} partition {partition}. kafka-marshal groups lists all.", NO)
    if options.json:
        print_json({"topic": topic, "topic_partition": partition, "key": key, "key_hash": hashed, "groups": found})
        return DONE
    if is_terminal():
        say(f"key {key!r} of {topic} partition {partition}: hash {hashed}")
    print_table(_OF_KEY.columns, [_OF_KEY.cells(each) for each in found])
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
        yield _key_json(info, done, hashed)


def _key_json(info: LeaseInfo, done: Progress, hashed: int) -> dict[str, Any]:
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


def _open_text(found: list[dict[str, Any]]) -> str:
    listed = ", ".join(f"{one['offset']} {one['reason'] or one['state']}" for one in found[:10])
    return listed + (", …" if len(found) > 10 else "") or "-"
