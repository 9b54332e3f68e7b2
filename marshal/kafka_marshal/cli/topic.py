"""`init` and `upgrade`: the coordination topic and its log of snapshots, created, checked, raised to a level."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command, paint
from kafka_marshal.cli.connection import admin_of, catch_up, connected, note, view_of
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.keep import FOREVER, keep_option, kept_text
from kafka_marshal.cli.output import ask, print_json, say, say_warning
from kafka_marshal.instance import knows_level
from kafka_marshal.node.kept import keep_settings
from kafka_marshal.observe.text import count
from kafka_marshal.topic_names import DEFAULT_PARTITIONS, snapshots_topic
from rationalizer.levels import LEVELS, SUPPORTED_LEVEL

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.node.coordination_topic import Problem
    from kafka_marshal.observe.log import Log
    from kafka_marshal.observe.rows import GroupRow, MemberRow, WorkerRow
    from kafka_marshal.ports import Cluster, TopicConfig


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with the topic."""

    what: str
    why: str
    #: What to do; a command, if one does it.
    mend: str
    #: Workers refuse the topic with it; else it is a note.
    fatal: bool


@dataclass(slots=True)
class Report:
    """Changes made to the topic, and its faults."""

    topic: str
    existed: bool = True
    partitions: int | None = None
    replication_factor: int | None = None
    done: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def fit(self) -> bool:
        """Whether workers can use the topic."""
        return not any(fault.fatal for fault in self.faults)


@command()
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    help=f"How many the topic gets, for ever ({DEFAULT_PARTITIONS}). A topic that is there must have that many.",
)
@click.option(
    "--keep",
    callback=keep_option,
    metavar="SPAN|forever",
    help="How long members keep the log (30d); see kafka-marshal topic. A new one is kept for ever.",
)
@click.option("--check", is_flag=True, help="Only look; change nothing.")
@click.pass_obj
def init(options: Options, partitions: int | None, keep: int | None, check: bool) -> int:
    r"""Create the coordination topic with its log of snapshots, or check the existing one.

    A new topic is at the newest level of the protocol; one of an older release stays at its level (see upgrade).
    For each wrong setting it says what it does to leases, and which Kafka command corrects it. It may be run again at
    any time.

    \b
    Exit status: 0 the topic is fit for use; 1 it is not, or is missing (--check); 3 Kafka was not reachable.
    """
    options.if_interrupted = "Run kafka-marshal init again: it continues where it stopped."
    if check:
        options.if_interrupted = "Nothing was changed."
    if check and keep is not None:
        raise click.UsageError("--check changes nothing, and --keep does: leave one of them out.")
    with connected(options) as cluster:
        report = _look_after(cluster, options, partitions, check)
        if keep is not None and report.fit:
            wanted = None if keep == FOREVER else keep
            cluster.alter_topic(options.topic, keep_settings(wanted), options.timeout)
            report.done.append(kept_text(keep))
    if options.json:
        print_json(_json(report))
    else:
        _print_report(report)
    return DONE if report.fit else NO


def _look_after(cluster: Cluster, options: Options, partitions: int | None, check: bool) -> Report:
    from kafka_marshal.admin.topic import create
    from kafka_marshal.node.coordination_topic import ADDRESSES_S, check_one_cluster, find_problems

    topic = options.topic
    report = Report(topic)
    check_one_cluster(cluster)
    config = cluster.topic_config(topic, options.timeout)
    check_one_cluster(cluster, ADDRESSES_S)
    if config is None:
        report.existed = False
        if check:
            mend = f"kafka-marshal init{options.reach()}"
            report.faults.append(Fault(f"the topic {topic!r} does not exist", "no worker can start", mend, fatal=True))
            return report
        config, report.done = create(cluster, topic, partitions or DEFAULT_PARTITIONS, options.timeout)
        report.existed = not report.done
    report.partitions = config.info.partitions
    report.replication_factor = config.replication_factor
    report.faults += [_fault(problem, topic, options) for problem in find_problems(config)]
    if partitions is not None and partitions != config.info.partitions:
        report.faults.append(
            Fault(
                f"it has {config.info.partitions} partitions, not {partitions}",
                "the count is fixed when the topic is made: another one would split what members see",
                f"leave out --partitions, or make a new topic: kafka-marshal init{options.reach(topic=False)} "
                f"--topic NEW-NAME --partitions {partitions}, and move all members to it",
                fatal=True,
            )
        )
    _look_at_log(cluster, options, check, report)
    _look_at_snapshots(cluster, options, check, report, config)
    if report.fit:
        _look_at_levels(cluster, options, report)
    report.faults.sort(key=lambda fault: not fault.fatal)
    return report


