"""The drivers' result, held against the files: every number, every check, every dead letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kafka_marshal.demo.bad_records import Planted
from kafka_marshal.demo.check import Difference, Value, Verdict, account, ask, differences
from kafka_marshal.demo.dead_letters import Letters
from kafka_marshal.demo.ledger import GROUP, NAMES, NUMBERS
from kafka_marshal.demo.reference import Expected

__all__ = ["check_drivers"]

#: What there is to be shown of a message that differs.
_SHOWN = 60


def check_drivers(
    database: Path, wanted: Expected, planted: Counter[Planted], letters: Letters, ends: Mapping[int, int]
) -> Verdict:
    """Compare. ends: partition → the offset after its last message. Raises SinkError."""
    width = len(GROUP)
    groups = {tuple(row[:width]): tuple(row[width:]) for row in ask(database, "SELECT * FROM delays")}
    found = differences((*NAMES, *NUMBERS), groups, {tuple(group): values for group, values in wanted.groups.items()})
    quality = dict(ask(database, "SELECT failed, flights FROM quality"))
    found += _counts("quality", quality, wanted.quality)
    troubles = Counter[str]()
    for (_, trouble), count in planted.items():
        troubles[trouble] += count
    found += _counts("dead letters", dict(ask(database, "SELECT trouble, messages FROM dead_letters")), troubles)
    found += _letters(letters, planted)
    lost, double = account(database, ends)
    flights = sum(int(values[len(NAMES)] or 0) for values in groups.values())
    return Verdict(
        rows=wanted.rows,
        groups=len(wanted.groups),
        rows_in_database=flights,
        differences=tuple(found),
        lost=tuple(lost),
        double=tuple(double),
    )


def _counts(what: str, found: Mapping[str, int], wanted: Mapping[str, int]) -> list[Difference]:
    """Counts by name; none there is 0."""
    names: Sequence[str] = sorted(found.keys() | wanted.keys())
    pairs = ((name, found.get(name, 0), wanted.get(name, 0)) for name in names)
    return [Difference((what,), name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


def _letters(letters: Letters, planted: Counter[Planted]) -> list[Difference]:
    found: list[Difference] = []
    both: list[tuple[Counter[Planted], bool]] = [(letters.missing(planted), False), (letters.unexpected(planted), True)]
    for letters_of, is_there in both:
        for (value, trouble), count in letters_of.items():
            shown: Value = "no value" if value is None else repr(value[:_SHOWN])
            sides: tuple[Value, Value] = (count, 0) if is_there else (0, count)
            found.append(Difference(("dead-letter topic", trouble), str(shown), *sides))
    return found
