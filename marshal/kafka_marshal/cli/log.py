"""`log` and `who`: the coordination log in words; who owned a partition, since when, until when."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command, paint, say_error
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
    print_json_line,
    print_table,
    progress,
    say,
    say_warning,
)
from kafka_marshal.errors import MarshalError
from kafka_marshal.observe.rows import STATES
from kafka_marshal.observe.text import clock_text, listed, local_ms, names_of, no_group, time_text
from kafka_marshal.secret import visible
from rationalizer import route_group, route_lease
from rationalizer.limits import MAX_PARTITION

if TYPE_CHECKING:
    from kafka_marshal.observe.ownership import OpenedAgain, Ownership, PieceOwnership
    from kafka_marshal.observe.view import LiveView
    from kafka_marshal.ports import LogEntry
    from kafka_marshal.types import LeaseInfo, OpenMessages
    from rationalizer import Outcome, Progress, Record, World
    from rationalizer.history import LeaseKey, Span

#: Records of the past that --follow shows by default.
_LAST = 10

#: Widths on a terminal, padded so that lines mostly form columns.
_WHERE, _WHO, _CODE = 10, 16, 12

_TITLES = ("time", "partition", "offset", "group", "client", "instance", "what", "code", "why")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record with its outcome, in words."""

    partition: int
    offset: int
    outcome: Outcome
    record: Record | None
    what: str
    why: str

    @property
    def key(self) -> tuple[int, int, int]:
        """The order of the whole log: by log time, ties by CP."""
        return self.outcome.log_time, self.partition, self.offset


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects records."""

    group: str | None
    since: int | None
    no_beats: bool

    def __call__(self, outcome: Outcome, record: Record | None) -> bool:
        from kafka_marshal.observe.words import is_beat

        if self.since is not None and outcome.log_time < self.since:
            return False
        if self.group is not None and outcome.group_id != self.group:
            return False
        return not (self.no_beats and is_beat(outcome, record))


class LogLines:
    """Replays runs of records; selected ones become lines."""

    def __init__(
        self, partitions: int, wanted: Filter, skip_below: dict[int, int], worlds: dict[int, World] | None = None
    ) -> None:
        """skip_below: CP → first offset that becomes a line. worlds: initial state of CPs."""
        from kafka_marshal.observe.fold import Fold
        from kafka_marshal.observe.meter import Standstills

        self.worlds: dict[int, World] = dict(worlds or {})
        self._partitions = partitions
        self._wanted = wanted
        self._skip_below = skip_below
        self._found_any = False
        self._fold = Fold()
        self._standstills = Standstills()
        #: CPs with records that were replayed without the fold.
        self._passed_over: set[int] = set()

    def read(self, cp: int, entries: list[LogEntry]) -> Iterator[LogLine]:
        """Replay a run of one CP's records, ascending; the lines of those selected."""
        from kafka_marshal.observe.checkpoint_history import happened_text
        from kafka_marshal.observe.meter import outage_text
        from kafka_marshal.observe.words import reason, what
        from rationalizer import World, codes

        world = self.worlds.get(cp)
        if world is None:
            world = self.worlds[cp] = World(cp, self._partitions)
        begin = self._first_to_show(cp, entries)
        if begin:
            world.apply_many(entries[:begin])
            self._passed_over.add(cp)
        if begin < len(entries) and (cp in self._passed_over or not self._fold.follows(world)):
            self._passed_over.discard(cp)
            self._fold.begin(world)
        for offset, stamp, value in entries[begin:]:
            outage = self._standstills.see(world, stamp)
            outcome = world.apply(offset, stamp, value)
            if outcome.code == codes.UPGRADE_REQUIRED:
                return
            record = outcome.record
            is_wanted = self._wanted(outcome, record)
            why = ""
            if is_wanted:
                before, overdue = self._fold.before(outcome, cp), self._fold.silent(outcome)
                why = reason(outcome, record, value, world, before, overdue)
            self._fold.see(cp, outcome)
            if is_wanted:
                self._found_any = True
                why = "; ".join(filter(None, [*map(happened_text, self._fold.happened), why, outage_text(outage)]))
                yield LogLine(cp, offset, outcome, record, what(record, value, outcome.log_time), why)

    @property
    def groups(self) -> set[str]:
        """The groups in the records so far."""
        return self._fold.groups | names_of(self.worlds.values()).keys()

    @property
    def knows_group(self) -> bool:
        """Whether the requested group, if there is one, is in the log."""
        return self._found_any or self._wanted.group is None or self._wanted.group in self.groups

    def _first_to_show(self, cp: int, entries: list[LogEntry]) -> int:
        """The number of records at the beginning of a run that are only replayed."""
        skip_below, since = self._skip_below.get(cp, 0), self._wanted.since
        for index, (offset, stamp, _) in enumerate(entries):
            if offset >= skip_below and (since is None or stamp >= since):
                return index
        return len(entries)


