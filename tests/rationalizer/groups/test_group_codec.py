"""Records of coordinated groups with an odd value in any one place are read as by the oracle (E2)."""

from __future__ import annotations

from typing import Any

import pytest

from rationalizer import Record, Upgrade, World, decode, encode
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.wire.codec import RejectedValueError
from tests.rationalizer.group_values import EDGES, GOOD, level_of
from tests.rationalizer.oracle import judge, shortest
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, paths, replaced, spell

HEAD = ["1", "a", "g"]


def _outcome(value: bytes) -> tuple[str | None, str | None]:
    """The code, if it is one of reading, and the name of the type."""
    world = World(0, 1)
    world.apply(0, 0, encode(Upgrade("1", "a", "g", SUPPORTED_LEVEL)))
    outcome = world.apply(1, 0, value)
    of_reading = outcome.code in ("MALFORMED", "UNSUPPORTED_VERSION", "UNKNOWN_TYPE")
    return (outcome.code if of_reading else None), outcome.type


@pytest.mark.parametrize("kind", GOOD)
def test_e6_an_odd_thing_in_each_place(kind: int) -> None:
    good: list[Any] = [level_of(kind), kind, *HEAD, *GOOD[kind]]
    for path in paths(good):
        for odd in EVERYTHING_ODD:
            value = spell(replaced(good, path, odd))
            judged = judge(value, SUPPORTED_LEVEL, 0, 1)
            assert _outcome(value) == (judged.code, judged.type), (path, odd)


def test_e2_each_bound_of_each_field_and_one_beyond() -> None:
    for kind, fields, fits in EDGES:
        level = level_of(kind)
        value = shortest([level, kind, *HEAD, *fields])
        code, name = _outcome(value)
        assert (code is None) == fits, (kind, str(fields)[:200])
        assert name is not None
        if fits:
            record = decode(value, level)
            assert isinstance(record, Record)
            assert decode(encode(record), level) == record
        else:
            with pytest.raises(RejectedValueError):
                decode(value, level)
        with pytest.raises(RejectedValueError):
            decode(value, level - 1)
