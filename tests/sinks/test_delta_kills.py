"""Writers to a Delta table that are killed or stopped at any moment."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from kafka_marshal.sinks import DeltaSink, Written
from tests.sinks.delta_writer import SCHEMA, Writer
from tests.sinks.test_delta import check_log, offsets


@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize(
    ("kills", "rows"), [(4, 60), pytest.param(100, 600, marks=[pytest.mark.campaign, pytest.mark.timeout(1_200)])]
)
def test_each_row_is_written_once_however_often_the_writer_is_killed(
    kills: int, rows: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Some are stopped instead, and continue once the next one writes: they are rejected."""
    draw, table = random.Random(kills), tmp_path / "table"
    sink = DeltaSink(table, schema=SCHEMA)
    epoch, frozen = 1, []
    following = Writer(table, 1, rows, 0, 1)
    for turn in range(kills):
        writer, epoch = following, epoch + 1
        following = Writer(table, epoch, rows, 0, 1)
        for each in (writer, following):
            request.addfinalizer(each.process.kill)
        assert writer.hear() == "ready"
        writer.go()
        heard = writer.hear(draw.randint(1, 4))
        time.sleep(draw.random() * 0.05)  # a batch takes some 40 ms: any moment of it
        if heard != "end" and turn % 2:
            writer.process.send_signal(signal.SIGSTOP)
            frozen.append(writer)
        else:
            writer.kill()
    assert following.hear() == "ready"
    following.go()
    first = following.hear()
    assert first.startswith("stored") or first == "end"
    for each in frozen:
        each.process.send_signal(signal.SIGCONT)
    assert following.rest() in ("end", "")
    assert {each.rest() for each in frozen} <= {"stale", "end"}
    for partition in (0, 1):
        assert offsets(sink, partition) == list(range(rows))
    assert sink.progress("group", [("flights", 0)]) == {("flights", 0): Written(rows - 1, epoch)}
    check_log(table)
