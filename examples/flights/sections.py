"""What the report's tables show of the database: carriers, routes, hours, and what Spark's drivers found besides."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flights.check import ask
from flights.findings import Audited, Findings
from flights.report import CarrierLine, Section

__all__ = ["carriers", "delay_sections", "spark_sections"]

#: Routes with fewer flights than this say little about themselves.
_ENOUGH: Final = 30

_CARRIERS: Final = """
    SELECT carrier || ' ' || coalesce(carrier_name, '(unknown)'), sum(flights), sum(cancelled),
           1.0 * sum(arrival_delay_sum) / nullif(sum(arrivals), 0) AS mean, max(arrival_delay_max)
    FROM delays GROUP BY carrier ORDER BY mean DESC, carrier
"""
_ROUTES: Final = f"""
    SELECT origin || ' to ' || coalesce(max(destination), dest), sum(flights),
           1.0 * sum(arrival_delay_sum) / sum(arrivals) AS mean
    FROM delays GROUP BY origin, dest HAVING sum(arrivals) >= {_ENOUGH}
    ORDER BY mean DESC, origin, dest LIMIT 10
"""  # noqa: S608 - a constant
_HOURS: Final = """
    SELECT hour, sum(flights), 1.0 * sum(departure_delay_sum) / nullif(sum(departures), 0),
           1.0 * sum(wet_departure_delay_sum) / nullif(sum(wet_departures), 0)
    FROM delays GROUP BY hour ORDER BY hour
"""


def carriers(database: Path) -> list[CarrierLine]:
    """Each carrier's line, the latest first. Raises SinkError."""
    return [CarrierLine(*line) for line in ask(database, _CARRIERS)]


def delay_sections(database: Path) -> list[Section]:
    """The latest routes, and the hours of the day. Raises SinkError."""
    return [
        Section(
            "The routes that were latest",
            ("route", "flights", "arrival delay, mean"),
            [(route, f"{flights:,}", _minutes(mean)) for route, flights, mean in ask(database, _ROUTES)],
            frozenset({1, 2}),
        ),
        Section(
            "By hour of the planned departure",
            ("hour", "flights", "departure delay, mean", "when it rained"),
            [
                (f"{hour}:00", f"{flights:,}", _minutes(mean), _minutes(wet))
                for hour, flights, mean, wet in ask(database, _HOURS)
            ],
            frozenset({0, 1, 2, 3}),
        ),
    ]


def spark_sections(findings: Findings, audit: Audited) -> list[Section]:
    """The audit, the dead letters and the checks."""
    troubles = [(trouble, f"{count:,}") for trouble, count in findings.letters.troubles.most_common()]
    note = "Each went to the dead-letter topic with whence it came, and all of them were found there."
    return [
        Section(
            "Audit of the coordination log",
            (),
            (),
            note=f"{audit.verdict}, replayed by Spark out of the topic, each with its outcome.",
            link=("The audit's own report", f"{audit.page}/report.html"),
        ),
        Section(
            "Messages that are no flights",
            ("what is wrong", "messages"),
            troubles,
            frozenset({1}),
            note if findings.verdict.equal else "",
        ),
        Section(
            "Flights that fail a check",
            ("check", "flights"),
            [(check, f"{flights:,}") for check, flights in findings.quality],
            frozenset({1}),
            "They count all the same.",
        ),
    ]


def _minutes(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.1f} min"
