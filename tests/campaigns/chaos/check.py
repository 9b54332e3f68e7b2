"""Invariants of a history, in the manner of Jepsen's Kafka tests: pure functions of the recorded events.

============ ====================================================================================================
lost         at least once: every message in the log is handled at the end, and nothing unhandled is done; at most
             once: what was never begun was granted to a killed worker (the last batch, or two if it requests ahead)
             or was reported by its worker (C13)
not granted  at most once: nothing is begun that the log has not granted before (C13)
repeated     at most once: never; at least once: nothing that was done when the lease was granted, nothing that was
             done before an accepted heartbeat was sent (C14), nothing twice under one epoch
unseen       acknowledged messages are in the log at their offset, and equal what the worker received
dual owner   no worker gets a message after the log granted the partition to another (T4), and a lease released in
             its holder's name has no message in flight
stale write  the fenced sink has each message once, in order, with epochs that only grow (C9)
replicas     two replays of the log, cut differently, agree, and all workers agree with them (S1)
progress     never goes back, and epochs only grow
============ ====================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

from kafka_marshal.ports import LogEntry
from rationalizer import World
from rationalizer.history import End, Span
from tests.campaigns.chaos.fleet import Stop
from tests.campaigns.chaos.history import LogHistory
from tests.campaigns.chaos.lines import Line, read_lines
from tests.campaigns.frame import Violation

Key = tuple[str, str, int]

#: Time between a read of the clock and the output line, on an overloaded machine (ms).
SLACK_MS = 100.0

#: Difference of two reads of one clock, one of them rounded to milliseconds.
CLOCK_MS = 5.0

#: Time between on_lost in the worker and the corresponding release in the log.
LOST_AND_RELEASED_MS = 1_000.0

#: Time for a worker to report undelivered offsets of a lost lease (HI).
UNTOLD_INTERVALS = 4

#: Messages that a process may still get if it was stopped after its read of the clock. (The consumer reads it once for
#: several messages only if they take less than a millisecond, which the campaign's never do.)
STRIDE = 2


@dataclass(slots=True)
class Handling:
    """One message in one worker."""

    life: Life
    offset: int
    epoch: int
    number: int
    began: float
    ended: float | None = None
    done: float | None = None
    #: Time of its delivery, with its batch or alone.
    handed: float = 0.0


@dataclass(slots=True)
class Life:
    """One worker process, by its output."""

    name: str
    pid: int
    killed: bool
    group: str = ""
    client_id: str = ""
    kind: str = ""
    instance_id: str = ""
    claims_ahead: bool = False
    handled: dict[Key, list[Handling]] = field(default_factory=dict)
    #: Digest of the value → time before the first append.
    sent: dict[str, float] = field(default_factory=dict)
    #: Partition → times of on_lost.
    lost: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    reported: list[tuple[str, int, int, int]] = field(default_factory=list)
    digests: list[tuple[int, int, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    last_line: float = 0.0

    @classmethod
    def read(cls, path: Path, pid: int, killed: bool) -> Life:
        """From a file of lines."""
        return cls.of(path.stem, pid, killed, read_lines(path) if path.exists() else ())

    @classmethod
    def of(cls, name: str, pid: int, killed: bool, lines: Iterable[Line]) -> Life:
        """From lines."""
        life = cls(name, pid, killed)
        open_: dict[tuple[str, int, int], Handling] = {}
        batches: dict[tuple[str, int], tuple[int, int, float]] = {}
        for what, at, *rest in lines:
            life.last_line = at
            match what:
                case "start":
                    life.group, life.client_id, life.instance_id, life.kind, _ = rest
                    life.claims_ahead = life.kind == "once ahead"
                case "handed":
                    topic, partition, first, last, _ = rest
                    batches[topic, partition] = (first, last, at)
                case "begin":
                    topic, partition, offset, epoch, number = rest
                    first, last, handed = batches.get((topic, partition), (0, -1, at))
                    one = Handling(life, offset, epoch, number, at, handed=handed if first <= offset <= last else at)
                    open_[topic, partition, offset] = one
                    life.handled.setdefault((life.group, topic, partition), []).append(one)
                case "end":
                    open_[tuple(rest)].ended = at
                case "done":
                    open_[tuple(rest)].done = at
                case "sent":
                    life.sent.setdefault(rest[2], at)
                case "lost":
                    life.lost.setdefault((rest[0], rest[1]), []).append(at)
                case "reported":
                    life.reported.append(tuple(rest))
                case "digest":
                    life.digests.append(tuple(rest))
                case "error":
                    life.errors.append(": ".join(rest))
        return life


#: "at least once" | "at most once" | "sink".
Mode = str


@dataclass(slots=True)
class Story:
    """All recorded events."""

    heartbeat_interval_ms: int
    modes: Mapping[Key, Mode]
    lives: list[Life]
    log: LogHistory
    #: (topic, partition) → offset → number in the log, without topics that are only names.
    messages: Mapping[tuple[str, int], Mapping[int, int]]
    acknowledged: Mapping[tuple[str, int], Mapping[int, int]]
    stops: list[Stop] = field(default_factory=list)
    #: Rows of the fenced sink in order of writing: (topic, partition, offset, epoch, number).
    rows: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    #: At most once: messages per request.
    grant_size: int = 10
    #: Whether everything had time to be handled: else messages behind the log's progress are not checked.
    drained: bool = True
    #: Workers that ended unexpectedly.
    unexplained: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """Figures and violations."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def say(self, promise: str, message: str) -> None:
        """A promise was broken."""
        self.violations.append(Violation(promise, message))


