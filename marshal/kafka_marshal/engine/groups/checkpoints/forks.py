"""The mark of a group that was forked from a checkpoint of another one: whose states it begins with (X18).

It is the metadata of each partition, and counts if the log says that a state was saved at the group's `checkpoint`.
Only the admin that made the fork has answered that one, without saving anything: the states are the other group's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from rationalizer.limits import MAX_KEY_HASH, MAX_OFFSET

_PREFIX = "kafka-marshal fork "

#: (lo, hi, id of a checkpoint; 0: no state was saved).
Saved = tuple[int, int, int]


class Fork(NamedTuple):
    """The mark of one partition."""

    checkpoint: int
    #: The group that was forked, and its checkpoint.
    source: str
    of: int
    #: Of all keys: where the source has saved the state.
    states: tuple[Saved, ...]

    @property
    def text(self) -> str:
        """As metadata."""
        row = [self.checkpoint, self.source, self.of, [[lo, state] for lo, _, state in self.states]]
        return _PREFIX + json.dumps(row, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def read(cls, text: str | None) -> Fork | None:
        """The mark in this metadata; None: there is none. Metadata of others are theirs."""
        if text is None or not text.startswith(_PREFIX):
            return None
        try:
            checkpoint, source, of, parts = json.loads(text.removeprefix(_PREFIX))
            numbers = [checkpoint, of, *(number for lo, state in parts for number in (lo, state))]
            is_whole = all(type(number) is int and 0 <= number <= MAX_OFFSET for number in numbers)
            ends = [*(lo for lo, _ in parts), MAX_KEY_HASH + 1]
            is_whole = is_whole and ends[0] == 0 and all(lo < end for lo, end in pairwise(ends))
        except (ValueError, TypeError, RecursionError):
            return None
        if not is_whole or not isinstance(source, str):
            return None
        spans = zip(parts, pairwise(ends), strict=True)
        return cls(checkpoint, source, of, tuple((lo, end - 1, state) for (_, state), (lo, end) in spans))


def of_whom(text: str | None, states: Iterable[Saved]) -> tuple[tuple[Saved, ...], tuple[tuple[int, int, str], ...]]:
    """Saved states by the ids of the group that saved them; (lo, hi, group) of those that another group saved."""
    found, groups = tuple(states), []
    fork = Fork.read(text)
    if fork is None or all(state != fork.checkpoint for _, _, state in found):
        return found, ()
    translated: list[Saved] = []
    for part in found:
        if part[2] != fork.checkpoint:
            translated.append(part)
            continue
        translated += within(fork.states, part[:2])
        groups.append((*part[:2], fork.source))
    return tuple(translated), tuple(groups)


def within(
    parts: tuple[tuple[int, int, int], ...], span: tuple[int, int] = (0, MAX_KEY_HASH)
) -> tuple[tuple[int, int, int], ...]:
    """What of these parts lies within a span."""
    lo, hi = span
    return tuple((max(lo, first), min(hi, last), value) for first, last, value in parts if first <= hi and lo <= last)
