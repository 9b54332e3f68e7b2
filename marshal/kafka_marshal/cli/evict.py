"""`evict`, `drain` and `forget-group`: take leases from dead workers, have live ones hand over, drop dead groups."""

from __future__ import annotations

from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import admin_of, connected, id_argument, note, view_of
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.options import (
    Options,
    complete_client,
    complete_group,
    complete_topic,
    read_names,
    refuse_name,
    refuse_unknown,
    span_option,
)
from kafka_marshal.cli.output import ask, print_json, say, say_warning
from kafka_marshal.observe.checkpoints import repeated_text
from kafka_marshal.observe.rows import DAY_MS, GroupRow, place_text, span_text
from kafka_marshal.observe.text import clients_of, count, span
from rationalizer.limits import MAX_PARTITION

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin
    from kafka_marshal.types import LeaseInfo

_NOT_DONE = "Nothing was changed."

#: The most workers named in one message.
_LISTED = 8


@command()
@click.argument("group", callback=id_argument, required=False, shell_complete=complete_group)
@click.argument("topic_name", metavar="[TOPIC", callback=id_argument, required=False, shell_complete=complete_topic)
@click.argument("partition", metavar="PARTITION]", type=click.IntRange(0, MAX_PARTITION), required=False)
@click.option(
    "--member",
    metavar="CLIENT",
    callback=id_argument,
    help="Release all that this worker holds.",
    shell_complete=complete_client,
)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also take the lease from a holder that beat within its interval.")
@click.option("--dry-run", is_flag=True, help="Say who would be evicted; change nothing.")
@click.pass_obj
def evict(
    options: Options,
    group: str | None,
    topic_name: str | None,
    partition: int | None,
    member: str | None,
    yes: bool,
    force: bool,
    dry_run: bool,
) -> int:
    r"""Release a lease in a dead holder's name, so that other workers need not wait until it goes stale.

    The next holder continues at the committed position; the dead holder's messages in flight are repeated. A holder
    that beat within its interval keeps the lease, unless --force takes it: the holder is then fenced, stops, and claims
    nothing until its handler has returned, and not this partition for three of its heartbeat intervals.

    Of a partition that several share, --member releases the shares of one: others get its batches at once.

    A member of a coordinated group has no single leases: --member removes it from the group, and other members get its
    partitions. One that beat within half its session stays without --force; it joins again after its handler has
    returned and three of its sessions have passed. If the group takes checkpoints, its pieces go back to their last
    cuts, with the states of then; in a hold group all members go back. (drain repeats nothing.)

    \b
    Exit status: 0 released; 1 the lease is free, or its holder may be alive; 2 wrong use, or no --yes; 3 no Kafka.
    """
    if (member is None) == (topic_name is None) or (topic_name is not None and partition is None):
        raise click.UsageError("name a group, a topic and a partition, or a worker: evict [GROUP] --member CLIENT")
    went_back = ""
    with admin_of(options) as admin:
        if member is not None:
            name, held = _held(options, admin, group, member)
            if (checkpoints := _looked_at(options, name).checkpoints) is not None:
                went_back = f"{name} takes checkpoints: {repeated_text(checkpoints)}"
        else:
            name, held = group or "", [_lease(options, admin, group or "", topic_name, partition)]
            if held[0].kind == "coordinated":
                admin.evict(name, held[0].topic, held[0].partition, dry_run=True)  # refuses, before anybody is asked

        def evict(*, dry_run: bool = False) -> list[LeaseInfo]:
            if member is not None:
                return admin.evict(name, member, force=force, dry_run=dry_run)
            return [admin.evict(name, held[0].topic, held[0].partition, force=force, dry_run=dry_run)]

        if dry_run:
            return _report(options, evict(dry_run=True), member, name, went_back, done=False)
        if went_back and held and not yes:
            note(options, went_back)
        if not ask(f"Evict {_all(held) if held else f'{member}, which owns nothing,'} of group {name}?", yes):
            note(options, _NOT_DONE)
            return NO
        options.if_interrupted = "The releases may have been written: see kafka-marshal who."
        if member is not None:
            _say_if_last(admin, name, member)
        return _report(options, evict(), member, name, went_back, done=True)


def _report(
    options: Options, held: list[LeaseInfo], member: str | None, group: str, went_back: str, *, done: bool
) -> int:
    if options.json:
        _print(held, member, done=done)
        return DONE
    for was in held:
        where = f"{was.topic} partition {place_text(was.partition, was.lo, was.hi)}"
        released = f"released: {was.client_id} no longer holds {where} (epoch {was.epoch})."
        say(released if done else f"{_described(was)} would be evicted from {where}.")
    if not held:
        left, owned = ("has left", "owned") if done else ("would leave", "owns")
        say(f"{member} {left} group {group}; it {owned} nothing.")
    elif went_back:
        say(went_back)
    return DONE