def in_order(told: Iterator[LogLine], ends: dict[int, int]) -> Iterator[LogLine]:
    """The records of all CPs by log time. `ends`: CP → the offset after its last record.

    Buffers only the records by which one CP is read ahead of another.
    """
    queues: dict[int, deque[LogLine]] = {cp: deque() for cp, end in ends.items() if end > 0}
    open_cps = set(queues)
    for each in told:
        cp = each.partition
        queues[cp].append(each)
        if each.offset + 1 >= ends[cp]:
            open_cps.discard(cp)
        while queues and all(queues[cp] for cp in open_cps):
            filled = [queue for queue in queues.values() if queue]
            if not filled:
                break
            yield min(filled, key=lambda queue: queue[0].key).popleft()
    yield from sorted((each for queue in queues.values() for each in queue), key=lambda each: each.key)


@command()
@click.option("--follow", "-f", is_flag=True, help="Continue with new records, until Ctrl-C.")
@click.option("--group", help="Only this group's records.", shell_complete=complete_group)
@click.option("--cp", type=click.IntRange(min=0), help="Only this partition of the log.")
@click.option(
    "--since",
    callback=time_option,
    metavar="TIME",
    help="From then on: 03:14, yesterday 03:14, 2026-11-21T04:50Z, or 10m (ago).",
)
@click.option("-n", "last", type=click.IntRange(min=0), metavar="N", help="The last N records (with --follow: 10).")
@click.option("--no-beats", is_flag=True, help="Leave out heartbeats and Ticks with nothing remarkable about them.")
@click.option("--from-dump", metavar="FILE", help="Read a dump instead of Kafka (- is standard input).")
@archive_option
@click.pass_obj
def log(
    options: Options,
    follow: bool,
    group: str | None,
    cp: int | None,
    since: int | None,
    last: int | None,
    no_beats: bool,
    from_dump: str | None,
    place: str | None,
) -> int:
    r"""The coordination log in words: time, who, what, outcome and why.

    Times are log time (the broker's). On a terminal one line a record; in a pipe tab-separated columns with a line of
    titles; with --json one object a line.

    \b
    Exit status: 0; 1 the group is unknown, or a part of the log needs a newer release; 3 no Kafka.
    """
    if from_dump is not None and follow:
        raise click.UsageError("--follow needs Kafka: a dump does not grow.")
    if place is not None and from_dump is not None:
        raise click.UsageError("--archive is read beside Kafka, and --from-dump instead of it: give one of them.")
    if follow and is_alone(options, place):
        raise click.UsageError("--follow needs Kafka: an archive alone does not grow. Name it with --bootstrap.")
    if follow and last is None and since is None:
        last = _LAST
    wanted = Filter(group, since, no_beats)
    printer = _printer(options)
    with ExitStack() as stack:
        if from_dump is not None:
            lines = _from_dump(stack, from_dump, cp, wanted, last, printer)
        else:
            lines = _from_kafka(stack, options, place, cp, wanted, last, printer, follow)
    status = stopped(lines.worlds.values())
    if lines.knows_group:
        return status
    say_error(visible(no_group(group or "", lines.groups)))
    return NO


def stopped(worlds: Iterable[World]) -> int:
    """Name the CPs that stopped at an Upgrade; returns the exit status."""
    status = DONE
    for world in sorted(worlds, key=lambda world: world.partition):
        if world.required_level is not None:
            say_error(
                f"partition {world.partition} of the log was raised to level {world.required_level}, which this "
                "release does not know: its later records are not shown. Install a newer release."
            )
            status = NO
    return status


Printer = Callable[[Iterable[LogLine]], None]


