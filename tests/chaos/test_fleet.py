"""How a worker ended is read from its last line, and each fail point of a kind has its turn."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

from kafka_marshal.testing.chaos.fleet import _died_at, _in_turn
from kafka_marshal.testing.chaos.lines import Pen, read_lines
from kafka_marshal.testing.chaos.points import points_of


def test_where_somebody_died(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert _died_at(path) is None  # killed before its first line
    pen = Pen(path)
    assert _died_at(path) is None
    pen.write("born")
    assert _died_at(path) is None
    pen.write("die", "at least once 01: claim before append")
    assert _died_at(path) == "at least once 01: claim before append"
    assert [line[0] for line in read_lines(path)] == ["born", "die"]
    with path.open("a") as file:
        file.write('["torn')
    assert [line[0] for line in read_lines(path)] == ["born", "die"]


def test_each_fail_point_has_its_turn_and_the_seed_says_when() -> None:
    names = points_of("at most once")
    first, again = (list(islice(_in_turn("at most once", Random(7)), 2 * len(names))) for _ in range(2))
    assert first == again
    assert sorted(first[: len(names)]) == sorted(first[len(names) :]) == sorted(names)
