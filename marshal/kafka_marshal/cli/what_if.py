"""`what-if`: a dump's members live again, under other settings, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.archive import checked_dump, history_of
from kafka_marshal.cli.failures import DONE, CommandError
from kafka_marshal.cli.options import Options, parsed, time_option
from kafka_marshal.cli.output import Column, print_json, print_table, progress, say, say_warning
from kafka_marshal.errors import needs
from kafka_marshal.observe.text import count, near, no_group, parse_span, span, time_text
from kafka_marshal.types import Strategy
from rationalizer.limits import (
    MAX_HEARTBEAT_INTERVAL_MS,
    MAX_SESSION_TIMEOUT_MS,
    MIN_HEARTBEAT_INTERVAL_MS,
    MIN_SESSION_TIMEOUT_MS,
)

if TYPE_CHECKING:
    from kafka_marshal.client.modes import Claims, Group
    from kafka_marshal.observe.intents import Figures, GroupIntents, Intents, MemberLife
    from rationalizer.log_hash import Entry

#: The most records that all members of both replays may read: about ten minutes.
MOST_READS: Final = 1_000_000
#: The replay of a window begins this much before it (ms), so that it does not begin with a start of all members.
WARM_UP_MS: Final = 60_000

POLICIES: Final = ("balanced", "greedy", "whole-topic")

#: Column: its name in JSON → its title.
COLUMNS: Final = {"was": "was", "as_it_was": "replayed as it was", "what_if": "what if"}
MEASURES: Final[dict[str, Callable[[Figures], str]]] = {
    "takeovers": lambda each: str(each.takeovers),
    "moves": lambda each: str(each.moves),
    "standstill": lambda each: span(each.standstill_ms),
    "repeats": lambda each: f"{each.repeats:.0f}",
}

CANNOT_KNOW: Final = (
    "when a dead member died: half a heartbeat after its last one is assumed, and messages handled since come again;",
    "why a member was silent: a frozen process, a lost network and a slow broker leave the same gap in the log;",
    "handlers: a partition's speed is taken from the log, and fewer members are assumed to keep up with it;",
    "members that wrote nothing, the policy of a claimed group (--policy-was), and what operators did except pauses.",
)


@dataclass(frozen=True, slots=True)
class Change:
    """The other settings."""

    #: Option → value, of claimed and of coordinated groups.
    claimed: dict[str, Any]
    coordinated: dict[str, Any]
    without: tuple[str, ...]
    policy_was: str

    def of(self, group: GroupIntents) -> dict[str, Any]:
        """Those of a group of this kind that are given."""
        found = self.claimed if group.assignments is None else self.coordinated
        return {option: value for option, value in found.items() if value is not None}

    def lives(self, group: GroupIntents, lives: list[MemberLife]) -> list[MemberLife]:
        """The lives under these settings."""
        found, stay = self.of(group), [life for life in lives if life.client not in self.without]
        interval = found.get("--heartbeat-interval", (found.get("--session", -1) + 1) // 2)
        return [replace(life, interval_ms=interval) for life in stay] if interval else stay

    def mode(self, group: GroupIntents, *, as_it_was: bool) -> Claims | Group:
        """The mode of all members."""
        from kafka_marshal.client.modes import Claims, Group
        from kafka_marshal.engine.policies import Balanced, Greedy, WholeTopic

        found = {} if as_it_was else self.of(group)
        if group.assignments is not None:
            strategy: Any = found.get("--strategy", group.strategy)
            return Group(strategy=strategy)
        made = {"balanced": Balanced(), "greedy": Greedy(), "whole-topic": Balanced() & WholeTopic()}
        return Claims(policy=made[found.get("--policy", self.policy_was)])

    def text(self, group: GroupIntents) -> str:
        """In words."""
        values = [(option, value) for option, value in self.of(group).items()]
        values += [("--without-member", name) for name in self.without]
        return " ".join(f"{option} {f'{value}ms' if isinstance(value, int) else value}" for option, value in values)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One group: what was, and two replays of it."""

    group: GroupIntents
    text: str
    since: int
    until: int
    members: int
    #: Column → partition → figures.
    columns: dict[str, dict[tuple[str, int], Figures]]

    def totals(self) -> dict[str, Figures]:
        """Of all partitions, by column."""
        from kafka_marshal.observe.intents import total

        return {column: total(found.values()) for column, found in self.columns.items()}


def _within(low: int, high: int) -> Any:
    def parse(_: Options, option: str, text: str) -> int:
        if not low <= (found := parse_span(text)) <= high:
            raise ValueError(f"{text} is not within {span(low)} and {span(high)}")
        return found

    return parsed(parse)


_INTERVAL = _within(MIN_HEARTBEAT_INTERVAL_MS, MAX_HEARTBEAT_INTERVAL_MS)
_SESSION = _within(MIN_SESSION_TIMEOUT_MS, MAX_SESSION_TIMEOUT_MS)


