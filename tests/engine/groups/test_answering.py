"""What one member does about an open barrier, part by part (X13, X16)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafka_marshal.engine.effects import Outbox, Warn
from kafka_marshal.engine.groups.checkpoints import answering
from kafka_marshal.engine.groups.checkpoints.answering import Answering
from kafka_marshal.engine.groups.checkpoints.shown import CheckpointFigures
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.settings import CheckpointOptions
from kafka_marshal.types import Key
from rationalizer import AnswerBarrier, CommitEntry
from rationalizer.groups.checkpoints import Barrier

KEY: Key = ("flights", 0)


class Bench:
    """One member that owns some pieces, and the part of it that answers barriers."""

    def __init__(self, keys: list[Key], *, named: bool, leave_by: float | None) -> None:
        self.closes: list[tuple[Key, bool]] = []
        self.outbox = Outbox()
        cutting = SimpleNamespace(
            is_in_doubt=lambda key: False,
            is_in_hand=lambda key: False,
            done_of=lambda key: None,
            take_back=lambda key: None,
            close_gaps=lambda key, is_on: self.closes.append((key, is_on)),
        )
        self.shown = SimpleNamespace(
            barrier=Barrier(7, 0, 60_000, passing=True),
            answer=None,
            owns=True,
            log_time=0,
            checkpoints=SimpleNamespace(hold=False),
            is_revoked=lambda piece, generation: False,
            is_outgrown=lambda piece: False,
        )
        member = SimpleNamespace(
            generation=5,
            interval_ms=1_000.0,
            member_id="g-1",
            settings=SimpleNamespace(ids=("i", "c", "g")),
            send=lambda record, now: 1,
        )
        pieces = {key: HeldPiece(key, 0, 5, 3_000, cast("Any", None)) for key in keys}
        for piece in pieces.values():
            piece.is_restored = True
        cutter = SimpleNamespace(
            can_be_named=lambda piece, done: named,
            entries=lambda piece, done: [CommitEntry("flights", piece.key[1], 0, 2**32 - 1, 0)],
        )
        self.answering = Answering(
            cast("Any", member),
            cast("Any", self.shown),
            pieces,
            cast("Any", SimpleNamespace(number=1, cutting=cutting)),
            self.outbox,
            CheckpointOptions(every_ms=None),
            cast("Any", cutter),
            CheckpointFigures(),
            lambda now: leave_by,
        )

    def answer(self, now: float) -> AnswerBarrier:
        self.answering.step(now)
        assert self.answering.now is not None
        assert self.answering.now.record is not None
        return self.answering.now.record


def test_x16_a_leaver_whose_drain_is_over_begins_nothing_below_a_gap() -> None:
    bench = Bench([KEY], named=False, leave_by=1_000.0)
    bench.answering.step(0.0)
    assert bench.closes == [(KEY, True)]
    bench.answer(950.0)
    assert bench.closes[-1] == (KEY, False)


def test_x13_what_does_not_fit_into_an_answer_is_named_and_comes_first_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "MAX_COMMIT_ENTRIES", 8)
    bench = Bench([("flights", partition) for partition in range(10)], named=True, leave_by=None)
    assert [entry.partition for entry in bench.answer(0.0).entries] == list(range(8))
    (warning,) = [effect for effect in bench.outbox.take() if isinstance(effect, Warn)]
    assert warning.message.startswith("flights [8], flights [9]: one answer has no room for these, too (8 entries")
    assert bench.answering.lacking == (1, 0.0, False)
    bench.shown.barrier = Barrier(9, 0, 60_000, passing=True)
    assert [entry.partition for entry in bench.answer(5.0).entries] == [8, 9, *range(6)]
    assert bench.answering.lacking == (2, 0.0, False)
