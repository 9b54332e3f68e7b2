"""`evict` and `forget-group`: ending what is dead (protocol: C8, C16)."""

from __future__ import annotations

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.names import complete_group, complete_topic, refuse_unknown
from kafka_marshal.cli.options import Options, span_option
from kafka_marshal.cli.output import ask, print_json, say
from kafka_marshal.cli.steering import admin_of, id_argument, tell
from kafka_marshal.cli.text import count, span
from rationalizer.limits import MAX_PARTITION

__all__ = ["evict", "forget_group"]

_NOT_DONE = "Nothing was changed."


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.argument("topic_name", metavar="TOPIC", callback=id_argument, shell_complete=complete_topic)
@click.argument("partition", type=click.IntRange(0, MAX_PARTITION))
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also take the lease from a holder that beat within its interval.")
@click.option("--dry-run", is_flag=True, help="Say who would be evicted; change nothing.")
@click.pass_obj
def evict(options: Options, group: str, topic_name: str, partition: int, yes: bool, force: bool, dry_run: bool) -> int:
    r"""Release a lease in a dead holder's name, so that nobody has to wait until it goes stale.

    The next holder goes on behind what was handed in; what the dead one had in hand is repeated. A holder that beat
    within its interval is left alone, unless --force takes the lease from it: it is fenced then, and stops.

    \b
    Exit status: 0 released; 1 nobody holds the lease, or its holder may be alive; 2 nobody to ask; 3 no Kafka.
    """
    with admin_of(options) as admin:
        leases = {(lease.topic, lease.partition): lease for lease in admin.progress(group)}
        lease = leases.get((topic_name, partition))
        if lease is None:
            refuse_unknown(options, group, topic_name, _NOT_DONE)
            raise CommandError(
                f"nobody of group {group!r} ever held {topic_name!r} partition {partition}. {_NOT_DONE}", NO
            )
        if lease.client_id is None:
            raise CommandError(f"{topic_name!r} partition {partition} is free already. {_NOT_DONE}", NO)
        who = f"{lease.client_id} (epoch {lease.epoch}, next offset: {0 if lease.stable is None else lease.stable + 1})"
        if dry_run:
            if options.json:
                print_json(_evicted(group, topic_name, partition, lease.client_id, lease.epoch, done=False))
            else:
                say(f"{who} would be evicted from {topic_name} partition {partition}.")
            return DONE
        if not ask(f"Evict {who} from {topic_name} partition {partition} of group {group}?", yes):
            tell(options, _NOT_DONE)
            return NO
        options.if_interrupted = "The release may have been written: kafka-marshal who tells."
        was = admin.evict(group, topic_name, partition, force=force)
    if options.json:
        print_json(_evicted(group, topic_name, partition, was.client_id, was.epoch, done=True))
    else:
        say(f"released: {was.client_id} no longer holds {topic_name} partition {partition} (epoch {was.epoch}).")
    return DONE


def _evicted(
    group: str, topic: str, partition: int, client: str | None, epoch: int, *, done: bool
) -> dict[str, object]:
    return {
        "group": group,
        "topic": topic,
        "partition": partition,
        "holder": client,
        "epoch": epoch,
        "evicted": done,
    }


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--within",
    callback=span_option,
    default="30s",
    metavar="SPAN",
    help="How long its members may take to let go, or to be silent enough (30s).",
)
@click.option("--force", is_flag=True, help="Also where members are alive: they begin from their start= again.")
@click.option("--dry-run", is_flag=True, help="Say what would be forgotten; change nothing.")
@click.pass_obj
def forget_group(options: Options, group: str, yes: bool, within: int, force: bool, dry_run: bool) -> int:
    r"""Drop all that the log knows of a group that is gone: leases and positions.

    The group is paused, and forgotten when nobody of it is at work any more; otherwise it goes on as before. A member
    that comes later begins from its start=, as if the group were new. Epochs go on growing all the same.

    \b
    Exit status: 0 forgotten; 1 it is alive, or unknown; 2 nobody to ask; 3 Kafka was not reachable.
    """
    with admin_of(options) as admin:
        leases = admin.progress(group)
        if not leases and not admin.pauses(group):
            refuse_unknown(options, group, effect=_NOT_DONE)
        topics = ", ".join(sorted({lease.topic for lease in leases}))
        held = sum(lease.client_id is not None for lease in leases)
        about = f"{count(len(leases), 'lease')} with their positions" + (f" (of {topics})" if topics else "")
        if dry_run:
            if options.json:
                print_json({"group": group, "leases": len(leases), "held": held, "forgotten": False})
            else:
                say(f"{about} would be forgotten; {held} of them are held.")
            return DONE
        if not ask(f"Forget {about} of group {group}? {held} of them are held.", yes):
            tell(options, _NOT_DONE)
            return NO
        options.if_interrupted = (
            f"The group may still be paused for {span(max(60_000, 2 * within))} at most; to end that: kafka-marshal "
            f"release-group {group} --resume --client-id {admin.client_id}{options.reach()}"
        )
        forgotten = admin.forget(group, within / 1000, force=force)
    if options.json:
        print_json({"group": group, "leases": forgotten, "held": held, "forgotten": True})
    else:
        say(f"forgotten: {count(forgotten, 'lease')} of group {group}.")
    return DONE
