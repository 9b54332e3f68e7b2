"""What the demo shows of a step that takes long."""

from __future__ import annotations

import io
import re

from rich.console import Console

from flights.process import Snapshot, WorkerLine
from flights.screen import Screen
from tests.demo.helpers import eventually


def test_a_pipe_gets_a_line_after_each_silence_and_the_time_of_each_step() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=110), silence_s=0.02) as screen:
        screen.step(1, "Kafka: a broker is started")
        screen.doing("its Java starts")
        eventually(lambda: out.getvalue().count("so far: its Java starts") > 1)
        screen.step(2, "Process")
        lines = [WorkerLine("driver-1", "starts Spark", [], 0), WorkerLine("driver-2", "at work", [3], 100)]
        screen.working(Snapshot(100, 900, 1.0, lines))
        eventually(lambda: "so far: 100 of 900 rows; driver-1 starts Spark, driver-2 at work" in out.getvalue())
        screen.headline("EQUAL", "")
        said = out.getvalue()
    assert re.fullmatch(
        r"1/5 Kafka.*\n(    \d+ s so far.*\n)+    \(\d+ s\)\n2/5 Process\n(    .*\n)+    \(\d+ s\)\nEQUAL\n", said
    )


def test_a_terminal_has_a_line_that_lives() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=110, force_terminal=True)) as screen:
        screen.step(5, "Audit")
        screen.doing("waiting for its result")
        eventually(lambda: "waiting for its result" in out.getvalue())
    assert "so far" not in out.getvalue()
