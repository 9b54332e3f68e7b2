"""What is known of a group that takes checkpoints (X1 to X3): its checkpoints, versions and barrier, as plain values.

A version is found by a search of all; nothing is kept by checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tests.rationalizer.oracle.assigning import TopicPartition
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.progress import LARGEST_HASH

PASSING, PERIODIC, PINNED = 0, 1, 2  # X1
REFUSED, REACHED, REACHED_AND_LEAVES = 0, 1, 2
RETIRE, PIN, END = 0, 1, 2

#: X9: of kind 2.
MOST_PINNED = 16
#: X6 (2).
MOST_WEIGHT = 1_000_000
#: X2, X5: pieces of `states`.
MOST_STATES = 2_000

States: TypeAlias = tuple[tuple[int, int, int], ...]  # lo, hi, checkpoint id or 0
NO_STATES: States = ((0, LARGEST_HASH, 0),)


@dataclass(frozen=True)
class Kept:
    """X1: [id, log time of its completion, kind]."""

    id: int
    log_time: int
    kind: int


@dataclass(frozen=True)
class Version:
    """X2: what is done from this checkpoint on. `initial` of the progress is not the version's; here it is −1."""

    checkpoint: int
    states: States
    progress: KeyedProgress

    @property
    def weight(self) -> int:
        """X6 (2)."""
        return 2 + len(self.states) + len(self.progress.through) + len(self.progress.ranges)


@dataclass(frozen=True)
class Answer:
    """X3."""

    generation: int
    answer: int


@dataclass(frozen=True)
class Barrier:
    """X3."""

    id: int
    opened: int
    timeout_ms: int
    passing: bool
    answers: Mapping[int, Answer] = field(default_factory=dict)  # by slot

    def is_over(self, now: int) -> bool:
        """X3."""
        return now - self.opened > self.timeout_ms


@dataclass(frozen=True)
class Checkpoints:
    """X1: what the state of a group that takes checkpoints has besides G3."""

    keep: int
    hold: bool
    kept: tuple[Kept, ...]  # ascending
    barrier: Barrier | None = None
    #: Of partitions with a start.
    initial: Mapping[TopicPartition, int] = field(default_factory=dict)
    versions: Mapping[TopicPartition, tuple[Version, ...]] = field(default_factory=dict)  # ascending

    @property
    def newest(self) -> int:
        """X1: the last one; there is always one."""
        return self.kept[-1].id

    def is_kept(self, checkpoint: int) -> bool:
        """Whether it is one of the group's."""
        return any(kept.id == checkpoint for kept in self.kept)

    def seen(self, place: TopicPartition, checkpoint: int) -> Version | None:
        """X2: the last version that is not above it."""
        below = [version for version in self.versions.get(place, ()) if version.checkpoint <= checkpoint]
        return below[-1] if below else None

    def as_seen(self, place: TopicPartition, checkpoint: int) -> Version:
        """X2: without a version `initial` (−1 if unset) for every key, no ranges, states 0, metadata nil."""
        start = KeyedProgress(through=((0, LARGEST_HASH, self.initial.get(place, -1)),))
        return self.seen(place, checkpoint) or Version(checkpoint, NO_STATES, start)

    def with_version(self, place: TopicPartition, version: Version) -> Checkpoints:
        """In place of the one of the same checkpoint, or added."""
        others = [known for known in self.versions.get(place, ()) if known.checkpoint != version.checkpoint]
        mine = tuple(sorted([*others, version], key=lambda known: known.checkpoint))
        return replace(self, versions={**self.versions, place: mine})

    def progress(self) -> dict[TopicPartition, KeyedProgress]:
        """X2: what sections 4 to 6 call progress, of the partitions that have it."""
        found = {}
        for place in {*self.initial, *self.versions}:
            if place in self.initial or self.seen(place, self.newest) is not None:
                seen = self.as_seen(place, self.newest).progress
                found[place] = replace(seen, initial=self.initial.get(place, -1))
        return found

    def tidy(self) -> Checkpoints:
        """X2: a version that no checkpoint sees, and that is not of the open barrier, vanishes at once."""
        kept = {}
        for place, versions in self.versions.items():
            seen = [self.seen(place, checkpoint.id) for checkpoint in self.kept]
            barrier = -1 if self.barrier is None else self.barrier.id
            mine = tuple(version for version in versions if version in seen or version.checkpoint == barrier)
            if mine:
                kept[place] = mine
        return replace(self, versions=kept)

    def without(self, gone: Iterable[Kept]) -> Checkpoints:
        """The same without these checkpoints, and what only they saw."""
        gone = list(gone)
        return replace(self, kept=tuple(kept for kept in self.kept if kept not in gone)).tidy()

    def ended(self) -> Checkpoints:
        """X6: the barrier's versions and answers go, nothing else changes."""
        return replace(self, barrier=None).tidy()

    def completed(self, checkpoint: int, log_time: int, kind: int) -> Checkpoints:
        """X6 (1) and (2)."""
        kept = [known for known in self.kept if known.kind != PASSING]
        after = replace(self, kept=(*kept, Kept(checkpoint, log_time, kind)), barrier=None).tidy()
        periodic = [known for known in after.kept if known.kind == PERIODIC]
        after = after.without(periodic[: -after.keep])
        while after.old_weight() > MOST_WEIGHT:
            others = [known for known in after.kept if known.id != after.newest]
            after = after.without(sorted(others, key=lambda known: (known.kind, known.id))[:1])
        return after

    def old_weight(self) -> int:
        """X6 (2): of the versions that the newest does not see."""
        return sum(
            version.weight
            for place, versions in self.versions.items()
            for version in versions
            if version != self.seen(place, self.newest)
        )


