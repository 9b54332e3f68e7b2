"""Interrupts at every line: proves that code survives Ctrl-C, alarms and soft time limits.

An exception that a signal handler raises can come out of any call. Here it is raised at one chosen point of one run, in
the thread that runs the code; :func:`sweep` does that for one point after the other, with a run for each::

    def attempt(interrupts):
        store = Store()
        try:
            with interrupts:
                store.add("x")
        except Interrupted:
            store.add("x")
        assert store.items() == ["x"]

    report = sweep(attempt, modules=("my_package",))
    assert not report.failures, report

Where an interrupt can be raised (:class:`Points`):

* ``LINES``: before each line. Stricter than signals are.
* ``CHECKS``: exactly where CPython runs signal handlers: as a function begins, and as a C function has returned, whose
  result is then dropped. (It checks at the end of a loop's turn, too; that is not simulated.) In Python 3.14 an
  ``__enter__`` written in C is such a function: its block is not entered, and not left (cpython issue 148874).
* ``OPCODES``: before each instruction. The strictest, and the slowest.

The end of a ``with`` block is not a point: the interpreter runs no handler between a block and its ``__exit__``.
Neither is the line of a ``try:``: no instruction runs there.

:class:`Alarms` raises by real signals after random short times. :func:`run_within` bounds a call that may hang.
"""

from __future__ import annotations

import dis
import importlib.util
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

T = TypeVar("T")

#: Interrupted by default: this library, except its testing tools.
MODULES = ("kafka_marshal", "rationalizer")
WITHOUT = ("kafka_marshal.testing",)

#: An alarm that comes while no chosen code runs is set again after this.
AGAIN_S = 0.0001

#: Of the call of ``__exit__`` at the end of a block, as its instruction counts them. In 3.14 the manager is one.
_EXIT_ARGUMENTS = 3 if sys.version_info >= (3, 14) else 2


class Interrupted(Exception):
    """Raised by an injected interrupt by default."""


class StuckError(AssertionError):
    """A call did not end in time. The message has the stacks of all threads."""


class Points(Enum):
    """Where interrupts are raised."""

    LINES = "lines"
    CHECKS = "checks"
    OPCODES = "opcodes"


class Place(NamedTuple):
    """One point of the code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class _Code:
    """The chosen code, and its instructions that are no points."""

    def __init__(self, modules: Sequence[str], without: Sequence[str]) -> None:
        self._roots = [root for name in modules for root in _roots(name)]
        self._without = [root for name in without for root in _roots(name)]
        self._chosen: dict[str, bool] = {}
        self._endings: dict[CodeType, frozenset[int]] = {}

    def has(self, code: CodeType) -> bool:
        """Whether this code belongs to the chosen modules."""
        name = code.co_filename
        found = self._chosen.get(name)
        if found is None:
            found = self._chosen[name] = _is_below(name, self._roots) and not _is_below(name, self._without)
        return found

    def is_ending(self, frame: FrameType) -> bool:
        """Whether a ``with`` block has ended and its ``__exit__`` is about to be called, or a ``try`` begins."""
        code = frame.f_code
        found = self._endings.get(code)
        if found is None:
            found = self._endings[code] = _endings(code)
        return frame.f_lasti in found

    def place(self, frame: FrameType) -> Place:
        """The point that a frame is at."""
        name = frame.f_code.co_filename
        for root in self._roots:
            if _is_below(name, [root]):
                name = os.path.relpath(name, Path(root).parent)
                break
        return Place(name, frame.f_lineno or 0, frame.f_code.co_qualname)


def _roots(module: str) -> list[str]:
    """The folder of a package, or the file of a module."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {module!r} to interrupt", name=module)
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin] if spec.origin else []


def _is_below(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith(root + os.sep) for root in roots)


