"""A search over every order of some records, whatever they are about: each state is visited once, breadth first."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from rationalizer import codes

#: States per task of a process.
CHUNK = 500


class BrokenError(AssertionError):
    """A step that must not be. Its notes have the records that lead there."""


@dataclass(slots=True)
class Explored:
    """What was met."""

    depth: int = 0
    #: States visited, which differ in more than which partition is which; and with those that do not.
    states: int = 1
    all_states: int = 1
    #: Records applied.
    steps: int = 0
    #: States first met at each depth.
    by_depth: list[int] = field(default_factory=lambda: [1])
    #: (record, outcome) → how often.
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: What must be met.
    wanted: frozenset[tuple[str, str]] = frozenset()
    #: All states were reached: the next depth has no new one.
    is_all: bool = False

    def missing(self) -> list[tuple[str, str]]:
        """Transitions of the protocol's table that were not reached."""
        return sorted(self.wanted - set(self.transitions))

    def tell(self) -> str:
        """For people."""
        lines = [f"depth {depth}: {states:>10,} new states" for depth, states in enumerate(self.by_depth)]
        lines += [f"{name:18} {code:26} {times:>10,}" for (name, code), times in sorted(self.transitions.items())]
        missing = ", ".join(f"{name} {code}" for name, code in self.missing())
        whole = "all there are" if self.is_all else f"to depth {self.depth}"
        alike = ""
        if self.all_states > self.states:
            alike = f"; the partitions may change places, which makes {self.all_states:,} of them"
        lines.append(
            f"{self.states:,} states visited one by one ({whole}{alike}), {self.steps:,} records applied, "
            f"{len(self.wanted) - len(self.missing())} of {len(self.wanted)} transitions"
            + (f"; not met: {missing}" if missing else "")
        )
        return "\n".join(lines)

    def figures(self) -> dict[str, object]:
        """The same, for a file."""
        return {
            "depth": self.depth,
            "states": self.states,
            "states_with_partitions_told_apart": self.all_states,
            "new_states_by_depth": self.by_depth,
            "records_applied": self.steps,
            "transitions": {f"{name} {code}": times for (name, code), times in sorted(self.transitions.items())},
            "not_met": [f"{name} {code}" for name, code in self.missing()],
        }


def transitions(names: Collection[str], left_out: Collection[str]) -> frozenset[tuple[str, str]]:
    """The protocol's table of outcomes, as (record, outcome), without the codes that are left out."""
    found: set[tuple[str, str]] = set()
    for row in codes.TABLE:
        of = names if row.records == "any" else {name.strip() for name in row.records.split(",")} & set(names)
        if row.code not in left_out:
            found.update((name, row.code) for name in of)
    return frozenset(found)


#: One state: a CP's snapshot, further data of the search, and the choices that lead there: for each step its index
#: among the possible ones.
State = tuple[bytes, Any, bytes]


@dataclass(slots=True)
class Part:
    """The successors of some states of one depth: new states, each with its key and the number that it stands for."""

    found: list[tuple[bytes, int, State | None]] = field(default_factory=list)
    steps: int = 0
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)


class Scope(Protocol):
    """What is searched."""

    #: (record, outcome) that must be reached.
    wanted: frozenset[tuple[str, str]]

    def first(self) -> tuple[bytes, State]:
        """The first state, and its key."""

    def steps(self, state: State, part: Part) -> Iterator[tuple[bytes, int, State]]:
        """Each state that one record leads to, with its key and for how many it stands. Counts in `part`."""


def search(scope: Scope, depth: int, most: int | None = None, jobs: int = 1) -> Explored:
    """Visit every state up to a depth, or at most a number of them. Raises BrokenError where a rule is broken.

    What is found, and in which order, does not depend on the number of processes (jobs).
    """
    explored = Explored(wanted=scope.wanted)
    key, first = scope.first()
    frontier, seen = [first], {key}
    while frontier and explored.depth < depth and (most is None or explored.states < most):
        explored.depth += 1
        following: list[State] = []
        new = 0
        for part in _expanded(scope, frontier, seen, explored.depth < depth, jobs):
            explored.steps += part.steps
            explored.transitions.update(part.transitions)
            for key, stands_for, state in part.found:
                if key not in seen:
                    seen.add(key)
                    new += 1
                    explored.all_states += stands_for
                    if state is not None:
                        following.append(state)
            if most is not None and explored.states + new >= most:
                break
        explored.by_depth.append(new)
        explored.states += new
        frontier = following
    explored.is_all = explored.by_depth[-1] == 0
    return explored


def _expanded(scope: Scope, frontier: list[State], seen: set[bytes], goes_on: bool, jobs: int) -> Iterator[Part]:
    """What comes of each of these states, in their order; goes_on: it is to be continued."""
    chunks = (frontier[at : at + CHUNK] for at in range(0, len(frontier), CHUNK))
    if jobs == 1 or len(frontier) <= CHUNK:
        yield from (_expand(scope, chunk, seen, goes_on) for chunk in chunks)
        return
    global _seen, _scope
    _scope = scope
    _seen = seen  # forked processes inherit it as of before this depth
    gc.freeze()
    try:
        with multiprocessing.get_context("fork").Pool(jobs, gc.freeze) as pool:
            yield from pool.imap(_expand_seen, ((chunk, goes_on) for chunk in chunks))
    finally:
        gc.unfreeze()
        _seen = frozenset()


_seen: Collection[bytes] = frozenset()
_scope: Scope | None = None


def _expand_seen(work: tuple[list[State], bool]) -> Part:
    assert _scope is not None
    return _expand(_scope, work[0], _seen, work[1])


def _expand(scope: Scope, states: list[State], seen: Collection[bytes], goes_on: bool) -> Part:
    part = Part()
    here: set[bytes] = set()
    for state in states:
        for key, stands_for, after in scope.steps(state, part):
            if key not in seen and key not in here:
                here.add(key)
                part.found.append((key, stands_for, after if goes_on else None))
    return part
