"""`upgrade`: the coordination topic, raised to the newest level of the protocol (E4)."""

from __future__ import annotations

import click

from kafka_marshal.admin.topic import below_level
from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import connected
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import ask, print_json, progress, say, say_warning
from kafka_marshal.cli.steering import admin_of, tell
from kafka_marshal.instance import knows_level
from kafka_marshal.observe.rows import GroupRow, HeardRow, MemberRow
from kafka_marshal.observe.text import count
from kafka_marshal.observe.view import View
from rationalizer.levels import LEVELS, SUPPORTED_LEVEL

__all__ = ["upgrade"]

_NOT_DONE = "Nothing was changed."

_NEEDS = " ".join(f"{level.adds.capitalize()} need level {level.number}." for level in LEVELS[1:])
_HELP = f"""Raise the coordination topic to the newest level of the protocol, for good. {_NEEDS}

There is no way back: a member, or a tool, of a release that does not know the level stops at it and does nothing
more on this topic. So members seen within 10 minutes whose release does not know it, or is not known, are named
first; with --yes alone nothing is raised while there are any. Replace them, then upgrade. Nothing else changes:
claimed groups go on.

\b
Exit status: 0 raised, or it was already; 1 members would stop (--force); 2 nobody to ask; 3 no Kafka.
"""

#: Members named one by one.
_LISTED = 20


@command(help=_HELP)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also where members would stop that are of an older release.")
@click.option("--dry-run", is_flag=True, help="Say what would be raised, and who would stop; change nothing.")
@click.pass_obj
def upgrade(options: Options, yes: bool, force: bool, dry_run: bool) -> int:
    """Raise the coordination topic; `--help` says more."""
    with connected(options) as cluster:
        view = View(cluster, options.topic, options.timeout)
        try:
            with progress("reading the log") as progressed:
                view.catch_up(progressed)
            low, notes = below_level(view.worlds), view.notes_on_upgrades()
            old = _old_members(view.groups()) if low else []
        finally:
            view.replica.close()
    if notes:
        raise CommandError(f"{notes[0]} {_NOT_DONE}", NO)
    for each in old[:_LISTED]:
        say_warning(f"{_described(each)} would stop for good.")
    if len(old) > _LISTED:
        say_warning(f"and {len(old) - _LISTED:,} more.")
    if low and not dry_run:
        if yes and old and not force:
            raise CommandError(
                f"{count(len(old), 'member')} would stop at level {SUPPORTED_LEVEL}. {_NOT_DONE} Replace them by this "
                "release first, or say --force.",
                NO,
            )
        question = (
            f"Raise {count(len(low), 'partition')} of {options.topic} to level {SUPPORTED_LEVEL}? There is no way back."
        )
        if not ask(question, yes):
            tell(options, _NOT_DONE)
            return NO
        options.if_interrupted = "It may be raised in a part of the log; run kafka-marshal upgrade again."
        with admin_of(options) as admin:
            low = admin.upgrade()
    _tell(options, low, old, dry_run)
    return DONE


def _old_members(groups: list[GroupRow]) -> list[MemberRow | HeardRow]:
    """Whoever may be alive and is not known to be of a release that knows the level."""
    alive: list[MemberRow | HeardRow] = []
    for group in groups:
        alive += [member for member in group.members if member.state != "gone"]
        alive += group.idle
    return [each for each in alive if not knows_level(each.instance, SUPPORTED_LEVEL)]


def _described(each: MemberRow | HeardRow) -> str:
    runs_at = each.runs_at
    where = "of an unknown release" if runs_at is None else f"at {runs_at}, release {runs_at.release}"
    return f"{each.client} of group {each.group} ({where})"


def _tell(options: Options, low: list[int], old: list[MemberRow | HeardRow], dry_run: bool) -> None:
    if options.json:
        print_json(
            {
                "topic": options.topic,
                "level": SUPPORTED_LEVEL,
                "partitions": low,
                "raised": bool(low) and not dry_run,
                "old_members": [
                    {
                        "group": each.group,
                        "client": each.client,
                        "instance": each.instance,
                        "release": None if each.runs_at is None else each.runs_at.release,
                    }
                    for each in old
                ],
            }
        )
    elif not low:
        say(f"{options.topic!r} is at level {SUPPORTED_LEVEL} already.")
    elif dry_run:
        say(f"partition(s) {', '.join(map(str, low))} of {options.topic!r} would be raised to level {SUPPORTED_LEVEL}.")
    else:
        say(f"raised: partition(s) {', '.join(map(str, low))} of {options.topic!r} to level {SUPPORTED_LEVEL}.")
