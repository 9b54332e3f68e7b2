"""The tables of the race, README's and all of it in docs/race.md, say what benchmarks/results/race.json says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OURS = "kafka-marshal"
CLASSIC = "classic, delay 0, heartbeat 2 s"
CLASSIC_FAST = "classic, delay 0, heartbeat 0.1 s"
KIP848 = "KIP-848"
TUNED = "KIP-848, tuned broker"
SHARE = "share group"
SHARE_TUNED = "share group, tuned broker"
GAP, USUAL = "longest gap, leave", "longest gap, steady"

_PAIR = [(CLASSIC,), (CLASSIC_FAST,), (KIP848,), (TUNED,)]

#: Beginning of a row → event, metric, and contestants from left to right (with their metric if it differs).
ROWS: dict[str, tuple[str, str, list[tuple[str, ...]]]] = {
    "new process": ("start", "start", [(OURS,), ("kafka-marshal, reclaim",), (CLASSIC,), (KIP848,)]),
    "`close()` of one": ("handover", "handover", [(OURS,), *_PAIR]),
    "kill -9 of one": (
        "kill",
        "kill",
        [
            ("kafka-marshal, watchdog",),
            (OURS,),
            ("kafka-marshal, HI 1 s",),
            (CLASSIC,),
            (KIP848,),
            (TUNED,),
            (SHARE,),
            (SHARE_TUNED,),
        ],
    ),
    "SIGSTOP of one": (
        "stop",
        "stop",
        [(OURS,), ("kafka-marshal, HI 1 s",), (CLASSIC,), (KIP848,), (TUNED,), (SHARE,), (SHARE_TUNED,)],
    ),
    "10 workers start": ("balance", "start", [(OURS,), *_PAIR]),
    "one of the 10 leaves": ("balance", "leave", [(OURS,), *_PAIR]),
    "the same: longest gap": (
        "balance",
        GAP,
        [(OURS,), (OURS, USUAL), (CLASSIC,), (CLASSIC, USUAL), (KIP848,), (KIP848, USUAL)],
    ),
    "an idle worker": ("cost", "processor", [(OURS,), (CLASSIC_FAST,), (KIP848,)]),
    "a backlog": (
        "throughput",
        "throughput",
        [
            ("kafka-marshal, batches()",),
            ("kafka-marshal, iteration",),
            ("classic group, poll loop, all defaults",),
            ("bare assign + consume(5000), best settings",),
        ],
    ),
}

#: The same for README, which has no figures of tuned settings.
SHORT: dict[str, tuple[str, str, list[tuple[str, ...]]]] = {
    "new process": ("start", "start", [(OURS,), (CLASSIC,), (KIP848,)]),
    "`close()`": ("handover", "handover", [(OURS,), (CLASSIC,), (KIP848,)]),
    "kill -9": ("kill", "kill", [("kafka-marshal, watchdog",), (CLASSIC,), (KIP848,), (SHARE,)]),
    "SIGSTOP": ("stop", "stop", [(OURS,), (CLASSIC,), (KIP848,), (SHARE,)]),
    "idle worker": ("cost", "processor", [(OURS,), (CLASSIC_FAST,), (KIP848,)]),
}

#: Numbers that are settings, not figures.
_SETTINGS = re.compile(r"heartbeat [\d.]+ s|at [\d.]+ s")
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")


def figures(row: str) -> list[str]:
    """The figures of a row of the table, without its title and settings."""
    cells = row.strip().strip("|").split("|")[1:]
    return _NUMBER.findall(_SETTINGS.sub("", "|".join(cells)))


@pytest.mark.parametrize(
    ("page", "beginning"), [*(("docs/race.md", row) for row in ROWS), *(("README.md", row) for row in SHORT)]
)
def test_a_row_is_that_of_the_file(page: str, beginning: str) -> None:
    event, metric, names = (SHORT if page == "README.md" else ROWS)[beginning]
    [row] = [x for x in (ROOT / page).read_text("utf-8").splitlines() if x.startswith(f"| {beginning}")]
    found = json.loads((ROOT / "benchmarks/results/race.json").read_text("utf-8"))
    [metrics] = [x["metrics"] for x in found["events"] if x["name"] == event]
    medians = [metrics[own[0] if own else metric][name]["median"] for name, *own in names]
    if event == "cost":
        expected = [f"{x:.1f}" for x in medians]
    else:
        expected = [f"{x / (1000 if event == 'throughput' else 1):,.0f}" for x in medians]
    assert figures(row) == expected


def test_readme_has_half_the_table() -> None:
    _, _, race = (ROOT / "README.md").read_text("utf-8").partition("## Beside Kafka's own groups")
    table = [x for x in race.splitlines() if x.startswith("| ")]
    assert len(table) == 1 + len(SHORT)
    assert "(" not in "".join(table).replace("`close()`", "")


def test_settings_are_no_figures() -> None:
    assert figures("| kill -9 | 17 with x; 5,551 (heartbeat 3 s; 1,917 at 1 s) | 0.7 |") == [
        "17",
        "5,551",
        "1,917",
        "0.7",
    ]
