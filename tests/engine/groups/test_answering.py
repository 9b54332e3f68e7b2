"""What one member does about an open barrier, part by part (X13, X16)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kafka_marshal.engine.effects import Key, Outbox
from kafka_marshal.engine.groups.checkpoints.answering import Answering
from kafka_marshal.engine.groups.checkpoints.figures import CheckpointFigures
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.settings import CheckpointOptions
from rationalizer.groups.checkpoints import Barrier

KEY: Key = ("flights", 0)


def test_x16_a_leaver_whose_drain_is_over_begins_nothing_below_a_gap() -> None:
    closes: list[tuple[Key, bool]] = []
    cutting = SimpleNamespace(
        is_in_doubt=lambda key: False,
        is_in_hand=lambda key: False,
        done_of=lambda key: None,
        take_back=lambda key: None,
        close_gaps=lambda key, is_on: closes.append((key, is_on)),
    )
    shown = SimpleNamespace(
        barrier=Barrier(7, 0, 60_000, passing=True),
        answer=None,
        owns=True,
        log_time=0,
        checkpoints=SimpleNamespace(hold=False),
        is_revoked=lambda piece, generation: False,
    )
    member = SimpleNamespace(
        generation=5,
        interval_ms=1_000.0,
        member_id="g-1",
        settings=SimpleNamespace(ids=("i", "c", "g")),
        send=lambda record, now: 1,
    )
    answering = Answering(
        cast("Any", member),
        cast("Any", shown),
        {KEY: HeldPiece(KEY, 0, 5, 3_000, cast("Any", None))},
        cast("Any", SimpleNamespace(number=1, cutting=cutting)),
        Outbox(),
        CheckpointOptions(every_ms=None),
        cast("Any", SimpleNamespace(can_be_named=lambda piece, done: False)),
        CheckpointFigures(),
        lambda now: 1_000.0,
    )
    answering.step(0.0)
    assert closes == [(KEY, True)]
    answering.step(950.0)
    assert answering.now is not None
    assert answering.now.record is not None
    assert closes[-1] == (KEY, False)
