"""``python -m benchmarks.against REV``: see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from random import Random
from statistics import median, quantiles

import msgpack

from benchmarks.against.worker import THREADS
from benchmarks.common import bench_kafka
from benchmarks.group_log import GroupLog
from benchmarks.race.contestants import MARSHAL
from benchmarks.race.events.handover import hand_over
from benchmarks.race.grounds import Grounds, new_name
from benchmarks.race.hosts import ROOT, Host
from kafka_marshal.testing.simulate import where_it_ran

#: Messages of the backlog, and records of the replayed logs: of claims, of a group.
MESSAGES, RECORDS, GROUP_RECORDS = 300_000, 60_000, 10_000

#: A heartbeat's phase is anywhere when a worker leaves: the pair runs this long before, at least and at most.
PHASE_S = (0.1, 1.1)

#: By the name of a measurement: its rounds.
ROUNDS = {"iteration": 14, "at-most-once": 14, "hand-over": 14, "replay": 10, "replay-group": 10}

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """One tree: its processes, and its part of the broker's topics."""

    coordination: str
    one: Host
    other: Host


@contextmanager
def worktree(rev: str) -> Iterator[Path]:
    """The commit's files, for as long as this is entered."""
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-against-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), rev], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


@contextmanager
def packages(tree: Path) -> Iterator[Path]:
    """A folder with the product of one tree, and this tree's benchmarks."""
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-against-") as folder:
        found = Path(folder)
        (found / "kafka_marshal").symlink_to(tree / "marshal" / "kafka_marshal")
        (found / "rationalizer").symlink_to(tree / "rationalizer")
        (found / "benchmarks").symlink_to(ROOT / "benchmarks")
        yield found


def coordination(bootstrap: str, folder: Path) -> str:
    """A log that one side creates itself: at the level that this release begins with."""
    name = new_name("__marshal")
    program = "import sys; from kafka_marshal.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "init", "--bootstrap", bootstrap, "--topic", name]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True, capture_output=True)
    return name


def measurements(grounds: Grounds, folder: Path) -> dict[str, Callable[[Side], Figures]]:
    """Each takes one figure, or several, of one side. folder: for the log of a group."""
    file = folder / "group.msgpack"
    written = GroupLog(GROUP_RECORDS, checkpoints=False)
    file.write_bytes(msgpack.packb((written.begin, written.work)))
    topic = grounds.topic(1)
    grounds.fill(topic, 1, MESSAGES)
    phase = Random(5)

    def read(delivery: str) -> Callable[[Side], Figures]:
        def one(side: Side) -> Figures:
            options = {"coordination": side.coordination, "topic": topic, "records": MESSAGES, "delivery": delivery}
            side.one.order("read", options={"bootstrap": grounds.bootstrap, **options})
            found = side.one.wait("read", "")
            return {name: float(found[name]) for name in ("rate", *THREADS)}

        return one

    def handed_over(side: Side) -> Figures:
        phase_s = phase.uniform(*PHASE_S)
        return {"ms": hand_over(grounds, MARSHAL, side.coordination, side.one, side.other, phase_s)}

    def replayed(side: Side) -> Figures:
        side.one.order("replay", records=RECORDS)
        return {"rate": float(side.one.wait("replayed", "")["rate"])}

    def replayed_group(side: Side) -> Figures:
        side.one.order("replay-group", file=str(file))
        return {"rate": float(side.one.wait("replayed", "")["rate"])}

    return {
        "iteration": read("at-least-once"),
        "at-most-once": read("at-most-once"),
        "hand-over": handed_over,
        "replay": replayed,
        "replay-group": replayed_group,
    }


#: (measurement, figure, what it is called, unit), as in the table.
ROWS = (
    ("iteration", "rate", "iteration, at least once", "messages/s"),
    *(("iteration", whose, f"  processor: {whose}", "ns a message") for whose in THREADS),
    ("at-most-once", "rate", "iteration, at most once", "messages/s"),
    *(("at-most-once", whose, f"  processor: {whose}", "ns a message") for whose in THREADS),
    ("hand-over", "ms", "hand-over of a partition", "ms"),
    ("replay", "rate", "replay, claims", "records/s"),
    ("replay-group", "rate", "replay, a group's commits", "records/s"),
)

#: (this tree, the commit) of each round, by measurement and figure.
Found = Mapping[tuple[str, str], Sequence[tuple[float, float]]]


def table(found: Found, rev: str) -> str:
    """For people: medians, the ratio's median, and between what the middle half of the ratios lies."""
    lines = [f"{'':26} {'this tree':>12} {rev[:12]:>12} {'ratio':>7} {'middle half':>13}"]
    for measurement, figure, name, unit in ROWS:
        if pairs := found.get((measurement, figure)):
            ours, theirs = zip(*pairs, strict=True)
            low, middle, high = quartiles([mine / other if other else nan for mine, other in pairs])
            digits = 1 if unit == "ms" else 0
            lines.append(
                f"{name:26} {median(ours):12,.{digits}f} {median(theirs):12,.{digits}f} {middle:7.3f} "
                f"{low:6.3f}–{high:.3f}  {unit}"
            )
    return "\n".join(lines)


def quartiles(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Of any number of them."""
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def measured(bootstrap: str, sides: Sequence[Side], rounds: Mapping[str, int]) -> Found:
    """All rounds; who goes first alternates."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-against-") as folder:
        for name, measure in measurements(Grounds(bootstrap), Path(folder)).items():
            for number in range(-1, rounds.get(name, -1)):  # the first warms both sides up
                order = sides if number % 2 else sides[::-1]
                came = {side: measure(side) for side in order}
                for figure in came[sides[0]] if number >= 0 else ():
                    found[name, figure].append((came[sides[0]][figure], came[sides[1]][figure]))
            print(f"{name}: {rounds.get(name, 0)} rounds", file=sys.stderr, flush=True)
    return found


def compare(bootstrap: str, rev: str, rounds: Mapping[str, int]) -> Found:
    """This tree beside a commit, on this broker. rounds: of each measurement that is taken."""
    with ExitStack() as stack:
        tree = stack.enter_context(worktree(rev))
        folders = [stack.enter_context(packages(each)) for each in (ROOT, tree)]
        hosts = [[stack.enter_context(Host("benchmarks.against.worker", [x])) for _ in range(2)] for x in folders]
        sides = [Side(coordination(bootstrap, x), *pair) for x, pair in zip(folders, hosts, strict=True)]
        return measured(bootstrap, sides, rounds)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("rev", help="the commit that is measured beside this tree")
    parser.add_argument("--rounds", type=int, help="of each measurement (10 to 14)")
    parser.add_argument("--only", default=",".join(ROUNDS), help=f"of {', '.join(ROUNDS)}")
    parser.add_argument("--json", type=Path, help="write every sample here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON if asked."""
    options = _options(arguments)
    rounds = {name: options.rounds or ROUNDS[name] for name in options.only.split(",")}
    began = time.monotonic()
    with bench_kafka() as bootstrap:
        found = compare(bootstrap, options.rev, rounds)
    print(f"{table(found, options.rev)}\n\n{time.monotonic() - began:.0f} s")
    if options.json:
        samples = {f"{name}: {figure}": pairs for (name, figure), pairs in found.items()}
        about = {"beside": options.rev, "machine": where_it_ran(), "samples": samples}
        options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
