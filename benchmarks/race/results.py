"""Results: samples by event, metric and contestant; tables, JSON, and which targets are met."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.race.contestants import Contestant
from benchmarks.race.events.base import Aim, Event, Samples
from kafka_marshal.testing.simulate import where_it_ran

__all__ = ["Found", "Judged", "closing_line", "earlier", "measured_here", "table", "to_json", "write"]


def p95(samples: Sequence[float]) -> float:
    """The 95th percentile; the sample itself if there is only one."""
    return quantiles(samples, n=20, method="inclusive")[-1] if len(samples) > 1 else samples[0]


@dataclass(frozen=True, slots=True)
class Judged:
    """A target and its result."""

    aim: Aim
    ours: float
    #: The other contestant's median; None: a fixed bound.
    theirs: float | None

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.aim.met(self.ours, self.theirs if self.theirs is not None else 1.0)

    @property
    def value(self) -> float:
        """The value that is compared with the bound."""
        return self.ours if self.theirs is None else self.ours / self.theirs


@dataclass(slots=True)
class Found:
    """All of one event."""

    event: Event
    #: metric → contestant's name → samples, in order of time.
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    #: (contestant's name, why): rounds without a figure.
    failures: list[tuple[str, str]] = field(default_factory=list)
    #: Commit, rounds, machine, load: events of one file may come from several runs.
    measured: Mapping[str, object] = field(default_factory=dict)

    def add(self, contestant: Contestant, samples: Samples) -> None:
        """Take in one round."""
        for metric, values in samples.items():
            if values:
                self.samples.setdefault(metric, {}).setdefault(contestant.name, []).extend(values)

    @property
    def without_figure(self) -> list[str]:
        """Contestants that were tried without any figure."""
        heard = {name for by_name in self.samples.values() for name in by_name}
        return sorted({name for name, _ in self.failures} - heard)

    def judged(self) -> Iterator[Judged]:
        """Every target whose figures exist."""
        for aim in self.event.aims:
            by_name = self.samples.get(aim.metric, {})
            if aim.contestant not in by_name or (aim.beside and aim.beside not in by_name):
                continue
            theirs = median(by_name[aim.beside]) if aim.beside else None
            yield Judged(aim, median(by_name[aim.contestant]), theirs)


def table(found: Found) -> str:
    """A table of every metric and contestant, then the targets, then failures."""
    event = found.event
    conditions = event.conditions
    lines = [f"{event.name}: {event.title}", "  " + ", ".join(f"{key}: {value}" for key, value in conditions.items())]
    if found.measured:
        lines.append("  measured: " + ", ".join(f"{key} {value}" for key, value in found.measured.items()))
    width = max((len(name) for metric in found.samples.values() for name in metric), default=0)
    for metric, by_name in found.samples.items():
        lines.append(f"  {metric} ({event.units[metric]}){'':{max(0, width - 8)}}")
        lines.append(f"    {'':{width}} {'median':>12} {'p95':>12} {'n':>4}")
        for name, samples in by_name.items():
            lines.append(f"    {name:{width}} {median(samples):12,.2f} {p95(samples):12,.2f} {len(samples):4d}")
    for judged in found.judged():
        verdict = "met" if judged.met else "MISSED"
        lines.append(
            f"  {verdict:6} {judged.aim.contestant}: {judged.aim.metric} {judged.value:.3g}, {judged.aim.text()}"
        )
    lines.extend(f"  FAILED {name}: {why}" for name, why in found.failures)
    return "\n".join(lines)


def closing_line(found: Sequence[Found]) -> str:
    """One line about a whole run: targets met and missed, rounds without a figure."""
    judged = [(x.event.name, each) for x in found for each in x.judged()]
    missed = [f"{name}: {x.aim.contestant}, {x.aim.metric} {x.value:.3g}" for name, x in judged if not x.met]
    failures = sum(len(x.failures) for x in found)
    silent = sorted({name for x in found for name in x.without_figure})
    return (
        f"race: {len(found)} events, {len(judged) - len(missed)} of {len(judged)} aims met"
        + (f", missed: {'; '.join(missed)}" if missed else "")
        + f"; {failures} rounds without a figure"
        + (f", none at all of {', '.join(silent)}" if silent else "")
    )


def measured_here(rounds: int, quick: bool, load: float) -> dict[str, object]:
    """Conditions of an event's figures: the commit, the machine, and the number of rounds."""
    return {"rounds": rounds, **({"quick": True} if quick else {}), "load before": round(load, 2), **where_it_ran()}


def to_json(found: Sequence[Found], conditions: Mapping[str, object]) -> str:
    """Everything, samples included."""
    return json.dumps(
        {
            "benchmark": "race",
            "conditions": dict(conditions),
            "contestants": {
                c.name: {"broker": c.broker, "settings": c.settings} for x in found for c in x.event.contestants
            },
            "events": [_event(x) for x in found],
        },
        indent=1,
    )


def earlier(path: str, kinds: Mapping[str, Callable[[], Event]]) -> dict[str, Found]:
    """Results of an earlier run in this file, by event; empty if there is no such file.

    Raises ValueError if it is no file of the race.
    """
    if not Path(path).exists():
        return {}
    kept = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(kept, dict) or kept.get("benchmark") != "race":
        raise ValueError(f"{path} is not what a race wrote; nothing was measured, and the file is as it was")
    found = {}
    for event in kept["events"]:
        if event["name"] in kinds:
            kind = kinds[event["name"]]()
            kind.conditions = event["conditions"]
            found[event["name"]] = Found(
                kind,
                {
                    metric: {name: list(figures["samples"]) for name, figures in by_name.items()}
                    for metric, by_name in event["metrics"].items()
                },
                [(x["contestant"], x["why"]) for x in event["failures"]],
                event["measured"],
            )
    return found


def _event(found: Found) -> dict[str, object]:
    return {
        "name": found.event.name,
        "title": found.event.title,
        "measured": dict(found.measured),
        "conditions": found.event.conditions,
        "metrics": {
            metric: {
                name: {
                    "unit": found.event.units[metric],
                    "median": round(median(samples), 3),
                    "p95": round(p95(samples), 3),
                    "samples": [round(x, 3) for x in samples],
                }
                for name, samples in by_name.items()
            }
            for metric, by_name in found.samples.items()
        },
        "aims": [
            {
                "contestant": judged.aim.contestant,
                "metric": judged.aim.metric,
                "aim": judged.aim.text(),
                "value": round(judged.value, 4),
                "met": judged.met,
            }
            for judged in found.judged()
        ],
        "failures": [{"contestant": name, "why": why} for name, why in found.failures],
    }


def write(path: str, text: str) -> None:
    """Write a file, creating folders as needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n", encoding="utf-8")
