"""Hostile records into a real log while workers work: the short campaign of each run, and what it would find."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.campaigns.fuzz import broker
from tests.campaigns.fuzz.broker import PARTITIONS, WORKERS, _Flood, fuzz_a_broker

Note = dict[str, Any]


# A violation is one though a second try has none: CI's --reruns is not for these.
@pytest.mark.flaky(reruns=0)
@pytest.mark.slow
@pytest.mark.usefixtures("topic_factory")
def test_twenty_thousand_hostile_records_harm_no_member(kafka_bootstrap: str) -> None:
    report = fuzz_a_broker(20_000, seed=1_000_000, bootstrap=kafka_bootstrap)
    assert report.problems == [], report.tell()
    assert report.records >= 20_000
    assert report.messages > 200
    assert report.digests > 10
    assert report.codes["HELD"] > 20, "nobody tried to take the workers' leases"


@pytest.fixture
def flood(tmp_path: Path) -> Iterator[_Flood]:
    """One that has published two messages to each partition."""
    made = _Flood("127.0.0.1:1", 1, 0, tmp_path, lambda _: None)
    made.report.messages = 2 * 2 * PARTITIONS
    yield made
    made.cluster.close()


def sound(flood: _Flood) -> list[Note]:
    notes: list[Note] = [
        {"what": "handled", "topic": topic, "partition": partition, "offset": offset}
        for topic in (flood.alo, flood.amo)
        for partition in range(PARTITIONS)
        for offset in range(2)
    ]
    memory: list[Note] = [{"what": "memory", "mb": 50.0 + n % 3} for n in range(10)]
    return [*notes, *memory, {"what": "claimed", "ms": 5.0}]


def judged(flood: _Flood, notes: list[Note]) -> list[str]:
    (flood.folder / WORKERS[0]).write_text("".join(json.dumps(note) + "\n" for note in notes))
    flood.judge()
    return flood.report.problems


class Granted:
    """A replica in which everything was granted, and so is done as far as the log knows."""

    def __init__(self) -> None:
        lease = SimpleNamespace(progress=SimpleNamespace(stable=1))
        self.worlds: defaultdict[int, Any] = defaultdict(lambda: SimpleNamespace(lease=lambda *_: lease))


def test_what_is_granted_is_waited_for_until_it_is_handled(flood: _Flood, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers were asked to end while they held a partition, and its messages were reported as lost."""
    *early, last = [note for note in sound(flood) if note["what"] == "handled"]
    path = flood.folder / WORKERS[0]
    path.write_text("".join(json.dumps(note) + "\n" for note in early))
    looks = count()

    def look(_timeout_s: float) -> None:
        if next(looks) == 2:
            with path.open("a") as file:
                file.write(json.dumps(last) + "\n")

    monkeypatch.setattr(flood, "replica", Granted(), raising=False)
    monkeypatch.setattr(flood, "take_in", look)
    flood.drain()
    assert flood.report.problems == []
    assert next(looks) == 3


def test_what_is_never_handled_is_reported(flood: _Flood, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood, "replica", Granted(), raising=False)
    monkeypatch.setattr(flood, "take_in", lambda _: None)
    monkeypatch.setattr(broker, "DRAIN_S", 0.1)
    flood.drain()
    assert any("all messages are done" in problem for problem in flood.report.problems)


def test_what_is_sound_is_no_problem(flood: _Flood) -> None:
    assert judged(flood, sound(flood)) == []
    assert flood.report.rss_by_tenth_mb[WORKERS[0]] == [50.0 + n % 3 for n in range(10)]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda notes: notes[1:], "1 messages were not handled"),
        (lambda notes: [*notes, notes[3]], "1 messages were handled twice"),
        (lambda notes: [*notes, {"what": "error", "text": "what it says"}], "worker-1: what it says"),
        (lambda notes: [*notes, {"what": "memory", "mb": 150.0}], "grew by"),
        (lambda notes: notes[:-1], "nobody could claim"),
    ],
)
def test_what_is_amiss_is_reported(flood: _Flood, spoil: Callable[[list[Note]], list[Note]], problem: str) -> None:
    found = judged(flood, spoil(sound(flood)))
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(("topic", "problem"), [("alo", "not handled"), ("amo", "handled twice")])
def test_a_lost_lease_excuses_one_thing_only(flood: _Flood, topic: str, problem: str) -> None:
    """At least once may repeat then, at most once may lose."""
    notes = sound(flood)
    mine = [note for note in notes if note.get("topic") == getattr(flood, topic)]
    excused = [note for note in notes if note.get("topic") == getattr(flood, {"alo": "amo", "amo": "alo"}[topic])]
    lost = {"what": "lost", "topic": getattr(flood, topic), "partition": 0}
    # Of the same kind the wrong one, of the other the right one.
    if topic == "alo":
        spoilt = [*(note for note in notes if note not in (mine[0], excused[0])), mine[1], lost]
    else:
        spoilt = [*notes, mine[0], excused[0], lost]
    (found,) = judged(flood, spoilt)
    assert problem in found
    assert found.startswith("1 messages")