def check(story: Story) -> Findings:
    """Check all of it."""
    found = Findings()
    for message in story.log.broken:
        found.say("progress", message)
    for life in story.lives:
        for error in life.errors:
            found.say("worker failed", f"{life.name}: {error}")
    for message in story.unexplained:
        found.say("worker failed", message)
    _check_unseen(story, found)
    _check_digests(story, found)
    handled: dict[Key, list[Handling]] = {}
    for life in story.lives:
        for key, items in life.handled.items():
            handled.setdefault(key, []).extend(items)
    grants = _Granted(story)
    for key, mode in sorted(story.modes.items()):
        items = sorted(handled.get(key, ()), key=lambda one: one.began)
        found.counts["handled"] += len(items)
        if mode == "sink":
            _check_sink(story, key, found)
        elif mode == "at most once":
            _check_once(story, key, items, grants, found)
        else:
            _check_again(story, key, items, found)
            _check_owners(story, key, items, found)
    return found


def _name(key: Key, offset: int | None = None) -> str:
    group, topic, partition = key
    return f"{group}: {topic} [{partition}]" + ("" if offset is None else f" offset {offset}")


def _offsets(story: Story, key: Key) -> Iterable[int]:
    """All offsets to handle."""
    messages = story.messages.get(key[1:])
    stable = story.log.stable.get(key, -1)
    if messages is None:
        return range(stable + 1)
    return sorted(messages) if story.drained else [offset for offset in sorted(messages) if offset <= stable]


# Messages.


def _check_unseen(story: Story, found: Findings) -> None:
    for place, numbers in story.acknowledged.items():
        there = story.messages[place]
        for offset, number in numbers.items():
            if there.get(offset) != number:
                found.say("unseen", f"{place} offset {offset} was acknowledged as {number}, and is {there.get(offset)}")
    for life in story.lives:
        for (_, topic, partition), items in life.handled.items():
            there = story.messages.get((topic, partition), {})
            for one in items:
                if there and there.get(one.offset) != one.number:
                    where = f"{topic} [{partition}] offset {one.offset}"
                    found.say(
                        "unseen", f"{life.name} was given {one.number} as {where}, which is {there.get(one.offset)}"
                    )


def _check_again(story: Story, key: Key, items: list[Handling], found: Findings) -> None:
    """At least once."""
    ended = {one.offset for one in items if one.ended is not None}
    for offset in _offsets(story, key):
        if offset not in ended:
            found.say("lost", f"{_name(key, offset)} was handled by nobody")
            found.counts["lost"] += 1
    by_offset: dict[int, list[Handling]] = {}
    for one in items:
        by_offset.setdefault(one.offset, []).append(one)
    _check_done(story, key, by_offset, found)
    found.counts["messages"] += len(by_offset)
    for offset, several in by_offset.items():
        for before, one in pairwise(several):
            found.counts["repeats"] += 1
            _check_repeat(story, key, offset, before, one, found)


def _check_done(story: Story, key: Key, by_offset: Mapping[int, list[Handling]], found: Findings) -> None:
    """Nothing is done by the log before it was handled: a crash then would lose it."""
    for offset, several in by_offset.items():
        since = story.log.done_since(key, offset)
        ended = min((one.ended for one in several if one.ended is not None), default=None)
        if since is not None and ended is not None and since < ended - CLOCK_MS:
            early = ended - since
            found.say("lost", f"{_name(key, offset)} was done by the log {early:.0f} ms before it was handled (C14)")


