"""`who`: who owned a partition, since when, until when.

Of a claimed group the lease's part of the log tells, of a coordinated one the group's home: both are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, NO, WRONG_USE, CommandError
from kafka_marshal.cli.log import stopped
from kafka_marshal.cli.names import complete_group, complete_topic, names_of, read_names, refuse_name
from kafka_marshal.cli.options import Options, time_option
from kafka_marshal.cli.output import Cell, Column, print_json, print_table, progress, say
from kafka_marshal.cli.steering import id_argument
from kafka_marshal.client.view import holdings
from kafka_marshal.observe.meter import local_ms
from kafka_marshal.observe.rows import STATES, place_text
from kafka_marshal.observe.text import clock_text, span, time_text
from kafka_marshal.ports import LogEntry
from rationalizer import Outcome, World, route_group, route_lease
from rationalizer.groups.history import Assignments
from rationalizer.history import End, LeaseKey, Owners, Span
from rationalizer.limits import MAX_KEY_HASH, MAX_PARTITION, STALE_AFTER_INTERVALS

__all__ = ["Moment", "ended_text", "moment_text", "span_json", "who"]

_COLUMNS = (
    Column("owner", fold=True, least=8),
    Column("instance", pipes_only=True),
    Column("epoch", right=True, from_width=60),
    Column("since"),
    Column("until"),
    Column("log offsets", from_width=100),
    Column("ended", fold=True, least=16),
)


@dataclass(slots=True)
class Moment:
    """The lease, or the piece, at the place that was asked about."""

    span: Span
    last_beat: int
    heartbeat_interval_ms: int
    freshness: str
    #: The offset to be read next, at that place; None: not asked for.
    next: int | None = None


@dataclass(slots=True)
class Ownership:
    """The history of one lease, and one moment of it, from a replay of its CP."""

    key: LeaseKey
    cp: int
    partitions: int
    #: Judge the state after the records up to this log time, or this offset; neither: at the end of the log.
    at: int | None = None
    at_offset: int | None = None
    spans: list[Span] = field(default_factory=list)
    #: One; in a coordinated group one for each range of keys.
    moments: list[Moment] = field(default_factory=list)
    world: World = field(init=False)
    owners: Owners = field(default_factory=Owners)
    _passed: bool = False

    def __post_init__(self) -> None:
        self.world = World(self.cp, self.partitions)

    def begin(self, world: World) -> None:
        """The log begins with this state: whoever holds the lease in it has held it since before."""
        self.world = world
        self.owners.begin(world)
        span = self.owners.now.get(self.key)
        if span is not None:
            span.since = world.log_time
            self.spans.append(span)

    def take(self, entries: Iterable[LogEntry]) -> None:
        """Replay records of the CP, ascending."""
        for offset, stamp, value in entries:
            if not self._passed and self._is_beyond(offset, stamp):
                self._passed = True
                self._capture()
            outcome = self.world.apply(offset, stamp, value)
            self._see(outcome)

    def _see(self, outcome: Outcome) -> None:
        if (begun := self.owners.see(self.key, self.world, outcome)) is not None:
            self.spans.append(begun)

    def end(self) -> None:
        """The log ends here."""
        if not self._passed:
            self._passed = True
            self._capture()

    @property
    def judged_at(self) -> int:
        """The log time at which it is judged who is silent, while the replay stands at the moment."""
        return self.world.log_time if self.at is None else max(self.at, self.world.log_time)

    def _is_beyond(self, offset: int, stamp: int) -> bool:
        if self.at_offset is not None:
            return offset > self.at_offset
        return self.at is not None and stamp > self.at

    def _capture(self) -> None:
        lease = self.world.lease(*self.key)
        if lease is not None and self.spans:
            freshness = lease.freshness(self.judged_at)
            beats = lease.last_beat, lease.heartbeat_interval_ms
            self.moments = [Moment(self.spans[-1], *beats, freshness, lease.progress.stable + 1)]


@dataclass(slots=True)
class PieceOwnership(Ownership):
    """The history of one partition of a coordinated group, from a replay of the group's home."""

    assignments: Assignments = field(default_factory=lambda: Assignments(""))
    #: The last offset before the moment; client_id → (last beat, half of its session, freshness) as of then.
    _last: int = -1
    _members: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    #: (first key, last key, next offset) as of then.
    _done: list[tuple[int, int, int]] = field(default_factory=list)

    def begin(self, world: World) -> None:
        self.world = world
        self.assignments.begin(world)
        self.spans: list[Span] = list(self.assignments.now.get(self.key[1:], []))
        for each in self.spans:
            each.since = world.log_time

    def _see(self, outcome: Outcome) -> None:
        begun = self.assignments.see(self.world, outcome)
        self.spans += [each for each in begun if each.key == self.key]

    def _capture(self) -> None:
        self._last = self.world.next_offset - 1
        group = self.world.group(self.key[0])
        self._done = [
            (info.lo, info.hi, 0 if info.stable is None else info.stable + 1)
            for info, _ in holdings(self.world, self.key[0])
            if (info.topic, info.partition) == self.key[1:]
        ]
        for member in () if group is None else group.members.values():
            half, silence = (member.session_timeout_ms + 1) // 2, self.judged_at - member.last_beat
            is_gone = silence > member.session_timeout_ms
            freshness = "stale" if is_gone else "unknown" if silence > half else "fresh"
            self._members[member.client_id] = member.last_beat, half, freshness

    def end(self) -> None:
        Ownership.end(self)
        self.assignments.spans(self.world.group(self.key[0]), self.key[1:])
        self.spans.sort(key=lambda each: (each.since_offset, each.lo))
        for each in sorted(self.spans, key=lambda each: each.lo):
            if each.since_offset <= self._last and (each.until_offset is None or self._last < each.until_offset):
                beat, half, freshness = self._members.get(each.client_id, (each.last_beat, 0, "free"))
                done = min((done for lo, hi, done in self._done if lo <= each.hi and each.lo <= hi), default=0)
                self.moments.append(Moment(each, beat, half, freshness if each.held else "free", done))


