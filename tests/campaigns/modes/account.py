"""The plain account of each message, from the workers' lines and the operator's acts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from tests.campaigns.crew import Life

__all__ = ["ORDERED", "SHARED", "WHOLE", "Account", "Place", "Try"]

#: Kinds of workers: the partition is held whole, by keys, or by batches. What is not shared by batches is in order.
WHOLE, BY_KEYS, SHARED = ("run", "loop", "group"), ("keys", "pieces"), ("batches", "shared")
ORDERED = (*WHOLE, *BY_KEYS)

#: (partition, offset)
Place = tuple[int, int]


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


class Account:
    """Judges what the workers have written down."""

    def __init__(self, key_of: Callable[[int, int], int]) -> None:
        """key_of: partition, offset → its key."""
        self._key_of = key_of
        self.tries: list[Try] = []
        self.handled: Counter[Place] = Counter()
        self.errors: list[str] = []
        self.poisoned = self.dropped = self.unavailable = 0
        #: What the operator gave up.
        self.discarded: set[Place] = set()

    def read(self, life: Life) -> None:
        """Read one process's lines."""
        begun: dict[Place, tuple[str, float]] = {}
        for what, *rest in (line.split(" ") for line in life.out.read_text().splitlines() if line):
            if what == "e" and rest[0] == "KafkaUnavailableError:":  # it was started while no broker was there
                self.unavailable += 1
            elif what == "e":
                self.errors.append(f"{life.name}: {' '.join(rest)}")
            elif what == "n":
                self.poisoned += 1
            else:
                kind, place, at = rest[0], (int(rest[1]), int(rest[2])), float(rest[3])
                if what == "b":
                    begun[place] = kind, at
                    continue
                self.dropped += what == "x"
                self.handled[place] += what == "h"
                _, began = begun.pop(place)
                self.tries.append(Try(life.out.stem, kind, *place, began, None if what == "x" else at, what in "hp"))
        for place, (kind, began) in begun.items():
            self.tries.append(Try(life.out.stem, kind, *place, began, None, is_over=False))

    def violations(self, written: dict[int, int], poison: set[Place], *, is_gentle: bool) -> Iterator[str]:
        """What must not be. written: partition → messages; is_gentle: no worker was killed or stopped."""
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
            if again and is_gentle:
                yield f"[{partition}]: {len(again)} handled again though no worker died, such as {again[:5]}"
            yield from self._two_hands(tries[partition])
            yield from self._order(partition, count, tries[partition], poison)

    def _two_hands(self, tries: list[Try]) -> Iterator[str]:
        """A message begins while another process has it, its key or its partition, and can prove that afterwards."""
        live: list[Try] = []
        for each in tries:
            live = [other for other in live if other.ended is not None and other.ended > each.began]
            for other in live:
                if other.worker != each.worker and self._excludes(other, each):
                    yield f"in two hands: {other} and {each}"
            if each.ended is not None:
                live.append(each)

    def _excludes(self, one: Try, other: Try) -> bool:
        if one.kind in SHARED and other.kind in SHARED:
            return one.offset == other.offset
        if one.kind in BY_KEYS and other.kind in BY_KEYS:
            return self._key_of(*one[2:4]) == self._key_of(*other[2:4])
        return True

    def _order(self, partition: int, count: int, tries: list[Try], poison: set[Place]) -> Iterator[str]:
        """In order of each key by first handling: what begins first has all before it of its key over."""
        firsts: dict[int, Try] = {}
        over: dict[int, float] = {}
        for each in tries:
            firsts.setdefault(each.offset, each)
            if each.is_over and each.ended is not None:
                over[each.offset] = min(each.ended, over.get(each.offset, inf))
        latest: dict[int, tuple[float, int]] = {}
        for offset in range(count):
            key, first = self._key_of(partition, offset), firsts.get(offset)
            before, which = latest.get(key, (-inf, -1))
            if first is not None and first.kind in ORDERED and first.began < before:
                yield f"[{partition}] key {key}: {offset} began ({first}) before {which} was over ({before:.3f})"
            if (partition, offset) not in poison:
                latest[key] = max(latest.get(key, (-inf, -1)), (over.get(offset, inf), offset))
