"""The fourth step: a page that explains itself, opens without a network, and holds the picture."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flights.errors import DemoError
from flights.findings import Findings
from flights.timeline import draw
from kafka_marshal.observe.report import ReportPage

__all__ = ["CarrierLine", "Section", "write_report"]

_CAPTION: Final = (
    "Every bar is one {}'s time with one partition and one epoch; its name stands in it. All of it is concluded from "
    "the coordination log by replaying it; only the moments of the kill and of the addition are the demo's own, by "
    "this machine's clock{}."
)

_WATCHED: Final = ", and that its watchdog released what the dead one held: in the log that looks like its own word"

_WATCHDOG: Final = (
    "Each {} had a watchdog: a small process that releases what it held when it dies, in its name. What no watchdog "
    "releases"
)

_SILENCE: Final = (
    "{} falls free when its holder was silent for more than 2 × {:,} ms, by the broker's clock. Times are counted from "
    "the first claim."
)


@dataclass(frozen=True, slots=True)
class CarrierLine:
    """What the workers found out about one carrier."""

    carrier: str
    flights: int
    cancelled: int
    #: Minutes; None: no flight arrived.
    mean_delay: float | None
    worst_delay: int | None


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    #: Places of the columns with numbers.
    numbers: frozenset[int] = frozenset()
    #: A sentence above it.
    note: str = ""
    #: (text, address relative to the page) below it.
    link: tuple[str, str] | None = None


def write_report(
    findings: Findings,
    carriers: Sequence[CarrierLine],
    folder: Path,
    sections: Sequence[Section],
    commands: Sequence[tuple[str, str]],
) -> tuple[Path, Path]:
    """Write report.html and ownership.png into the folder; their paths.

    sections: more tables, before the carriers'. commands: to see for oneself, each with what it shows.

    Raises DemoError.
    """
    story = findings.story
    page, picture = folder / "report.html", folder / "ownership.png"
    try:
        draw(
            findings.history,
            findings.clients,
            findings.marks(),
            findings.title(),
            findings.subtitle(),
            picture,
            story.closing_ms,
        )
        _page(findings, carriers, picture.read_bytes(), sections, commands).write(page)
    except OSError as error:
        raise DemoError(
            f"{error.filename or folder}: {error.strerror}. The comparison is done ({findings.verdict_text()}), its "
            "report could not be written. Make room, or name another folder with --dir."
        ) from error
    return page, picture


def _page(
    findings: Findings,
    carriers: Sequence[CarrierLine],
    picture: bytes,
    sections: Sequence[Section],
    commands: Sequence[tuple[str, str]],
) -> ReportPage:
    noun = findings.noun
    title = f"kafka-marshal demo: {'equal' if findings.equal else 'not equal'}"
    report = ReportPage(title, findings.verdict_text(), good=findings.equal)
    report.bullets(findings.differences(50))
    report.paragraph(" ".join(findings.sentences()))
    image = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    caption = _CAPTION.format(noun, _WATCHED if findings.watchdog else "")
    report.picture(image, _alternative(findings), caption)
    columns = ("partition", "from", "to", "when", "freed by", "after its last beat", "after the kill")
    report.heading(f"Taken over from a {'dead or silent' if findings.watchdog else 'silent'} {noun}")
    _table(report, columns, findings.rows_of(findings.takeovers()), {3, 5, 6})
    freed = _WATCHDOG.format(noun) if findings.watchdog else f"No {noun} had a watchdog. A lease"
    report.note(_SILENCE.format(freed, findings.heartbeat_interval_ms))
    for section in sections:
        _section(report, section)
    report.heading(f"What the {noun}s found out")
    _carriers(report, carriers)
    report.heading(f"Handed over by a living {noun}")
    handed = findings.handovers()
    rows = [(*row[:4], f"{each.vacant_ms:,} ms") for row, each in zip(findings.rows_of(handed), handed, strict=True)]
    _table(report, (*columns[:4], "had nobody for"), rows, {3, 4})
    report.heading("See for yourself")
    report.paragraph(
        f"Beside this page are the coordination log as it was at the end, the {noun}s' database, and the {noun}s' logs:"
    )
    width = max(len(command) for command, _ in commands)
    report.commands(f"{command:<{width}}  # {shows}" for command, shows in commands)
    return report


def _alternative(findings: Findings) -> str:
    """The picture in words, for readers that can't see it."""
    rows = [f"{row[0]} from {row[1]} to {row[2]} at {row[3]}" for row in findings.rows_of(findings.takeovers())]
    return f"{findings.title()}. {'; '.join(rows)}."


def _carriers(report: ReportPage, carriers: Sequence[CarrierLine]) -> None:
    rows = [
        (
            line.carrier,
            f"{line.flights:,}",
            f"{line.cancelled:,}",
            "-" if line.mean_delay is None else f"{line.mean_delay:.1f} min",
            "-" if line.worst_delay is None else f"{line.worst_delay:,} min",
        )
        for line in carriers
    ]
    columns = ("carrier", "flights", "cancelled", "arrival delay, mean", "arrival delay, worst")
    _table(report, columns, rows, {1, 2, 3, 4}, empty="No flights.")


def _section(report: ReportPage, section: Section) -> None:
    report.heading(section.title)
    if section.note:
        report.paragraph(section.note)
    if section.rows:
        report.table(section.columns, section.rows, section.numbers)
    if section.link is not None:
        report.link(*section.link)


def _table(
    report: ReportPage, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int], empty: str = "None."
) -> None:
    if rows:
        report.table(columns, rows, numbers)
    else:
        report.paragraph(empty)
