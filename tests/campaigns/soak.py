"""Workers that survive faults without growing.

The campaign of :mod:`tests.campaigns.chaos`, in which one worker of each kind is never killed: it is stopped and cut
off, its broker dies, and other workers die all the time. Its memory, file descriptors and threads are sampled every two
seconds; the last third must not exceed the first one (after the warm-up) by more than the limits below.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median

from tests.campaigns.chaos import ChaosResult, Options, run_campaign
from tests.campaigns.chaos.fleet import Fleet
from tests.campaigns.frame import Say

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


@dataclass(slots=True)
class SoakResult(ChaosResult):
    """Growth is among the violations."""

    series: Series = field(default_factory=Series)

    def tell(self) -> str:
        return f"soak: {self.series.tell()}; {ChaosResult.tell(self)}"

    def to_json(self) -> dict[str, object]:
        thirds = {
            name: {"first": _figures(first), "last": _figures(last)}
            for name, (first, last) in ((name, self.series.thirds(name)) for name in sorted(self.series.samples))
        }
        return {**ChaosResult.to_json(self), "flat": self.series.tell(), "thirds": thirds}


def soak(options: Options, say: Say = lambda _: None) -> SoakResult:
    """Run it."""
    series = Series()
    found = run_campaign(options, look=series.look, say=say)
    for problem in series.problems():
        found.findings.say("not flat", problem)
    return SoakResult(**{each.name: getattr(found, each.name) for each in fields(found)}, series=series)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (20)")
    parser.add_argument("--cluster3", action="store_true", help="three brokers, min.insync.replicas 2")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[SoakResult]:
    """What the command runs."""
    options = Options(chosen.minutes, chosen.seed, 3 if chosen.cluster3 else 1, steady=STEADY, keep=chosen.keep)
    found = soak(options, say)
    if chosen.plot is not None:
        plot(found.series, chosen.plot)
    yield found


def _figures(sample: Sample) -> dict[str, float]:
    return {"rss_mb": sample.rss_mb, "descriptors": sample.descriptors, "threads": sample.threads}