@command()
@click.argument("dump", metavar="DUMP")
@click.option("--heartbeat-interval", "interval", callback=_INTERVAL, metavar="SPAN", help="Of claimed groups, as 1s.")
@click.option("--policy", type=click.Choice(POLICIES), help="Of claimed groups.")
@click.option(
    "--policy-was", type=click.Choice(POLICIES), default="balanced", help="The present one; the log does not name it."
)
@click.option("--session", callback=_SESSION, metavar="SPAN", help="The session timeout of coordinated groups, as 5s.")
@click.option("--strategy", type=click.Choice(get_args(Strategy)), help="Of coordinated groups.")
@click.option("--without-member", "without", multiple=True, metavar="CLIENT", help="Had it never been (repeatable).")
@click.option("--group", "name", help="Only this group.")
@click.option("--since", callback=time_option, metavar="TIME", help="Only from then on: a window of a long log.")
@click.option("--until", callback=time_option, metavar="TIME", help="And up to then.")
@click.option("--seed", type=int, default=0, help="Other seeds have other delays of records (0).")
@click.pass_obj
def what_if(
    options: Options,
    /,
    dump: str,
    name: str | None,
    since: int | None,
    until: int | None,
    seed: int,
    without: tuple[str, ...],
    policy_was: str,
    **settings: Any,
) -> int:
    r"""What would have been: the members of DUMP start, freeze, die and leave when they did, under other settings.

    DUMP is a file (see dump; - is standard input) or the folder of an archive. Three columns: what was, the replay
    with the settings of old, which shows how far the model can be trusted, and the replay with the other ones. It
    needs the extra [simulation], and neither Kafka nor your handlers.

    \b
    Exit status: 0; 1 it can't be replayed (cut, too long, an unknown group or member); 2 wrong use, or no dump.
    """
    needs("simulation", "greenlet")
    claimed = {"--heartbeat-interval": settings["interval"], "--policy": settings["policy"]}
    coordinated = {"--session": settings["session"], "--strategy": settings["strategy"]}
    change = Change(claimed, coordinated, without, policy_was)
    if not any((*claimed.values(), *coordinated.values(), *without)):
        raise click.UsageError(f"say what is to differ: {', '.join([*claimed, *coordinated])} or --without-member.")
    with ExitStack() as stack:
        fold = _read(*stack.enter_context(_opened(options, dump)))
    chosen = _chosen(fold, change, name)
    options.if_interrupted = "Nothing was written."
    found = [_replayed(group, change, len(fold.worlds), since, until, seed) for group in chosen]
    if options.json:
        print_json({"groups": [_json(each) for each in found], "cannot_know": CANNOT_KNOW})
        return DONE
    for each in found:
        _print(each)
    say("\n  ".join(["What the replay can't know:", *CANNOT_KNOW]))
    return DONE


# -- reading -------------------------------------------------------------------------------------------------------

#: For each coordination partition its first offset, and its end if that is known.
Bounds = dict[int, tuple[int, int | None]]


@contextmanager
def _opened(options: Options, path: str) -> Iterator[tuple[Bounds, Iterator[tuple[int, Entry]]]]:
    if path != "-" and Path(path).is_dir():
        source = history_of(path)(None, options.topic, options.timeout)
        bounds: Bounds = {cp: (first, source.ends[cp]) for cp, first in source.starts.items()}
        yield bounds, ((cp, entry) for cp, entries in source.read() for entry in entries)
        return
    with checked_dump(path) as (header, found):
        bounds = dict(enumerate(header.bounds or [(0, None)] * header.partitions))
        yield bounds, ((cp, (offset, stamp, value)) for cp, offset, stamp, value in found)


def _read(bounds: Bounds, records: Iterator[tuple[int, Entry]]) -> Intents:
    from kafka_marshal.observe.intents import Intents
    from rationalizer import codes

    fold = Intents(len(bounds))
    _refuse_missing({cp: (0, first) for cp, (first, _) in bounds.items()})
    for cp, entry in records:
        if entry[0] != (due := fold.worlds[cp].next_offset):
            _refuse_missing({cp: (due, entry[0])})
        if fold.take(cp, entry).code == codes.UPGRADE_REQUIRED:
            raise CommandError(
                f"partition {cp} of the log is at a level that this release does not know. Install a newer one."
            )
    ends = {cp: fold.worlds[cp].next_offset for cp in bounds}
    _refuse_missing({cp: (ends[cp], end or 0) for cp, (_, end) in bounds.items()})
    return fold


def _refuse_missing(ranges: dict[int, tuple[int, int]]) -> None:
    """Raise an error if one of these ranges (partition → first, end) is not empty."""
    for cp, (first, end) in ranges.items():
        if end > first:
            raise CommandError(
                f"offsets {first} to {end - 1} of partition {cp} of the log are missing (pruned, cut or compacted): "
                "what members did there is not known, so nothing is replayed. Make a whole one with kafka-marshal "
                "dump; what was pruned may be in an archive, whose folder what-if reads, too."
            )


