"""``python -m tests.campaigns.soak --minutes 20``: workers that survive faults without growing.

The campaign of :mod:`tests.campaigns.chaos`, in which one worker of each kind is never killed: it is stopped and cut
off, its broker dies, and other workers die all the time. Its memory, file descriptors and threads are sampled every two
seconds; the last third must not exceed the first one (after the warm-up) by more than the limits below.

Exit status: 0 flat and every promise kept, 1 not, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.simulate import where_it_ran
from tests.campaigns.chaos import Options, Result, run_campaign
from tests.campaigns.chaos.fleet import Fleet

__all__ = ["STEADY", "Sample", "Series", "main", "plot", "soak"]

#: Workers that are never killed: one of each kind.
STEADY = ("again-1", "again-3", "sink-1", "once-1", "once-3", "hand-1")

LOOK_EVERY_S = 2.0

#: Share of the time for the warm-up of connections, caches and heaps.
WARM_UP = 0.25

#: Largest growth from the first to the last third.
RSS_GROWTH_MB = 6.0
RSS_GROWTH_SHARE = 0.08
DESCRIPTORS_GROWTH = 3
THREADS_GROWTH = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a process."""

    seconds: float
    pid: int
    rss_mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, seconds: float, pid: int) -> Sample | None:
        """A sample from /proc; None if the process does not exist."""
        folder = Path("/proc") / str(pid)
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            descriptors = len(os.listdir(folder / "fd"))
        except OSError:
            return None
        if "VmRSS" not in status:
            return None  # it is a zombie
        rss_mb = int(status["VmRSS"].split()[0]) / 1024
        return cls(round(seconds, 1), pid, round(rss_mb, 2), descriptors, int(status["Threads"]))


@dataclass(slots=True)
class Series:
    """Samples of each steady worker."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    _next: float = 0.0

    def look(self, fleet: Fleet, seconds: float) -> None:
        """Sample all steady workers if it is time."""
        if seconds < self._next:
            return
        self._next = seconds + LOOK_EVERY_S
        for place in fleet.places:
            if place.steady and place.pid and (sample := Sample.of(seconds, place.pid)) is not None:
                self.samples.setdefault(place.name, []).append(sample)

    def thirds(self, name: str) -> tuple[Sample, Sample]:
        """Medians of the first and the last third after the warm-up."""
        samples = self.samples[name]
        warm = samples[int(len(samples) * WARM_UP) :]
        third = max(1, len(warm) // 3)
        return _middle(warm[:third]), _middle(warm[-third:])

    def problems(self) -> list[str]:
        """What is not flat."""
        found = []
        for name in sorted(set(STEADY) | set(self.samples)):
            if len(self.samples.get(name, ())) < 6:
                found.append(f"{name}: seen {len(self.samples.get(name, ()))} times, too few to tell")
                continue
            if len(pids := {sample.pid for sample in self.samples[name]}) > 1:
                found.append(f"{name}: it ended by itself, and {len(pids)} processes took turns")
                continue
            first, last = self.thirds(name)
            limits = (
                ("MB of memory", first.rss_mb, last.rss_mb, max(RSS_GROWTH_MB, RSS_GROWTH_SHARE * first.rss_mb)),
                ("file descriptors", first.descriptors, last.descriptors, DESCRIPTORS_GROWTH),
                ("threads", first.threads, last.threads, THREADS_GROWTH),
            )
            found.extend(
                f"{name}: {what} went from {before:g} to {now:g} (limit: {limit:g} more)"
                for what, before, now, limit in limits
                if now > before + limit
            )
        return found

    def tell(self) -> str:
        """First and last third of the worker with the largest growth of each figure."""
        pairs = [self.thirds(name) for name in self.samples]
        parts = []
        for what, unit in (("rss_mb", "MB"), ("descriptors", "descriptors"), ("threads", "threads")):
            both = max(
                ((getattr(a, what), getattr(b, what)) for a, b in pairs), key=lambda x: x[1] - x[0], default=(0, 0)
            )
            parts.append(f"{both[0]:g} to {both[1]:g} {unit}")
        return f"first to last third, largest growth: {', '.join(parts)}"


def _middle(samples: Sequence[Sample]) -> Sample:
    """Median of the memory; of descriptors and threads the upper quartile: they are fewer while a broker is away."""
    upper = len(samples) * 3 // 4
    return Sample(
        samples[0].seconds,
        samples[0].pid,
        round(median(x.rss_mb for x in samples), 2),
        sorted(x.descriptors for x in samples)[upper],
        sorted(x.threads for x in samples)[upper],
    )


def soak(options: Options) -> tuple[Result, Series]:
    """Run it; growth is among the result's violations."""
    series = Series()
    result = run_campaign(options, look=series.look, say=lambda line: sys.stderr.write(f"{line}\n"))
    for problem in series.problems():
        result.findings.say("not flat", problem)
    return result, series


def plot(series: Series, path: Path) -> None:
    """Memory, file descriptors and threads over time. Needs matplotlib (kafka-marshal[spark] has it)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8))
    for axis, (what, title) in zip(
        axes, (("rss_mb", "memory, MB"), ("descriptors", "file descriptors"), ("threads", "threads")), strict=True
    ):
        for name, samples in sorted(series.samples.items()):
            axis.plot([x.seconds / 60 for x in samples], [getattr(x, what) for x in samples], label=name, linewidth=1)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    axes[0].legend(ncols=3, fontsize="small")
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (20)")
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--cluster3", action="store_true", help="three brokers, min.insync.replicas 2")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    chosen = _parser().parse_args(arguments)
    seed = chosen.seed if chosen.seed is not None else int.from_bytes(os.urandom(3))
    logging.basicConfig(level=logging.ERROR)  # brokers die, so that broken connections are expected
    sys.stderr.write(f"seed {seed}\n")
    options = Options(chosen.minutes, seed, 3 if chosen.cluster3 else 1, steady=STEADY)
    try:
        result, series = soak(options)
    except LocalBrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if chosen.json is not None:
        thirds = {
            name: {"first": _figures(first), "last": _figures(last)}
            for name, (first, last) in ((name, series.thirds(name)) for name in sorted(series.samples))
        }
        figures = {**where_it_ran(), "flat": series.tell(), "thirds": thirds, **result.to_json()}
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    if chosen.plot is not None:
        plot(series, chosen.plot)
    sys.stdout.writelines(f"{each}\n" for each in result.findings.violations[:50])
    if not result.ok and result.folder:
        sys.stdout.write(f"seed {seed}; what was written down: {result.folder}\n")
    sys.stdout.write(f"soak: {series.tell()}; {result.tell()}\n")
    return int(not result.ok)


def _figures(sample: Sample) -> dict[str, float]:
    return {"rss_mb": sample.rss_mb, "descriptors": sample.descriptors, "threads": sample.threads}


if __name__ == "__main__":
    sys.exit(main())
