"""Hostile records straight into the replay: the short campaign of each run, and that it would see what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rationalizer import World, intervals
from rationalizer.leases.machine import LeasePlane
from rationalizer.snapshot_log import SnapshotParts
from rationalizer.wire.unpacking import Message
from tests.campaigns.__main__ import main
from tests.campaigns.fuzz import Author, run_offline, run_story
from tests.campaigns.fuzz.campaign import RSS_LIMIT_MB, OfflineReport

SEED = 1_000_000


# A violation is one though a second try has none: CI's --reruns is not for these.
@pytest.mark.flaky(reruns=0)
@pytest.mark.slow
@pytest.mark.timeout(300)  # on a busy machine
def test_12_000_hostile_inputs_break_nothing() -> None:
    """``make fuzz`` is the long form."""
    report = run_offline(12_000, first=SEED, jobs=1)
    assert [str(violation) for violation in report.violations] == [], report.tell()
    assert report.total.inputs >= 12_000
    # It has been everywhere: most of E6's outcomes, accepted and rejected, long values.
    assert len(report.total.codes) >= 18, report.total.codes
    assert report.accepted > report.total.inputs / 10
    assert report.total.large > 12


def test_one_seed_is_one_log() -> None:
    first, second = run_story(SEED, 500, 100), run_story(SEED, 500, 100)
    assert (first.codes, first.bytes, first.inputs) == (second.codes, second.bytes, second.inputs)
    assert run_story(SEED + 1, 500, 100).codes != first.codes


def _forget_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = World.restore.__func__  # type: ignore[attr-defined]

    def broken(cls: type[World], snapshot: bytes, partitions: int) -> World:
        world: World = restore(cls, snapshot, partitions)
        world._pauses.clear()
        return world

    monkeypatch.setattr(World, "restore", classmethod(broken))


def _lose_the_last_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that only shows where a rejected record has changed something."""
    refused = LeasePlane._claiming_partition

    def broken(self: LeasePlane, message: Message, context: object) -> str:
        code = refused(self, message, context)  # type: ignore[arg-type]
        if code == "HELD":
            self.leases[message[4], message[5], message[6]].last_beat += 1
        return code

    monkeypatch.setattr(LeasePlane, "_claiming_partition", broken)


def _let_a_value_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ranges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        firsts, lasts = intervals._merge([first for first, _ in ranges], [last for _, last in ranges])
        if len(firsts) > 30:
            raise IndexError("planted")
        return firsts, lasts

    monkeypatch.setattr("rationalizer.progress.union", broken)


def _let_a_part_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SnapshotParts, value: bytes | None) -> None:
        if value is not None and len(value) % 7 == 0:
            raise KeyError("planted")

    monkeypatch.setattr(SnapshotParts, "add", broken)


@pytest.mark.parametrize(
    ("plant", "word"),
    [
        (_forget_pauses, "restored"),
        (_lose_the_last_edit, "changed the state"),
        (_let_a_value_raise, "uncaught IndexError"),
        (_let_a_part_raise, "uncaught KeyError"),
    ],
)
def test_what_is_planted_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], word: str
) -> None:
    plant(monkeypatch)
    found = []
    for seed in range(SEED, SEED + 20):
        found += run_story(seed, 1_000, 200).findings
        if any(word in finding.what for finding in found):
            return
    pytest.fail(f"20,000 inputs, and only {[str(finding) for finding in found]}")


@pytest.mark.campaign
def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["fuzz", "--inputs", "2000", "--jobs", "1", "--seed", str(SEED)]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "0 uncaught errors, 0 other findings" in line
    with pytest.raises(SystemExit, match="2"):
        main(["fuzz", "--inputs", "0"])
    _let_a_part_raise(monkeypatch)
    assert main(["fuzz", "--story", "--seed", str(SEED)]) == 1
    assert f"seed {SEED}, record" in capsys.readouterr().out


def test_memory_that_one_large_value_needed_is_no_growth_and_a_little_more_each_time_is() -> None:
    report = OfflineReport(memory={1: [50.0, 51.0, 121.0, 50.0] * 25})
    assert abs(report.grown_mb) < 1
    assert report.violations == []
    report.memory[2] = [50.0 + 0.5 * chunk for chunk in range(100)]
    assert report.grown_mb > RSS_LIMIT_MB
    assert report.violations == ["a process has grown by 38 MB"]


#: What an author of hostile records meets of coordinated groups in a few logs: most of what there is (codes of entries
#: under "entry"). Full groups and starts that are too large are for others: they are slow.
MET = {
    "JoinGroup": "OK ALREADY_MEMBER REPLACED UNKNOWN_CONSUMER UNKNOWN_PARTITIONING_STRATEGY WRONG_KIND PAUSED "
    "INCONSISTENT_PARTITIONING_STRATEGY SESSION_TIMEOUT_TOO_HIGH TOO_MANY_PARTITIONS WRONG_PARTITION MALFORMED",
    "GroupHeartbeat": "OK ILLEGAL_GENERATION UNKNOWN_CONSUMER WRONG_KIND PAUSED",
    "LeaveGroup": "OK UNKNOWN_CONSUMER WRONG_KIND",
    "CommitOffsets": "OK PARTIAL ILLEGAL_GENERATION UNKNOWN_CONSUMER GROUP_ACTIVE WRONG_KIND",
    "entry": "OK DUPLICATE_COMMIT OFFSET_REGRESSION NOT_ASSIGNED ILLEGAL_GENERATION ALREADY_STARTED OUT_OF_ORDER "
    "INDIVIDUAL_COMMIT_NOT_ALLOWED INDIVIDUAL_COMMIT_TOO_OLD MAX_INDIVIDUAL_COMMIT_REACHED REPOSITIONED",
    "TopicsChanged": "OK UNKNOWN_CONSUMER WRONG_KIND",
    "ConfigureGroup": "OK WRONG_KIND MALFORMED",
    "ForgetGroup": "OK GROUP_ACTIVE",
    "ClaimingPartition": "OK HELD WRONG_KIND",
}


def test_its_author_gets_far_into_coordinated_groups() -> None:
    met: set[tuple[str | None, str]] = set()
    wanted = {(name, code) for name, found in MET.items() for code in found.split()}
    for seed in range(150):
        cps = (1, 1, 3, 8)[seed % 4]
        author, world, offset = Author(seed, 0, cps, large_every=0, upgrades=False), World(0, cps), 0
        for _ in range(1_000):
            value = author.next()
            offset += author.step()
            outcome = world.apply(offset, author.stamp(), value)
            author.hear(offset, outcome)
            met.add((outcome.type, outcome.code))
            met |= {("entry", code) for code in outcome.entries or () if outcome.of_group}
        if wanted <= met:
            break
    assert wanted - met == set()