def _chosen(fold: Intents, change: Change, name: str | None) -> list[GroupIntents]:
    """The groups that would differ."""
    groups = {each.name: each for each in fold.groups.values() if each.topics and each.members}
    if not groups:
        raise CommandError("no group in it ever asked for a partition: there is nothing to replay.")
    if name is not None and name not in groups:
        raise CommandError(no_group(name, groups))
    found = [groups[each] for each in sorted(groups) if name in (None, each)]
    clients = {each.client for group in found for each in group.members.values()}
    for unknown in sorted(set(change.without) - clients):
        raise CommandError(f"no member {unknown!r} wrote in it.{near(unknown, clients)}")
    for kind, settings in (("claimed", change.claimed), ("coordinated", change.coordinated)):
        for option in [option for option, value in settings.items() if value is not None]:
            if not any((group.assignments is None) == (kind == "claimed") for group in found):
                raise click.UsageError(f"{option} is of {kind} groups, and none of {', '.join(groups)} is one.")
    found = [x for x in found if change.of(x) or not {y.client for y in x.members.values()}.isdisjoint(change.without)]
    for group in found:
        if group.problem:
            say_warning(f"{group.name} is left out: {group.problem}, and that is not replayed.")
    found = [group for group in found if not group.problem]
    if not found:
        raise CommandError("no group is left that can be replayed.")
    return found


# -- replaying -----------------------------------------------------------------------------------------------------


def _replayed(
    group: GroupIntents, change: Change, cps: int, since: int | None, until: int | None, seed: int
) -> Replayed:
    from kafka_marshal.observe.intents import figures
    from kafka_marshal.testing.simulation.scripted import replay, script_of

    lives = group.lives()
    begin, end = max(since or 0, group.begin), min(until or group.end, group.end)
    if begin >= end:
        at = f"{time_text(group.begin)} to {time_text(group.end)}"
        raise CommandError(f"{group.name} has records from {at}: --since and --until leave nothing of it.")
    starts = max(group.begin, begin - WARM_UP_MS)
    both = {"as_it_was": lives, "what_if": change.lives(group, lives)}
    _refuse_if_too_long(group, [life for lived in both.values() for life in lived], cps, starts, end)
    columns = {"was": figures(group, lives, group.spans, begin, end)}
    for column, lived in both.items():
        script = script_of(group, lived, change.mode(group, as_it_was=lived is lives), starts, end, cps, seed)
        with progress(f"{group.name}, {COLUMNS[column]}") as show:
            columns[column] = figures(group, lived, replay(script, show).spans, begin, end)
    members = len({life.client for life in lives})
    return Replayed(group, change.text(group), begin, end, members, columns)


def _refuse_if_too_long(group: GroupIntents, lives: list[MemberLife], cps: int, begin: int, end: int) -> None:
    members, parts = len({life.client for life in lives}), 1 if group.assignments is not None else cps
    beats = sum(max(0.0, life.works(begin, end)) / group.beat_ms(life.interval_ms) for life in lives)
    if (reads := beats * parts * members) > MOST_READS:
        raise CommandError(
            f"{group.name} is too large to be replayed: {count(members, 'member')} over {span(end - begin)} would read "
            f"some {reads:,.0f} records, and what-if reads at most {MOST_READS:,} (about ten minutes). Take a "
            f"window of {span((end - begin) * MOST_READS / reads)} around the incident, with --since and --until."
        )


# -- printing ------------------------------------------------------------------------------------------------------


def _print(found: Replayed) -> None:
    group = found.group
    kind = "claimed" if group.assignments is None else f"coordinated, {group.strategy}"
    when = f"{time_text(found.since)} to {time_text(found.until)} ({span(found.until - found.since)})"
    say(f"{group.name} ({kind}), {count(found.members, 'member')}, {when}")
    say(f"What if {found.text}" + (f" ({count(group.evictions, 'eviction')} not replayed)" if group.evictions else ""))
    say()
    totals = found.totals()
    rows = [[name, *(text(totals[column]) for column in COLUMNS)] for name, text in MEASURES.items()]
    print_table([Column("all partitions"), *(Column(title, right=True) for title in COLUMNS.values())], rows)
    say()
    parts = [
        [
            f"{key[0]} {key[1]}",
            *(" | ".join(text(found.columns[c][key]) for c in COLUMNS) for text in MEASURES.values()),
        ]
        for key in found.columns["was"]
    ]
    print_table([Column("partition", fold=True, least=8), *(Column(name, right=True) for name in MEASURES)], parts)
    say()


def _json(found: Replayed) -> dict[str, object]:
    group = found.group
    return {
        "group": group.name,
        "kind": "claimed" if group.assignments is None else "coordinated",
        "what_if": found.text,
        "since": found.since,
        "until": found.until,
        "members": found.members,
        "evictions_not_replayed": group.evictions,
        "total": {column: each._asdict() for column, each in found.totals().items()},
        "partitions": [
            {"topic": topic, "partition": part}
            | {column: found.columns[column][topic, part]._asdict() for column in COLUMNS}
            for topic, part in found.columns["was"]
        ],
    }
