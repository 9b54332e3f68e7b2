"""Generates logs for the oracle's tests: plausible records near every edge, and bytes of any shape.

`Author` generates the next record of a log from the oracle's present world: right and wrong
epochs, times around the edges of fresh, stale and paused, offsets around stable, granted and the ends of
ranges. It asks a `choose` function whenever there is a choice, so that Hypothesis (which can shrink) and a
seeded `random.Random` (which is fast, for long logs) drive the same author.

`effort(n)` is how many examples a test draws: n/2 in the normal run, n·factor with KAFKA_MARSHAL_THOROUGH=<factor>.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from msgpack import unpackb

from tests.rationalizer.oracle import OracleLease, OracleWorld, shortest
from tests.rationalizer.oracle.layout import home_of_lease
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, paths, replaced, spell
from tests.rationalizer.oracle.world import LeaseKey, Who

T = TypeVar("T")

LARGEST = 2**63 - 1
THOROUGH = float(os.environ.get("KAFKA_MARSHAL_THOROUGH", "0"))
# One test of a thorough campaign may take hours; the limit of the normal run would cut it short.
TEST_TIMEOUT_S = 0 if THOROUGH else 120

GROUPS = ("g", "gé")
TOPICS = ("t", "u")
CLIENTS = ("a", "b", "admin")
INSTANCES = ("1", "2")  # the same for each client: a fence that checks one of the two ids only is no fence
EVERYBODY: tuple[Who, ...] = tuple((client, instance) for client in CLIENTS for instance in INSTANCES)
INTERVALS = (100, 101, 150, 1000, 600_000)
Entry = tuple[int, int, bytes | None]  # offset, timestamp, value


def many(count: int) -> int:
    """At most this many in a thorough run (factor 1), half of them in the normal one."""
    return max((count + 1) // 2, int(count * THOROUGH))


def effort(examples: int, **more: Any) -> settings:
    """Hypothesis settings for a test that draws `examples` in a thorough run (factor 1)."""
    return settings(
        max_examples=many(examples),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        **more,
    )


class Choose(Protocol):
    """Picks one of the options, which are never empty."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def by_draw(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Choose:
    """Choices made, and shrunk, by Hypothesis."""

    def choose(options: Sequence[T], /) -> T:
        picked: T = draw(st.sampled_from(options))
        return picked

    return choose


def by_seed(seed: int) -> Choose:
    """The same choices for the same seed, on every platform."""
    return random.Random(seed).choice


def record(kind: int, who: Who, group: str, *fields: object) -> bytes:
    """A version 1 record in its shortest form; `who` is (client_id, instance_id)."""
    client, instance = who
    return shortest([1, kind, instance, client, group, *fields])


def home_keys(cp: int, partitions: int, count: int = 2) -> list[LeaseKey]:
    """Keys that belong to the CP: `count` (topic, partition) pairs in each group."""
    pairs = [(topic, number) for number in range(60) for topic in TOPICS]
    home = [pair for pair in pairs if home_of_lease(*pair, partitions) == cp][:count]
    return [(group, *pair) for group in GROUPS for pair in home]


def key_elsewhere(cp: int, partitions: int) -> LeaseKey:
    """A key of another CP; where there is only one CP, just another key."""
    pairs = [(topic, number) for number in range(60, 120) for topic in TOPICS]
    away = [pair for pair in pairs if home_of_lease(*pair, partitions) != cp]
    return ("g", *(away or pairs)[0])


