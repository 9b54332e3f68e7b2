"""`init`, `upgrade`, `topic`, `prune`: the coordination topic, created, checked, raised to a level, kept, pruned."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command, paint, say_error
from kafka_marshal.cli.change import NOT_DONE, carry_out, dry_run_option, yes_option
from kafka_marshal.cli.connection import admin_of, catch_up, connected, viewing
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.options import parsed, span_option
from kafka_marshal.cli.output import (
    Column,
    Field,
    Rows,
    fields_of,
    print_json,
    print_table,
    progress,
    say,
    say_warning,
)
from kafka_marshal.instance import knows_level
from kafka_marshal.node.kept import check_keep, keep_settings
from kafka_marshal.observe.text import count, parse_span, span
from kafka_marshal.topic_names import DEFAULT_PARTITIONS, snapshots_topic
from rationalizer.levels import LEVELS, SUPPORTED_LEVEL

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.node.coordination_topic import WrongSetting
    from kafka_marshal.observe.log import Log
    from kafka_marshal.observe.rows import GroupRow, MemberRow, WorkerRow
    from kafka_marshal.ports import Cluster, TopicConfig
    from kafka_marshal.snapshots.prune import PrunedPartition, PrunePlan


_PRUNED: Rows[PrunedPartition] = Rows(
    Field("partition", column=Column("partition", right=True)),
    Field("log_start", column=Column("log from", right=True)),
    Field("log_end", column=Column("log to", right=True)),
    Field("checked", column=Column("checked", right=True), cell=lambda each: str(len(each.checked))),
    Field(
        "remove_below",
        "cut",
        Column("remove below", right=True),
        lambda each: "" if each.cut is None else str(each.cut),
    ),
    Field("records", "records_removed", Column("records", right=True)),
    Field("snapshots", "snapshots_removed", Column("snapshots", right=True)),
    Field("note", lambda each: each.why or None, Column("note", fold=True), lambda each: each.why),
)

#: Written so, since 0 could mean either.
FOREVER = -1


#: Of --keep: milliseconds, or FOREVER.
_keep_option = parsed(
    lambda _, __, text: FOREVER if text == "forever" else check_keep(parse_span(text)), ", or forever"
)


def _kept_text(keep: int) -> str:
    """What was set, for people."""
    if keep == FOREVER:
        return "the log is kept for ever"
    return f"members remove log that is older than {span(keep)}, behind checked snapshots"


@dataclass(frozen=True, slots=True)
class TopicFault:
    """Something wrong with the topic."""

    what: str
    why: str
    #: What to do; a command, if one does it.
    mend: str
    #: Workers refuse the topic with it; else it is a note.
    fatal: bool


@dataclass(slots=True)
class InitReport:
    """Changes made to the topic, and its faults."""

    topic: str
    existed: bool = True
    partitions: int | None = None
    replication_factor: int | None = None
    done: list[str] = field(default_factory=list)
    faults: list[TopicFault] = field(default_factory=list)

    def add(self, what: str, why: str, mend: str, *, fatal: bool) -> None:
        """Add a fault."""
        self.faults.append(TopicFault(what, why, mend, fatal))

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
    callback=_keep_option,
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
            report.done.append(_kept_text(keep))
    if options.json:
        print_json(_json(report))
    else:
        _print_report(report)
    return DONE if report.fit else NO


def _look_after(cluster: Cluster, options: Options, partitions: int | None, check: bool) -> InitReport:
    from kafka_marshal.admin.topic import create
    from kafka_marshal.node.coordination_topic import ADDRESSES_S, check_one_cluster, find_problems

    topic = options.topic
    report = InitReport(topic)
    check_one_cluster(cluster)
    config = cluster.topic_config(topic, options.timeout)
    check_one_cluster(cluster, ADDRESSES_S)
    if config is None:
        report.existed = False
        if check:
            mend = f"kafka-marshal init{options.reach()}"
            report.add(f"the topic {topic!r} does not exist", "no worker can start", mend, fatal=True)
            return report
        config, report.done = create(cluster, topic, partitions or DEFAULT_PARTITIONS, options.timeout)
        report.existed = not report.done
    report.partitions = config.info.partitions
    report.replication_factor = config.replication_factor
    report.faults += [_fault(problem, topic, options) for problem in find_problems(config)]
    if partitions is not None and partitions != config.info.partitions:
        report.add(
            f"it has {config.info.partitions} partitions, not {partitions}",
            "the count is fixed when the topic is made: another one would split what members see",
            f"leave out --partitions, or make a new topic: kafka-marshal init{options.reach(topic=False)} "
            f"--topic NEW-NAME --partitions {partitions}, and move all members to it",
            fatal=True,
        )
    _look_at_log(cluster, options, check, report)
    _look_at_snapshots(cluster, options, check, report, config)
    if report.fit:
        _look_at_levels(cluster, options, report)
    report.faults.sort(key=lambda fault: not fault.fatal)
    return report


def _look_at_log(cluster: Cluster, options: Options, check: bool, report: InitReport) -> None:
    """Check the first record of each CP, and whether the log is complete (L2)."""
    from kafka_marshal.node.coordination_topic import append_first_records
    from kafka_marshal.observe.log import Log

    log = Log(cluster, options.topic, options.timeout)
    cut = _not_bridged(cluster, options, log)
    if cut:
        report.add(
            f"the log's beginning is gone in partition(s) {_list(cut)}, and no two snapshots bridge the gap",
            "who holds what can't be known from the rest",
            f"make a new topic: kafka-marshal init{options.reach(topic=False)} --topic NEW-NAME, "
            "and move all members to it",
            fatal=True,
        )
    empty = [cp for cp, end in log.ends.items() if end == 0]
    if empty and not check:
        append_first_records(cluster, options.topic, log.ends, options.timeout)
        report.done.append(f"appended to partition(s) {_list(empty)} the record that fixes their number")
    elif empty:
        report.add(
            f"partition(s) {_list(empty)} lack the first record, which fixes their number at {log.partitions}",
            "partitions added later by mistake would go unnoticed, and members no longer see each other",
            f"kafka-marshal init{options.reach()}",
            fatal=True,
        )
    counts = _marker_counts(log, [cp for cp, end in log.ends.items() if log.starts[cp] == 0 and end > 0])
    for other in sorted({c for c in counts.values() if c is not None and c != log.partitions}):
        where = _list([cp for cp, c in counts.items() if c == other])
        report.add(
            f"it has {log.partitions} partitions, and its first record in partition(s) {where} says {other}",
            "partitions were added since: members that count differently do not see each other's claims",
            f"make a new topic: kafka-marshal init{options.reach(topic=False)} --topic NEW-NAME "
            f"--partitions {log.partitions}, and move all members to it",
            fatal=True,
        )
    unmarked = [cp for cp, marked in counts.items() if marked is None]
    if unmarked:
        report.add(
            f"partition(s) {_list(unmarked)} begin with another record than the one that fixes their number",
            "that partitions were added would go unnoticed there",
            "nothing to do now; make the next topic with kafka-marshal init before anybody writes to it",
            fatal=False,
        )


def _look_at_levels(cluster: Cluster, options: Options, report: InitReport) -> None:
    """Check whether coordinated groups can be used."""
    from kafka_marshal.admin.topic import low_levels
    from kafka_marshal.node.replica import Begin, Replica

    replica = Replica(cluster, options.topic, options.timeout, Begin.SNAPSHOT)
    try:
        replica.catch_up(options.timeout)
        for what, why in low_levels(replica):
            report.add(what, why, f"kafka-marshal upgrade{options.reach()}", fatal=False)
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
    cluster: Cluster, options: Options, check: bool, report: InitReport, coordination: TopicConfig
) -> None:
    """Create the log of snapshots beside the topic (S2) if it is missing. Workers can do without it."""
    from kafka_marshal.node.coordination_topic import create_snapshots_topic, find_snapshot_problems

    name = snapshots_topic(options.topic)
    partitions = coordination.info.partitions
    config = cluster.topic_config(name, options.timeout)
    if config is None and check:
        report.add(
            f"there is no log of snapshots, {name!r}",
            "members start from the beginning of the log, which takes longer as it grows",
            f"kafka-marshal init{options.reach()}",
            fatal=False,
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


def _fault(problem: WrongSetting, topic: str, options: Options) -> TopicFault:
    """A wrong setting, with the Kafka command that corrects it."""
    value = problem.wanted.rpartition(" ")[2]
    words = ["kafka-configs.sh", "--bootstrap-server", options.bootstrap or "HOST:PORT"]
    words += ["--command-config", options.config_file] if options.config_file else []
    words += ["--alter", "--entity-type", "topics", "--entity-name", topic]
    words += ["--add-config", f"{problem.setting}={value}"]
    found = f"{problem.setting} is {problem.found}, and must be {problem.wanted}"
    return TopicFault(found, problem.why, shlex.join(words), problem.fatal)


def _list(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions))


def _json(report: InitReport) -> dict[str, object]:
    return {
        **fields_of(report, "topic fit existed partitions replication_factor done"),
        "problems": [fields_of(fault, "what why mend fatal") for fault in report.faults],
    }


def _print_report(report: InitReport) -> None:
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
@yes_option()
@click.option("--force", is_flag=True, help="Also where members would stop that are of an older release.")
@dry_run_option("Say what would be raised, and who would stop; change nothing.")
@click.pass_obj
def upgrade(options: Options, force: bool) -> int:
    """Raise the coordination topic; `--help` says more."""
    from kafka_marshal.admin.topic import below_level

    with viewing(options) as view:
        catch_up(view)
        low, notes = below_level(view.worlds), view.notes_on_upgrades()
        old = _old_members(view.groups()) if low else []
    if notes:
        raise CommandError(f"{notes[0]} {NOT_DONE}", NO)
    for each in old[:_LISTED]:
        say_warning(f"{_described(each)} would stop for good.")
    if len(old) > _LISTED:
        say_warning(f"and {len(old) - _LISTED:,} more.")
    if options.yes and old and not (force or options.dry_run):
        raise CommandError(
            f"{count(len(old), 'member')} would stop at level {SUPPORTED_LEVEL}. {NOT_DONE} Replace them by this "
            "release first, or say --force.",
            NO,
        )

    def do() -> list[int]:
        if not low:
            return low
        with admin_of(options) as admin:
            return admin.upgrade()

    what = f"{count(len(low), 'partition')} of {options.topic} to level {SUPPORTED_LEVEL}"
    return carry_out(
        options,
        lambda: low,
        question=f"Raise {what}? There is no way back." if low else "",
        do=do,
        if_interrupted="It may be raised in a part of the log; run kafka-marshal upgrade again.",
        say=partial(_say_levels, options),
        json=lambda raised, done: {
            "topic": options.topic,
            "level": SUPPORTED_LEVEL,
            "partitions": raised,
            "raised": bool(raised) and done,
            "old_members": [_old_member_json(each) for each in old],
        },
    )


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


def _old_member_json(each: MemberRow | WorkerRow) -> dict[str, object]:
    release = None if each.runs_at is None else each.runs_at.release
    return {**fields_of(each, "group client instance"), "release": release}


def _say_levels(options: Options, low: list[int], done: bool) -> None:
    if not low:
        say(f"{options.topic!r} is at level {SUPPORTED_LEVEL} already.")
        return
    what = f"partition(s) {_list(low)} of {options.topic!r}"
    if done:
        say(f"raised: {what} to level {SUPPORTED_LEVEL}.")
    else:
        say(f"{what} would be raised to level {SUPPORTED_LEVEL}.")


# -- how long the log is kept ------------------------------------------------------------------------------------


@command()
@click.option(
    "--keep",
    callback=_keep_option,
    metavar="SPAN|forever",
    help="How long members keep the log: 30d, 12h (at least 1h), or forever.",
)
@click.pass_obj
def topic(options: Options, keep: int | None) -> int:
    r"""How large the coordination log is, how old, how long it is kept; with --keep, how long from now on.

    Members remove what is older by themselves, one at a time, up to a snapshot that a replay has borne out, and within
    a tenth of that time. They need the right DELETE on both topics. History before the cut is gone for log, who, dump
    and audit, but for what was archived before (kafka-marshal archive). It stands in the topic's settings
    min.compaction.lag.ms and max.compaction.lag.ms, which have no other use on it.

    \b
    Exit status: 0 done; 2 wrong use; 3 Kafka was not reachable, or forbids it.
    """
    from kafka_marshal.node.coordination_topic import check_topic
    from kafka_marshal.observe.log_size import measure

    options.if_interrupted = "It may be set or not: kafka-marshal topic says it."
    with connected(options) as cluster:
        check_topic(cluster, options.topic, options.timeout)
        if keep is not None:
            wanted = None if keep == FOREVER else keep
            cluster.alter_topic(options.topic, keep_settings(wanted), options.timeout)
        config, _ = check_topic(cluster, options.topic, options.timeout)
        size = measure(cluster, options.topic, options.timeout, time.time() * 1000, living=None)
    if options.json:
        print_json(
            {"topic": options.topic, "partitions": config.info.partitions, **size.json, "warnings": size.warnings()}
        )
    else:
        if keep is not None:
            say(f"{_kept_text(keep)}.")
        say(f"{options.topic}: {size.text}.")
        for warning in size.warnings():
            say_warning(warning)
    return DONE


# -- old log, removed --------------------------------------------------------------------------------------------


@command()
@click.option(
    "--keep",
    type=click.IntRange(2),
    metavar="N",
    help="How many checked snapshots of each partition stay, with all log behind the oldest of them (3).",
)
@click.option(
    "--older-than", callback=span_option, metavar="SPAN", help="Only what is older than this (30d); all that may go."
)
@dry_run_option("Say what would be removed; remove nothing.")
@yes_option()
@click.option("--force", is_flag=True, help="Also remove log that shows a snapshot to be wrong.")
@click.pass_obj
def prune(options: Options, keep: int | None, older_than: int | None, force: bool) -> int:
    r"""Remove old log and old snapshots together, up to a snapshot that agrees with the log, never further.

    The whole log is replayed first, and every snapshot compared with it; with --older-than, what is about to go and the
    snapshots next to it. Members continue meanwhile, and new ones can
    start at any time. History before the cut is gone for log, who, dump and audit: archive it first if you need it
    (kafka-marshal archive).

    \b
    Exit status: 0 removed, or nothing to remove; 1 a snapshot contradicts the log, or you said no; 2 wrong use, or no
    --yes; 3 Kafka was not reachable.
    """
    from kafka_marshal.snapshots.prune import DEFAULT_KEEP, OlderThan, make_plan
    from kafka_marshal.snapshots.prune import carry_out as remove

    options.if_interrupted = "Nothing was removed."
    with connected(options) as cluster:
        with progress("checking") as show:
            plan = make_plan(
                cluster,
                options.topic,
                options.timeout,
                keep=DEFAULT_KEEP if keep is None else keep,
                force=force,
                older_than=None if older_than is None else OlderThan(older_than, time.time() * 1000),
                progress=show,
            )
        if not options.json:
            print_table(_PRUNED.columns, map(_PRUNED.cells, plan.partitions))
        for difference in plan.differences:
            say_error(str(difference.error(plan.topic, plan.snapshots_topic)))
        something = bool(plan.records_removed or plan.snapshots_removed)
        goes = f"{count(plan.records_removed, 'record')} and {count(plan.snapshots_removed, 'snapshot')}"

        def do() -> PrunePlan:
            if something:
                remove(cluster, plan, options.timeout)
            return plan

        def say_removed(_: PrunePlan, done: bool) -> None:
            if not something:
                say("nothing to remove.")
            else:
                say(f"removed: {goes}." if done else f"{goes} would be removed.")

        return carry_out(
            options,
            lambda: plan,
            question=f"Remove {goes} of {plan.topic}, for ever?" if something else "",
            do=do,
            if_interrupted="A part may have been removed: run kafka-marshal prune again, it continues.",
            not_done="Nothing was removed.",
            say=say_removed,
            json=lambda _, done: _pruned_json(plan, done and something),
            status=lambda _: NO if plan.differences else DONE,
        )


def _cut(each: PrunedPartition) -> str:
    return "" if each.cut is None else str(each.cut)


def _pruned_json(plan: PrunePlan, done: bool) -> dict[str, object]:
    return {
        **fields_of(plan, "topic snapshots_topic"),
        "removed": done,
        **fields_of(plan, "records=records_removed snapshots=snapshots_removed"),
        "partitions": [_PRUNED.json(each) for each in plan.partitions],
        "differences": [
            fields_of(found, "partition=cp next_offset digest=theirs replayed_digest=ours since why")
            for found in plan.differences
        ],
    }
