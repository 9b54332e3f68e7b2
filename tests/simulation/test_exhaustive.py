"""Small scope: every order of a few records, and that a rule that is broken is seen."""

from __future__ import annotations

import pytest

from kafka_marshal.testing import exhaustive
from kafka_marshal.testing.exhaustive import BrokenError, explore
from rationalizer import codes
from rationalizer.lease import Lease
from rationalizer.progress import Progress


def test_every_order_of_five_records_and_every_transition() -> None:
    explored = explore(5)
    assert explored.missing() == []
    assert explored.states > 9_000
    assert explored.steps > 40_000


def test_the_command_prints_what_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert exhaustive.main(["--depth", "2"]) == 1  # not every transition can be met in two records
    assert "not met: " in capsys.readouterr().out


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
