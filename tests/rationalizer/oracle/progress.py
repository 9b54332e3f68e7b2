"""Section 4 twice more, both times by recomputing everything from the list of what happened.

`progress_from` serves the oracle world, where every change is for all keys: it works on intervals, so offsets
may be as large as they get. `SetProgress` also knows key ranges (P8) and holds plain sets of offsets, one for
each of a few sample hashes, so offsets have to be small; it is the definition of P2 and P10 written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
# ("raised", offset), ("committed", spans), ("granted", offset), ("repositioned", offset)
Step: TypeAlias = tuple[str, "int | Sequence[Span]"]

LARGEST_HASH = 2**63 - 1


@dataclass(frozen=True)
class OracleProgress:
    """The one form of P10 where done_through is the same for every key. −1 stands for nil (P2)."""

    stable: int
    ranges: tuple[Span, ...]
    granted: int

    def is_done(self, offset: int) -> bool:
        """P2."""
        return offset <= self.stable or any(first <= offset <= last for first, last in self.ranges)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same offsets as disjoint intervals that do not even touch, in order."""
    result: list[Span] = []
    for first, last in sorted(spans):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return result


def progress_from(steps: Iterable[Step]) -> OracleProgress:
    """The progress after `steps`, which are those that were accepted, in order."""
    raised, granted, spans = -1, -1, list[Span]()
    for kind, what in steps:
        if isinstance(what, int):
            if kind == "raised":
                raised = max(raised, what)
            elif kind == "granted":
                granted = max(granted, what)
            else:  # C11: everything that was known before is replaced
                assert kind == "repositioned"
                raised, granted, spans = what, -1, []
        else:
            assert kind == "committed"
            spans.extend(what)
    stable = max(raised, granted)
    for first, last in merged(spans):
        if first <= stable + 1:
            stable = max(stable, last)
    above = [(max(first, stable + 1), last) for first, last in merged(spans) if last > stable]
    return OracleProgress(stable, tuple(above), granted)


class SetProgress:
    """P1–P10 with key ranges, for offsets 0 … `ceiling` and the given sample hashes.

    Two hashes between which no key range begins or ends behave alike, so samples at all edges say everything.
    """

    def __init__(self, samples: Sequence[int], ceiling: int) -> None:
        self.samples = sorted({0, LARGEST_HASH, *samples})
        self.ceiling = ceiling
        self.granted = -1
        self.through: dict[int, int] = dict.fromkeys(self.samples, -1)
        self.committed: set[int] = set()

    def raise_all(self, offset: int) -> None:
        """A last_offset: done through `offset` for every key."""
        self.raise_range(0, LARGEST_HASH, offset)

    def raise_range(self, low: int, high: int, offset: int) -> None:
        """P8: done through `offset` for hashes low … high."""
        for sample in self.samples:
            if low <= sample <= high:
                self.through[sample] = max(self.through[sample], offset)

    def commit(self, spans: Iterable[Span]) -> None:
        """Done for every key: the offsets of `spans`."""
        for first, last in spans:
            self.committed |= set(range(first, last + 1))

    def grant(self, offset: int) -> None:
        """C12."""
        self.granted = max(self.granted, offset)

    def reposition(self, offset: int) -> None:
        """C11."""
        self.granted = -1
        self.through = dict.fromkeys(self.samples, offset)
        self.committed = set()

    def is_done(self, offset: int, sample: int) -> bool:
        """P2, word for word."""
        return offset <= self.granted or offset <= self.through[sample] or offset in self.committed

    @property
    def stable(self) -> int:
        """The largest offset with everything up to it done, for every key; −1: none."""
        stable = -1
        while stable < self.ceiling and all(self.is_done(stable + 1, sample) for sample in self.samples):
            stable += 1
        return stable

    @property
    def ranges(self) -> list[Span]:
        """What was committed above stable."""
        return merged((offset, offset) for offset in self.committed if offset > self.stable)

    def done_through(self, sample: int) -> int:
        """The largest offset with everything up to it done for this hash; −1: none."""
        through = -1
        while through < self.ceiling and self.is_done(through + 1, sample):
            through += 1
        return through