def _check_repeat(story: Story, key: Key, offset: int, before: Handling, one: Handling, found: Findings) -> None:
    if before.life is one.life and before.epoch == one.epoch:
        found.say("repeated", f"{_name(key, offset)} twice under epoch {one.epoch}, by {one.life.name}")
        return
    tenure = story.log.tenure(key, one.epoch)
    if tenure is None or tenure.span.instance_id != one.life.instance_id or one.epoch < before.epoch:
        return  # it did not hold the partition (any more): checked by _check_owners
    if tenure.was_done(offset):
        found.say("repeated", f"{_name(key, offset)} was done when {one.life.name} got epoch {one.epoch}")
        return
    former = story.log.tenure(key, before.epoch)
    if before.done is None or former is None:
        return
    for beat in former.beats:
        sent = before.life.sent.get(beat, 0.0)
        if sent > before.done + SLACK_MS and not _stopped(story, before.life, before.done, sent):
            late = sent - before.done
            found.say(
                "repeated",
                f"{_name(key, offset)} was done by {before.life.name}, a beat sent {late:.0f} ms later was accepted, "
                f"and {one.life.name} was handed it again",
            )
            return


def _stopped(story: Story, life: Life, since: float, until: float) -> bool:
    return any(stop.pid == life.pid and stop.began < until and stop.ended > since for stop in story.stops)


