"""Records of types without a separate writer: a few values for each kind of field, at its edges and between.

Authors, the fuzz and the small scope write them, so that a new record type is in their logs from its first day. A type
whose fields have to fit the state gets its own writer in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rationalizer import Record
from rationalizer.levels import CHECKPOINTS_LEVEL
from rationalizer.wire import wellformed as ok
from rationalizer.wire.records import KINDS, Belongs
from rationalizer.wire.wellformed import Rule

#: By what a field has to be. A new kind of field needs its values here.
SAMPLES: dict[Rule, Sequence[Any]] = {
    ok.ID: ("a", "é", "x" * 255),
    ok.TOPIC: ("t", "u"),
    ok.PARTITION: (0, 1),
    ok.OFFSET: (0, 5, 2**63 - 1),
    ok.TIME: (0, 2**63 - 1),
    ok.BOOLEAN: (False, True),
    ok.MEMBER_ID: ("g-nobody",),
    ok.EPOCH_OR_NIL: (None, 0),
    ok.LAST_OFFSET: (None, -1, 7),
    ok.HEARTBEAT_INTERVAL: (100, 600_000),
    ok.SESSION_TIMEOUT: (100, 60_000),
    ok.PATTERN: ("", "^t"),
    ok.TIMEOUT: (100, 1000, 3_600_000),
    ok.KEEP: (0, 1, 2, 64),
    ok.ANSWER: (0, 1, 2),
    ok.ANSWER_ENTRIES: ((),),
    ok.KEEPING: (0, 1, 2),
    ok.MEMBER_ID_OR_NONE: ("g-nobody", ""),
    ok.KEY_OR_NIL: (None, 0, 2**63 - 1),
    ok.START_OR_NIL: (None, 5),
    ok.SEEN: (0, 7, 2**63 - 1),
    ok.DONE: ((), ((0, 4), (2, 9))),
    ok.OPENED: ((), ((5, 5, 7, 1), (6, 9, None, 0))),
    ok.PARKED: ((), ((5, 7, 5, "ValueError"),)),
    ok.TAKE_OR_NIL: (None, (5, 40, False)),
}

#: The kinds that levels above those with writers in the fuzz and the small scope added.
OTHERS = [kind for kind in KINDS.values() if kind.level > CHECKPOINTS_LEVEL]


def fields_of(number: int, choose: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """Fields of a record of this type, after group_id."""
    return [choose(SAMPLES[rule]) for rule in KINDS[number].rules]


def other_records(ids: tuple[str, str, str]) -> Iterator[Record]:
    """Two of each type about a group, and so of each of its fields."""
    for kind in OTHERS:
        if kind.belongs is Belongs.GROUP:
            for place in (0, -1):
                yield kind.build(*ids, [SAMPLES[rule][place] for rule in kind.rules])
