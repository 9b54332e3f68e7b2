"""`release-group` with files: positions from one, and the plan that undoes a move."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.harness import Command
from tests.cli.test_steering import append, data

__all__ = ["append", "data"]  # fixtures


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def positions(kafka: Command) -> list[int | None]:
    return [each["next"] for each in kafka("lag", "--group", "g", "--json").json["partitions"]]


def test_from_a_file_and_back_by_the_plan(kafka: Command, append: Callable[..., None], data: str, here: Path) -> None:
    first = kafka("release-group", "g", "--partition", f"{data}:0=10", "--yes", "--json").json
    assert first["plan"].startswith(str(here))
    rows = [
        "# from kafka-consumer-groups --export",
        f'"g","{data}",0,40',
        f'"other","{data}",0,7',
        f'"g","{data}",1,50',
    ]
    (here / "offsets.csv").write_text("\r\n".join(rows), encoding="utf-8-sig")
    dry = kafka("release-group", "g", "--from-file", "offsets.csv", "--dry-run")
    assert [row["means"] for row in dry.table] == ["30 offsets skipped", "never claimed"]
    assert len(list(here.glob("*.json"))) == 1, "a dry run saves nothing"
    ran = kafka("release-group", "g", "--from-file", "offsets.csv", "--yes")
    assert (ran.status, positions(kafka)) == (0, [40, 50])
    (told,) = [line for line in ran.err.splitlines() if line.startswith("as it was: ")]
    plan = told.removeprefix("as it was: ").partition(". To put it back: ")[0]
    assert f"release-group g --undo {plan}" in told
    undone = kafka("release-group", "g", "--undo", plan, "--yes", "--plan", "again.json")
    assert (undone.status, positions(kafka)) == (0, [10, 50])
    assert "1 partition had no position before that move" in undone.err
    again = kafka("release-group", "g", "--undo", "again.json", "--yes", "--json").json
    assert [(move["before"], move["after"]) for move in again["moves"]] == [(10, 40)]
    moved = kafka("release-group", "g", "--from-file", again["plan"], "--dry-run")
    assert moved.status == 2, "a plan is undone, not taken for positions"
    assert kafka("release-group", "other", "--undo", plan, "--yes").status == 2
    assert kafka("release-group", "g", "--to", "earliest", "--yes", "--plan", here / "no" / "where").status == 2
    assert positions(kafka) == [40, 50]


def test_a_time_is_said_with_its_moment(kafka: Command, append: Callable[..., None], data: str, here: Path) -> None:
    (here / "p.json").write_text(json.dumps([{"topic": data, "partition": 0, "offset": "1d"}]))
    for args in (["--partition", f"{data}:0=1d"], ["--from-file", "p.json"]):
        ran = kafka("release-group", "g", *args, "--dry-run")
        assert (ran.status, f"{args[0]} 1d is 20" in ran.err) == (0, True)
        (moment,) = kafka("release-group", "g", *args, "--dry-run", "--json").json["times"]
        assert (moment["option"], moment["text"]) == (args[0], "1d")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("t,0", "line 1: topic,partition,offset or"),
        ("t,0,1\nt,x,2", "line 2: invalid literal"),
        ("t,0,1\nt,0,2", "line 2: t [0] stands there twice"),
        ("t,0,sideways", "line 1: 'sideways' is no time"),
        ("t,-1,5", "line 1: a topic and a partition from 0 on"),
        ("other,t,0,5", "it has no positions of group 'g'"),
        ("", "it has no positions of group 'g'"),
        ("{", "it is no JSON"),
        ('{"a": 1}', "a list of objects"),
        ('[{"topic": "t", "partition": 0}]', "object 1: it has no offset"),
    ],
)
def test_a_file_that_can_not_be_meant_is_refused(command: Command, here: Path, text: str, why: str) -> None:
    (here / "file").write_text(text)
    ran = command("--bootstrap", "127.0.0.1:1", "release-group", "g", "--from-file", "file", "--yes")
    assert (ran.status, why in ran.err, "Nothing was changed" in ran.err) == (2, True, True), ran.err


@pytest.mark.parametrize(
    "args",
    [
        ["--undo", "file", "--to", "latest"],
        ["--undo", "file", "--from-file", "file"],
        ["--from-file", "file", "--partition", "t:0=1"],
        ["--keep-done"],
        ["--undo", "file", "--keep-done"],
        ["--resume", "--undo", "file"],
        ["--undo", "file"],  # it is no plan
    ],
)
def test_what_contradicts_itself_is_refused(command: Command, here: Path, args: list[str]) -> None:
    (here / "file").write_text("t,0,1")
    assert command("--bootstrap", "127.0.0.1:1", "release-group", "g", *args, "--yes").status == 2