class Author:
    """Writes the next record of a log, given the present world."""

    def __init__(self, choose: Choose, world: OracleWorld) -> None:
        self.choose = choose
        self.world = world
        self.keys = home_keys(world.partition, world.partitions)
        self.elsewhere = key_elsewhere(world.partition, world.partitions)

    # Values near the edges.

    def stamp(self) -> int:
        """A broker's time stamp: mostly a step ahead, often right at an edge, sometimes back or absent."""
        now = self.world.log_time
        manner = self.choose(("same", "same", "step", "step", "step", "step", "edge", "edge", "back"))
        if manner == "same":
            return now
        if manner == "back":
            return self.choose((-1, 0, now - 1, now - 50, now - 10_000, -(2**63)))
        if manner == "edge":
            ahead = [edge for edge in self.time_edges() if edge > now]
            if ahead:
                return self.choose(ahead)
        return now + self.choose((1, 1, 1, 10, 10, 40, 99, 2001))

    def time_edges(self) -> list[int]:
        """One before, at and after each end of fresh, unknown and paused."""
        ends = [pause.expires for pause in self.world.pauses() if pause.expires < 2**60]
        for lease in self.world.leases():
            ends += [lease.last_beat + times * lease.heartbeat_interval_ms for times in (1, 2)]
        return sorted({end + step for end in ends for step in (-1, 0, 1)})

    def key(self) -> LeaseKey:
        """One of a few leases of this CP, mostly one that is held, rarely one of another CP."""
        held = [key for key in self.keys if (lease := self.world.lease(key)) and lease.holder]
        return self.choose((*held * 9, *self.keys * 3, self.elsewhere))

    def who(self, group: str, lease: OracleLease | None) -> Who:
        """The sender: mostly the holder, else the pausing client, its twin, or any client."""
        holder = lease.holder if lease and lease.holder else self.choose(EVERYBODY)
        pause = self.world.pause(group)
        pauser = pause.client if pause else "admin"
        client, instance = holder
        twin = (client, "2" if instance == "1" else "1")
        return self.choose((*(holder,) * 9, twin, (pauser, "1"), self.choose(EVERYBODY)))

    def epoch(self, lease: OracleLease | None) -> int:
        """Mostly the right one."""
        right = lease.epoch if lease else 0
        wrong = (right + 1, max(0, right - 1), 0, self.world.next_offset, LARGEST)
        return self.choose((right,) * 30 + wrong)

    def offsets(self, lease: OracleLease | None) -> list[int]:
        """Offsets around all edges of the lease's progress."""
        if lease is None:
            return [0, 1, 5, 20]
        progress = lease.progress
        edges = {0, progress.stable, progress.granted, progress.stable + 8}
        for first, last in progress.ranges[:3] + progress.ranges[-3:]:
            edges |= {first, last}
        near = {edge + step for edge in edges for step in (-2, -1, 0, 1, 2)}
        return sorted(offset for offset in near if 0 <= offset <= LARGEST)

    def offset(self, lease: OracleLease | None) -> int:
        """One of them, sometimes one near 2^63−1."""
        return self.choose((*self.offsets(lease) * 6, LARGEST, LARGEST - 1))

    def last_offset(self, lease: OracleLease | None) -> int | None:
        """An offset, −1 or nil."""
        return self.choose((self.offset(lease), self.offset(lease), self.offset(lease), -1, None))

    def spans(self, lease: OracleLease | None) -> list[list[int]]:
        """1 … 4 intervals in any order, overlapping or not, mostly short."""
        spans = []
        for _ in range(self.choose((1, 1, 2, 3, 4))):
            first = self.choose((self.offset(lease), *self.offsets(lease)[-4:]))
            last = self.choose((first, first, min(first + 1, LARGEST), min(first + 4, LARGEST), self.offset(lease)))
            spans.append([min(first, last), max(first, last)])
        return spans

    # Records.

    def claim(self) -> bytes:
        """Type 2."""
        key = self.key()
        group, topic, partition = key
        sender = self.who(group, self.world.lease(key))
        return record(2, sender, group, topic, partition, self.choose(INTERVALS))

    def heartbeat(self) -> bytes:
        """Type 1 with an epoch."""
        key = self.key()
        group, topic, partition = key
        lease = self.world.lease(key)
        sender = self.who(group, lease)
        return record(1, sender, group, topic, partition, self.epoch(lease), self.last_offset(lease))

    def takeover(self) -> bytes:
        """Type 1 with epoch nil, mostly of the holder's client."""
        key = self.key()
        group, topic, partition = key
        lease = self.world.lease(key)
        client = lease.holder[0] if lease and lease.holder else "a"
        sender = (self.choose((client, client, client, "b")), self.choose(INSTANCES))
        return record(1, sender, group, topic, partition, None, self.last_offset(lease))

    def release(self) -> bytes:
        """Type 3."""
        key = self.key()
        group, topic, partition = key
        lease = self.world.lease(key)
        sender = self.who(group, lease)
        return record(3, sender, group, topic, partition, self.epoch(lease), self.last_offset(lease))

    def grant(self) -> bytes:
        """Type 4."""
        key = self.key()
        group, topic, partition = key
        lease = self.world.lease(key)
        sender = self.who(group, lease)
        return record(4, sender, group, topic, partition, self.epoch(lease), self.offset(lease))

    def commit(self) -> bytes:
        """Type 7."""
        key = self.key()
        group, topic, partition = key
        lease = self.world.lease(key)
        sender = self.who(group, lease)
        return record(7, sender, group, topic, partition, self.epoch(lease), self.spans(lease))

    def batch(self) -> bytes:
        """Type 6: entries of one group, sometimes the same lease more than once."""
        group = self.choose(GROUPS)
        mine = [key for key in self.keys if key[0] == group]
        sender = self.who(group, self.world.lease(mine[0]))
        entries = []
        for _ in range(self.choose((1, 2, 2, 3, 5))):
            key = self.choose((*mine * 6, self.elsewhere))
            lease = self.world.lease((group, key[1], key[2]))
            entries.append([key[1], key[2], self.epoch(lease), self.last_offset(lease)])
        return record(6, sender, group, entries)

    def pause(self) -> bytes:
        """Type 5: a pause, a longer or shorter one, or its end."""
        now = self.world.log_time
        expires = self.choose((0, now - 1, now, now + 1, now + 150, now + 150, now + 5000, LARGEST))
        return record(5, (self.choose(("admin", "admin", "a", "b")), "1"), self.choose(GROUPS), max(0, expires))

    def forget(self) -> bytes:
        """Type 8."""
        group = self.choose(GROUPS)
        pause = self.world.pause(group)
        pauser = (pause.client, "1") if pause else self.choose(EVERYBODY)
        return record(8, self.choose((pauser, pauser, self.choose(EVERYBODY))), group)

    def tick(self) -> bytes:
        """Type 32."""
        return record(32, self.choose(EVERYBODY), self.choose(GROUPS))

    def same_level(self) -> bytes:
        """Type 33 with the present level."""
        return record(33, self.choose(EVERYBODY), self.choose(GROUPS), 1)

    def noise(self) -> bytes | None:
        """A record that no world of level 1 accepts."""
        return self.choose((None, b"", b"\xc1", b"\x90", shortest([2, 1, "1", "a", "g"]), record(16, ("a", "1"), "g")))

    def value(self) -> bytes | None:
        """Any of the above, in a mix that makes progress."""
        writers: tuple[Callable[[], bytes | None], ...] = (
            *(self.claim,) * 4,
            *(self.heartbeat,) * 4,
            *(self.takeover,) * 2,
            self.release,
            *(self.grant,) * 3,
            *(self.commit,) * 5,
            *(self.batch,) * 3,
            *(self.pause,) * 2,
            self.choose((self.forget, self.commit, self.grant)),
            self.tick,
            self.same_level,
            self.noise,
        )
        return self.choose(writers)()

    def entry(self) -> Entry:
        """The next record of the log, with its offset (gaps allowed) and time stamp."""
        return (self.world.next_offset + self.choose((0, 0, 0, 1, 7)), self.stamp(), self.value())


