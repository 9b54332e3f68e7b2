"""Members of one process that read partitions together (U13): opened, closed, slow, killed and stopped.

Each message is handled, in order of its key, in one hand at a time, and (gentle) once.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from rationalizer.routing import key_range
from tests.campaigns.account import Account
from tests.campaigns.frame import Campaign, Place, Result, Say, Settings, run_campaign

KEYS = 100


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    seconds: float = 60.0
    rate: int = 1_000
    #: Messages that are there before the first worker is.
    backlog: int = 10_000
    processes: int = 2
    members: int = 2
    kill_every_s: float = 8.0
    stop_every_s: float = 8.0
    broker_every_s: float = 15.0
    #: Members only open and close: then no message comes twice.
    gentle: bool = False
    #: Off: each member reads by itself, to compare.
    shared: bool = True


class Reads(Campaign[Options]):
    """One run."""

    NAME = "reads"

    def story(self) -> None:
        """Messages are there before the workers."""
        self.rate, self.backlog = self.options.rate, self.options.backlog
        self.workers = self.crew({f"p{number}": "keys" for number in range(self.options.processes)}, self._job)
        super().story()

    def _job(self, place: Place) -> dict[str, object]:
        options, number = self.options, int(place.name[1:])
        parts = options.processes * options.members
        return self.job(
            spans=[key_range(number * options.members + part, parts) for part in range(options.members)],
            hi_ms=options.hi_ms * (4 if options.gentle else 1),  # on a full machine, too, nothing is unproven
            shared=options.shared,
        )

    def faults(self) -> Mapping[Callable[[], None], float]:
        options = self.options
        return {} if options.gentle else {self.kill: options.kill_every_s, self.stop: options.stop_every_s}

    def operates(self) -> Mapping[Callable[[], None], float]:
        every_s = 2 * self.options.broker_every_s
        return {self.freeze: every_s, self.restart: every_s} if self.may_kill and not self.options.gentle else {}

    def goes_on(self) -> bool:
        return time.monotonic() < self.began + self.options.seconds

    def key_of(self, partition: int, offset: int) -> int:
        """The key's number: drawn, and the same for the account."""
        return Random(f"{self.options.seed} {partition} {offset}").randrange(KEYS)

    def message(self, partition: int, offset: int) -> tuple[bytes, bytes]:
        return b"k%d" % self.key_of(partition, offset), b"x" * 100

    def quiet(self) -> None:
        self.calm.touch()

        def look() -> tuple[object, list[str]]:
            stable = self.stable()
            is_done = all(stable.get(x) == end - 1 for x, end in self.written.items())
            return stable, [] if is_done else [f"liveness: {stable} of {self.written}"]

        self.violations += self.until_quiet(look)

    def judge(self) -> None:
        account = Account(self.key_of)
        for life in self.workers.lives:
            account.read(life)
        for file in self.folder.glob("*.reads"):
            for line in file.read_text().splitlines():
                hits, misses = line.split()
                self.counts += Counter({"read by another": int(hits), "not": int(misses), "members": 1})
        # What is unproven for a moment, on a full machine, is dropped and comes again.
        is_once = self.options.gentle and not account.dropped
        self.violations += account.violations(self.written, (), is_once=is_once)
        self.counts["messages"] = sum(self.written.values())
        self.counts["handled"] = account.handled.total()
        self.counts["dropped unproven"] = account.dropped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--seeds", type=int, default=1, help="how many (1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="with faults, each (60)")
    parser.add_argument("--members", type=int, default=2, help="of each process (2)")
    parser.add_argument("--gentle", action="store_true", help="members only open and close")
    parser.add_argument("--alone", action="store_true", help="each reads by itself, to compare")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        options = Options(
            seconds=chosen.seconds,
            seed=seed,
            members=chosen.members,
            gentle=chosen.gentle,
            shared=not chosen.alone,
            keep=chosen.keep,
        )
        yield run_campaign(Reads, options, say=say)
