"""`evict`, `drain` and `forget-group`: take leases from dead workers, have live ones hand over, drop dead groups."""

from __future__ import annotations

from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import (
    NOT_DONE,
    carry_out,
    client_option,
    dry_run_option,
    group_argument,
    within_option,
    yes_option,
)
from kafka_marshal.cli.connection import admin_of, id_argument, note, viewing
from kafka_marshal.cli.failures import NO, CommandError
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
from kafka_marshal.cli.output import fields_of, say, say_warning
from kafka_marshal.observe.checkpoints import repeated_text
from kafka_marshal.observe.rows import DAY_MS, GroupRow, place_text, span_text
from kafka_marshal.observe.text import clients_of, count, span
from rationalizer.limits import MAX_PARTITION

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin
    from kafka_marshal.types import LeaseInfo

#: The most workers named in one message.
_LISTED = 8


@command()
@click.argument("group", callback=id_argument, required=False, shell_complete=complete_group)
@click.argument("topic_name", metavar="[TOPIC", callback=id_argument, required=False, shell_complete=complete_topic)
@click.argument("partition", metavar="PARTITION]", type=click.IntRange(0, MAX_PARTITION), required=False)
@client_option("Release all that this worker holds.", "--member", metavar="CLIENT")
@yes_option()
@click.option("--force", is_flag=True, help="Also take the lease from a holder that beat within its interval.")
@dry_run_option("Say who would be evicted; change nothing.")
@click.pass_obj
def evict(
    options: Options,
    group: str | None,
    topic_name: str | None,
    partition: int | None,
    member: str | None,
    force: bool,
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

        def do() -> list[LeaseInfo]:
            if member is not None:
                _say_if_last(admin, name, member)
            return evict()

        if went_back and held and not (options.yes or options.dry_run):
            note(options, went_back)
        return carry_out(
            options,
            lambda: evict(dry_run=True),
            question=f"Evict {_all(held) if held else f'{member}, which owns nothing,'} of group {name}?",
            do=do,
            if_interrupted="The releases may have been written: see kafka-marshal who.",
            say=lambda were, done: _say_evicted(were, f"{member}", name, went_back, done),
            json=lambda were, done: _evicted_json(were, member, done),
        )


def _say_evicted(held: list[LeaseInfo], member: str, group: str, went_back: str, done: bool) -> None:
    for was in held:
        where = f"{was.topic} partition {place_text(was.partition, was.lo, was.hi)}"
        released = f"released: {was.client_id} no longer holds {where} (epoch {was.epoch})."
        say(released if done else f"{_described(was)} would be evicted from {where}.")
    if not held:
        left, owned = ("has left", "owned") if done else ("would leave", "owns")
        say(f"{member} {left} group {group}; it {owned} nothing.")
    elif went_back:
        say(went_back)


def _evicted_json(held: list[LeaseInfo], member: str | None, done: bool) -> dict[str, object]:
    found = [
        {**fields_of(lease, "group=group_id topic partition holder=client_id epoch"), "evicted": done} for lease in held
    ]
    return found[0] if member is None else {"member": member, "leases": found}


def _held(options: Options, admin: Admin, group: str | None, client: str) -> tuple[str, list[LeaseInfo]]:
    """A group, and what a worker holds in it; a member of a coordinated group may own nothing."""
    held = [lease for lease in admin.held_by(client) if group is None or lease.group_id == group]
    groups = sorted({lease.group_id for lease in held})
    if not held:
        known = read_names(options, options.timeout)
        if group is not None:
            refuse_name(known, group, None, NOT_DONE)
        joined = [name for name in known if group in (None, name) and client in clients_of(known, name)]
        if len(joined) == 1:
            return joined[0], []
        where = "" if group is None else f" in group {group!r}"
        raise CommandError(f"{client!r} holds nothing{where}. {_who_does(clients_of(known, group))}{NOT_DONE}", NO)
    if len(groups) > 1:
        raise CommandError(f"{client!r} works in several groups ({', '.join(groups)}): name one. {NOT_DONE}", NO)
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
        refuse_unknown(options, group, topic, NOT_DONE)
        raise CommandError(f"nobody of group {group!r} ever held {topic!r} partition {partition}. {NOT_DONE}", NO)
    if found[0].client_id is None:
        raise CommandError(f"{topic!r} partition {partition} is free already. {NOT_DONE}", NO)
    return found[0]


def _described(lease: LeaseInfo) -> str:
    return f"{lease.client_id} (epoch {lease.epoch}, next offset: {0 if lease.stable is None else lease.stable + 1})"


def _all(held: list[LeaseInfo]) -> str:
    first = held[0]
    if len(held) == 1:
        return f"{_described(first)} from {first.topic} partition {first.partition}"
    return f"{first.client_id} from {count(len(held), 'partition')}"


@command()
@click.argument("names", metavar="[GROUP] CLIENT", nargs=-1, required=True, shell_complete=complete_client)
@click.option("--wait", callback=span_option, default=None, metavar="SPAN", help="Wait until it holds nothing.")
@dry_run_option("Say what it would be asked to hand over; change nothing.")
@click.pass_obj
def drain(options: Options, names: tuple[str, ...], wait: int | None) -> int:
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

        def say_asked(held: list[LeaseInfo], done: bool) -> None:
            what = f"{count(len(held), 'partition')} of group {name}"
            if not done:
                say(f"{client} would be asked to hand over {what}.")
            elif wait is None:
                say(f"asked: {client} is to hand over {what}.")
            else:
                say(f"done: {client} has handed over {what}.")

        def asked_json(held: list[LeaseInfo], done: bool) -> dict[str, object]:
            waited = done and wait is not None
            return {"group": name, "member": client, "held": len(held), "waited": waited, "last": is_last}

        return carry_out(
            options,
            lambda: held,
            do=lambda: admin.drain(name, client, timeout=None if wait is None else wait / 1000),
            say=say_asked,
            json=asked_json,
        )


@command()
@group_argument
@yes_option()
@within_option("How long its members may take to release, or to be silent enough")
@click.option("--force", is_flag=True, help="Also where members are alive: they begin from their start= again.")
@dry_run_option("Say what would be forgotten; change nothing.")
@click.pass_obj
def forget_group(options: Options, group: str, within: int, force: bool) -> int:
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
            refuse_unknown(options, group, effect=NOT_DONE)
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
            "open": {**dict.fromkeys(("parked", "waiting", "acquired"), 0), **still_open},
            **_lost_json(lost),
        }

        def say_forgotten(leases: int, done: bool) -> None:
            if done:
                say(f"forgotten: {count(leases, 'partition' if is_coordinated else 'lease')} of group {group}.")
            else:
                say(f"{about} would be forgotten; {held} of them are held. {_lost_text(lost, still_open)}")

        if not (options.dry_run or options.json):
            say(_lost_text(lost, still_open))
        return carry_out(
            options,
            lambda: len(leases),
            question=f"Forget {about} of group {group}? {held} of them are held.",
            do=lambda: admin.forget(group, within / 1000, force=force),
            if_interrupted=(
                f"The group may still be paused for {span(max(60_000, 2 * within))} at most; to end that: "
                f"kafka-marshal release-group {quote(group)} --resume --client-id {quote(admin.client_id)}"
                f"{options.reach()}"
            ),
            say=say_forgotten,
            json=lambda leases, done: {**found, "leases": leases, "forgotten": done},
        )


def _looked_at(options: Options, group: str) -> GroupRow:
    """The group as in `status`: its positions, and when a member was last seen."""
    with viewing(options) as view:
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
        **fields_of(lost, "lag silence_ms=silent_ms"),
        "checkpoints": [] if lost.checkpoints is None else [checkpoint for checkpoint, _ in lost.checkpoints.kept],
        "positions": [
            {**fields_of(row, "topic partition"), "keys": [row.lo, row.hi], **fields_of(row, "next lag")}
            for row in lost.leases
            if row.next is not None
        ],
    }