class RangesAuthor(Author):
    """Writes about one lease with many ranges: progress out of order, in scattered spans, short and long."""

    #: How far offsets go beyond stable.
    REACH = 2_000

    def spans(self, lease: OracleLease | None) -> list[list[int]]:
        """Many scattered ones; a few, which lie among many stored ones or cover them; such as are stored already."""
        stable, known = (lease.progress.stable, lease.progress.ranges) if lease else (-1, [])
        manner = self.choose(("many", "few", "few", "few", "known", "known"))
        if known and manner == "known":
            chosen = [self.choose(known) for _ in range(self.choose((1, 1, 2, 5)))]
            moved = [
                (first + self.choose((-2, -1, 0, 0, 0)), last + self.choose((-1, 0, 0, 1, 2))) for first, last in chosen
            ]
            return [[max(0, first), max(0, first, last)] for first, last in moved]
        count, lengths = (60, (1, 1, 2)) if manner == "many" else (self.choose((1, 2, 2, 3, 5)), (1, 2, 5, 30, 100))
        firsts = [stable + 3 + self.choose(range(self.REACH)) for _ in range(count)]
        return [[first, first + self.choose(lengths) - 1] for first in firsts]

    def value(self) -> bytes | None:
        """Mostly commits by the holder; sometimes progress advances, or the lease changes holders."""
        group, topic, partition = self.keys[0]
        lease = self.world.lease(self.keys[0])
        if lease is None or lease.holder is None:
            return record(2, ("a", "1"), group, topic, partition, 600_000)
        epoch = lease.epoch
        manner = self.choose(("commit",) * 30 + ("beat", "grant", "release"))
        if manner == "commit":
            return record(7, lease.holder, group, topic, partition, epoch, self.spans(lease))
        if manner == "release":
            return record(3, lease.holder, group, topic, partition, epoch, None)
        edges = [lease.progress.stable + 1, *(last for _, last in lease.progress.ranges[:12])]
        return record(1 if manner == "beat" else 4, lease.holder, group, topic, partition, epoch, self.choose(edges))

    def entry(self) -> Entry:
        """The next record, a millisecond after the one before: nothing here goes stale."""
        return (self.world.next_offset, self.world.log_time + 1, self.value())


