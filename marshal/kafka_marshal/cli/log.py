"""`log`: the coordination log in words."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command, paint, say_error
from kafka_marshal.cli.archive import archive_option, checked_dump, is_alone, open_history
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, complete_group, time_option
from kafka_marshal.cli.output import is_terminal, print_json_line, progress, say_warning
from kafka_marshal.observe.checkpoints import happened_text
from kafka_marshal.observe.text import names_of, no_group, time_text
from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from kafka_marshal.ports import LogEntry
    from rationalizer import Outcome, Record, World

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
        from kafka_marshal.observe.fold import group_of
        from kafka_marshal.observe.words import is_beat

        if self.since is not None and outcome.log_time < self.since:
            return False
        if self.group is not None and (record is None or group_of(outcome) != self.group):
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
    from kafka_marshal.observe.fold import group_of

    record = told.record
    who = ("", "", "") if record is None else (group_of(told.outcome), record.client_id, record.instance_id)
    time = time_text(told.outcome.log_time)
    return [time, str(told.partition), str(told.offset), *who, told.what, told.outcome.code, told.why]


def _print_lines(told: Iterable[LogLine]) -> None:
    from kafka_marshal.observe.fold import group_of
    from kafka_marshal.observe.words import is_beat
    from rationalizer import codes

    for each in told:
        outcome, record = each.outcome, each.record
        dim = is_beat(outcome, record)
        colour = "red" if not outcome.accepted else "green" if outcome.code == codes.OK else "yellow"
        time = time_text(outcome.log_time).replace("T", " ")
        who = "?" if record is None else visible(record.client_id)
        group = "" if record is None else visible(group_of(outcome))
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
        outcome, record = each.outcome, each.record
        line: dict[str, object] = {
            "partition": each.partition,
            "offset": each.offset,
            "log_time": outcome.log_time,
            "type": outcome.type,
            "accepted": outcome.accepted,
            "code": outcome.code,
            "epoch": outcome.epoch,
        }
        if outcome.entries is not None:
            line["entries"] = list(outcome.entries)
        if outcome.of_group:
            line["generation"] = outcome.generation
        if outcome.member is not None or (outcome.of_group and outcome.type == "JoinGroup"):
            line["member"] = outcome.member
        for name in ("instance_id", "client_id", "group_id", "topic"):
            line[name.removesuffix("_id")] = getattr(record, name, None)
        line["topic_partition"] = getattr(record, "partition", None)
        line["what"] = each.what
        line["why"] = each.why
        print_json_line(line)
