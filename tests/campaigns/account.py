"""The plain account of each message, from the workers' lines and an operator's acts.

| line | meaning |
|---|---|
| ``b KIND PARTITION OFFSET TIME`` | a try of a message begins |
| ``h KIND PARTITION OFFSET TIME`` | it was handled, and the member could still prove at TIME that it has the message |
| ``f KIND PARTITION OFFSET TIME`` | it failed, and is not the last one |
| ``p KIND PARTITION OFFSET TIME`` | the last try failed, or the message was set aside by hand |
| ``x KIND PARTITION OFFSET TIME`` | it has no effect: the member could not prove that it has the message |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import NamedTuple

from tests.campaigns.frame import Life

#: Kinds of workers: the partition is held whole, by keys, or by batches. What is not shared by batches is in order.
WHOLE, BY_KEYS, SHARED = ("run", "loop", "group"), ("keys", "pieces"), ("batches", "shared")
ORDERED = (*WHOLE, *BY_KEYS)

#: (partition, offset)
Place = tuple[int, int]


class Lines:
    """What processes have written down: their errors, and how many were killed by a message."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.poisoned = self.unavailable = self.dropped = 0
        #: What the operator gave up.
        self.discarded: set[Place] = set()

    def read(self, life: Life) -> None:
        """Read one process's lines."""
        self.of_life(life, self._without_ends(life))

    def _without_ends(self, life: Life) -> Iterator[tuple[str, list[str]]]:
        for what, *rest in (line.split(" ") for line in life.out.read_text().splitlines() if line):
            if what == "e" and rest[0] == "KafkaUnavailableError:":  # it was started while no broker was there
                self.unavailable += 1
            elif what == "e":
                self.errors.append(f"{life.name}: {' '.join(rest)}")
            elif what == "n":
                self.poisoned += 1
            else:
                self.dropped += what == "x"
                yield what, rest

    def of_life(self, life: Life, lines: Iterable[tuple[str, list[str]]]) -> None:
        """What its lines say about messages."""
        raise NotImplementedError


class Try(NamedTuple):
    """One handling of one message by one process."""

    worker: str
    kind: str
    partition: int
    offset: int
    began: float
    #: Until when the process could prove that the message is its own; None: it could not, or was killed.
    ended: float | None
    #: The message needs nothing more: it was handled, or its last try failed.
    is_over: bool


class Account(Lines):
    """Judges what workers have written down that handle one message after the other."""

    def __init__(self, key_of: Callable[[int, int], object]) -> None:
        """key_of: partition, offset → its key."""
        super().__init__()
        self._key_of = key_of
        self.tries: list[Try] = []
        self.handled: Counter[Place] = Counter()

    def of_life(self, life: Life, lines: Iterable[tuple[str, list[str]]]) -> None:
        begun: dict[Place, tuple[str, float]] = {}
        for what, (kind, partition, offset, at) in lines:
            place = int(partition), int(offset)
            if what == "b":
                begun[place] = kind, float(at)
                continue
            self.handled[place] += what == "h"
            _, began = begun.pop(place)
            ended = None if what == "x" else float(at)
            self.tries.append(Try(life.out.stem, kind, *place, began, ended, what in "hp"))
        for place, (kind, began) in begun.items():
            self.tries.append(Try(life.out.stem, kind, *place, began, None, is_over=False))

    def violations(self, written: dict[int, int], odd: Collection[Place], *, is_once: bool) -> Iterator[str]:
        """What must not be. written: partition → messages.

        odd: messages of which the order is not known. is_once: no process died.
        """
        yield from self.errors
        tries: dict[int, list[Try]] = defaultdict(list)
        for each in sorted(self.tries, key=lambda each: each.began):
            tries[each.partition].append(each)
        for partition, count in sorted(written.items()):
            places = [(partition, offset) for offset in range(count)]
            lost = [x for x in places if not self.handled[x] and x not in self.discarded]
            if lost:
                yield f"[{partition}]: {len(lost)} lost, such as {lost[:5]}: done by the log, and handled by nobody"
            again = [x for x in places if self.handled[x] > 1]
            if again and is_once:
                yield f"[{partition}]: {len(again)} handled again though no worker died, such as {again[:5]}"
            yield from self._two_hands(tries[partition])
            yield from self._order(partition, count, tries[partition], odd)

    def _two_hands(self, tries: list[Try]) -> Iterator[str]:
        """A message begins while another process has it, its key or its partition, and can prove that afterwards."""
        live: list[Try] = []
        for each in tries:
            live = [other for other in live if other.ended is not None and other.ended > each.began]
            for other in live:
                if self._excludes(other, each):
                    yield f"in two hands: {other} and {each}"
            if each.ended is not None:
                live.append(each)

    def _excludes(self, one: Try, other: Try) -> bool:
        is_one_key = self._key_of(*one[2:4]) == self._key_of(*other[2:4])
        if one.worker == other.worker:
            return is_one_key and one.kind in ORDERED and other.kind in ORDERED
        if one.kind in SHARED and other.kind in SHARED:
            return one.offset == other.offset
        return is_one_key or not (one.kind in BY_KEYS and other.kind in BY_KEYS)

    def _order(self, partition: int, count: int, tries: list[Try], odd: Collection[Place]) -> Iterator[str]:
        """In order of each key by first handling: what begins first has all before it of its key over."""
        firsts: dict[int, Try] = {}
        over: dict[int, float] = {}
        for each in tries:
            firsts.setdefault(each.offset, each)
            if each.is_over and each.ended is not None:
                over[each.offset] = min(each.ended, over.get(each.offset, inf))
        latest: dict[object, tuple[float, int]] = {}
        for offset in range(count):
            key, first = self._key_of(partition, offset), firsts.get(offset)
            before, which = latest.get(key, (-inf, -1))
            if first is not None and first.kind in ORDERED and first.began < before:
                yield f"[{partition}] key {key}: {offset} began ({first}) before {which} was over ({before:.3f})"
            if (partition, offset) not in odd:
                latest[key] = max(latest.get(key, (-inf, -1)), (over.get(offset, inf), offset))