#: Long enough to be read like large values.
LARGE = 5_000


class OddAuthor(Author):
    """Writes records with a fault in one place, half of the time: an odd value for a field, an entry or an interval."""

    def value(self) -> bytes | None:
        """A valid or almost valid record."""
        value = super().value()
        if value is None or self.choose((True, False)):
            return value
        try:
            tree = unpackb(value)
        except ValueError:
            return value
        return value if not isinstance(tree, list) else spell(self._odd(tree))

    def _odd(self, tree: list[Any]) -> object:
        if len(tree) > 1 and tree[1] == 33:  # it must not raise the level, as nothing would be read after it
            return tree
        odd = self.choose(EVERYTHING_ODD)
        manner = self.choose(("replaced",) * 8 + ("longer", "shorter") + ("large",) * 2)
        if manner == "replaced":
            return replaced(tree, self.choose(list(paths(tree))), odd)
        if manner == "large":  # large values are read in another way
            inner = [path for path in paths(tree) if path]
            return [*(replaced(tree, self.choose(inner), odd) if inner else tree), "x" * LARGE]
        return [*tree, odd] if manner == "longer" else tree[:-1]


def write_odd_log(choose: Choose, length: int) -> tuple[list[Entry], OracleWorld]:
    """A log of `length` records, many of them malformed, and the oracle's world after it."""
    world = OracleWorld(0, 1)
    return _written(OddAuthor(choose, world), length), world


def write_log_of_ranges(choose: Choose, length: int) -> tuple[list[Entry], OracleWorld]:
    """A log of `length` records about one lease with hundreds of ranges, and the oracle's world after it."""
    world = OracleWorld(0, 1)
    return _written(RangesAuthor(choose, world), length), world


def write_log(choose: Choose, length: int, cp: int = 0, partitions: int = 1) -> tuple[list[Entry], OracleWorld]:
    """A log of `length` records and the oracle's world after it."""
    world = OracleWorld(cp, partitions)
    return _written(Author(choose, world), length), world


def _written(author: Author, length: int) -> list[Entry]:
    log = []
    for _ in range(length):
        entry = author.entry()
        author.world.apply(*entry)
        log.append(entry)
    return log


@st.composite
def logs(draw: Callable[[st.SearchStrategy[Any]], Any], longest: int = 40) -> tuple[list[Entry], OracleWorld]:
    """Logs that Hypothesis can shrink."""
    partitions = draw(st.sampled_from((1, 1, 2, 8)))
    cp = draw(st.integers(0, partitions - 1))
    return write_log(by_draw(draw), draw(st.integers(1, longest)), cp, partitions)


@st.composite
def long_logs(draw: Callable[[st.SearchStrategy[Any]], Any], longest: int = 400) -> tuple[list[Entry], OracleWorld]:
    """Longer logs at the price of shrinking: the choices come from a seed."""
    partitions = draw(st.sampled_from((1, 1, 2, 8)))
    cp = draw(st.integers(0, partitions - 1))
    return write_log(by_seed(draw(st.integers(0, 2**32))), draw(st.integers(longest // 4, longest)), cp, partitions)
