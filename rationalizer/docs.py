"""The part of PROTOCOL.md that is written from the tables: records, transitions, states, outcomes, limits.

    python -m rationalizer.docs < PROTOCOL.md > new && mv new PROTOCOL.md

puts it in anew between its two markers. A test compares the page with the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from rationalizer import codes, limits
from rationalizer.groups import transitions as groups
from rationalizer.leases.transitions import TRANSITIONS
from rationalizer.wire.records import KINDS, Belongs, Kind

BEGIN: Final = "<!-- written by rationalizer.docs: begin -->"
END: Final = "<!-- written by rationalizer.docs: end -->"


def tables() -> str:
    """Markdown: the tables of kinds, transitions, outcomes and limits, as the code has them."""
    return "\n".join([*_kinds(), "", *_transitions(), "", *_group_transitions(), "", *_codes(), "", *_limits()])


def replaced(page: str) -> str:
    """The page with what stands between the markers written again. ValueError where the markers are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}; it was left as it is. Put both in.")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _kinds() -> list[str]:
    return [
        "### Records, as they are checked",
        "",
        "A record belongs to a CP by what the third column names (L3). The last column says whether it passes a",
        "pause by another client (C10).",
        "",
        *_table(
            ("type", "record", "belongs", "fields after group_id", "during another's pause"),
            [
                (str(number), kind.name, _belongs(kind), _fields(kind), kind.during_pause.value)
                for number, kind in sorted(KINDS.items())
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
        "### The life of a lease",
        "",
        "How a record ends, by who sends it and how the lease stands (C1). The last column says what an accepted",
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
        "### The life of a coordinated group",
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


def _ending(ending: groups.Ending) -> str:
    if ending.effect is groups.Effect.NOTHING:
        return f"`{ending.code}`"
    return f"`{ending.code}` ({ending.effect.value})"


def _codes() -> list[str]:
    return [
        "### Outcomes",
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
        ("bytes of a part of a snapshot", limits.MAX_PART_BYTES, "S2"),
        ("parts of a snapshot", limits.MAX_SNAPSHOT_PARTS, "S2"),
        ("offsets between two snapshots, least", limits.SNAPSHOT_INTERVAL, "S2"),
        ("highest level this release replays", limits.SUPPORTED_LEVEL, "E4"),
    ]
    return ["### Limits", "", *_table(("limit", "value", "rule"), [(what, f"{n:,}", rule) for what, n, rule in named])]


if __name__ == "__main__":
    sys.stdout.write(replaced(sys.stdin.read()))
