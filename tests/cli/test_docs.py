"""docs/json.md and docs/exit-codes.md name exactly what commands print."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.cli import app, failures, status
from kafka_marshal.cli.output import Cell, Column, Field, Rows
from kafka_marshal.observe.checkpoints import checkpoints_json
from rationalizer import ClaimingPartition, Heartbeat, ReleaseGroup, SettlingMessages
from tests.cli.harness import Command
from tests.cli.test_kafka import A, Append, append, cluster, data

__all__ = ["append", "cluster", "data"]  # fixtures

DOCS = Path(__file__).parents[2] / "docs"


def documented(command: str) -> set[str]:
    """The fields in the table of a command's section."""
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {command}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def fields(value: Any, path: str = "") -> set[str]:
    """The paths of all fields of a document, as the page writes them."""
    if isinstance(value, dict):
        below = {found for key, inner in value.items() for found in fields(inner, f"{path}.{key}" if path else key)}
        return below | ({path} if path and not path.endswith("[]") else set())
    if isinstance(value, list):
        return {found for inner in value for found in fields(inner, f"{path}[]")}
    return {path}


def slim(found: set[str]) -> set[str]:
    """Without containers, and without fields that depend on the log (codes)."""
    return {path for path in found if not re.match(r"partitions\[\]\.rejected\.", path)}


@pytest.mark.parametrize(
    "args", [["status"], ["check"], ["lag"], ["who", "g", "{data}", "0"]], ids=lambda args: str(args[0])
)
def test_fields_are_those_of_the_page(kafka: Command, append: Append, data: str, args: list[str]) -> None:
    epoch = append(ClaimingPartition("host/17/1.0/x", *A[1:], data, 0, 100_000))
    append(Heartbeat("host/17/1.0/x", *A[1:], data, 0, epoch, 23))  # lost: it has 10
    if args[0] == "who":
        opened = ((3, 5, None, 0),)
        append(SettlingMessages("x", "admin", "g", data, 0, None, epoch + 9, open=opened, redo=True))
    append(ReleaseGroup("x", "admin", "g", int(time.time() * 1000) + 600_000), 0)
    found = slim(fields(kafka(*(arg.format(data=data) for arg in args), "--json").json))
    wanted = documented(args[0]) - {"answers[]"}
    optional = {"notes[]", "history[]", "redone[]", "answer", "left_out[]", "warnings[]"}
    optional |= {path for path in wanted if path.startswith("leases[].sharers[]")} | {"leases[].sharers"}
    of_answer = {path for path in found if re.match(r"answer(s\[\])?\.", path) and path not in wanted}
    assert {re.sub(r"^answer(s\[\])?\.", "history[].", path) for path in of_answer} <= wanted | {
        "history[].holder",
        "history[].last_beat",
        "history[].state",
        "history[].next",
        "history[].open",
        "history[].parked",
    }
    containers = {"clock", "log", "answer", "leases[].holder", "history[].holder"}
    assert found - of_answer - containers - optional == wanted - containers - optional


@pytest.mark.parametrize(
    ("command", "place", "rows", "more"),
    [
        ("status", "groups[]", status._groups({}), checkpoints_json(None)),
        ("status", "members[]", status._MEMBERS, ()),
        ("status", "leases[]", status._LEASES, ()),
        ("lag", "partitions[]", status._LAGS, ()),
        ("check", "problems[]", status._PROBLEMS, ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_page_lists_each_field_of_a_row(command: str, place: str, rows: Rows[Any], more: Iterable[str]) -> None:
    found = {path.removeprefix(f"{place}.") for path in documented(command) if path.startswith(f"{place}.")}
    assert {re.split(r"\[|\.", name)[0] for name in found} == {each.name for each in rows._fields if each.name} | set(
        more
    )


def test_a_row_is_declared_once_for_tables_and_json() -> None:
    rows = Rows[Cell](
        Field("group", "text", Column("in group", fold=True)),
        "style label=short",
        Field("size", lambda row: len(row.text) or None, Column("size", right=True)),
        Field("", column=Column("looks"), cell=lambda row: Cell(row.text.upper(), "bold")),
    )
    assert [column.title for column in rows.columns] == ["in group", "size", "looks"]
    assert rows.cells(Cell("a")) == ["a", "1", Cell("A", "bold")]
    assert rows.cells(Cell(""))[1] == "-", "there is no value"
    assert list(rows.json(Cell("", "red", "x"))) == ["group", "style", "label", "size"]
    assert rows.json(Cell("", "red", "x")) == {"group": "", "style": "red", "label": "x", "size": None}


def test_the_page_has_a_section_for_every_command_that_prints_json() -> None:
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    titles = {name for title in re.findall(r"^## (.*)$", text, re.MULTILINE) for name in title.split(" and ")}
    assert titles == set(app.COMMANDS) - {"demo", "completion"}


def test_the_page_of_exit_codes_names_each() -> None:
    text = (DOCS / "exit-codes.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(failures).items() if name.isupper() and isinstance(value, int)}
    assert {int(code) for code in re.findall(r"^\| ([0-9]+) \|", text, re.MULTILINE)} == codes
    named = {
        name for row in re.findall(r"^\| (`[a-z].*?) \|", text, re.MULTILINE) for name in re.findall("`([a-z-]+)`", row)
    }
    assert named == set(app.COMMANDS) - {"dump", "broker", "completion"}
