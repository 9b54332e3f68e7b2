"""The plain account of one group's messages, some of which are set aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tests.campaigns.account import Account, Place
from tests.campaigns.frame import Life
from tests.campaigns.parks.worker import BAD
from tests.campaigns.process import POISON

#: Tries of a message that begin and do not end, until it is set aside as CRASHED.
DEATHS = 5


class Written(NamedTuple):
    """A message."""

    key: bytes
    value: bytes


class ParksAccount(Account):
    """Also judges what is set aside."""

    def __init__(self, message: Callable[[int, int], Written]) -> None:
        """message: of a partition at an offset."""
        super().__init__(lambda partition, offset: message(partition, offset).key)
        self._message = message
        #: What the operator has given up for sure (discarded: may have), and set aside by hand.
        self.given_up: set[Place] = set()
        self.by_hand: set[Place] = set()
        #: What was opened again, and since when (monotonic, s).
        self.redone: list[tuple[Place, float]] = []
        #: Processes that were asked, and what their health said last.
        self.health: dict[str, tuple[bool, str]] = {}

    def read_again(self, lives: Iterable[Life]) -> None:
        """Read all lines of these processes, from the beginning."""
        self.errors, self.tries, self.health = [], [], {}
        self.poisoned = self.unavailable = self.dropped = 0
        self.handled.clear()
        for life in lives:
            self.read(life)
        self._begun = Counter(each[2:4] for each in self.tries)

    def of_life(self, life: Life, lines: Iterable[tuple[str, list[str]]]) -> None:
        """What its health says beside its tries."""
        tries = []
        for what, rest in lines:
            if what == "s":
                self.health[life.out.stem] = rest[0] == "1", " ".join(rest[1:])
            else:
                tries.append((what, rest))
        super().of_life(life, tries)

    def parks(self, written: set[Place], parked: dict[Place, str]) -> Iterator[str]:
        """What is wrong when all is done but what is set aside."""
        must = {place for place in written if self._message(*place).value in (BAD, POISON)}
        for place in sorted(parked):
            story, reason = self._story(place), parked[place]
            is_killer = self._message(*place).value == POISON
            if place in self.given_up:
                yield f"{place} is set aside ({reason}), and was discarded"
            if place in self.discarded:
                continue  # the answer was lost, and nothing was done
            if place not in must and place not in self.by_hand and not self._died(place):
                yield f"{place} is set aside ({reason}), and can be handled: {story}"
            if reason == "CRASHED" and not is_killer and not self._died(place):
                yield f"{place} is set aside as CRASHED, and kills no process: {story}"
            if is_killer and reason != "CRASHED" and place not in self.by_hand:
                yield f"{place} kills its process, and is set aside as {reason}"
            if self.handled[place] and place not in self.by_hand:
                yield f"{place} is set aside ({reason}), and was handled: {story}"
        for place in sorted(must - parked.keys() - self.discarded):
            yield f"{place} can't be handled, and is not set aside: {self._story(place)}"
        for place in sorted(written - parked.keys() - self.discarded):
            if not self.handled[place]:
                yield f"{place} is done by the log, and no worker handled it: {self._story(place)}"

    def _story(self, place: Place) -> str:
        return f"{self._message(*place)}, {self._begun[place]} tries, {self.handled[place]} times handled"

    def _died(self, place: Place) -> bool:
        """Whether enough processes died of a message, or with it, for it to be set aside."""
        return self._begun[place] - self.handled[place] >= DEATHS

    def in_the_end(self, written: dict[int, int]) -> Iterator[str]:
        """What must not be when everything could be handled. written: partition → messages."""
        odd = self.discarded | self.by_hand
        for partition, count in written.items():
            for place in ((partition, offset) for offset in range(count)):
                if self._message(*place).value == POISON or self._died(place):
                    odd.add(place)
        last = {(each.partition, each.offset): each.began for each in sorted(self.tries, key=lambda each: each.began)}
        for place, since in self.redone:
            if last[place] < since and place not in odd:
                yield f"{place} was opened again at {since:.3f}, and not begun since: {self._story(place)}"
        yield from self.violations(written, odd, is_once=False)