def _look_at_log(cluster: Cluster, options: Options, check: bool, report: Report) -> None:
    """Check the first record of each CP, and whether the log is complete (L2)."""
    from kafka_marshal.node.coordination_topic import append_first_records
    from kafka_marshal.observe.log import Log

    log = Log(cluster, options.topic, options.timeout)
    cut = _not_bridged(cluster, options, log)
    if cut:
        report.faults.append(
            Fault(
                f"the log's beginning is gone in partition(s) {_list(cut)}, and no two snapshots bridge the gap",
                "who holds what can't be known from the rest",
                f"make a new topic: kafka-marshal init{options.reach(topic=False)} --topic NEW-NAME, "
                "and move all members to it",
                fatal=True,
            )
        )
    empty = [cp for cp, end in log.ends.items() if end == 0]
    if empty and not check:
        append_first_records(cluster, options.topic, log.ends, options.timeout)
        report.done.append(f"appended to partition(s) {_list(empty)} the record that fixes their number")
    elif empty:
        report.faults.append(
            Fault(
                f"partition(s) {_list(empty)} lack the first record, which fixes their number at {log.partitions}",
                "partitions added later by mistake would go unnoticed, and members no longer see each other",
                f"kafka-marshal init{options.reach()}",
                fatal=True,
            )
        )
    counts = _marker_counts(log, [cp for cp, end in log.ends.items() if log.starts[cp] == 0 and end > 0])
    for other in sorted({c for c in counts.values() if c is not None and c != log.partitions}):
        where = _list([cp for cp, c in counts.items() if c == other])
        report.faults.append(
            Fault(
                f"it has {log.partitions} partitions, and its first record in partition(s) {where} says {other}",
                "partitions were added since: members that count differently do not see each other's claims",
                f"make a new topic: kafka-marshal init{options.reach(topic=False)} --topic NEW-NAME "
                f"--partitions {log.partitions}, and move all members to it",
                fatal=True,
            )
        )
    unmarked = [cp for cp, marked in counts.items() if marked is None]
    if unmarked:
        report.faults.append(
            Fault(
                f"partition(s) {_list(unmarked)} begin with another record than the one that fixes their number",
                "that partitions were added would go unnoticed there",
                "nothing to do now; make the next topic with kafka-marshal init before anybody writes to it",
                fatal=False,
            )
        )


def _look_at_levels(cluster: Cluster, options: Options, report: Report) -> None:
    """Check whether coordinated groups can be used."""
    from kafka_marshal.admin.topic import low_levels
    from kafka_marshal.node.replica import Begin, Replica

    replica = Replica(cluster, options.topic, options.timeout, Begin.SNAPSHOT)
    try:
        replica.catch_up(options.timeout)
        for what, why in low_levels(replica):
            report.faults.append(Fault(what, why, f"kafka-marshal upgrade{options.reach()}", fatal=False))
    finally:
        replica.close()


def _not_bridged(cluster: Cluster, options: Options, log: Log) -> list[int]:
    """CPs whose log lacks its beginning, without a snapshot that a replica could start from."""
    from kafka_marshal.snapshots.reader import SnapshotReader
    from kafka_marshal.snapshots.start import CpStart

    cut = [cp for cp, start in log.starts.items() if start > 0]
    reader = SnapshotReader.find(cluster, snapshots_topic(options.topic), options.timeout) if cut else None
    if reader is None or len(reader.partitions) != log.partitions:
        return cut
    reader.read_newest(2)
    starts = {cp: CpStart(cp, log.partitions, log.starts[cp], log.ends[cp]) for cp in cut}
    return [cp for cp, start in starts.items() if start.from_snapshot(reader.partitions[cp].sorted()) is None]


def _look_at_snapshots(
    cluster: Cluster, options: Options, check: bool, report: Report, coordination: TopicConfig
) -> None:
    """Create the log of snapshots beside the topic (S2) if it is missing. Workers can do without it."""
    from kafka_marshal.node.coordination_topic import create_snapshots_topic, find_snapshot_problems

    name = snapshots_topic(options.topic)
    partitions = coordination.info.partitions
    config = cluster.topic_config(name, options.timeout)
    if config is None and check:
        report.faults.append(
            Fault(
                f"there is no log of snapshots, {name!r}",
                "members start from the beginning of the log, which takes longer as it grows",
                f"kafka-marshal init{options.reach()}",
                fatal=False,
            )
        )
        return
    if config is None:
        create_snapshots_topic(cluster, options.topic, partitions, coordination.replication_factor, options.timeout)
        report.done.append(f"created {name!r}, the log of snapshots: {partitions} partitions")
        return
    for problem in find_snapshot_problems(config, partitions):
        fault = _fault(problem, name, options)
        if problem.setting == "partitions":
            mend = f"delete the topic {name!r}, then kafka-marshal init{options.reach()}: members write new snapshots"
            fault = replace(fault, mend=mend)
        report.faults.append(replace(fault, what=f"{name!r}: {fault.what}"))


