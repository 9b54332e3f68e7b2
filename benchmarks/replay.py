"""Records a second of World.apply_many, divided by a bare msgpack decode of the same values:

    python -m benchmarks.replay [--records N] [--rounds N] [--compiled] [--json FILE]

apply_many decodes, validates, routes and applies; the baseline only decodes (msgpack.unpackb, as it comes). Both take
turns in one process; rates and the ratio are medians over the rounds. The log: one CP of eight, 60 leases held by
20 clients, single Heartbeats of about 75 bytes whose offsets and stamps move on. The same beats in HeartbeatBatches are
their own row.

--compiled measures the compiled core too (benchmarks.compiled builds it): the same source through mypyc.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from msgpack import unpackb

if TYPE_CHECKING:
    from benchmarks.common import Row

PARTITIONS = 8
CP = 3
LEASES = 60
CLIENTS = 20
GROUP = "delays-by-carrier"
TOPIC = "flights"
HEARTBEAT_INTERVAL_MS = 3000

Entry = tuple[int, int, bytes | None]


class Written:
    """The log to replay: claims first, then heartbeats, single (`beats`) and in batches (`batches`)."""

    def __init__(self, records: int) -> None:
        from rationalizer import BeatEntry, ClaimingPartition, Heartbeat, HeartbeatBatch, encode, route_lease

        rng = random.Random(75)
        here = [n for n in range(LEASES * PARTITIONS * 3) if route_lease(TOPIC, n, PARTITIONS) == CP][:LEASES]
        who = [(f"{n:02d}-5f0e9a3c1b7d42e8", f"delays-worker-{n:02d}", GROUP) for n in range(CLIENTS)]
        self.claims: list[Entry] = [
            (n, 1_000_000, encode(ClaimingPartition(*who[n % CLIENTS], TOPIC, partition, HEARTBEAT_INTERVAL_MS)))
            for n, partition in enumerate(here)
        ]
        done = [rng.randrange(1_000_000, 50_000_000) for _ in here]
        self.beats: list[Entry] = []
        self.batches: list[Entry] = []
        now = 1_700_000_000_000
        while len(self.beats) < records:
            client = rng.randrange(CLIENTS)
            now += rng.randrange(20)
            entries = []
            for lease in range(client, LEASES, CLIENTS):
                done[lease] += rng.randrange(2000)
                beat = Heartbeat(*who[client], TOPIC, here[lease], lease, done[lease])
                self.beats.append((LEASES + len(self.beats), now, encode(beat)))
                entries.append(BeatEntry(TOPIC, here[lease], lease, done[lease]))
            batch = HeartbeatBatch(*who[client], tuple(entries))
            self.batches.append((LEASES + len(self.batches), now, encode(batch)))


def measure(name: str, records: int, rounds: int, target: float) -> tuple[list[Row], dict[str, object]]:
    """The rows of the imported core, and the conditions."""
    from benchmarks.common import Row

    written = Written(records)
    rows = []
    for what, log, aim in (("heartbeats", written.beats, target), ("heartbeat batches of 3", written.batches, 0.0)):
        ours, bare = _interleaved([partial(replay, written.claims, log), partial(decode_bare, log)], rounds)
        # Each round's two runs are adjacent, so that disturbances of the machine affect both.
        ratio = median(theirs / mine for mine, theirs in zip(ours, bare, strict=True))
        rate, baseline = len(log) / median(ours), len(log) / median(bare)
        rows.append(Row(f"{name}: {what}", rate, baseline, ratio, aim, "records/s"))
    values = [value for _, _, value in written.beats if value is not None]
    return rows, {
        "records": len(written.beats),
        "bytes": round(sum(map(len, values)) / len(values), 1),
        "leases": LEASES,
        "clients": CLIENTS,
        "rounds": rounds,
    }


def _interleaved(runs: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """The seconds of each run in each round, all taking turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, seconds, strict=True):
            found.append(run())
    return seconds


def replay(claims: Sequence[Entry], log: Sequence[Entry], cp: int = CP, partitions: int = PARTITIONS) -> float:
    """Seconds for the log of this CP, after the claims."""
    from rationalizer import World

    world = World(cp, partitions)
    world.apply_many(claims)
    start = time.perf_counter()
    world.apply_many(log)
    seconds = time.perf_counter() - start
    if world.accepted != {"OK": len(claims) + len(log)}:
        raise AssertionError(f"the log was not accepted as a whole: {world.accepted}, {world.rejected}")
    return seconds


def decode_bare(log: Sequence[Entry]) -> float:
    """Seconds of a bare decode of the same values."""
    values = [value for _, _, value in log]
    start = time.perf_counter()
    for value in values:
        unpackb(value)
    return time.perf_counter() - start


def _measure_compiled(records: int, rounds: int) -> list[Row]:
    """The same in another process, which imports the compiled core."""
    from benchmarks.common import Row
    from benchmarks.compiled import build

    script = (
        f"import sys; sys.path.insert(0, {str(build())!r})\n"
        "import json, dataclasses, rationalizer.world, benchmarks.replay\n"
        "assert not rationalizer.world.__file__.endswith('.py'), rationalizer.world.__file__\n"
        f"rows, _ = benchmarks.replay.measure('compiled', {records}, {rounds}, 0.33)\n"
        "print(json.dumps([dataclasses.asdict(row) for row in rows]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True
    )
    return [Row(**row) for row in json.loads(run.stdout)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON on request."""
    from benchmarks.common import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compiled", action="store_true", help="measure the compiled core too")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    rows, conditions = measure("pure Python", options.records, options.rounds, 0.22)
    if options.compiled:
        rows += _measure_compiled(options.records, options.rounds)
    report("replay", rows, options.json, **conditions)


if __name__ == "__main__":
    main()
