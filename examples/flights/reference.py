"""The same result by a plain loop over the files: no Kafka, no Spark, no JSON, one process.

This is what the drivers' database must equal, row by row, whatever was killed meanwhile. It shares nothing with
``on_spark.py`` but the names of the measures, so that a mistake there can't hide here. (Plain workers run it on
their batches, too: there it is the sharing out, not the sums, that is held against one loop.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flights.data import COLUMNS, MISSING
from flights.tables import PlainTables

__all__ = ["Expected", "compute"]

#: carrier, origin, destination, hour
Route = tuple[str, str, str, int]

_PLACE: Final = {name: place for place, name in enumerate(COLUMNS)}


@dataclass(slots=True)
class _Sums:
    """One group's numbers, in the order of the database's columns."""

    carrier_name: str | None
    destination: str | None
    flights: int = 0
    cancelled: int = 0
    departures: int = 0
    departure_delay_sum: int = 0
    departure_delay_max: int | None = None
    arrivals: int = 0
    arrival_delay_sum: int = 0
    arrival_delay_max: int | None = None
    wet_departures: int = 0
    wet_departure_delay_sum: int = 0

    def values(self) -> tuple[str | int | None, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class Expected:
    """What the files say."""

    rows: int = 0
    #: Group → names and measures.
    groups: dict[Route, tuple[str | int | None, ...]] = field(default_factory=dict)
    #: Check → flights that fail it.
    quality: dict[str, int] = field(default_factory=dict)


def compute(rows: Iterable[Sequence[str]], tables: PlainTables) -> Expected:
    """Add up rows of the file (see data.read)."""
    sums: dict[Route, _Sums] = {}
    failed = dict.fromkeys(
        (
            "no tail number",
            "departed, no arrival",
            "delay contradicts times",
            "carrier unknown",
            "destination unknown",
            "no weather",
        ),
        0,
    )
    count = 0
    carrier_at, origin_at, dest_at, hour_at = (_PLACE[name] for name in ("carrier", "origin", "dest", "hour"))
    dep_time_at, sched_at, tail_at = _PLACE["dep_time"], _PLACE["sched_dep_time"], _PLACE["tailnum"]
    dep_at, arr_at, time_at = _PLACE["dep_delay"], _PLACE["arr_delay"], _PLACE["time_hour"]
    for row in rows:
        count += 1
        carrier, origin, dest = row[carrier_at], row[origin_at], row[dest_at]
        group = (carrier, origin, dest, int(row[hour_at]))
        found = sums.get(group)
        if found is None:
            found = sums[group] = _Sums(tables.airlines.get(carrier), tables.airports.get(dest))
        wet = tables.wet.get((origin, row[time_at]))
        found.flights += 1
        failed["no tail number"] += row[tail_at] == MISSING
        failed["carrier unknown"] += carrier not in tables.airlines
        failed["destination unknown"] += dest not in tables.airports
        failed["no weather"] += wet is None
        departed, delay, arrival = row[dep_time_at] != MISSING, row[dep_at], row[arr_at]
        if not departed:
            found.cancelled += 1
        else:
            failed["departed, no arrival"] += arrival == MISSING
            failed["delay contradicts times"] += delay == MISSING or not _agree(row[sched_at], row[dep_time_at], delay)
        if delay != MISSING:
            minutes = int(delay)
            found.departures += 1
            found.departure_delay_sum += minutes
            found.departure_delay_max = _larger(found.departure_delay_max, minutes)
            if wet:
                found.wet_departures += 1
                found.wet_departure_delay_sum += minutes
        if arrival != MISSING:
            minutes = int(arrival)
            found.arrivals += 1
            found.arrival_delay_sum += minutes
            found.arrival_delay_max = _larger(found.arrival_delay_max, minutes)
    return Expected(count, {group: found.values() for group, found in sums.items()}, failed)


def _agree(planned: str, real: str, delay: str) -> bool:
    """Whether planned + delay is the real time of day (both hhmm, on whatever day)."""
    hours, minutes = divmod(int(planned), 100)
    due = (60 * hours + minutes + int(delay)) % 1440
    return due == (60 * (int(real) // 100) + int(real) % 100) % 1440


def _larger(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)
