"""Runs many seeds in parallel, shrinks the first failure and writes it as a script.

Shrinking: fewer faults, clients and messages, a shorter story. A step is kept if the smaller story still breaks the
same promise.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import cast, get_args

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation.interrupting import interrupted_between
from kafka_marshal.testing.simulation.process import Worker
from kafka_marshal.testing.simulation.recorded import Judge
from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.story import HANGS, Result, simulate_one
from kafka_marshal.types import Delivery

#: The story is first cut at this multiple of the virtual time at which the promise broke.
AFTER = 1.05


def shrink(result: Result, run: Callable[[Scenario], Result], attempts: int = 150) -> Result:
    """The smallest story found within ``most`` runs that breaks the same promise; run: runs one."""
    if result.violation is None:
        raise ValueError("there is nothing to shrink: this run broke no promise")
    promise = result.violation.promise
    best = result
    left = attempts

    def still_breaks(scenario: Scenario) -> bool:
        nonlocal best, left
        if left <= 0 or scenario == best.scenario:
            return False
        left -= 1
        found = run(scenario)
        if found.violation is None or found.violation.promise != promise:
            return False
        best = found
        return True

    progress = True
    while progress and left > 0:
        progress = False
        for smaller in _steps:
            for scenario in smaller(best):
                if still_breaks(scenario):
                    progress = True
                    break  # the next step starts from this one
    return best


def _shorter(result: Result) -> Iterator[Scenario]:
    """End soon after the break, without the later faults."""
    scenario, violation = result.scenario, result.violation
    if violation is None or violation.promise == "liveness":
        lasting = max((fault.at + fault.intervals for fault in scenario.faults), default=0.0)
        yield from (replace(scenario, intervals=n) for n in (5, int(lasting) + 2) if n < scenario.intervals)
        return
    ended = violation.at_ms / scenario.heartbeat_interval_ms * AFTER
    kept = tuple(fault for fault in scenario.faults if fault.at <= ended)
    until = int(ended) + 1
    if until < scenario.intervals or scenario.recovers:
        yield replace(scenario, faults=kept, intervals=until, recovers=False)
    if len(kept) < len(scenario.faults):
        yield replace(scenario, faults=kept)


def _fewer_faults(result: Result) -> Iterator[Scenario]:
    """Halves, then quarters, then one by one."""
    scenario = result.scenario
    for kept in _without(scenario.faults):
        yield replace(scenario, faults=kept)


def _without(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    size = len(faults)
    while size >= 1:
        for start in range(0, len(faults), size):
            yield faults[:start] + faults[start + size :]
        size //= 2


def _fewer_clients(result: Result) -> Iterator[Scenario]:
    scenario = result.scenario
    for gone in scenario.clients[1:] if len(scenario.clients) > 1 else ():
        yield replace(
            scenario,
            clients=tuple(client for client in scenario.clients if client != gone),
            faults=tuple(fault for fault in scenario.faults if fault.client != gone.name),
        )


def _plainer(result: Result) -> Iterator[Scenario]:
    """Default clocks, policies and sizes."""
    scenario = result.scenario
    plain = tuple(Client(x.name, x.worker, claims_ahead=x.claims_ahead, reads=x.reads) for x in scenario.clients)
    yield replace(scenario, clients=plain)
    yield replace(scenario, records=0)
    for messages in (0.1, 1.0, 4.0, round(scenario.messages / 2, 1)):
        if messages < scenario.messages:
            yield replace(scenario, messages=messages)
    if scenario.other_partitions:
        alike = tuple(replace(client, reads="") for client in scenario.clients)
        yield replace(scenario, clients=alike, other_partitions=0)
        yield replace(scenario, clients=alike)
        yield replace(scenario, other_partitions=1)
    for partitions in (1, 2, 4):
        if partitions < scenario.data_partitions:
            yield replace(scenario, data_partitions=partitions)
    if scenario.coordination_partitions > 1:
        yield replace(scenario, coordination_partitions=1)


_steps: tuple[Callable[[Result], Iterator[Scenario]], ...] = (_shorter, _fewer_faults, _fewer_clients, _plainer)


def load_worker(name: str) -> Worker:
    """The function that ``package.module:function`` or ``path/to/file.py:function`` names."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ConfigurationError(f"{name!r} names no worker; write package.module:function or file.py:function")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        worker = getattr(module, function)
        inspect.signature(worker).bind(None)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigurationError(f"the worker {name!r} was not found: {error}") from error
    except SyntaxError as error:
        raise ConfigurationError(f"the worker {name!r} can't be read: {error}") from error
    except TypeError as error:
        raise ConfigurationError(f"{name!r} is no function of one Job: {error}") from error
    return cast("Worker", worker)


def lasting(name: str) -> str:
    """The worker's name with an absolute path."""
    where, _, function = name.rpartition(":")
    return f"{Path(where).resolve()}:{function}" if where.endswith(".py") else name


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # modules beside it can be imported, as by a script
    spec.loader.exec_module(module)
    return module


def name_of(worker: Worker) -> str:
    """The name by which load_worker finds a function again; "" for one that can't be found."""
    module, function = getattr(worker, "__module__", ""), getattr(worker, "__qualname__", "")
    if not function.isidentifier():
        return ""
    source = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or (module and "." not in module and source is not None):
        return f"{source}:{function}" if source else ""
    return f"{module}:{function}" if module else ""


#: Seeds per task of a worker process.
CHUNK = 10