#: The broker's clock may be ahead of ours by that.
_AHEAD_MS = 60_000


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.argument("topic_name", metavar="TOPIC", callback=id_argument, shell_complete=complete_topic)
@click.argument("partition", type=click.IntRange(0, MAX_PARTITION))
@click.option(
    "--at", callback=time_option, metavar="TIME", help="03:14, yesterday 03:14, 2026-11-21T04:50:12Z, or 10m (ago)."
)
@click.option(
    "--offset", type=click.IntRange(min=0), metavar="CP_OFFSET", help="At this offset of its part of the log."
)
@click.option("--from-dump", metavar="FILE", help="Read a dump instead of Kafka (- is standard input).")
@click.pass_obj
def who(
    options: Options,
    group: str,
    topic_name: str,
    partition: int,
    at: int | None,
    offset: int | None,
    from_dump: str | None,
) -> int:
    r"""Who owned PARTITION of TOPIC for GROUP, since when and until when, with the epochs.

    Without --at and --offset: who owns it now, and the whole history. The answer comes from the records alone, so a
    dump gives it a year later. TIME is log time, the broker's; without an offset it is local. In a coordinated group
    the epoch is the generation since which the owner has it; where a partition is shared, one line a range of keys.

    \b
    Exit status: 0, also where nobody owned it; 1 the log knows no such lease; 2 wrong use; 3 no Kafka.
    """
    if at is not None and offset is not None:
        raise click.UsageError("--at and --offset both say when: give one of them.")
    if at is not None and at > local_ms() + _AHEAD_MS:
        raise click.BadParameter(f"{time_text(at)} is in the future: nobody can know.", param_hint="'--at'")
    key = (group, topic_name, partition)
    with ExitStack() as stack:
        if from_dump is not None:
            owned = _from_dump(stack, from_dump, key, at, offset)
        else:
            owned = _from_kafka(stack, options, key, at, offset)
    if options.json:
        print_json(_json(owned))
    elif owned.spans:
        _tell(owned)
    if not owned.spans:
        known = names_of([owned.world]) if from_dump is not None else read_names(options, options.timeout)
        refuse_name(known, group, topic_name)
        raise CommandError(
            f"the log knows no lease of {group!r} on {topic_name!r} partition {partition}: nobody ever got it (or the "
            f"group was forgotten before the log began). Its place would be partition {owned.cp} of the log "
            f"({route_group(group, owned.partitions)} of a coordinated group).",
            NO,
        )
    return stopped([owned.world]) or DONE


def _both(key: LeaseKey, partitions: int, at: int | None, offset: int | None) -> tuple[Ownership, PieceOwnership]:
    """Of either kind that the group may be of."""
    claimed = Ownership(key, route_lease(key[1], key[2], partitions), partitions, at, offset)
    pieces = PieceOwnership(key, route_group(key[0], partitions), partitions, at, offset)
    pieces.assignments = Assignments(key[0])
    return claimed, pieces


def _chosen(claimed: Ownership, pieces: PieceOwnership) -> Ownership:
    """The one of the kind that the group is, or was when it was last known (G1)."""
    for owned in (claimed, pieces):
        owned.end()
    is_coordinated = pieces.world.group(pieces.key[0]) is not None or not claimed.spans
    return pieces if pieces.spans and is_coordinated else claimed


def _from_kafka(stack: ExitStack, options: Options, key: LeaseKey, at: int | None, offset: int | None) -> Ownership:
    from kafka_marshal.cli.reading import Log, connected

    source = Log(stack.enter_context(connected(options)), options.topic, options.timeout)
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
    from kafka_marshal.cli.dumps import open_dump
    from rationalizer.dump import DumpReader

    reader = DumpReader(stack.enter_context(open_dump(path)))
    both = _both(key, reader.header.partitions, at, offset)
    for record in reader:
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


