"""on_checkpoint does not return, or fails, in a member that closes or continues; on a cluster in memory."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kafka_marshal.metrics.rows import CheckpointMetrics
from tests.client.conftest import wait_until
from tests.client.test_checkpoints import Team, Worker, settled, team

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

    def found() -> list[str]:  # on a busy machine there may be others for a moment, too
        return [x for x in a.marshal.health().problems if x.startswith("its last ")]

    wait_until(lambda: bool(found()))
    (problem,) = found()
    assert "lack some or all of its pieces" in problem
    assert "on_checkpoint fails or hangs: check the store of states" in problem
    monkeypatch.setattr(team.store, "save", save)
    wait_until(lambda: a.marshal.health().ok)
    a.leave()


def test_figures_and_the_log_count_what_is_saved_and_not_what_was_tried(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = team.start("a")
    team.produce(3)

    def read() -> CheckpointMetrics:
        found = a.marshal.metrics().checkpoints
        assert found is not None
        return found

    def outcomes() -> dict[str, int]:
        return dict(read().outcomes)

    wait_until(lambda: outcomes().get("complete", 0) > 0)
    save = team.store.save

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(team.store, "save", fails)
    ended = outcomes().get("ended", 0)
    team.produce(3)
    wait_until(lambda: outcomes().get("ended", 0) > ended + 1)
    before, saved, kept = outcomes(), read().save_seconds.count, a.consumer.checkpoints.kept
    cut_at = time.monotonic() - (read().oldest_cut_seconds or 0.0)
    wait_until(lambda: outcomes().get("ended", 0) > before["ended"] + 2)
    found = read()
    assert found.oldest_cut_seconds is not None
    assert abs(time.monotonic() - found.oldest_cut_seconds - cut_at) < 0.2, "the alert of a store that refuses"
    assert outcomes() == {**before, "ended": outcomes()["ended"]}
    assert (found.save_seconds.count, a.consumer.checkpoints.kept) == (saved, kept), "nothing was retired either"
    monkeypatch.setattr(team.store, "save", save)
    wait_until(lambda: (read().oldest_cut_seconds or 9.0) < time.monotonic() - cut_at - 0.5)
    assert outcomes()["complete"] > before["complete"]


def test_one_of_two_members_that_saves_nothing_is_named(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = team.start("a"), team.start("b")
    settled(a, b)
    monkeypatch.setattr(b.ledger, "failures", 10**6)
    team.produce(1)

    def outcome(worker: Worker, what: str) -> int:
        found = worker.marshal.metrics().checkpoints
        return 0 if found is None else dict(found.outcomes).get(what, 0)

    wait_until(lambda: outcome(a, "without_some") > 0 and outcome(b, "without_some") > 0)