@dataclass(slots=True)
class Report:
    """The result of a campaign."""

    seeds: int = 0
    #: Results that broke a promise, at most the first of each process; the first one is shrunk.
    broken: list[Result] = field(default_factory=list)
    #: The name of the worker under test, for the script.
    worker: str = ""
    intervals: float = 0.0
    faults: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: The minimum over all seeds of "clients", "partitions", "HI" …
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
        """A Python program that reproduces the first broken promise; "" if there is none."""
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
        """The counts as JSON."""
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
        """Raise AssertionError with a script that reproduces it if a promise was broken."""
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
    transactions: bool = False,
    checkpoints: bool = False,
    parks: bool = False,
    sharing: bool = False,
    lists: bool = False,
    redoes: bool = False,
    later: bool = False,
) -> Report:
    """Run seeds and report the promises that broke.

    ``worker``: a function of one :class:`Job`, or its name; every second client of each story runs it. None: the
    built-in workers. ``seeds``: their number, from 0, or the seeds themselves. ``jobs``: parallel processes.
    ``keep_going``: run all seeds, even if one broke a promise. ``small``: shrink the first failure. ``progress`` is
    called after each seed with the same report object, so that an interrupted campaign can be reported too.
    ``judge`` makes an independent judge for each story (:class:`Judge`). ``delivery``: "at-least-once" or
    "at-most-once" for all consumers; by default, stories of your own worker are at least once, and a quarter of the
    others are at most once. ``groups``: all clients are members of a coordinated group, with ``job.strategy`` and
    ``job.session_timeout_ms``. ``lanes``: the built-in workers call ``consumer.run``, and messages have keys; always
    at least once. ``transactions``: the built-in workers commit outputs and progress in transactions; a reader of
    committed records gets the output of each message once and in order. ``checkpoints``: the built-in workers count, in
    a coordinated group that takes checkpoints; each state holds what is done once. These four change the story of a
    seed. ``sharing``: the built-in workers share partitions by batches, some hold them whole; another story of a seed,
    too. ``parks``: the built-in workers set messages aside, and operators redrive them; what is set aside at the end is
    what a plain account says. Your own worker may, too: what the log calls done was handled, or it is open.
    ``lists``: in stories of lanes and of parks the built-in workers' handlers get lists (``batch=``).
    ``redoes``: operators open what is done, in stories of every other kind; what opens is handled again, nothing else.
    ``later``: in stories of parks some messages wait for a time, in the process or in the log.
    Raises ConfigurationError if the worker is not found.
    """
    if delivery:  # the command passes "" for None
        arguments.one_of("delivery", delivery, get_args(Delivery))
    _check_parts(lanes=lanes, parks=parks, lists=lists, later=later, delivery=delivery)
    if transactions and (lanes or delivery == "at-most-once"):
        raise ConfigurationError("stories of transactions are of delivery='at-least-once' and have no lanes")
    if parks and (transactions or checkpoints or delivery == "at-most-once"):
        raise ConfigurationError("stories of parks are at least once, without transactions or checkpoints")
    if checkpoints and (worker is not None or lanes or transactions or delivery == "at-most-once"):
        raise ConfigurationError(
            "stories of checkpoints have built-in workers only, with delivery='at-least-once': leave out the others"
        )
    if sharing and (groups or lanes or transactions or checkpoints or delivery == "at-most-once"):
        raise ConfigurationError(
            "stories of sharing are of claimed groups and at least once, without lanes, transactions or checkpoints"
        )
    numbers = range(arguments.a_whole("seeds", seeds)) if isinstance(seeds, int) else seeds
    function = load_worker(worker) if isinstance(worker, str) else worker
    report = Report(worker=lasting(worker) if isinstance(worker, str) else "" if worker is None else name_of(worker))
    began = time.monotonic()
    draw = partial(
        Scenario.from_seed,
        worker=function is not None,
        delivery=delivery,
        coordinated=groups,
        lanes=lanes,
        transactions=transactions,
        checkpoints=checkpoints,
        parks=parks,
        sharing=sharing,
        lists=lists,
        redoes=redoes,
        later=later,
    )
    run = partial(_run_one, draw, function, judge)
    for result in _run_all(run, iter(numbers), max(1, jobs)):
        report.add(result)
        report.seconds = time.monotonic() - began
        if progress is not None:
            progress(report)
        if report.broken and not keep_going:
            break
    # A hang costs its time-out in each run, and its report already shows the line.
    if report.broken and small and _promise(report.broken[0]) != HANGS:
        report.broken[0] = shrink(report.broken[0], lambda scenario: _judged(scenario, function, judge))
    report.seconds = time.monotonic() - began
    return report


def _check_parts(*, lanes: bool, parks: bool, lists: bool, later: bool, delivery: Delivery | None) -> None:
    """Raises ConfigurationError if stories of lanes or of parks can't have these options."""
    if lanes and delivery == "at-most-once":
        raise ConfigurationError("consumer.run is for delivery='at-least-once', and so are stories of lanes")
    if lists and not (lanes or parks):
        raise ConfigurationError("handlers get lists in stories of lanes or of parks only: name one of them, too")
    if later and not parks:
        raise ConfigurationError("messages wait for a time in stories of parks only: name these, too")


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
    # Forked, so that the worker need not be picklable; this process has no threads.
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
        finally:  # also if ended early or interrupted: don't wait for running seeds
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
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent's timers are not inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal reaches the parent, which kills its processes
    gc.freeze()
    gc.disable()  # a collection after each run costs less than those during it


def _run_chunk(seeds: list[int]) -> list[Result]:
    found = []
    for seed in seeds:
        found.append(replace(_run(seed), events=()))  # too much to send
        gc.collect()
    return found
