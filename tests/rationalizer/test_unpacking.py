"""Large values are checked in another way, which finds the same as for small ones (E2)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import packb

from rationalizer import RejectedValueError
from rationalizer.wire import unpacking
from rationalizer.wire.codec import read

HEAD = [1, 99, "1", "a", "g"]
FILLER = "x" * unpacking.LARGE

KEYS = st.sampled_from(["", "a", "aa", "Ä", b"", b"a"]) | st.text(max_size=3)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=3)
    | st.sampled_from([0xC4, 0xCA, 0xD8, "\u0112", 1.5, b"", b"x"])
)
THINGS: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def _verdict(value: bytes) -> str:
    try:
        read(value, 1)
    except RejectedValueError as error:
        return error.code if error.kind is None else f"{error.code} {error.kind.name}"
    return "fine"


def _by_level(value: bytes) -> str:
    """The other way: for small values, and where msgpack's reader is the one in Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "_AROUND", b"")
        return _verdict(value)


@given(THINGS, st.integers(0, 8), st.sampled_from(["array", "map"]), st.sampled_from([1, 2]))
def test_both_ways_agree(thing: Any, deeper: int, how: str, version: int) -> None:
    for _ in range(deeper):
        thing = [thing] if how == "array" else {"k": thing}
    value = packb([version, *HEAD[1:], FILLER, thing])
    assert _verdict(value) == _by_level(value) == _verdict(packb([version, *HEAD[1:], thing]))


@given(st.integers(1, 5_000), st.binary(min_size=1, max_size=3))
def test_both_ways_agree_on_bytes_that_were_changed(place: int, change: bytes) -> None:
    pieces: list[Any] = [{"a": [n, {}], "b": {"c": "Ä"}} for n in range(500)]
    value = bytearray(packb([*HEAD, pieces]))
    value[place : place + len(change)] = change
    assert _verdict(bytes(value)) == _by_level(bytes(value))


@pytest.mark.parametrize("last", ["", 1.5, [[[[[[[[1]]]]]]]]])
def test_nothing_is_left_for_the_collector_of_cycles(last: Any) -> None:
    """Tiny maps by the hundred thousand would stay in memory until it comes by."""
    value = packb([*HEAD, [{"": {"": {}}}] * 1_000, last])
    torn = value[:-1] + b"\xc1"
    gc.collect()
    for bytes_ in (value, torn):
        assert _verdict(bytes_) in ("UNKNOWN_TYPE", "MALFORMED")
    assert gc.collect() < 100


def test_where_msgpack_reads_in_python_the_verdicts_are_the_same() -> None:
    script = (
        "import sys; from tests.rationalizer.test_unpacking import HEAD, FILLER, _verdict, unpacking\n"
        "from msgpack import packb\n"
        "assert not unpacking._AROUND\n"
        "deep = [[[[[[[]]]]]]]\n"
        "print(*(_verdict(packb([*HEAD, FILLER, x])) for x in (1, deep, [deep], {'k': 1.5}, {b'k': 1})))\n"
    )
    environment = {**os.environ, "MSGPACK_PUREPYTHON": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["UNKNOWN_TYPE", "UNKNOWN_TYPE", *["MALFORMED"] * 3]