def _marker_counts(log: Log, partitions: list[int]) -> dict[int, int | None]:
    """CP → the number of CPs in its first record."""
    from rationalizer.marker import count_of

    counts: dict[int, int | None] = dict.fromkeys(partitions)
    for cp, entries in log.read(dict.fromkeys(partitions, 0), ends=dict.fromkeys(partitions, 1)):
        counts[cp] = count_of(entries[0][2])
    return counts


def _fault(problem: Problem, topic: str, options: Options) -> Fault:
    """A wrong setting, with the Kafka command that corrects it."""
    value = problem.wanted.rpartition(" ")[2]
    words = ["kafka-configs.sh", "--bootstrap-server", options.bootstrap or "HOST:PORT"]
    words += ["--command-config", options.config_file] if options.config_file else []
    words += ["--alter", "--entity-type", "topics", "--entity-name", topic]
    words += ["--add-config", f"{problem.setting}={value}"]
    found = f"{problem.setting} is {problem.found}, and must be {problem.wanted}"
    return Fault(found, problem.why, shlex.join(words), problem.fatal)


def _list(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions))


def _json(report: Report) -> dict[str, object]:
    return {
        "topic": report.topic,
        "fit": report.fit,
        "existed": report.existed,
        "partitions": report.partitions,
        "replication_factor": report.replication_factor,
        "done": report.done,
        "problems": [
            {"what": fault.what, "why": fault.why, "mend": fault.mend, "fatal": fault.fatal} for fault in report.faults
        ],
    }


def _print_report(report: Report) -> None:
    for line in report.done:
        say(line)
    for fault in report.faults:
        mark = "wrong" if fault.fatal else "note"
        mark = paint(mark, fg="red" if fault.fatal else "yellow", bold=True)
        click.echo(f"{mark}: ", nl=False)  # click removes colours outside of terminals
        say(f"{fault.what}: {fault.why}.")
        say(f"  {fault.mend}")
    if not report.fit:
        say(f"{report.topic!r} is not fit for use: workers refuse it.")
    elif not report.done:
        say(
            f"{report.topic!r} is fit for use ({report.partitions} partitions, {report.replication_factor} replica(s))."
        )


_NOT_DONE = "Nothing was changed."

_NEEDS = " ".join(f"{level.adds.capitalize()} need level {level.number}." for level in LEVELS[1:])
_HELP = f"""Raise the coordination topic to the newest level of the protocol, for good. {_NEEDS}

There is no way back: a member, or a tool, of a release that does not know the level stops at it and does nothing
more on this topic. So members seen within 10 minutes whose release does not know it, or is not known, are named
first; with --yes alone nothing is raised while there are any. Replace them, then upgrade. Nothing else changes:
claimed groups continue.

\b
Exit status: 0 raised, or it was already; 1 members would stop (--force); 2 wrong use, or no --yes; 3 no Kafka.
"""

#: The most members that are named.
_LISTED = 20


@command(help=_HELP)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also where members would stop that are of an older release.")
@click.option("--dry-run", is_flag=True, help="Say what would be raised, and who would stop; change nothing.")
@click.pass_obj
def upgrade(options: Options, yes: bool, force: bool, dry_run: bool) -> int:
    """Raise the coordination topic; `--help` says more."""
    from kafka_marshal.admin.topic import below_level

    with connected(options) as cluster, view_of(cluster, options) as view:
        catch_up(view)
        low, notes = below_level(view.worlds), view.notes_on_upgrades()
        old = _old_members(view.groups()) if low else []
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
            note(options, _NOT_DONE)
            return NO
        options.if_interrupted = "It may be raised in a part of the log; run kafka-marshal upgrade again."
        with admin_of(options) as admin:
            low = admin.upgrade()
    _print_levels(options, low, old, dry_run)
    return DONE


def _old_members(groups: list[GroupRow]) -> list[MemberRow | WorkerRow]:
    """Workers that may be alive and are not known to be of a release with this level."""
    alive: list[MemberRow | WorkerRow] = []
    for group in groups:
        alive += [member for member in group.members if member.state != "gone"]
        alive += group.idle
    return [each for each in alive if not knows_level(each.instance, SUPPORTED_LEVEL)]


def _described(each: MemberRow | WorkerRow) -> str:
    runs_at = each.runs_at
    where = "of an unknown release" if runs_at is None else f"at {runs_at}, release {runs_at.release}"
    return f"{each.client} of group {each.group} ({where})"


def _print_levels(options: Options, low: list[int], old: list[MemberRow | WorkerRow], dry_run: bool) -> None:
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