def saved(states: States, low: int, high: int, checkpoint: int) -> States:
    """X5: `states` set on [low, high], in the form of P10."""
    parts: list[tuple[int, int, int]] = []
    for part_low, part_high, known in states:
        for piece_low, piece_high, value in (
            (part_low, min(part_high, low - 1), known),
            (max(part_low, low), min(part_high, high), checkpoint),
            (max(part_low, high + 1), part_high, known),
        ):
            if piece_low > piece_high:
                continue
            if parts and parts[-1][2] == value:
                parts[-1] = (parts[-1][0], piece_high, value)
            else:
                parts.append((piece_low, piece_high, value))
    return tuple(parts)


# S1 and D3.


def barrier_row(barrier: Barrier | None) -> list[Any] | None:
    """S1."""
    if barrier is None:
        return None
    answers = [[slot, given.generation, given.answer] for slot, given in sorted(barrier.answers.items())]
    return [barrier.id, barrier.opened, barrier.timeout_ms, barrier.passing, answers]


def checkpoints_row(known: Checkpoints) -> list[Any]:
    """S1: the eighth part."""
    kept = [[each.id, each.log_time, each.kind] for each in known.kept]
    return [known.keep, known.hold, barrier_row(known.barrier), kept]


def version_rows(known: Checkpoints, place: TopicPartition) -> list[Any]:
    """S1: `initial` or nil, and the versions."""
    rows: list[Any] = [known.initial.get(place)]
    for version in known.versions.get(place, ()):
        _, *progress = version.progress.canonical(1)
        rows.append([version.checkpoint, [list(part) for part in version.states], *progress])
    return rows


def shown_checkpoints(known: Checkpoints) -> dict[str, Any]:
    """D3."""
    barrier = known.barrier
    shown = None
    if barrier is not None:
        shown = {
            "id": barrier.id,
            "opened": barrier.opened,
            "timeout_ms": barrier.timeout_ms,
            "passing": barrier.passing,
            "answers": [
                {"slot": slot, "generation": given.generation, "answer": given.answer}
                for slot, given in sorted(barrier.answers.items())
            ],
        }
    kept = [[each.id, each.log_time, each.kind] for each in known.kept]
    return {"keep": known.keep, "hold": known.hold, "barrier": shown, "kept": kept}


def shown_versions(known: Checkpoints, place: TopicPartition) -> list[dict[str, Any]]:
    """D3: states 0 and offsets −1 are null."""
    return [
        {
            "checkpoint": version.checkpoint,
            "states": [[low, high, state or None] for low, high, state in version.states],
            "done_through": [
                [low, high, None if offset == -1 else offset] for low, high, offset in version.progress.through
            ],
            "ranges": [list(span) for span in version.progress.ranges],
            "metadata": version.progress.metadata,
        }
        for version in known.versions.get(place, ())
    ]
