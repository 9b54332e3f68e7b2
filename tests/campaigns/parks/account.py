"""The plain account of one group's messages, from its workers' lines alone, and from what an operator did."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.campaigns.crew import Life
from tests.campaigns.parks.worker import BAD, KILLER

__all__ = ["Account", "Place", "Written"]

#: (partition, offset)
Place = tuple[int, int]

#: Tries of a message that begin and do not end, until it is set aside as CRASHED.
DEATHS = 5


class Written(NamedTuple):
    """A message."""

    key: bytes
    value: bytes


class _Handling(NamedTuple):
    worker: str
    offset: int
    began: float
    #: Its worker could still prove then that it has the message.
    ended: float


@dataclass(slots=True)
class _Story:
    """The history of one message."""

    begun: int = 0
    failed: int = 0
    first: float = math.inf
    #: When it was first handled, or failed for good.
    over: float = math.inf
    #: When it was handled.
    handled: list[float] = field(default_factory=list)


class Account:
    """Judges what the workers have written down."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.killed = self.unavailable = self.unproven = 0
        #: What the operator may have given up (given_up: has, for sure), and set aside by hand.
        self.discarded: set[Place] = set()
        self.given_up: set[Place] = set()
        self.by_hand: set[Place] = set()
        #: Processes that were asked, and what their health said last.
        self.health: dict[str, tuple[bool, str]] = {}
        self.stories: dict[Place, _Story] = defaultdict(_Story)
        self._handlings: list[tuple[int, _Handling]] = []

    def read(self, lives: Iterable[Life]) -> None:
        """Read all lines of these processes, from the beginning."""
        self.errors, self._handlings, self.health = [], [], {}
        self.killed = self.unavailable = self.unproven = 0
        self.stories.clear()
        for life in lives:
            self._read(life)

    def _read(self, life: Life) -> None:
        begun: dict[Place, float] = {}
        for what, *rest in (line.split(" ") for line in life.out.read_text().splitlines() if line):
            if what == "e" and rest[0] != "KafkaUnavailableError:":  # it was started while no broker was there
                self.errors.append(f"{life.name}: {' '.join(rest)}")
            elif what == "e":
                self.unavailable += 1
            elif what == "n":
                self.killed += 1
            elif what == "s":
                self.health[life.out.stem] = rest[0] == "1", " ".join(rest[1:])
            else:
                place, at = (int(rest[0]), int(rest[1])), float(rest[4])
                story = self.stories[place]
                if what == "b":
                    begun[place] = at
                    story.begun += 1
                    story.first = min(story.first, at)
                    continue
                story.failed += what == "f"
                self.unproven += what == "x"
                if what == "h":
                    story.handled.append(at)
                    self._handlings.append((place[0], _Handling(life.out.stem, place[1], begun[place], at)))
                if what == "h" or (what == "f" and rest[3] == "1"):
                    story.over = min(story.over, at)

    def parks(self, written: dict[Place, Written], parked: dict[Place, str], fails: set[Place]) -> Iterator[str]:
        """What is wrong when all is done but what is set aside. fails: what can't be handled yet."""
        must = fails | {place for place, message in written.items() if message.value in (BAD, KILLER)}
        for place in sorted(parked):
            story, reason = self.stories[place], parked[place]
            if place in self.given_up:
                yield f"{place} is set aside ({reason}), and was discarded"
            if place in self.discarded:
                continue  # the answer was lost, and nothing was done
            if place not in must and place not in self.by_hand and not self._died(story):
                yield f"{place} is set aside ({reason}), and can be handled: {story}"
            if reason == "CRASHED" and written[place].value != KILLER and not self._died(story):
                yield f"{place} is set aside as CRASHED, and kills no process: {written[place]}, {story}"
            if written[place].value == KILLER and reason != "CRASHED" and place not in self.by_hand:
                yield f"{place} kills its process, and is set aside as {reason}"
            if story.handled and place not in self.by_hand:
                yield f"{place} is set aside ({reason}), and was handled: {story}"
        for place in sorted(must - parked.keys() - self.discarded):
            yield f"{place} can't be handled, and is not set aside: {written[place]}, {self.stories[place]}"
        for place in sorted(written.keys() - parked.keys() - self.discarded):
            if not self.stories[place].handled:
                yield f"{place} is done by the log, and no worker handled it: {written[place]}, {self.stories[place]}"

    @staticmethod
    def _died(story: _Story) -> bool:
        """Whether enough processes died of a message, or with it, for it to be set aside."""
        return story.begun - len(story.handled) >= DEATHS

    def violations(self, written: dict[Place, Written]) -> Iterator[str]:
        """What must not be, in the end, when everything could be handled."""
        yield from self.errors
        lost = [x for x in sorted(written) if not self.stories[x].handled and x not in self.discarded]
        if lost:
            yield f"{len(lost)} lost, such as {lost[:5]}: done by the log, and no worker handled them"
        lanes: dict[tuple[int, bytes], list[Place]] = defaultdict(list)
        for place in sorted(written):
            lanes[place[0], written[place].key].append(place)
        for lane, places in lanes.items():
            yield from self._order(lane, places, written)
        yield from self._two_hands(written)

    def _order(self, lane: tuple[int, bytes], places: list[Place], written: dict[Place, Written]) -> Iterator[str]:
        """The first try of each message begins when all before it of its key have ended: handled, or for good."""
        ended, latest = -math.inf, places[0]
        for place in places:
            story = self.stories[place]
            if story.first < ended:
                yield f"{lane}: {place} begins at {story.first:.3f}, and {latest} ends at {ended:.3f}"
            is_known = not (place in self.discarded | self.by_hand or written[place].value == KILLER)
            if is_known and not self._died(story) and story.over > ended:
                ended, latest = story.over, place

    def _two_hands(self, written: dict[Place, Written]) -> Iterator[str]:
        """Two messages of one key are handled at a time, by workers that prove both that they have it."""
        last: dict[tuple[int, bytes], _Handling] = {}
        for partition, handling in sorted(self._handlings, key=lambda each: each[1].began):
            lane = partition, written[partition, handling.offset].key
            before = last.get(lane)
            if before is not None and handling.began < before.ended:
                yield f"{lane} in two workers: {before} and {handling}"
            if before is None or handling.ended > before.ended:
                last[lane] = handling

    @property
    def handled(self) -> int:
        """How many messages were handled, repeats included."""
        return len(self._handlings)
