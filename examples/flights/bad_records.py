"""Messages that are no flights, put among the flights on purpose: each kind of trouble that a topic has in real life.

Which they are and where they stand follows from the rows alone, so that it can be said exactly what a dead-letter topic
must hold in the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from flights.data import encode

__all__ = ["EVERY", "TROUBLES", "Planted", "count", "messages", "planted"]

#: One is planted after each this many flights, the first after the FIRST.
EVERY: Final = 500
FIRST: Final = 100

#: (value, why it is no flight)
Planted = tuple[bytes | None, str]


def _with(**values: object) -> Callable[[Sequence[str]], bytes]:
    """The flight's message with some fields changed; a value of ... takes a field away."""

    def change(row: Sequence[str]) -> bytes:
        flight: dict[str, Any] = json.loads(encode(row)[1])
        flight |= values
        return json.dumps({name: value for name, value in flight.items() if value is not ...}).encode()

    return change


#: How each kind is made of a flight's row, and what is to be said of it.
_KINDS: Final[Sequence[tuple[Callable[[Sequence[str]], bytes | None], str]]] = (
    (lambda row: encode(row)[1][:-40], "no JSON object"),  # cut short
    (lambda row: ",".join(row).encode(), "no JSON object"),  # a line of the file, sent as it is
    (_with(carrier=...), "missing or impossible: carrier"),
    (_with(month="January"), "missing or impossible: month"),
    (lambda row: None, "no value"),  # a tombstone
    (_with(hour=99, dest="Zurich"), "missing or impossible: dest, hour"),
    (lambda row: encode(row)[1].replace(b'"origin":"', b'"origin":"\xfc'), "not UTF-8"),
    (_with(dep_delay="late"), "a field of another type"),
    (lambda row: b"[%s,%s]" % (encode(row)[1], encode(row)[1]), "no JSON object"),  # two at once
    (lambda row: b"", "no value"),
)

#: What can be said of a message that is no flight.
TROUBLES: Final = tuple(sorted({trouble for _, trouble in _KINDS}))


def _after(number: int, row: Sequence[str]) -> Planted | None:
    """What is planted after the flight of this number (counted from 1), if anything."""
    if number % EVERY != FIRST % EVERY:
        return None
    make, trouble = _KINDS[number // EVERY % len(_KINDS)]
    return make(row), trouble


def messages(rows: Iterable[Sequence[str]]) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Key and value of every message: the flights, and what is planted among them."""
    for number, row in enumerate(rows, 1):
        key, value = encode(row)
        yield key, value
        extra = _after(number, row)
        if extra is not None:
            yield key, extra[0]


def planted(rows: Iterable[Sequence[str]]) -> Counter[Planted]:
    """What ``messages`` plants among these rows, each with how often it is there."""
    return Counter(extra for number, row in enumerate(rows, 1) if (extra := _after(number, row)) is not None)


def count(rows: int) -> int:
    """How many are planted among this many rows."""
    return (rows + EVERY - FIRST) // EVERY
