"""Hostile records, by grammar and by mutation: straight into the replay, or (--broker) into a real coordination log.

Straight into it: many stories in parallel, and the memory of their processes.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from rationalizer.codes import ACCEPTED
from tests.campaigns.frame import Result, Say
from tests.campaigns.fuzz.author import LARGE_EVERY
from tests.campaigns.fuzz.story import Story, run_story

INPUTS_A_STORY: Final = 2_000
#: Stories per task of a process.
CHUNK: Final = 10
#: Chunks of a process before its memory is first read: by then it has read one of everything.
WARM_UP: Final = 2
#: Largest growth of a process from the first quarter of its chunks to the last (MB, medians: memory that the allocator
#: has not returned after one chunk's largest values is no growth).
RSS_LIMIT_MB: Final = 32.0

_STATM: Final = Path("/proc/self/statm")


def rss_mb() -> float:
    """This process's resident memory now (MB; its peak without /proc)."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(slots=True)
class OfflineReport:
    """The result of a campaign."""

    total: Story = field(default_factory=Story)
    seconds: float = 0.0
    jobs: int = 1
    #: Process → its memory (MB) after each chunk except the warm-up.
    memory: dict[int, list[float]] = field(default_factory=dict)

    @property
    def grown_mb(self) -> float:
        """The largest growth of a process."""
        return max(map(_growth, self.memory.values()), default=0.0)

    @property
    def violations(self) -> list[object]:
        """Promises that were broken. Times are printed, not judged: the machine may have other work."""
        grown = [f"a process has grown by {self.grown_mb:.0f} MB"] if self.grown_mb > RSS_LIMIT_MB else []
        return [*self.total.findings, *grown]

    def tell(self) -> str:
        """One line of figures."""
        total = self.total
        uncaught = sum("uncaught" in finding.what for finding in total.findings)
        inputs = max(1, total.inputs)
        return (
            f"{total.inputs:,} inputs ({total.bytes / 1e6:,.0f} MB, {total.large:,} above 1 kB; "
            f"{self.accepted / inputs:.0%} accepted, {len(total.codes)} outcomes), {total.stored:,} snapshots and "
            f"{total.lines:,} lines of dumps in {self.seconds:,.0f} s on {self.jobs} processes, "
            f"{total.inputs / max(1e-9, self.seconds):,.0f} inputs/s; {uncaught} uncaught errors, "
            f"{len(total.findings) - uncaught} other findings; {total.compared:,} comparisons of states; "
            f"{total.stopped} logs stopped at an Upgrade; {total.applying_s / inputs * 1e6:.1f} us each, at most "
            f"{total.worst[0]:.2f} of what is allowed up to 1 kB, {total.worst[1]:.2f} above "
            f"({len(total.over)} over it); memory {self.grown_mb:+.0f} MB"
        )

    @property
    def accepted(self) -> int:
        """Number of accepted records."""
        return sum(count for code, count in self.total.codes.items() if code in ACCEPTED)

    def figures(self) -> dict[str, Any]:
        """The same, for a file."""
        total = self.total
        return {
            "inputs": total.inputs,
            "bytes": total.bytes,
            "above_1_kB": total.large,
            "outcomes": dict(sorted(total.codes.items())),
            "snapshots": total.stored,
            "dump_lines": total.lines,
            "seconds": round(self.seconds, 1),
            "processes": self.jobs,
            "inputs_per_s": round(total.inputs / max(1e-9, self.seconds)),
            "findings": [str(finding) for finding in total.findings],
            "comparisons": total.compared,
            "stopped_at_upgrade": total.stopped,
            "us_per_input": round(total.applying_s / max(1, total.inputs) * 1e6, 2),
            "worst_share_of_bound_up_to_1_kB": round(total.worst[0], 3),
            "worst_share_of_bound_above_1_kB": round(total.worst[1], 3),
            "over_bound_at_first_sight": total.slow,
            "over_bound_again": [
                {"seed": over.seed, "index": over.index, "bytes": over.size, "ratio": round(over.ratio, 2)}
                for over in sorted(total.over, key=lambda over: -over.ratio)[:20]
            ],
            "over_bound_again_count": len(total.over),
            "rss_growth_MB": round(self.grown_mb, 1),
            "rss_limit_MB": RSS_LIMIT_MB,
            "rss_peak_MB": round(max(map(max, self.memory.values()), default=0.0), 1),
        }