def _held(options: Options, admin: Admin, group: str | None, client: str) -> tuple[str, list[LeaseInfo]]:
    """A group, and what a worker holds in it; a member of a coordinated group may own nothing."""
    held = [lease for lease in admin.held_by(client) if group is None or lease.group_id == group]
    groups = sorted({lease.group_id for lease in held})
    if not held:
        known = read_names(options, options.timeout)
        if group is not None:
            refuse_name(known, group, None, _NOT_DONE)
        joined = [name for name in known if group in (None, name) and client in clients_of(known, name)]
        if len(joined) == 1:
            return joined[0], []
        where = "" if group is None else f" in group {group!r}"
        raise CommandError(f"{client!r} holds nothing{where}. {_who_does(clients_of(known, group))}{_NOT_DONE}", NO)
    if len(groups) > 1:
        raise CommandError(f"{client!r} works in several groups ({', '.join(groups)}): name one. {_NOT_DONE}", NO)
    return groups[0], held


def _who_does(clients: set[str]) -> str:
    """The workers that hold partitions; the named one may be alive and hold nothing."""
    listed = ", ".join(map(repr, sorted(clients)[:_LISTED])) + (", …" if len(clients) > _LISTED else "")
    return f"Who does: {listed}. " if clients else ""


def _say_if_last(admin: Admin, group: str, client: str) -> bool:
    """Warn if no other worker of the group is at work; returns whether it did."""
    rest = [lease for lease in admin.progress(group) if lease.client_id not in (None, client)]
    is_last = all(lease.freshness == "stale" for lease in rest)
    if is_last:
        say_warning(
            f"nobody else holds anything of group {group}: what {client} gives up stands still until another worker "
            "claims it, or this one is started again."
        )
    return is_last


def _lease(options: Options, admin: Admin, group: str, topic: str | None, partition: int | None) -> LeaseInfo:
    found = [lease for lease in admin.progress(group) if (lease.topic, lease.partition) == (topic, partition)]
    if not found:
        refuse_unknown(options, group, topic, _NOT_DONE)
        raise CommandError(f"nobody of group {group!r} ever held {topic!r} partition {partition}. {_NOT_DONE}", NO)
    if found[0].client_id is None:
        raise CommandError(f"{topic!r} partition {partition} is free already. {_NOT_DONE}", NO)
    return found[0]


def _described(lease: LeaseInfo) -> str:
    return f"{lease.client_id} (epoch {lease.epoch}, next offset: {0 if lease.stable is None else lease.stable + 1})"


def _all(held: list[LeaseInfo]) -> str:
    first = held[0]
    if len(held) == 1:
        return f"{_described(first)} from {first.topic} partition {first.partition}"
    return f"{first.client_id} from {count(len(held), 'partition')}"


def _print(held: list[LeaseInfo], member: str | None, *, done: bool) -> None:
    found = [
        {
            "group": lease.group_id,
            "topic": lease.topic,
            "partition": lease.partition,
            "holder": lease.client_id,
            "epoch": lease.epoch,
            "evicted": done,
        }
        for lease in held
    ]
    print_json(found[0] if member is None else {"member": member, "leases": found})