def _from_kafka(
    stack: ExitStack,
    options: Options,
    place: str | None,
    cp: int | None,
    wanted: Filter,
    last: int | None,
    printer: Printer,
    follow: bool,
) -> LogLines:
    source = open_history(stack, options, place)
    cps = _chosen(source.partitions, cp)
    worlds = source.first_worlds(cps)
    ends = {cp: source.ends[cp] for cp in cps}
    unfiltered = wanted.group is None and wanted.since is None and not wanted.no_beats
    skip = {cp: max(0, end - last) for cp, end in ends.items()} if last is not None and unfiltered else {}
    begin = {cp: world.next_offset for cp, world in worlds.items()}
    lines = LogLines(source.partitions, wanted, skip, {cp: worlds[cp] for cp, first in begin.items() if first})
    # With --last lines are printed at the end only, so a progress bar does not disturb them.
    progressed = stack.enter_context(progress("reading the log")) if last is not None else None

    def told() -> Iterator[LogLine]:
        for cp, entries in source.read(begin, progress=progressed):
            source.check_marker(cp, entries[0])
            yield from lines.read(cp, entries)

    if last is not None:
        tails: dict[int, deque[LogLine]] = {cp: deque(maxlen=last) for cp in cps}
        for each in told():
            tails[each.partition].append(each)
        printer(_last(tails, last))
    else:
        printer(in_order(told(), {cp: end for cp, end in ends.items() if end > begin[cp]}))
    if follow:
        if not lines.knows_group:
            say_warning(no_group(wanted.group or "", lines.groups))
        _follow(source.follow(ends), lines, printer)
    return lines


def _follow(batches: Iterator[dict[int, list[LogEntry]]], lines: LogLines, printer: Printer) -> None:
    for batch in batches:
        news = [told for cp, entries in batch.items() for told in lines.read(cp, entries)]
        printer(sorted(news, key=lambda told: told.key))
        if lines.worlds and all(world.required_level is not None for world in lines.worlds.values()):
            return


def _from_dump(
    stack: ExitStack, path: str, cp: int | None, wanted: Filter, last: int | None, printer: Printer
) -> LogLines:
    """Lines are buffered until the end of the dump: it does not say how far each CP reaches."""
    header, found = stack.enter_context(checked_dump(path))
    cps = _chosen(header.partitions, cp)
    lines = LogLines(header.partitions, wanted, {})
    tails: dict[int, deque[LogLine]] = {}
    for number, records in groupby(found, key=lambda record: record.partition):
        if number in cps:
            for record in records:
                tail = tails.setdefault(number, deque(maxlen=last))
                tail.extend(lines.read(number, [(record.offset, record.timestamp_ms, record.value)]))
    printer(_last(tails, last))
    return lines


def _last(tails: dict[int, deque[LogLine]], last: int | None) -> list[LogLine]:
    told = sorted((each for tail in tails.values() for each in tail), key=lambda each: each.key)
    return told if last is None else told[max(0, len(told) - last) :]


def _chosen(partitions: int, cp: int | None) -> range:
    if cp is None:
        return range(partitions)
    if cp >= partitions:
        raise click.BadParameter(f"{cp}: the log has partitions 0 … {partitions - 1}", param_hint="--cp")
    return range(cp, cp + 1)


# -- printing ------------------------------------------------------------------------------------------------


def _printer(options: Options) -> Printer:
    """A function that prints lines at once."""
    if options.json:
        return _print_json
    if is_terminal():
        return _print_lines
    # Printed with the first lines: an error before them must not leave titles alone.
    titles = iter(["\t".join(_TITLES) + "\n"])

    def print_columns(told: Iterable[LogLine]) -> None:
        sys.stdout.writelines(titles)
        sys.stdout.writelines("\t".join(map(visible, _columns(each))) + "\n" for each in told)
        sys.stdout.flush()

    return print_columns


def _columns(told: LogLine) -> list[str]:
    record = told.record
    who = ("", "", "") if record is None else (told.outcome.group_id, record.client_id, record.instance_id)
    time = time_text(told.outcome.log_time)
    return [time, str(told.partition), str(told.offset), *who, told.what, told.outcome.code, told.why]