def _endings(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that call ``__exit__(None, None, None)``, and of a ``try:`` (a NOP).

    The compiler leaves the NOP of a ``try:`` out of the block around it: raised there, no ``__exit__`` would be called.
    """
    instructions = list(dis.get_instructions(code))
    found = {each.offset for each in instructions if each.opname == "NOP"}
    for index in range(len(instructions) - 3):
        three = instructions[index : index + 3]
        call = instructions[index + 3]
        if call.opname not in ("PRECALL", "CALL") or call.arg != _EXIT_ARGUMENTS:
            continue
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in three):
            first = index
            while first and instructions[first - 1].opname in ("SWAP", "NOP", "POP_BLOCK"):
                first -= 1
            last = index + (4 if call.opname == "PRECALL" else 3)
            found.update(each.offset for each in instructions[first : last + 1])
    return frozenset(found)


class Interrupts:
    """Counts the points that this thread reaches within ``with`` blocks, and raises at the chosen one; see the module.

    The count continues over several ``with`` blocks. ``at``: the point, from 1; None: only count. ``again_after``: a
    second interrupt, this many points (as of ``CHECKS``) after the first, which is likely in a handler of the first.
    ``keep``: record all points in ``places``.
    """

    def __init__(
        self,
        at: int | None,
        exception: type[BaseException] | BaseException = Interrupted,
        *,
        again_after: int | None = None,
        points: Points = Points.LINES,
        modules: Sequence[str] = MODULES,
        without: Sequence[str] = WITHOUT,
        keep: bool = False,
        _code: _Code | None = None,
    ) -> None:
        self.at = at
        self.exception = exception
        self.again_after = again_after
        self.points = points
        #: Called at the point instead of raising, as a signal's handler that returns; set it before the block.
        self.handler: Callable[[], object] | None = None
        #: Number of counted points.
        self.count: int = 0
        #: All points, in order, if they are kept.
        self.places: list[Place] = []
        #: Where it was interrupted: nowhere, once, or twice.
        self.fired: list[Place] = []
        self._keep = keep
        self._code = _code or _Code(modules, without)
        self._wanted = "opcode" if points is Points.OPCODES else "line"
        self._before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Self:
        self._before = sys.gettrace(), sys.getprofile()
        if not self._is_spent:
            if self.points is Points.CHECKS:
                sys.setprofile(self._profile)
            else:
                # Python 3.12 reports instructions only if a frame asks for them before this.
                sys._getframe().f_trace_opcodes = self.points is Points.OPCODES
                sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        trace, profile = self._before
        sys.settrace(trace)
        sys.setprofile(profile)

    @property
    def _is_spent(self) -> bool:
        return self.at is not None and len(self.fired) > (self.again_after is not None)

    # The interpreter removes a hook that raises: the second interrupt comes from the other hook.

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not self._code.has(frame.f_code):
            return None
        if self.points is Points.OPCODES:
            frame.f_trace = self._local  # from Python 3.13 on without it no instruction of a first run is reported
            frame.f_trace_opcodes = True
        return self._local

    def _local(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == self._wanted and not self._code.is_ending(frame):
            self._come_to(frame)
        return self._local

    def _profile(self, frame: FrameType, event: str, _arg: object) -> None:
        if event in ("call", "c_return") and self._code.has(frame.f_code):
            self._come_to(frame)

    def _come_to(self, frame: FrameType) -> None:
        self.count += 1
        if self._keep:
            self.places.append(self._code.place(frame))
        if self.fired:
            if self._is_spent or self.at is None or self.count < self.at + (self.again_after or 0):
                return
        elif self.count != self.at:
            return
        self.fired.append(self._code.place(frame))
        if self.handler is not None:
            self.handler()
            return
        if not self._is_spent:
            self._arm_again(frame)
        raise self.exception

    def _arm_again(self, frame: FrameType) -> None:
        if self.points is not Points.CHECKS:
            sys.setprofile(self._profile)
            return
        self._wanted = "line"
        sys.settrace(self._trace)
        above: FrameType | None = frame
        while above is not None:
            if self._code.has(above.f_code):
                above.f_trace = self._local
            above = above.f_back

    def __str__(self) -> str:
        if not self.fired:
            return f"not interrupted (point {self.at} of {self.points.value} was not reached)"
        what = self.exception if isinstance(self.exception, type) else type(self.exception)
        where = ", and again at ".join(map(str, self.fired))
        return f"{what.__name__} at {where} (point {self.at} of {self.points.value})"


def interrupt_at(at: int, exception: type[BaseException] | BaseException = Interrupted, **options: Any) -> Interrupts:
    """Interrupt a ``with`` block at this point, from 1. The options are those of :class:`Interrupts`."""
    return Interrupts(at, exception, **options)


def lines(call: Callable[[], object], **options: Any) -> list[Place]:
    """The points that a call reaches in this thread, in order: one for each interrupt to try."""
    counting = Interrupts(None, keep=True, **options)
    with counting:
        call()
    return counting.places


# A campaign.


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed run."""

    where: str
    error: BaseException

    def __str__(self) -> str:
        if isinstance(self.error, AssertionError):
            return f"{self.where}: {self.error}"
        return f"{self.where}: {''.join(traceback.format_exception(self.error)).strip()}"


@dataclass(slots=True)
class Report:
    """The result of a sweep."""

    #: Points of the uninterrupted run.
    counted: int = 0
    #: Number of runs, and of those really interrupted.
    runs: int = 0
    interrupted: int = 0
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        head = (
            f"{len(self.failures)} of {self.runs} runs failed ({self.interrupted} were interrupted; "
            f"{self.counted} points in a run)"
        )
        return "\n".join([head, *map(str, self.failures)])


def spread(places: Sequence[Place], limit: int | None, per_line: int | None = None, seed: int = 0) -> list[int]:
    """Numbers of points to try, from 1: of each line the first ones, and a random ``limit`` of these."""
    met: dict[Place, int] = {}
    found = []
    for number, place in enumerate(places, 1):
        met[place] = met.get(place, 0) + 1
        if per_line is None or met[place] <= per_line:
            found.append(number)
    if limit is not None and len(found) > limit:
        found = sorted(random.Random(seed).sample(found, limit))
    return found


def sweep(
    attempt: Callable[[Interrupts], object],
    *,
    exception: type[BaseException] = Interrupted,
    again_after: int | None = None,
    points: Points = Points.LINES,
    modules: Sequence[str] = MODULES,
    without: Sequence[str] = WITHOUT,
    limit: int | None = None,
    per_line: int | None = None,
    seed: int = 0,
    within_s: float = 30.0,
    most_failures: int | None = None,
) -> Report:
    """Run attempt once to count its points, then once for each: interrupted there.

    attempt enters its Interrupts argument around the code to interrupt, catches the exception, and raises
    AssertionError if anything is wrong then. Each run has its own thread, and ``within_s`` to end.
    ``limit``, ``per_line``, ``seed``: see :func:`spread`. ``most_failures``: stop after this many.
    """
    code = _Code(modules, without)
    counting = Interrupts(None, points=points, keep=True, _code=code)
    report = Report()
    if (failure := _one(attempt, counting, within_s)) is not None:
        report.failures.append(failure)
        return report
    report.counted = counting.count
    for number in spread(counting.places, limit, per_line, seed):
        interrupts = Interrupts(number, exception, again_after=again_after, points=points, _code=code)
        failure = _one(attempt, interrupts, within_s)
        report.runs += 1
        report.interrupted += bool(interrupts.fired)
        if failure is not None:
            report.failures.append(failure)
            if most_failures is not None and len(report.failures) >= most_failures:
                break
    return report


def _one(attempt: Callable[[Interrupts], object], interrupts: Interrupts, within_s: float) -> Failure | None:
    before = sys.unraisablehook

    def ignore(unraisable: Any) -> None:
        # An interrupt within a destructor is reported only to this hook; the code was interrupted nevertheless.
        if not _is_kind(unraisable.exc_value, interrupts.exception):
            before(unraisable)

    sys.unraisablehook = ignore
    try:
        run_within(within_s, lambda: attempt(interrupts))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not (interrupts.fired and _is_kind(error, interrupts.exception)):
            raise  # a real Ctrl-C
        return Failure(str(interrupts), error)
    finally:
        sys.unraisablehook = before
    return None


def _is_kind(error: BaseException | None, wanted: type[BaseException] | BaseException) -> bool:
    return isinstance(error, wanted if isinstance(wanted, type) else type(wanted))


# Calls that may hang.


def run_within(seconds: float, call: Callable[[], T], what: str = "the call") -> T:
    """Run call in a separate thread; StuckError, with all stacks, unless it has ended within this many seconds.

    The thread of a stuck call is left behind: nothing can end it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run, name="run-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise StuckError(f"{what} has not ended after {seconds:g} s\n{stacks(first=thread)}")
    if errors:
        raise errors[0]
    return results[0]


def stacks(first: threading.Thread | None = None) -> str:
    """The stacks of all other threads, as text."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda each: (each is not first, each.name))
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


# Real signals.


class Alarms:
    """Interrupts by SIGALRM after random short times, in the main thread; one for each :meth:`run`.

    A signal that arrives outside the chosen code is postponed, so that always that code is interrupted.
    """

    def __init__(
        self,
        longest_s: float,
        shortest_s: float = 0.00002,
        exception: type[BaseException] = Interrupted,
        *,
        seed: int | None = None,
        modules: Sequence[str] = MODULES,
        without: Sequence[str] = WITHOUT,
    ) -> None:
        self.exception = exception
        #: Places of the interrupts.
        self.fired: list[Place] = []
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._rng = random.Random(seed)
        self._code = _Code(modules, without)
        self._armed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def run(self, call: Callable[[], object]) -> bool:
        """Run call, interrupted once if it takes long enough. Returns whether it ended by itself."""
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(self._shortest_s, self._longest_s))
        try:
            call()
        except self.exception:
            return False
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return True

    def _ring(self, _number: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        at = frame
        while at is not None and not self._code.has(at.f_code):
            at = at.f_back
        if at is None:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        self._armed = False
        self.fired.append(self._code.place(at))
        raise self.exception
