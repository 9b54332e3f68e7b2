"""Run by other interpreters: replays the logs given on stdin and prints what the real world makes of them.

stdin: JSON `[{"partition", "partitions", "log": [[offset, timestamp, hex or null]]}]`.
stdout: JSON, for each log `[digest, snapshot in hex, accepted, rejected, outcomes]`, of each outcome
`[code, epoch, entries, generation, member]`.
Imports nothing but the standard library and rationalizer, so that it runs without test tools.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rationalizer import World


def replay(case: dict[str, Any]) -> list[Any]:
    """The result of one log, applied one by one and (the digest twice) in one go."""
    one_by_one, at_once = (World(case["partition"], case["partitions"]) for _ in range(2))
    log = [(offset, stamp, None if text is None else bytes.fromhex(text)) for offset, stamp, text in case["log"]]
    outcomes = [one_by_one.apply(*entry) for entry in log]
    at_once.apply_many(log)
    if at_once.snapshot() != one_by_one.snapshot():
        raise AssertionError("apply and apply_many differ")
    counts = [dict(sorted(counted.items())) for counted in (one_by_one.accepted, one_by_one.rejected)]
    names = ("code", "epoch", "entries", "generation", "member")  # the last two from level 2 on
    answers = [[getattr(outcome, name, None) for name in names] for outcome in outcomes]
    return [one_by_one.digest(), one_by_one.snapshot().hex(), *counts, answers]


if __name__ == "__main__":
    json.dump([replay(case) for case in json.load(sys.stdin)], sys.stdout)
