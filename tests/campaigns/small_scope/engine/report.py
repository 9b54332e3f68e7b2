"""What the search with real engines prints."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from tests.campaigns.small_scope.engine.rules import CHECKED
from tests.campaigns.small_scope.engine.searching import explore_engines
from tests.campaigns.small_scope.engine.situation import MoveKind
from tests.figures import keep_figures

#: What an engine can want done that a search must have met; a record each, but for what admins write.
EFFECTS = frozenset(
    [
        "Append ClaimingMessages",
        "Append ClaimingPartition",
        "Append CommitRanges",
        "Append Heartbeat",
        "Append Heartbeat (takeover)",
        "Append HeartbeatBatch",
        "Append ReleasingPartition",
        "Append Tick",
        "Call on_assign",
        "Call on_lost",
        "Call on_revoke",
        "LookUp",
        "StartFetch",
        "StopFetch",
        "Warn: fenced",
        "Warn: granted, not handed out",
        "Warn: not proven in time",
    ]
)


def tell(depth: int | None, most: int | None, jobs: int, json_path: Path | None = None) -> int:
    """Search and print; returns 0, or 1 where an effect or a move was not met. BrokenError where a rule is broken.

    json_path: a file for the figures, as its part "engine".
    """
    began = time.monotonic()
    effects, moves, outcomes = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    states = finished = 0
    scenarios = []
    for found in explore_engines(depth, most, jobs):
        sys.stdout.write(f"{found.tell()}\n")
        sys.stdout.flush()
        effects += found.effects
        moves += found.moves
        outcomes += found.outcomes
        states += found.states
        finished += found.finished
        scenarios.append(found.tell())
    sys.stdout.write("moves:    " + ", ".join(f"{name} {times:,}" for name, times in sorted(moves.items())) + "\n")
    sys.stdout.write("effects:  " + ", ".join(f"{name} {times:,}" for name, times in sorted(effects.items())) + "\n")
    in_log = (f"{name} {code} {times:,}" for (name, code), times in sorted(outcomes.items()))
    sys.stdout.write(f"in the log: {', '.join(in_log)}\nheld to, after each move:\n{CHECKED}\n")
    wanted = EFFECTS | {kind.name for kind in MoveKind}
    missing = sorted(wanted - set(effects) - set(moves))
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"{states:,} states visited one by one, {moves.total():,} moves, {finished:,} states gone on from to the end, "
        f"{len(wanted) - len(missing)} of {len(wanted)} effects and moves, {seconds:.0f} s"
        + (f"; not met: {', '.join(missing)}" if missing else "")
        + "\n"
    )
    if json_path is not None:
        figures = {
            "states": states,
            "moves": dict(sorted(moves.items())),
            "gone_on_from_to_the_end": finished,
            "effects": dict(sorted(effects.items())),
            "in_the_log": {f"{name} {code}": times for (name, code), times in sorted(outcomes.items())},
            "not_met": missing,
            "scenarios": scenarios,
            "processes": jobs,
            "seconds": round(seconds, 1),
        }
        keep_figures(json_path, "engine", figures)
    return int(bool(missing))
