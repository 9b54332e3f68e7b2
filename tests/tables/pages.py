"""The parts of docs/protocol that are written from the tables: levels, records, transitions, outcomes, limits.

    python -m tests.tables.pages < PAGE > new && mv new PAGE

rewrites each part of a page between its two markers (all pages: ``make tables``). A test compares them with the tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from rationalizer import codes, limits
from rationalizer.levels import LEVELS, SUPPORTED_LEVEL, Level
from rationalizer.wire.records import KINDS, Belongs, Kind
from tests.tables import groups
from tests.tables.leases import TRANSITIONS
from tests.tables.shares import SHARE_COLUMNS, SHARE_TRANSITIONS

END: Final = "<!-- tables: end -->"
_PART: Final = re.compile(f"(<!-- tables: (?!end)(.*?) -->).*?({END})", re.DOTALL)


def parts() -> dict[str, list[str]]:
    """Lines of Markdown, as the code has them, by the name of the part that they belong into."""
    return {
        **{f"records of level {level.number}": _kinds(level.number) for level in LEVELS if level.records},
        "levels": _levels(),
        "leases": _transitions(),
        "groups": _group_transitions(),
        "checkpoints": _checkpoint_transitions(),
        "shares": _share_transitions(),
        "settled": _settle_transitions(),
        "outcomes": _codes(),
        "limits": _limits(),
    }


def parts_of(page: str) -> list[str]:
    """The names of the parts that have a place in this page."""
    return [found[2] for found in _PART.finditer(page)]


def replaced(page: str) -> str:
    """The page with its parts written again. KeyError for a part that there is none of."""
    known = parts()
    return _PART.sub(lambda found: "\n\n".join((found[1], "\n".join(known[found[2]]), found[3])), page)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _kinds(level: int) -> list[str]:
    return _table(
        ("type", "record", "belongs (L3)", "fields after group_id", "in another client's pause (C10)"),
        [
            (str(number), kind.name, _belongs(kind), _fields(kind), kind.during_pause.value)
            for number, kind in sorted(KINDS.items())
            if kind.level == level
        ],
    )


def _levels() -> list[str]:
    def listed(level: Level) -> str:
        found = (kind for _, kind in sorted(KINDS.items()) if kind.level == level.number)
        return ", ".join(f"{kind.type} {kind.name}" for kind in found)

    return [
        "## Levels",
        "",
        "What each level adds to those before it (E4). A type that no row lists is unknown (E6).",
        "",
        *_table(
            ("level", "adds", "since release", "record types", "parts of the state (S1)"),
            [
                (
                    str(level.number),
                    level.adds,
                    ".".join(map(str, level.first_release)),
                    listed(level),
                    ", ".join(level.state),
                )
                for level in LEVELS
            ],
        ),
    ]


def _belongs(kind: Kind) -> str:
    return "everywhere" if kind.belongs is Belongs.EVERYWHERE else kind.belongs.value


def _fields(kind: Kind) -> str:
    fields = (f"`{name}`: {rule.wants}" for name, rule in zip(kind.field_names, kind.rules, strict=True))
    return "; ".join(fields) or "none"


def _transitions() -> list[str]:
    return [
        "## The life of a lease",
        "",
        "How a record ends, by its sender and the state of the lease (C1). The last column says what an accepted",
        "one does to the lease, apart from its progress.",
        "",
        *_table(
            ("record", "sender", "free", "fresh", "unknown", "stale", "effect on the lease", "rules"),
            [
                (
                    f"{row.record} (epoch nil)" if row.nil_epoch else row.record,
                    row.sender.value,
                    *(f"`{code}`" for code in (row.free, row.fresh, row.unknown, row.stale)),
                    row.effect,
                    row.rule,
                )
                for row in TRANSITIONS
            ],
        ),
    ]


def _group_transitions() -> list[str]:
    moves = [
        f"    {move.before or '[*]'} --> {move.after or '[*]'}: {move.why} ({move.rule})".replace(";", ",")
        for move in groups.MOVES
    ]
    return [
        "## The life of a coordinated group",
        "",
        "How a record ends, by the state of its group; the overdue are gone as G8 says before the column is chosen.",
        "A JoinGroup can also fail by the checks of G11, from the strategy on. A record of section 3 that meets no",
        "such group is judged by that section.",
        "",
        *_table(
            ("record", *groups.COLUMNS.values(), "rules"),
            [
                (
                    f"{row.record}, {row.who.value}" if row.who.value else row.record,
                    *("; or ".join(map(_ending, getattr(row, column))) or "–" for column in groups.COLUMNS),
                    row.rule,
                )
                for row in groups.TRANSITIONS
            ],
        ),
        "",
        "And how its state moves (G7). REBALANCING is passed through within one record, with a new generation.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        *moves,
        "```",
    ]


def _checkpoint_transitions() -> list[str]:
    return _table(
        ("record", *groups.CHECKPOINT_COLUMNS.values(), "rules"),
        [
            (
                f"{row.record}, {row.who.value}" if row.who.value else row.record,
                *("; or ".join(map(_ending, getattr(row, column))) or "–" for column in groups.CHECKPOINT_COLUMNS),
                row.rule,
            )
            for row in groups.CHECKPOINT_TRANSITIONS
        ],
    )


def _share_transitions() -> list[str]:
    return _table(
        ("record", *SHARE_COLUMNS.values(), "effect on the lease", "rules"),
        [
            (
                f"{row.record} (epoch nil)" if row.nil_epoch else row.record,
                *(
                    "; or ".join(f"`{code}`" for code in getattr(row, column)) or "chapter 3"
                    for column in SHARE_COLUMNS
                ),
                row.effect,
                row.rule,
            )
            for row in SHARE_TRANSITIONS
        ],
    )


def _settle_transitions() -> list[str]:
    return _table(
        ("record", *groups.SETTLE_COLUMNS.values(), "rules"),
        [
            (
                f"{row.record}, {row.who.value}",
                *("; or ".join(map(_ending, getattr(row, column))) or "–" for column in groups.SETTLE_COLUMNS),
                row.rule,
            )
            for row in groups.SETTLE_TRANSITIONS
        ],
    )


def _ending(ending: groups.Ending) -> str:
    if ending.effect is groups.Effect.NOTHING:
        return f"`{ending.code}`"
    return f"`{ending.code}` ({ending.effect.value})"


def _codes() -> list[str]:
    return [
        "## Outcomes",
        "",
        "First what is accepted, then the rejections in the order in which they are checked (E6).",
        "",
        *_table(
            ("code", "accepted", "records", "meaning", "rules"),
            [
                (
                    f"`{row.code}`",
                    {True: "yes", False: "no", None: "depends"}[row.accepted],
                    row.records,
                    row.means,
                    row.rules,
                )
                for row in codes.TABLE
            ],
        ),
    ]


def _limits() -> list[str]:
    named = [
        ("bytes of a value", limits.MAX_VALUE_BYTES, "E2"),
        ("depth of containers", limits.MAX_DEPTH, "E2"),
        ("bytes of a topic", limits.MAX_TOPIC_BYTES, "E2"),
        ("bytes of an id", limits.MAX_ID_BYTES, "E2"),
        ("heartbeat interval, least (ms)", limits.MIN_HEARTBEAT_INTERVAL_MS, "E2"),
        ("heartbeat interval, most (ms)", limits.MAX_HEARTBEAT_INTERVAL_MS, "E2"),
        ("ranges of one CommitRanges", limits.MAX_COMMIT_RANGES, "section 3"),
        ("intervals left after a record", limits.MAX_INTERVALS, "P5"),
        ("time of a barrier, least (ms)", limits.MIN_BARRIER_TIMEOUT_MS, "section 7"),
        ("time of a barrier, most (ms)", limits.MAX_BARRIER_TIMEOUT_MS, "section 7"),
        ("periodic checkpoints of a group", limits.MAX_KEPT, "X6"),
        ("pinned checkpoints of a group", limits.MAX_PINNED, "X9"),
        ("weight of older versions of a group", limits.MAX_OLD_WEIGHT, "X6"),
        ("holes of a partition", limits.MAX_HOLES, "H5"),
        ("holes of a CP, from which on clients set no message aside", limits.MANY_HOLES, "U2"),
        ("entries of a SettlingMessages or SettleOffsets", limits.MAX_SETTLED_ENTRIES, "section 7b"),
        ("offsets of an entry, or of a take", limits.MAX_SETTLED_OFFSETS, "section 7b"),
        ("offsets of all entries of a record", limits.MAX_SETTLED_TOGETHER, "section 7b"),
        ("pieces of done_through, and two for each share", limits.MAX_KEY_PIECES, "B3, G15"),
        ("bytes of a part of a snapshot", limits.MAX_PART_BYTES, "S2"),
        ("parts of a snapshot", limits.MAX_SNAPSHOT_PARTS, "S2"),
        ("offsets between two snapshots, least", limits.SNAPSHOT_INTERVAL, "S2"),
        ("highest level this release replays", SUPPORTED_LEVEL, "E4"),
    ]
    return ["## Limits", "", *_table(("limit", "value", "rule"), [(what, f"{n:,}", rule) for what, n, rule in named])]


if __name__ == "__main__":
    sys.stdout.write(replaced(sys.stdin.read()))
