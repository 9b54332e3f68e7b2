"""Run the race."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from confluent_kafka import KafkaException

import benchmarks.race
from benchmarks.race.contestants import Contestant
from benchmarks.race.events.balance import Balance
from benchmarks.race.events.base import Event
from benchmarks.race.events.cost import Cost
from benchmarks.race.events.crash import Killed, Stopped
from benchmarks.race.events.handover import Handover
from benchmarks.race.events.logs import BigLog
from benchmarks.race.events.start import Start
from benchmarks.race.events.throughput import Throughput
from benchmarks.race.grounds import HEAP, Brokers
from benchmarks.race.hosts import RaceError
from benchmarks.race.plot import draw
from benchmarks.race.results import Found, closing_line, earlier, measured_here, table, to_json, write
from kafka_marshal.errors import MarshalError

EVENTS: Mapping[str, Callable[[], Event]] = {
    "start": Start,
    "handover": Handover,
    "kill": Killed,
    "stop": Stopped,
    "balance": Balance,
    "throughput": Throughput,
    "cost": Cost,
    "logs": BigLog,
}

#: The same, small: a minute to check that the race runs. Its figures mean nothing.
QUICK: Mapping[str, Callable[[], Event]] = {
    "start": lambda: Start(history=50),
    "handover": Handover,
    "kill": Killed,
    "balance": lambda: Balance(workers=2, partitions=4),
    "throughput": lambda: Throughput(records=20_000),
    "cost": lambda: Cost(window_s=1.0),
    "logs": lambda: BigLog(records=5_000),
}

#: The contestants of a quick run, without those that wait for seconds.
QUICK_NAMES = ("kafka-marshal", "classic, delay 0, heartbeat 0.1 s", "bare", "apply_many", "1 ÷")


def run(
    events: Sequence[Event],
    rounds: int,
    wanted: Callable[[Contestant], bool],
    keep: Callable[[list[Found]], None],
    quick: bool,
) -> list[Found]:
    """Run all events, contestants taking turns in every round; prints progress. keep: called after each event."""
    brokers = Brokers()
    found = [Found(event) for event in events]
    try:
        for each in found:
            began = monotonic()
            each.measured = measured_here(rounds, quick, os.getloadavg()[0])
            for number in range(rounds):
                for contestant in filter(wanted, each.event.contestants):
                    tell(f"{each.event.name}, round {number + 1} of {rounds}: {contestant.name}")
                    _round(brokers, each, contestant)
            tell("")
            print(f"{table(each)}\n  ({monotonic() - began:.0f} s)\n", flush=True)
            keep([x for x in found if x.samples])
    finally:
        brokers.close()
    return found


def _round(brokers: Brokers, found: Found, contestant: Contestant) -> None:
    try:
        found.add(contestant, found.event.round(brokers.only(contestant.broker), contestant))
    except (RaceError, MarshalError, KafkaException) as error:
        found.failures.append((contestant.name, str(error)))


def tell(what: str) -> None:
    """Print progress on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a contestant gave no figure at all in an event. Missed targets are only printed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race",
        description=benchmarks.race.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default=",".join(EVENTS), help="events, with commas (all: %(default)s)")
    parser.add_argument("--contestants", default="", help="only those whose name begins so; with semicolons")
    parser.add_argument("--quick", action="store_true", help="one small round, to see that the race itself runs")
    parser.add_argument("--json", help="write everything to this file; events in it that are not run now stay")
    parser.add_argument("--table", help="write the tables to this file")
    parser.add_argument("--plot", help="write the picture to this file")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in EVENTS]:
        parser.error(f"no such event: {', '.join(unknown)}")
    rounds = 1 if options.quick else options.rounds
    beginnings = tuple(filter(None, options.contestants.split(";")))

    def wanted(contestant: Contestant) -> bool:
        if options.quick and not contestant.name.startswith(QUICK_NAMES):
            return False
        return not beginnings or contestant.name.startswith(beginnings)

    kinds = QUICK if options.quick else EVENTS
    try:
        before = earlier(options.json, EVENTS) if options.json else {}
    except ValueError as error:
        parser.error(str(error))

    def keep(found: list[Found]) -> None:
        by_name = {**before, **{x.event.name: x for x in found}}
        everything = [by_name[name] for name in EVENTS if name in by_name]
        if options.json:
            write(options.json, to_json(everything, {"a broker's heap": " ".join(HEAP)}))
        if options.table:
            write(options.table, "\n\n".join(map(table, everything)))
        if options.plot:
            draw(everything, options.plot)

    found = run([kinds[name]() for name in names if name in kinds], rounds, wanted, keep, options.quick)
    print(closing_line(found))
    return 1 if any(each.without_figure or not each.samples for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