@command()
@click.argument("names", metavar="[GROUP] CLIENT", nargs=-1, required=True, shell_complete=complete_client)
@click.option("--wait", callback=span_option, default=None, metavar="SPAN", help="Wait until it holds nothing.")
@click.option("--dry-run", is_flag=True, help="Say what it would be asked to hand over; change nothing.")
@click.pass_obj
def drain(options: Options, names: tuple[str, ...], wait: int | None, dry_run: bool) -> int:
    r"""Ask a live worker to hand over: it finishes its messages in flight, releases all it holds, and claims no more.
    A member of a coordinated group finishes, commits and leaves.

    Nothing is lost or repeated. kafka-marshal status --members shows which workers were asked; a warning says if it is
    the last one of its group. It can't be undone: the worker claims again after a restart of its process. Workers of a
    release before this one ignore it; evict --member takes their leases.

    \b
    Exit status: 0 asked (with --wait: it holds nothing now); 1 it held nothing, or still holds something after --wait;
    2 wrong use; 3 no Kafka.
    """
    if len(names) > 2:
        raise click.UsageError("name a worker, and its group where it works in several: drain [GROUP] CLIENT")
    client = names[-1]
    with admin_of(options) as admin:
        name, held = _held(options, admin, names[0] if len(names) == 2 else None, client)
        options.if_interrupted = "It may have been asked; nothing was taken from it."
        is_last = _say_if_last(admin, name, client)
        if dry_run:
            if options.json:
                print_json({"group": name, "member": client, "held": len(held), "waited": False, "last": is_last})
            else:
                say(f"{client} would be asked to hand over {count(len(held), 'partition')} of group {name}.")
            return DONE
        held = admin.drain(name, client, timeout=None if wait is None else wait / 1000)
    if options.json:
        print_json(
            {
                "group": name,
                "member": client,
                "held": len(held),
                "waited": wait is not None,
                "last": is_last,
            }
        )
    elif wait is None:
        say(f"asked: {client} is to hand over {count(len(held), 'partition')} of group {name}.")
    else:
        say(f"done: {client} has handed over {count(len(held), 'partition')} of group {name}.")
    return DONE


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--within",
    callback=span_option,
    default="30s",
    metavar="SPAN",
    help="How long its members may take to release, or to be silent enough (30s).",
)
@click.option("--force", is_flag=True, help="Also where members are alive: they begin from their start= again.")
@click.option("--dry-run", is_flag=True, help="Say what would be forgotten; change nothing.")
@click.pass_obj
def forget_group(options: Options, group: str, yes: bool, within: int, force: bool, dry_run: bool) -> int:
    r"""Drop all that the log knows of a group that has ended: leases, pieces, settings and positions.

    It first shows what is lost: positions, lag, and when a member was seen. It refuses while a member beats, and then
    pauses no worker; it waits for one that has just died (--within). Later members begin from their start=, as in a new
    group. Epochs keep growing.

    \b
    Exit status: 0 forgotten; 1 it is alive, or unknown; 2 wrong use, or no --yes; 3 Kafka was not reachable.
    """
    with admin_of(options) as admin:
        leases = admin.progress(group)
        if not leases and not admin.pauses(group):
            refuse_unknown(options, group, effect=_NOT_DONE)
        topics = ", ".join(sorted({lease.topic for lease in leases}))
        held = sum(lease.client_id is not None for lease in leases)
        is_coordinated = any(lease.kind == "coordinated" for lease in leases)
        amount = count(len(leases), "piece" if is_coordinated else "lease")
        about = f"{amount} with their positions" + (f" (of {topics})" if topics else "")
        lost = _looked_at(options, group)
        still_open = Counter[str](each.state for each in (admin.open_messages(group) if leases else ()))
        found = {
            "group": group,
            "leases": len(leases),
            "held": held,
            "open": {state: still_open[state] for state in ("parked", "waiting", "acquired")},
            **_lost_json(lost),
        }
        if dry_run:
            if options.json:
                print_json({**found, "forgotten": False})
            else:
                say(f"{about} would be forgotten; {held} of them are held. {_lost_text(lost, still_open)}")
            return DONE
        if not options.json:
            say(_lost_text(lost, still_open))
        if not ask(f"Forget {about} of group {group}? {held} of them are held.", yes):
            note(options, _NOT_DONE)
            return NO
        options.if_interrupted = (
            f"The group may still be paused for {span(max(60_000, 2 * within))} at most; to end that: kafka-marshal "
            f"release-group {quote(group)} --resume --client-id {quote(admin.client_id)}{options.reach()}"
        )
        forgotten = admin.forget(group, within / 1000, force=force)
    if options.json:
        print_json({**found, "leases": forgotten, "forgotten": True})
    else:
        say(f"forgotten: {count(forgotten, 'partition' if is_coordinated else 'lease')} of group {group}.")
    return DONE


def _looked_at(options: Options, group: str) -> GroupRow:
    """The group as in `status`: its positions, and when a member was last seen."""
    with connected(options) as cluster, view_of(cluster, options) as view:
        view.catch_up(lambda done, of_all: None)
        view.learn_time()
        view.look_at_data([group])
        return next(iter(view.groups(group)), GroupRow(group, []))


def _lost_text(lost: GroupRow, still_open: Counter[str]) -> str:
    """What is lost with the group, in words."""
    rows = [row for row in lost.leases if row.next is not None]
    listed = [f"{row.topic} {row.place} at {row.next}" for row in rows[:_LISTED]]
    positions = ", ".join(listed) + (f", and {len(rows) - _LISTED:,} more" if len(rows) > _LISTED else "")
    behind = "lag is not known" if lost.lag is None else f"{count(lost.lag, 'message')} not done"
    seen = "" if not rows else f"; last seen {span_text(lost.silent_ms, lost.silent_at_least)} ago"
    kept = () if lost.checkpoints is None else lost.checkpoints.kept
    states = f"; {count(len(kept), 'checkpoint')}, pinned ones too (saved states stay where they are)" if kept else ""
    open_ones = ", ".join(f"{amount:,} {state}" for state, amount in sorted(still_open.items()))
    messages = (
        f"; open messages ({open_ones}): no worker of a later group gets those below its start" if open_ones else ""
    )
    text = f"What is lost: next offsets {positions or '(none)'}{states}{messages}; {behind}{seen}."
    if lost.known_lag and lost.silent_ms <= DAY_MS and not lost.living:
        text += " To continue it, start its workers instead: they continue at these positions."
    return text


def _lost_json(lost: GroupRow) -> dict[str, object]:
    return {
        "lag": lost.lag,
        "silence_ms": lost.silent_ms,
        "checkpoints": [] if lost.checkpoints is None else [checkpoint for checkpoint, _ in lost.checkpoints.kept],
        "positions": [
            {"topic": row.topic, "partition": row.partition, "keys": [row.lo, row.hi], "next": row.next, "lag": row.lag}
            for row in lost.leases
            if row.next is not None
        ],
    }