def _tell(owned: Ownership) -> None:
    group, topic, partition = owned.key
    say(f"{group}, {topic} partition {partition} (kept in partition {owned.cp} of the log)")
    say(_answer(owned))
    if owned.at is not None and owned.at > owned.world.log_time:
        say(f"Its part of the log ends at {time_text(owned.world.log_time)}; what came after is not in it.")
    if owned.at is None and owned.at_offset is None:
        say()
        now_ms = int(local_ms())
        columns = (*_COLUMNS, Column("keys")) if isinstance(owned, PieceOwnership) else _COLUMNS
        print_table(columns, [_row(each, now_ms)[: len(columns)] for each in owned.spans])


def _answer(owned: Ownership) -> str:
    """The sentence that answers the question."""
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
    return "\n".join(f"{moment_text(when, moment, is_piece)}\nNext offset: {moment.next}." for moment in owned.moments)


def moment_text(when: str, moment: Moment, is_piece: bool) -> str:
    """Who had it at that moment, in a sentence."""
    held = moment.span
    when += f", {keys}" if (keys := _keys(held)) else ""
    if not held.held:
        return f"{when}: nobody, free since {time_text(held.since)} ({_later(held)})."
    text = f"{when}: {held.client_id}, epoch {held.epoch}, since {time_text(held.since)} ({_later(held)})."
    lapse, before = ("session had ended", "half a session") if is_piece else ("lease had lapsed", "one interval")
    if moment.freshness == "stale":
        lapsed = moment.last_beat + STALE_AFTER_INTERVALS * moment.heartbeat_interval_ms
        text += f"\nBut silent since {time_text(moment.last_beat)}: its {lapse} at {time_text(lapsed)}."
    elif moment.freshness == "unknown":
        text += f"\nIts last beat was at {time_text(moment.last_beat)}, more than {before} before."
    return text


def _keys(span: Span) -> str:
    """The part of the keys that it is about; "" for all."""
    if span.lo == 0 and span.hi == MAX_KEY_HASH:
        return ""
    return "keys " + place_text(0, span.lo, span.hi)[3:-1]


def _later(found: Span) -> str:
    if found.until is None:
        return "as far as the log goes"
    return f"until {time_text(found.until)}: {ended_text(found)}"


def ended_text(found: Span) -> str:
    """How a span ended, in words; "" while it lasts."""
    match found.ended:
        case End.OPEN:
            return ""
        case End.RELEASED:
            return f"released{_done(found)}" + (f"; then {found.ended_by}" if found.ended_by else "")
        case End.EVICTED if found.is_lease:
            return f"evicted by {found.ended_by}{_done(found)}"
        case End.EVICTED:
            return f"evicted by {found.evictor}{_done(found)}" + (f"; then {found.ended_by}" if found.ended_by else "")
        case End.REPLACED:
            silence = span((found.until or 0) - found.last_beat)
            verb = "then claimed by" if found.is_lease else "then it went to"
            return f"silent for {silence}" + (f", {verb} {found.ended_by}" if found.ended_by else "")
        case End.LEFT:
            return f"it left{_done(found)}" + (f"; then {found.ended_by}" if found.ended_by else "")
        case End.RESTARTED:
            return "its own newer instance took over"
        case End.FORGOTTEN:
            return "the group was forgotten"
        case End.CLAIMED:
            return f"claimed by {found.ended_by}" if found.is_lease else f"given to {found.ended_by}"


def _done(found: Span) -> str:
    return f", next offset {found.stable + 1}" if found.stable >= 0 else ", nothing done"


def _row(each: Span, now_ms: int) -> list[str | Cell]:
    last = "" if each.until_offset is None else str(each.until_offset)
    since, until = (
        "" if at is None else Cell(time_text(at), short=clock_text(at, now_ms)) for at in (each.since, each.until)
    )
    return [
        each.client_id if each.held else "nobody",
        each.instance_id if each.held else "",
        str(each.epoch) if each.held else "",
        since,
        until,
        f"{each.since_offset}-{last}",
        ended_text(each),
        _keys(each).removeprefix("keys ") or "all",
    ]


def span_json(each: Span) -> dict[str, object]:
    """One span as `who --json` prints it."""
    return {
        "holder": {"client": each.client_id, "instance": each.instance_id} if each.held else None,
        "keys": [each.lo, each.hi],
        "epoch": each.epoch if each.held else None,
        "since": each.since,
        "since_offset": each.since_offset,
        "until": each.until,
        "until_offset": each.until_offset,
        "ended": ended_text(each) or None,
    }


def _json(owned: Ownership) -> dict[str, object]:
    group, topic, partition = owned.key
    answers = [
        {
            **span_json(each.span),
            "last_beat": each.last_beat,
            "state": STATES[each.freshness],
            "next": each.next,
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
