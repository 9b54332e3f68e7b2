"""Many seeds, side by side; what breaks is made small, and written down as a script."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import get_args

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation.checks import Judge
from kafka_marshal.testing.simulation.interrupting import interrupted_between
from kafka_marshal.testing.simulation.process import Worker
from kafka_marshal.testing.simulation.scenario import Scenario
from kafka_marshal.testing.simulation.shrink import shrink
from kafka_marshal.testing.simulation.stall_detector import HANGS
from kafka_marshal.testing.simulation.story import Result, simulate_one
from kafka_marshal.testing.simulation.worker_loader import lasting, load_worker, name_of
from kafka_marshal.types import Delivery

__all__ = ["Report", "simulate"]

#: Seeds that one process gets at a time.
CHUNK = 10


@dataclass(slots=True)
class Report:
    """What a campaign has shown."""

    seeds: int = 0
    #: Results that broke a promise, the first of each process at most; made small.
    broken: list[Result] = field(default_factory=list)
    #: The name of the worker under test, for the script.
    worker: str = ""
    intervals: float = 0.0
    faults: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: The least of each that any seed had: "clients", "partitions", "HI" …
    least: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        """Count one run."""
        scenario = result.scenario
        self.seeds += 1
        self.intervals += result.intervals
        self.faults += len(scenario.faults)
        self.counts.update(result.counts)
        self.outcomes.update(result.outcomes)
        if result.violation is not None:
            self.broken.append(result)
            return
        had = {
            "clients": len(scenario.clients),
            "partitions": sum(scenario.data_topics.values()),
            "CPs": scenario.coordination_partitions,
            "HI": result.intervals,
            "faults": len(scenario.faults),
            "records": result.counts["records"],
            "messages": result.counts["messages"],
        }
        for name, value in had.items():
            self.least[name] = min(value, self.least.get(name, value))

    @property
    def script(self) -> str:
        """A Python program that shows the first broken promise; "" where there is none."""
        if not self.broken:
            return ""
        result = self.broken[0]
        return result.scenario.script(self.worker, str(result.violation))

    def tell(self) -> str:
        """One line of figures."""
        least = ", ".join(f"{value:.0f} {name}" for name, value in self.least.items())
        return (
            f"{self.seeds} seeds, {len(self.broken)} broken; {self.intervals:.0f} HI, {self.faults} faults, "
            f"{self.counts['records']} records, {self.counts['replicas']} comparisons of replicas, "
            f"{self.counts['messages']} messages ({self.counts['repeats']} repeated), "
            f"{self.counts['transactions']} transactions, {self.counts['snapshots']} snapshots, "
            f"{self.counts['pruned']} records pruned, {self.counts['forgotten']} leases forgotten, "
            f"{self.counts['interrupted']} calls interrupted, {self.counts['torn']} reads torn; "
            f"at least {least or 'nothing'} in each; {self.seconds:.0f} s"
        )

    def to_json(self) -> dict[str, object]:
        """The same and more, for a file."""
        return {
            "seeds": self.seeds,
            "broken": [f"seed {result.scenario.seed}: {result.violation}" for result in self.broken],
            "intervals": round(self.intervals),
            "faults": self.faults,
            **self.counts,
            "least": self.least,
            "outcomes": {" ".join(key): count for key, count in sorted(self.outcomes.items())},
            "seconds": round(self.seconds, 1),
        }

    def raise_for_violation(self) -> None:
        """Raise AssertionError, with the script that shows it, where a promise was broken."""
        if self.broken:
            raise AssertionError(f"{self.broken[0].violation}\n\n{self.script}")


def simulate(
    worker: Worker | str | None = None,
    seeds: int | Iterable[int] = 100,
    *,
    jobs: int = 1,
    keep_going: bool = False,
    small: bool = True,
    progress: Callable[[Report], object] | None = None,
    judge: Callable[[Scenario], Judge] | None = None,
    delivery: Delivery | None = None,
    groups: bool = False,
    lanes: bool = False,
) -> Report:
    """Run seeds, and say what broke.

    ``worker``: a function of one :class:`Job`, or its name; every second client of each story then runs it, at least
    once; None: the built-in workers. ``seeds``: how many, from 0, or which. ``jobs``: processes side by side.
    ``keep_going``: run all seeds, even when one broke a promise. ``small``: shrink the first failure. ``progress`` is
    called after each seed, with one and the same report, which so tells also what was shown before an interruption.
    ``judge`` makes the second opinion that each story is held against (:class:`Judge`). ``delivery``: how everybody's
    consumers deliver, "at-least-once" or "at-most-once"; by default an own worker's stories are of the first kind, and
    a quarter of the others of the second. ``groups``: everybody is a member of a coordinated group, as
    ``job.strategy`` and ``job.session_timeout_ms`` say; the stories are others. ``lanes``: the built-in workers call
    ``consumer.run``, and messages have keys; the stories are others, all of them at least once. Raises
    ConfigurationError for a worker that is not found.
    """
    if delivery:  # the command has "" for none
        arguments.one_of("delivery", delivery, get_args(Delivery))
    if lanes and delivery == "at-most-once":
        raise ConfigurationError("consumer.run is for delivery='at-least-once', and so are stories of lanes")
    numbers = range(arguments.a_whole("seeds", seeds)) if isinstance(seeds, int) else seeds
    function = load_worker(worker) if isinstance(worker, str) else worker
    report = Report(worker=lasting(worker) if isinstance(worker, str) else "" if worker is None else name_of(worker))
    began = time.monotonic()
    run = partial(
        _run_one,
        partial(Scenario.from_seed, worker=function is not None, delivery=delivery, coordinated=groups, lanes=lanes),
        function,
        judge,
    )
    for result in _run_all(run, iter(numbers), max(1, jobs)):
        report.add(result)
        report.seconds = time.monotonic() - began
        if progress is not None:
            progress(report)
        if report.broken and not keep_going:
            break
    # What hangs takes its time with each run, and says where as it is.
    if report.broken and small and _promise(report.broken[0]) != HANGS:
        report.broken[0] = shrink(report.broken[0], lambda scenario: _judged(scenario, function, judge))
    report.seconds = time.monotonic() - began
    return report


def _promise(result: Result) -> str:
    return "" if result.violation is None else result.violation.promise


MakeJudge = Callable[[Scenario], Judge]


Run = Callable[[int], Result]


def _run_one(draw: Callable[[int], Scenario], worker: Worker | None, judge: MakeJudge | None, seed: int) -> Result:
    return _judged(draw(seed), worker, judge)


def _judged(scenario: Scenario, worker: Worker | None, judge: MakeJudge | None) -> Result:
    return simulate_one(scenario, worker, None if judge is None else judge(scenario))


def _run_all(run: Run, seeds: Iterator[int], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        for seed in seeds:
            yield run(seed)
            with interrupted_between():
                gc.collect()
        return
    # Forked, so that the worker need not be pickled; nothing here has threads.
    context = multiprocessing.get_context("fork")
    others = set(context.active_children())
    with ProcessPoolExecutor(jobs, context, _set_up, (run,)) as pool:
        waiting = [pool.submit(_run_chunk, chunk) for chunk in islice(_chunks(seeds), 2 * jobs)]
        try:
            while waiting:
                results = waiting.pop(0).result()
                if (chunk := next(_chunks(seeds), None)) is not None:
                    waiting.append(pool.submit(_run_chunk, chunk))
                yield from results
        finally:  # ended early, too, or interrupted: nobody waits for what still runs
            for process in set(context.active_children()) - others:
                process.kill()  # a worker may have a handler for SIGTERM
            pool.shutdown(wait=True, cancel_futures=True)


def _chunks(seeds: Iterator[int]) -> Iterator[list[int]]:
    while chunk := list(islice(seeds, CHUNK)):
        yield chunk


_run: Run


def _set_up(run: Run) -> None:
    global _run
    _run = run
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent's timers are its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which ends its processes
    gc.freeze()
    gc.disable()  # it would look through each run twice, and while it runs; once after each is less than once after ten


def _run_chunk(seeds: list[int]) -> list[Result]:
    found = []
    for seed in seeds:
        found.append(replace(_run(seed), events=()))  # too much to send
        gc.collect()
    return found
