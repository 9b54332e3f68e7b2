"""Small scope: every order of a few records, and a broken rule is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rationalizer import World, codes
from rationalizer.leases.lease import Lease
from rationalizer.progress import Progress
from tests.campaigns.small_scope import records as exhaustive
from tests.campaigns.small_scope import search
from tests.campaigns.small_scope.records import BrokenError, explore


def test_every_order_of_four_records_and_every_transition() -> None:
    """``make exhaustive`` is the long form: eight."""
    explored = explore(4)
    assert explored.missing() == []
    assert explored.states > 2_500
    assert explored.steps > 10_000


def test_how_many_processes_there_are_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = explore(3)
    monkeypatch.setattr(search, "CHUNK", 20)
    assert explore(3, jobs=2) == alone
    assert alone.states < alone.all_states < 2 * alone.states


def test_a_broken_rule_is_reported_with_the_records_that_lead_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Lease, "is_stale", lambda self, log_time: True)
    monkeypatch.setattr(search, "CHUNK", 5)
    assert exhaustive.main(["--depth", "3", "--jobs", "2"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "C3" in told[0]
    assert [line.split(":")[0] for line in told[1:]] == ["  offset 0,    0 ms", "  offset 1,    0 ms"]


def test_the_short_cut_of_the_replay_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = World.apply_many

    def forgets(self: World, records: list[tuple[int, int, bytes | None]]) -> None:
        replay(self, records)
        for lease in self.leases():
            lease.last_beat -= lease.last_beat == self.log_time

    monkeypatch.setattr(World, "apply_many", forgets)
    with pytest.raises(BrokenError, match="short cut"):
        explore(4)


def test_the_command_prints_what_was_met(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text('{"engine": {"states": 7}}')
    # Two records can't reach every transition.
    assert exhaustive.main(["--depth", "2", "--json", str(path)]) == 1
    assert "not met: " in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert kept["engine"] == {"states": 7}
    assert kept["rationalizer"]["states"] == sum(kept["rationalizer"]["new_states_by_depth"])
    assert kept["rationalizer"]["not_met"]
    assert kept["rationalizer"]["commit"]


def grants_again(self: Progress, proposal: int) -> str:
    self.granted = proposal
    self.stable = max(self.stable, proposal)
    return codes.OK


@pytest.mark.parametrize(
    ("where", "name", "value", "rule"),
    [
        (Lease, "is_stale", lambda self, log_time: True, "C3"),
        (Lease, "is_stale", lambda self, log_time: log_time - self.last_beat >= 200, "C3"),
        (Lease, "is_stale", lambda self, log_time: log_time - self.last_beat > 300, "C3|C12"),
        (Lease, "is_held_by", lambda self, instance, client, epoch: self.client_id == client, "C5"),
        (Lease, "is_held_by", lambda self, instance, client, epoch: self.instance_id == instance, "C5"),
        (Progress, "grant", grants_again, "C12"),
        (Progress, "through", lambda self, offset: self.reposition(offset), "C5"),
    ],
)
def test_a_rule_that_is_broken_is_seen(
    where: type, name: str, value: object, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.raises(BrokenError, match=rule):
        explore(6, most=20_000)
