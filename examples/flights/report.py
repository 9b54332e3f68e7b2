"""The fourth step: a page that explains itself, opens without a network, and holds the picture."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from flights.errors import DemoError
from flights.findings import Findings
from flights.timeline import draw

__all__ = ["CarrierLine", "Section", "write_report"]

_STYLE: Final = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 66rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; line-height: 1.3; padding: .8rem 1rem; border-left: .5rem solid; border-radius: .2rem }
h1.equal { background: #e6f4ef; border-color: #009e73 }
h1.differs { background: #fbe9e0; border-color: #d55e00 }
figure { margin: 0 }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
img { width: 100%; height: auto; border: 1px solid #e2e2e2; border-radius: .3rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid #e2e2e2 }
th { font-weight: 600; border-color: #999 }
td.number, th.number { text-align: right }
pre { background: #f5f5f5; padding: .8rem 1rem; border-radius: .3rem; overflow-x: auto }
figcaption, .note { color: #555; font-size: .93rem }
"""

_CAPTION: Final = """<figcaption>Every bar is one {}'s time with one partition and one epoch; its name stands in it.
All of it is concluded from the coordination log by replaying it; only the moments of the kill and of the addition are
the demo's own, by this machine's clock{}.</figcaption>"""

_WATCHED: Final = """, and that its watchdog released what the dead one held: in the log that looks like its own word"""

_WATCHDOG: Final = """Each {} had a watchdog: a small process that releases what it held when it dies, in its name. What
no watchdog releases"""

_SILENCE: Final = """<p class="note">{} falls free when its holder was silent for more than 2 × {:,} ms, by the broker's
clock. Times are counted from the first claim.</p>"""


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
        text = _page(findings, carriers, picture.read_bytes(), sections, commands)
        page.write_text(text, encoding="utf-8")
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
) -> str:
    equal, noun = findings.equal, findings.noun
    caption = _CAPTION.format(noun, _WATCHED if findings.watchdog else "")
    image = base64.b64encode(picture).decode()
    columns = ("partition", "from", "to", "when", "freed by", "after its last beat", "after the kill")
    taken = findings.rows_of(findings.takeovers())
    handed = findings.handovers()
    handed_rows = [
        (*row[:4], f"{each.vacant_ms:,} ms") for row, each in zip(findings.rows_of(handed), handed, strict=True)
    ]
    parts = [
        f'<h1 class="{"equal" if equal else "differs"}">{escape(findings.verdict_text())}</h1>',
        _list(findings.differences(50)),
        "<p>" + " ".join(escape(text) for text in findings.sentences()) + "</p>",
        f'<figure><img src="data:image/png;base64,{image}" alt="{escape(_alternative(findings))}">{caption}</figure>',
        f"<h2>Taken over from a {'dead or silent' if findings.watchdog else 'silent'} {noun}</h2>",
        _table(columns, taken, {3, 5, 6}) if taken else "<p>None.</p>",
        _SILENCE.format(
            _WATCHDOG.format(noun) if findings.watchdog else f"No {noun} had a watchdog. A lease",
            findings.heartbeat_interval_ms,
        ),
        *map(_section, sections),
        f"<h2>What the {noun}s found out</h2>",
        _carriers(carriers),
        f"<h2>Handed over by a living {noun}</h2>",
        _table((*columns[:4], "had nobody for"), handed_rows, {3, 4}) if handed_rows else "<p>None.</p>",
        _commands(noun, commands),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kafka-marshal demo: {'equal' if equal else 'not equal'}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _alternative(findings: Findings) -> str:
    """The picture for those who can't see it."""
    rows = [f"{row[0]} from {row[1]} to {row[2]} at {row[3]}" for row in findings.rows_of(findings.takeovers())]
    return f"{findings.title()}. {'; '.join(rows)}."


def _carriers(carriers: Sequence[CarrierLine]) -> str:
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
    return _table(columns, rows, {1, 2, 3, 4}) if rows else "<p>No flights.</p>"


def _section(section: Section) -> str:
    link = section.link
    parts = [
        f"<h2>{escape(section.title)}</h2>",
        f"<p>{escape(section.note)}</p>" if section.note else "",
        _table(section.columns, section.rows, set(section.numbers)) if section.rows else "",
        f'<p><a href="{escape(link[1])}">{escape(link[0])}</a></p>' if link is not None else "",
    ]
    return "\n".join(part for part in parts if part)


def _commands(noun: str, commands: Sequence[tuple[str, str]]) -> str:
    width = max(len(command) for command, _ in commands)
    lines = "\n".join(f"{escape(command):<{width}}  # {escape(shows)}" for command, shows in commands)
    return (
        "<h2>See for yourself</h2>\n<p>Beside this page are the coordination log as it was at the end, the "
        f"{noun}s' database, and the {noun}s' logs:</p>\n<pre>{lines}</pre>"
    )


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    def cells(kind: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=number' if place in numbers else ''}>{escape(value)}</{kind}>"
            for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"
