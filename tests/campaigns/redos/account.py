"""The exact account of rows: each is written once, and once more for each redo of its message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kafka_marshal.admin import RedoPlan
from tests.campaigns.account import Account, Place


def places_of(plan: RedoPlan) -> frozenset[Place]:
    """The messages that it names."""
    return frozenset((partition, offset) for (_, partition), found in plan.offsets.items() for offset in found)


class Asked(NamedTuple):
    """What the operator has asked for: the numbers of a message are its offset, or its time (ms)."""

    partitions: frozenset[int]
    #: From the first up to the second, not included.
    numbers: tuple[float, float]
    by_time: bool = False
    keys: frozenset[bytes] | None = None

    def names(self, place: Place, key: bytes, time_ms: int) -> bool:
        """Whether a message is one of them."""
        first, end = self.numbers
        number = time_ms if self.by_time else place[1]
        return place[0] in self.partitions and first <= number < end and (self.keys is None or key in self.keys)


@dataclass(slots=True)
class Redo:
    """A plan, and how far it is."""

    file: Path
    asked: Asked
    #: What the sink was rewound for.
    places: frozenset[Place]
    #: What it found there is, whether it opens it or not.
    found: int
    #: When it was planned (monotonic, s).
    since: float
    #: At which steps its operators are killed, one after the other; and whether it is undone after them.
    deaths: list[int]
    is_to_be_undone: bool = False
    is_rewound: bool = False
    #: All of it is opened, or as much as is to be undone.
    is_opened: bool = False
    #: What the undo took back, or found set aside; None: an answer was lost.
    taken_back: set[Place] | None = field(default_factory=set)
    is_over: bool = False

    @property
    def plan(self) -> RedoPlan:
        """As its file has it."""
        return RedoPlan.read(self.file)

    def opened(self, *, surely: bool) -> set[Place]:
        """What its records opened; surely: those of which the file has the answer."""
        return {
            (record.partition, offset)
            for record in self.plan.records
            if record.offset is not None or not surely
            for span in record.spans
            for offset in range(span.first, span.last + 1)
        }


#: A message's key; and its time (ms).
KeyOf = Callable[[int, int], bytes]
Times = Mapping[Place, int]


class RedosAccount(Account):
    """Also of rows."""

    def __init__(self, key_of: KeyOf) -> None:
        super().__init__(key_of)
        self._key = key_of
        self.redos: list[Redo] = []
        #: How often a row was written more than once, as far as it is known.
        self.more: Counter[Place] = Counter()
        #: What was set aside: the order in which it was handled is not known.
        self.aside: set[Place] = set()

    def finished(self, redo: Redo) -> None:
        """All that a plan names was opened, and not taken back: each row will be written once more."""
        redo.is_over = True
        self.more.update(redo.places)

    def undone(self, redo: Redo, rows: Mapping[Place, int], *, stale_too: bool) -> Iterator[str]:
        """A redo was undone, in the log first, and then in the sink, which writes nothing more by it.

        rows: how often each was written. stale_too: a batch from before may have written what was not opened.
        """
        redo.is_over = True
        sure, perhaps = redo.opened(surely=True), redo.opened(surely=False)
        for place in sorted(redo.places):
            more = rows.get(place, 0) - 1 - self.more[place]
            if more not in (0, 1):
                yield f"{place} was written {more} times more by a redo that was undone"
            elif more == 0 and place in sure and redo.taken_back is not None and place not in redo.taken_back:
                yield f"{place} was opened, and not taken back by the undo: its row was not written again"
            elif more == 1 and place not in perhaps and not stale_too:
                yield f"{place} was not opened, and its row was written again"
            self.more[place] += more

    def in_the_end(
        self, written: dict[int, int], rows: Mapping[Place, int], opened: Mapping[Place, int], times: Times
    ) -> Iterator[str]:
        """What must not be.

        written: partition → messages. rows: how often each was written. opened: how often the log opened what was done.
        times: of each message.
        """
        everything = {(partition, offset) for partition, end in written.items() for offset in range(end)}
        for place in sorted(everything | rows.keys()):
            wanted = 1 + self.more[place] if place in everything else 0
            if rows.get(place, 0) != wanted:
                yield f"the row of {place} was written {rows.get(place, 0)} times, not {wanted}: {self.story(place)}"
        yield from self._opened(opened)
        yield from self._asked(everything, times)
        last: dict[Place, float] = {}
        for each in self.tries:
            if each.is_over and each.ended is not None:
                place = each.partition, each.offset
                last[place] = max(last.get(place, 0.0), each.began)
        for redo in self.redos:
            for place in sorted(redo.places) if not redo.is_to_be_undone else ():
                if last.get(place, 0.0) < redo.since:
                    yield f"{place} was opened again at {redo.since:.3f}, and not handled since: {self.story(place)}"
        yield from self.violations(written, self.aside, is_once=False)

    def _opened(self, opened: Mapping[Place, int]) -> Iterator[str]:
        """Each that was named, by each redo, once; and no other."""
        least, most = Counter[Place](), Counter[Place]()
        for redo in self.redos:
            least.update(redo.opened(surely=True) if redo.is_to_be_undone else redo.places)
            most.update(redo.opened(surely=False) if redo.is_to_be_undone else redo.places)
        for place in sorted(opened.keys() | least.keys()):
            if not least[place] <= opened.get(place, 0) <= most[place]:
                yield f"the log opened {place} {opened.get(place, 0)} times, not {least[place]} to {most[place]}"

    def _asked(self, everything: set[Place], times: Times) -> Iterator[str]:
        """A plan names what was asked for, and nothing else."""
        for redo in self.redos:
            asked = {place for place in everything if redo.asked.names(place, self._key(*place), times[place])}
            if others := redo.places - asked:
                yield f"{redo.asked}: the plan names {sorted(others)[:5]}, too"
            if redo.found > len(asked) or (redo.found < len(asked) and not redo.asked.by_time):  # some came late
                yield f"{redo.asked}: the plan has found {redo.found}, and {len(asked)} are there"

    def story(self, place: Place) -> str:
        """Of a message, for people."""
        redos = [f"{x.file.stem}{' (undone)' * x.is_to_be_undone}" for x in self.redos if place in x.places]
        return f"{self.handled[place]} times handled, in {', '.join(redos) or 'no redo'}"
