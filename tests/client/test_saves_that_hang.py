"""on_checkpoint does not return, or fails, in a member that closes or continues; on a cluster in memory."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.client.conftest import wait_until
from tests.client.test_checkpoints import Team, team

__all__ = ["team"]  # a fixture


def test_pieces_whose_state_was_not_saved_are_not_said_to_be_handed_over(
    team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    hangs, save = threading.Event(), team.store.save
    monkeypatch.setattr(team.store, "save", lambda *_: hangs.wait(20))
    a = team.start("a")
    team.produce(3)
    wait_until(lambda: "on_checkpoint has not returned since an earlier checkpoint" in caplog.text)
    a.leave(timeout=1)
    assert "close() does not wait any longer: on_checkpoint of t [0]" in caplog.text
    assert "The member leaves its group without that" in caplog.text
    assert "lost t [0-3]: this member has left at a checkpoint that does not have what was done" in caplog.text
    assert "handed over" not in caplog.text and "messages in flight were not done" not in caplog.text
    monkeypatch.setattr(team.store, "save", save)
    hangs.set()
    b = team.start("b")
    team.await_counted(b)
    assert {why for why, _ in b.restored()} == {"joined"}


def test_a_member_whose_saves_fail_one_after_another_is_not_well(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    save = team.store.save

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(team.store, "save", fails)
    a = team.start("a")
    team.produce(3)
    wait_until(lambda: not a.marshal.health().ok)
    (problem,) = a.marshal.health().problems
    assert problem.startswith("its last ") and "lack some or all of its pieces" in problem
    monkeypatch.setattr(team.store, "save", save)
    wait_until(lambda: a.marshal.health().ok)
    a.leave()
