"""Dumps (section 9): the real replay prints what the oracle's does, and refuses the same lines."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rationalizer.dump import (
    DumpError,
    DumpHeader,
    DumpRecord,
    Replay,
    header_line,
    json_of_outcome,
    json_of_state,
    record_line,
)
from tests.rationalizer.oracle.dump import first_bad_line, replay
from tests.rationalizer.strategies import TEST_TIMEOUT_S, by_seed, effort, record, write_log

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


def some_dump(seed: int, upgrade: bool = False) -> list[str]:
    """A dump of three CPs, interleaved, with gaps and now and then an Upgrade to a level nobody knows."""
    choose = by_seed(seed)
    length = choose((0, 1, 5, 40))
    logs = {cp: write_log(choose, length, cp, 3)[0] for cp in (0, 1, 2)}
    if upgrade and length:
        cp, level = choose((0, 1, 2)), choose((2, 7))
        offset, stamp, _ = logs[cp][length // 2]
        logs[cp][length // 2] = (offset, stamp, record(33, ("a", "1"), "g", level))
    lines = [json.dumps({"topic": "__marshal", "partitions": 3, "format": 1})]
    while any(logs.values()):
        cp = choose([number for number, log in logs.items() if log])
        offset, stamp, value = logs[cp].pop(0)
        text = None if value is None else base64.b64encode(value).decode()
        lines.append(json.dumps({"partition": cp, "offset": offset, "timestamp": stamp, "value": text}))
    return lines


def in_bytes(lines: list[str]) -> list[bytes]:
    return [line.encode() + b"\n" for line in lines]


@given(seed=st.integers(0, 2**32), upgrade=st.booleans(), data=st.data())
@effort(60)
def test_outcomes_and_state_of_any_dump(seed: int, upgrade: bool, data: st.DataObject) -> None:
    lines = some_dump(seed, upgrade)
    offsets = sorted({json.loads(line)["offset"] for line in lines[1:]} | {0})
    places = st.sampled_from((*offsets, offsets[-1] + 1))
    until = data.draw(st.dictionaries(st.integers(0, 2), places), "until")
    outcomes, state, levels = replay(lines, until)
    real = Replay(in_bytes(lines), until=until)
    printed = [json_of_outcome(outcome) for outcome in real.outcomes()]
    assert [json.loads(line) for line in printed] == outcomes
    assert json.loads(json_of_state(real.state())) == state
    assert dict(real.required_levels) == levels
    only_state = Replay(in_bytes(lines), until=until)
    assert json.loads(json_of_state(only_state.state())) == state


@given(seed=st.integers(0, 2**32))
@effort(20)
def test_written_dumps_are_the_same_dumps(seed: int) -> None:
    lines = some_dump(seed)
    written = [header_line(DumpHeader("__marshal", 3))]
    for line in lines[1:]:
        item = json.loads(line)
        value = None if item["value"] is None else base64.b64decode(item["value"])
        written.append(record_line(DumpRecord(item["partition"], item["offset"], item["timestamp"], value)))
    assert [json.loads(line) for line in written] == [json.loads(line) for line in lines]


ODD_JSON: tuple[Any, ...] = (None, True, False, 0, 1, 2, 3, -1, 1.0, 1.5, "1", "", [], {}, [1])
ODD_JSON += ("AA==", "AA=", "A", "AAAA=", "AAA=*", "*AAA=", "A AA=", "AA==AA==", "AA==\n", "-_8=", "é", "\x00")
odd_json: st.SearchStrategy[Any] = st.sampled_from(ODD_JSON)


@st.composite
def damaged_dumps(draw: Any) -> list[str]:
    """A dump with one line changed, doubled, left out, moved or put in."""
    lines = some_dump(draw(st.integers(0, 50)))
    at = draw(st.integers(0, len(lines) - 1))
    how = draw(st.sampled_from(("field", "field", "field", "no field", "double", "drop", "swap", "text", "empty")))
    if how in ("field", "no field"):
        item = json.loads(lines[at])
        name = draw(st.sampled_from(sorted(item)))
        if how == "field":
            item[name] = draw(odd_json)
        else:
            del item[name]
        lines[at] = json.dumps(item)
    elif how == "double":
        lines.insert(at, lines[at])
    elif how == "drop":
        del lines[at]
    elif how == "swap":
        lines[at], lines[-1] = lines[-1], lines[at]
    else:
        junk = ("{", "[]", "1", "null", '"x"', lines[at][:-1], lines[at] + "x", "{}", "\x00")
        lines.insert(at, draw(st.sampled_from(junk)) if how == "text" else draw(st.sampled_from(("", "  ", "\t"))))
    return lines


def same_verdict(lines: list[str]) -> None:
    """Refused at the same line, or replayed with the same result."""
    bad = first_bad_line(lines)
    if bad is None:
        outcomes, state, _ = replay(lines)
        real = Replay(in_bytes(lines))
        assert [json.loads(json_of_outcome(outcome)) for outcome in real.outcomes()] == outcomes
        assert json.loads(json_of_state(real.state())) == state
        return
    with pytest.raises(DumpError) as caught:
        list(Replay(in_bytes(lines)).outcomes())
    assert caught.value.line_number == bad
    with pytest.raises(DumpError) as caught:
        Replay(in_bytes(lines)).state()
    assert caught.value.line_number == bad


@given(lines=damaged_dumps())
@example(lines=[])
@example(lines=["", ""])
@effort(150)
def test_damaged_dumps_are_refused_at_the_same_line(lines: list[str]) -> None:
    same_verdict(lines)


@pytest.mark.parametrize("at", [0, 1, 2, 6])
def test_every_odd_value_in_every_field(at: int) -> None:
    lines = next(dump for dump in map(some_dump, range(100)) if len(dump) == 1 + 3 * 5)
    for name in json.loads(lines[at]):
        for odd in ODD_JSON:
            damaged = json.dumps({**json.loads(lines[at]), name: odd})
            same_verdict([*lines[:at], damaged, *lines[at + 1 :]])


def test_a_dump_longer_than_one_reads_ahead() -> None:
    """State is replayed in chunks; where one ends must not show."""
    header = json.dumps({"topic": "__marshal", "partitions": 1, "format": 1})
    who, key = ("a", "1"), ("g", "t", 0)
    values = [record(2, who, *key, 1000), *(record(1, who, *key, 0, done) for done in range(4500))]
    lines = [header]
    for offset, value in enumerate(values):
        text = base64.b64encode(value).decode()
        lines.append(json.dumps({"partition": 0, "offset": offset, "timestamp": offset, "value": text}))
    (lease,) = json.loads(json_of_state(Replay(in_bytes(lines)).state()))["leases"]
    assert (lease["stable"], lease["last_beat"], lease["epoch"]) == (4499, 4500, 0)
