"""Dumps (section 9): the real replay prints what the oracle's does, and refuses the same lines."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer.dump import Replay, json_of_state
from tests.rationalizer.dumps import (
    ODD_JSON,
    damaged,
    dump_differs,
    in_bytes,
    places,
    replay_differs,
    some_dump,
    verdict_differs,
    written_differs,
)
from tests.rationalizer.strategies import TEST_TIMEOUT_S, by_draw, effort, record

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@given(seed=st.integers(0, 2**32), upgrade=st.booleans(), data=st.data())
@effort(60)
def test_outcomes_and_state_of_any_dump(seed: int, upgrade: bool, data: st.DataObject) -> None:
    lines = some_dump(seed, upgrade)
    until = data.draw(st.dictionaries(st.integers(0, 2), st.sampled_from(places(lines))), "until")
    assert not replay_differs(lines, until)


@given(seed=st.integers(0, 2**32))
@effort(20)
def test_written_dumps_are_the_same_dumps(seed: int) -> None:
    assert not written_differs(some_dump(seed))


@given(data=st.data())
@effort(150)
def test_damaged_dumps_are_refused_at_the_same_line(data: st.DataObject) -> None:
    assert not verdict_differs(damaged(by_draw(data.draw)))


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_empty_dumps_are_refused_at_the_same_line(lines: list[str]) -> None:
    assert not verdict_differs(lines)


def test_dumps_by_seed_differ_nowhere() -> None:
    assert not list(filter(None, map(dump_differs, range(20))))


@pytest.mark.parametrize("at", [0, 1, 2, 6])
def test_every_odd_value_in_every_field(at: int) -> None:
    lines = next(dump for dump in map(some_dump, range(100)) if len(dump) == 1 + 3 * 5)
    for name in json.loads(lines[at]):
        for odd in ODD_JSON:
            line = json.dumps({**json.loads(lines[at]), name: odd})
            assert not verdict_differs([*lines[:at], line, *lines[at + 1 :]])


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