def _print_lines(told: Iterable[LogLine]) -> None:
    from kafka_marshal.observe.words import is_beat
    from rationalizer import codes

    for each in told:
        outcome, record = each.outcome, each.record
        dim = is_beat(outcome, record)
        colour = "red" if not outcome.accepted else "green" if outcome.code == codes.OK else "yellow"
        time = time_text(outcome.log_time).replace("T", " ")
        who = "?" if record is None else visible(record.client_id)
        group = visible(outcome.group_id)
        where = f"{each.partition}@{each.offset}"
        does = visible(each.what) if not group else f"{group}: {visible(each.what)}"
        code = paint(f"{outcome.code:{_CODE}}", fg=colour, bold=not outcome.accepted or None, dim=dim or None)
        line = f"{paint(time, dim=True)} {where:>{_WHERE}}  {who:{_WHO}} {code} {does}"
        if each.why:
            line += paint(f"  ({visible(each.why)})", dim=True)
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_json(told: Iterable[LogLine]) -> None:
    for each in told:
        line: dict[str, object] = {"partition": each.partition, "offset": each.offset, **each.outcome.shown()}
        for name in ("instance_id", "client_id", "group_id", "topic"):
            line[name.removesuffix("_id")] = getattr(each.record, name, None)
        line["topic_partition"] = getattr(each.record, "partition", None)
        line["what"] = each.what
        line["why"] = each.why
        print_json_line(line)


# -- who -----------------------------------------------------------------------------------------------------

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

    if at is not None and offset is not None:
        raise click.UsageError("--at and --offset both say when: give one of them.")
    if place is not None and from_dump is not None:
        raise click.UsageError("--archive is read beside Kafka, and --from-dump instead of it: give one of them.")
    if at is not None and at > local_ms() + _AHEAD_MS:
        raise click.BadParameter(f"{time_text(at)} is in the future.", param_hint="'--at'")
    lease = (group, topic_name, partition)
    with ExitStack() as stack:
        if from_dump is not None:
            owned = _owned_in_dump(stack, from_dump, lease, at, offset)
        else:
            owned = _owned_in_kafka(stack, options, lease, at, offset, place)
    if options.json:
        print_json(_ownership_json(owned))
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


def _of_its_kind(claimed: Ownership, pieces: PieceOwnership) -> Ownership:
    """The one for the kind of the group, or its last known kind (G1)."""
    for owned in (claimed, pieces):
        owned.end()
    is_coordinated = pieces.world.group(pieces.key[0]) is not None or not claimed.spans
    return pieces if pieces.spans and is_coordinated else claimed


def _owned_in_kafka(
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
    found = _of_its_kind(*both)
    _check_offset(offset, source.ends[found.cp], found.cp)
    return found


def _owned_in_dump(stack: ExitStack, path: str, key: LeaseKey, at: int | None, offset: int | None) -> Ownership:

    header, records = stack.enter_context(checked_dump(path))
    both = _both(key, header.partitions, at, offset)
    for record in records:
        for owned in both:
            if record.partition == owned.cp:
                owned.take([(record.offset, record.timestamp_ms, record.value)])
    found = _of_its_kind(*both)
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


_REDONE: Rows[OpenedAgain] = Rows(
    Field("by", lambda x: x.client, Column("by", fold=True, least=8)),
    Field("time", column=Column("at"), cell=lambda x: _moment(x.time)),
    Field("offset", lambda x: x.offset, Column("log offset", right=True, from_width=60)),
    Field("ranges", lambda x: _ranges_text(x.ranges), Column("messages", fold=True, least=16)),
)

#: The most ranges of a redo that are named one by one.
_MOST_RANGES = 20


def _ranges_text(ranges: list[tuple[int, int]]) -> str:
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges]
    return f"{sum(last - first + 1 for first, last in ranges):,}: {listed(shown, _MOST_RANGES)}"


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
        if owned.redone:
            say()
            say("Done messages that an operator opened again (kafka-marshal redo):")
            print_table(_REDONE.columns, [_REDONE.cells(each) for each in owned.redone])


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


def _ownership_json(owned: Ownership) -> dict[str, object]:
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
        "redone": [fields_of(each, "time offset client ranges") for each in owned.redone],
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


def _found(view: LiveView, topic: str, partition: int, hashed: int, group: str | None) -> Iterator[dict[str, Any]]:
    from kafka_marshal.client.view import holdings

    found = [
        (info, done)
        for world in view.worlds.values()
        for info, done in holdings(world, group)
        if (info.topic, info.partition) == (topic, partition) and info.lo <= hashed <= info.hi
    ]
    for info, done in sorted(found, key=lambda each: each[0].group_id):
        yield _key_json(info, done, hashed)


def _state_of(open_: OpenMessages) -> str:
    if open_.until is not None:
        return "later"
    return "parked" if open_.is_parked else "acquired" if open_.holder is not None else "waiting"


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
                "state": _state_of(each),
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
