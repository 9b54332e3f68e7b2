"""Runs a campaign in a folder alone, on a broker that it may kill."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from kafka_marshal.testing import RunningKafka, open_kafka

__all__ = ["Result", "Say", "run_on_a_broker"]

Say = Callable[[str], object]


class Found(Protocol):
    """What came of a campaign."""

    folder: str

    @property
    def violations(self) -> Sequence[object]: ...


@dataclass(slots=True)
class Result:
    """The figures, and what was broken."""

    name: str
    seed: int
    violations: list[str]
    seconds: float = 0.0
    folder: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def tell(self) -> str:
        """One line of figures."""
        counts = ", ".join(f"{name} {times:,}" for name, times in sorted(self.counts.items()))
        end = f"{len(self.violations)} violations; seed {self.seed}"
        return f"{self.name}: {self.seconds / 60:.1f} min; {counts}; {end}"


FoundT = TypeVar("FoundT", bound=Found)


def run_on_a_broker(
    name: str, run: Callable[[Path, RunningKafka, bool], FoundT], kafka: RunningKafka | None, keep: bool, say: Say
) -> FoundT:
    """Call run(folder, broker, may be killed): on one made for it, which may, or on the given one, which may not.

    If a promise was broken, or with keep, what the workers wrote down stays in the result's folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"kafka-marshal-{name}-"))
    is_kept = True
    own = open_kafka(1, controllable=True) if kafka is None else None
    try:
        result = run(folder, kafka or own, own is not None)  # type: ignore[arg-type]
        is_kept = keep or bool(result.violations)
        result.folder = str(folder) if is_kept else ""
        return result
    finally:
        if own is not None:
            own.stop()
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"what was written down: {folder}")