@dataclass(slots=True)
class Fuzzed(Result):
    """What either of them has found: its own line, and its own figures."""

    line: str = ""
    figures: dict[str, object] = field(default_factory=dict)

    def tell(self) -> str:
        """The figures, for people."""
        return self.line

    def to_json(self) -> dict[str, object]:
        """For a file."""
        return {"name": self.name, **self.figures}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--inputs", type=_number, default=100_000, help="how many (100,000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (0); a log of 2,000 inputs has one")
    parser.add_argument("--jobs", type=_number, default=os.cpu_count() or 1, help="processes (as many as processors)")
    parser.add_argument("--story", action="store_true", help="only the log of this seed, to see a finding again")
    parser.add_argument("--large-every", type=int, default=LARGE_EVERY, help="one input in so many is above 1 kB")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first finding")
    parser.add_argument("--broker", action="store_true", help="into a real log, while workers work (starts a broker)")


def _number(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """One of both."""
    if chosen.broker:
        from tests.campaigns.fuzz.broker import fuzz_a_broker  # a Kafka client, which no process of a story needs

        flood = fuzz_a_broker(chosen.inputs, seed=chosen.seed, progress=say)
        yield Fuzzed("broker", chosen.seed, flood.problems, line=flood.tell(), figures=flood.figures())
        return
    if chosen.story:
        report = OfflineReport(run_story(chosen.seed, INPUTS_A_STORY, chosen.large_every))
    else:
        report = run_offline(
            chosen.inputs,
            first=chosen.seed,
            jobs=chosen.jobs,
            large_every=chosen.large_every,
            keep_going=chosen.keep_going,
            progress=lambda far: say(f"{far.total.inputs:,} inputs, {len(far.total.findings)} findings"),
        )
    yield Fuzzed("offline", chosen.seed, report.violations, line=report.tell(), figures=report.figures())


def run_offline(
    inputs: int,
    *,
    first: int = 0,
    jobs: int = 1,
    large_every: int = LARGE_EVERY,
    keep_going: bool = False,
    progress: Callable[[OfflineReport], object] | None = None,
) -> OfflineReport:
    """Replay at least this number of hostile records, from the story of seed `first` on, with this number of processes.

    Ends at the first finding, unless keep_going. progress is called regularly.
    """
    report = OfflineReport(jobs=jobs)
    began = time.monotonic()
    seeds = iter(range(first, 2**62))
    context = multiprocessing.get_context("fork")
    others = set(context.active_children())
    # Frozen: garbage of this process, such as a Kafka client, must not be collected in a child without its threads.
    with ProcessPoolExecutor(jobs, context, gc.freeze) as pool:
        waiting = [_submit(pool, seeds, large_every) for _ in range(2 * jobs)]
        try:
            while waiting:
                pid, memory, story = waiting.pop(0).result()
                report.total.add(story)
                report.memory.setdefault(pid, []).append(memory)
                report.seconds = time.monotonic() - began
                if progress is not None:
                    progress(report)
                if report.total.findings and not keep_going:
                    break
                if report.total.inputs < inputs:
                    waiting.append(_submit(pool, seeds, large_every))
        finally:  # ended early, too, or interrupted: what still runs is not waited for
            for process in set(context.active_children()) - others:
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
    for found in report.memory.values():
        del found[: min(WARM_UP, len(found) - 1)]
    return report


def _growth(samples: list[float]) -> float:
    quarter = max(1, len(samples) // 4)
    return median(samples[-quarter:]) - median(samples[:quarter])


def _submit(pool: ProcessPoolExecutor, seeds: Iterator[int], large_every: int) -> Future[tuple[int, float, Story]]:
    return pool.submit(_run_chunk, list(islice(seeds, CHUNK)), large_every)


def _run_chunk(seeds: list[int], large_every: int) -> tuple[int, float, Story]:
    total = Story()
    for seed in seeds:
        total.add(run_story(seed, INPUTS_A_STORY, large_every))
        if total.findings:
            break
    return os.getpid(), rss_mb(), total