class _Granted:
    """At most once: grants of messages that were never begun, and whether these are excused."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._lives = {life.instance_id: life for life in story.lives if life.instance_id}
        #: Partition → (first, last, instance, its grants from this one on, epoch, when).
        self.by_key: dict[Key, list[tuple[int, int, str, int, int, int]]] = {}
        for instance_id, grants in story.log.grants.items():
            for number, grant in enumerate(grants):
                left = len(grants) - number
                entry = (grant.first, grant.last, instance_id, left, grant.epoch, grant.at)
                self.by_key.setdefault(grant.key, []).append(entry)

    def allows(self, key: Key, one: Handling) -> bool:
        """Whether the log had granted a message to its worker before it began (C13)."""
        return any(
            first <= one.offset <= last
            and (instance_id, epoch) == (one.life.instance_id, one.epoch)
            and granted_at <= one.began + CLOCK_MS
            for first, last, instance_id, _, epoch, granted_at in self.by_key.get(key, ())
        )

    def excuse(self, key: Key, offset: int) -> str | None:
        """Why this offset may be lost: "crash", "reported"; None: it may not."""
        for first, last, instance_id, left, epoch, granted_at in self.by_key.get(key, ()):
            if not first <= offset <= last:
                continue
            life = self._lives.get(instance_id)
            if life is None:
                return None
            _, topic, partition = key
            if any(r[:2] == (topic, partition) and r[2] <= offset <= r[3] for r in life.reported):
                return "reported"
            if not life.killed:
                return None
            if left <= 1 + life.claims_ahead:
                return "crash"
            # Its lease was lost, and it was killed before it could report undelivered offsets. (It may already have
            # released leases that it did not trust any more.)
            tenure = self._story.log.tenure(key, epoch)
            # Also if it noticed the loss before the log granted it: a late record, followed by the release.
            since = granted_at if tenure is None else tenure.span.since
            was_told = any(lost_at > since for lost_at in life.lost.get((topic, partition), ()))
            was_lost = was_told or (tenure is not None and tenure.span.ended not in (End.OPEN, End.RELEASED))
            recent = life.last_line - granted_at < UNTOLD_INTERVALS * self._story.heartbeat_interval_ms
            return "crash after a lost lease" if was_lost and recent else None
        return None


def _check_once(story: Story, key: Key, items: list[Handling], grants: _Granted, found: Findings) -> None:
    """At most once."""
    begun: dict[int, Handling] = {}
    for one in items:
        before = begun.setdefault(one.offset, one)
        if before is not one:
            found.say("repeated", f"{_name(key, one.offset)} went to {before.life.name} and to {one.life.name}")
        if one.epoch >= 0 and not grants.allows(key, one):
            found.say("not granted", f"{_name(key, one.offset)} went to {one.life.name} before it was granted (C13)")
    found.counts["messages"] += len(begun)
    for offset in _offsets(story, key):
        if offset not in begun:
            excuse = grants.excuse(key, offset)
            if excuse is None:
                found.say("lost", f"{_name(key, offset)} went to nobody, and no crash explains it (C12, C13)")
                found.counts["lost"] += 1
            else:
                found.counts[f"at most once, not handled: {excuse}"] += 1


# Owners.


def _check_owners(story: Story, key: Key, items: list[Handling], found: Findings) -> None:
    tenures = story.log.tenures.get(key, [])
    after = {old.span.epoch: new.span for old, new in pairwise(tenures)}
    late: Counter[str] = Counter()
    for one in items:
        if one.epoch < 0:
            found.counts["begun before on_assign was told"] += 1
            continue
        tenure = story.log.tenure(key, one.epoch)
        if tenure is None or tenure.span.instance_id != one.life.instance_id:
            found.say("dual owner", f"{_name(key, one.offset)}: {one.life.name} never held epoch {one.epoch}")
            continue
        _check_released(story, key, one, tenure.span, found)
        new = after.get(one.epoch)
        if new is None or one.handed <= new.since + SLACK_MS:
            if new is not None and (one.ended or one.began) > new.since:
                found.counts["in hand when the lease ended"] += 1
            continue
        if _stopped(story, one.life, one.handed - 10 * SLACK_MS, one.handed) and late[one.life.name] < STRIDE:
            late[one.life.name] += 1  # stopped between its read of the clock and its line
            continue
        found.say(
            "dual owner",
            f"{_name(key, one.offset)} was handed to {one.life.name} under epoch {one.epoch}, "
            f"{one.handed - new.since:.0f} ms after {new.client_id} was granted epoch {new.epoch}",
        )


def _check_released(story: Story, key: Key, one: Handling, tenure: Span, found: Findings) -> None:
    """A worker that releases a lease has no message of it in flight, unless it has lost the lease."""
    if tenure.ended is not End.RELEASED or tenure.until is None or one.ended is None:
        return
    if any(abs(lost_at - tenure.until) < LOST_AND_RELEASED_MS for lost_at in one.life.lost.get(key[1:], ())):
        return
    across = one.began < tenure.until - SLACK_MS and one.ended > tenure.until + SLACK_MS
    if across and not _stopped(story, one.life, one.began, one.ended):
        late = one.ended - tenure.until
        found.say(
            "dual owner",
            f"{_name(key, one.offset)} was in hand at {one.life.name} for {late:.0f} ms after its release",
        )


def _check_sink(story: Story, key: Key, found: Findings) -> None:
    newest, seen, highest = -1, set[int](), -1
    for topic, partition, offset, epoch, number in story.rows:
        if (topic, partition) != key[1:]:
            continue
        if epoch < newest:
            found.say("stale write", f"{_name(key, offset)} was written under epoch {epoch}, after {newest}")
        if offset in seen:
            found.say("stale write", f"{_name(key, offset)} is in the sink twice")
        elif offset < highest:
            found.say("stale write", f"{_name(key, offset)} was written after offset {highest}")
        if story.messages[topic, partition].get(offset) != number:
            found.say("unseen", f"{_name(key, offset)} is in the sink as {number}")
        newest, highest = max(newest, epoch), max(highest, offset)
        seen.add(offset)
    found.counts["messages"] += len(seen)
    found.counts["rows"] += len(seen)
    for offset in _offsets(story, key):
        if offset not in seen:
            found.say("lost", f"{_name(key, offset)} is not in the sink")
            found.counts["lost"] += 1


# Replicas.


def _check_digests(story: Story, found: Findings) -> None:
    for life in story.lives:
        for cp, next_offset, digest in life.digests:
            if next_offset and story.log.digests.get((cp, next_offset)) != digest:
                found.say("replicas", f"{life.name} differs from the log's replay, CP {cp} before offset {next_offset}")
            found.counts["digests"] += 1


def _cuts(entries: list[LogEntry], rng: Random) -> Iterator[list[LogEntry]]:
    place = 0
    while place < len(entries):
        size = rng.choice((1, 2, 7, 100, 5_000))
        yield entries[place : place + size]
        place += size


def replay_in_cuts(log: Mapping[int, list[LogEntry]], reference: LogHistory, seed: int) -> list[Violation]:
    """Replay again by the fast path, in batches of random size, with a restart from its own snapshot in between."""
    found = []
    rng = Random(seed)
    for cp, entries in log.items():
        world = World(cp, len(log))
        for part in _cuts(entries, rng):
            world.apply_many(part)
            if rng.random() < 0.01:
                world = World.restore(world.snapshot(), len(log))
        if world.digest() != reference.worlds[cp].digest():
            found.append(Violation("replicas", f"two replays of CP {cp} differ after {len(entries)} records"))
    return found
