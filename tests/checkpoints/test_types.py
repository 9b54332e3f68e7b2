"""What a policy accepts, and which keys a piece has."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from kafka_marshal import CheckpointPolicy, ConfigurationError
from kafka_marshal.checkpoints import CheckpointPiece
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.routing import key_hash, key_range
from tests.checkpoints.conftest import restored

_HALF = MAX_KEY_HASH // 2


def test_the_policy_is_as_documented() -> None:
    assert CheckpointPolicy() == CheckpointPolicy(
        every=30.0, keep=16, drain=10.0, timeout=60.0, hold=False, save="changed", adopt=False
    )


@pytest.mark.parametrize(
    "given",
    [
        {"every": None},
        {"every": 0.1},
        {"keep": 1},
        {"keep": 64},
        {"drain": 0},
        {"drain": 0.09, "timeout": 0.1},
        {"timeout": 3600},
        {"drain": 54},
        {"hold": True, "save": "all", "adopt": True},
    ],
)
def test_a_policy_within_its_limits(given: dict[str, Any]) -> None:
    CheckpointPolicy(**given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": 0}, "every must be None, or at least 0.1 seconds"),
        ({"every": "30"}, "every must be a number of seconds"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"keep": 65}, "keep must be at most 64"),
        ({"keep": True}, "keep must be a whole number"),
        ({"timeout": 0.05, "drain": 0}, "timeout must be 0.1 to 3600 seconds"),
        ({"timeout": 3601}, "timeout must be 0.1 to 3600 seconds"),
        ({"timeout": float("nan")}, "timeout must be a number of seconds"),
        ({"drain": 54.1}, "drain must be at most 54 seconds, nine tenths of timeout (60)"),
        ({"timeout": 5}, "drain must be at most 4.5 seconds, nine tenths of timeout (5)"),
        ({"drain": -1}, "drain must be at least 0 seconds"),
        ({"hold": 1}, "hold must be True or False"),
        ({"save": "change"}, "did you mean 'changed'?"),
        ({"adopt": None}, "adopt must be True or False"),
    ],
)
def test_a_policy_beyond_its_limits_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        CheckpointPolicy(**given)
    assert says in str(refused.value)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_piece_holds_the_keys_of_its_share(part: int) -> None:
    piece = CheckpointPiece("flights", 3, *key_range(part, 3), group_id="delays")
    keys = [f"key {number}" for number in range(200)]
    ours = [key for key in keys if piece.holds(key)]
    assert ours == [key for key in keys if key_hash(key.encode(), 0) * 3 // 2**63 == part] != []
    assert [piece.holds(key.encode()) for key in keys] == [piece.holds(key) for key in keys]
    assert [piece.holds(None, offset) for offset in range(50)] == [
        piece.lo <= key_hash(None, offset) <= piece.hi for offset in range(50)
    ]


def test_a_key_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="not None: only some keys"):
        CheckpointPiece("flights", 3, 0, 5, group_id="delays").holds(None)
    with pytest.raises(ConfigurationError, match="not 5"):
        CheckpointPiece("flights", 3, 0, 5, group_id="delays").holds(5)  # type: ignore[arg-type]
    assert CheckpointPiece("flights", 3, 0, MAX_KEY_HASH, group_id="delays").holds(None)


def test_pieces_can_be_taken_apart_copied_and_compared() -> None:
    piece = CheckpointPiece("flights", 3, 0, 9, group_id="delays")
    topic, partition, lo, hi = piece
    assert (topic, partition, lo, hi, piece.key) == ("flights", 3, 0, 9, ("flights", 3))
    assert pickle.loads(pickle.dumps(piece)) == copy.deepcopy(piece) == piece
    assert len({piece, copy.copy(piece)}) == 1
    assert tuple(restored()) == ("flights", 3, 0, MAX_KEY_HASH, 7, 0, (), ((0, MAX_KEY_HASH, None),))


@pytest.mark.parametrize(
    ("changed", "untouched"),
    [
        ({}, ((0, MAX_KEY_HASH),)),
        ({"initial": 99, "done_through": ((0, MAX_KEY_HASH, 99),)}, ((0, MAX_KEY_HASH),)),
        ({"position": 100}, ((0, MAX_KEY_HASH),)),  # retention passed the beginning
        ({"done_through": ((0, MAX_KEY_HASH, 99),)}, ()),
        ({"ranges": ((5, 9),)}, ()),
        ({"done_through": ((0, _HALF, 99), (_HALF + 1, MAX_KEY_HASH, -1))}, ((_HALF + 1, MAX_KEY_HASH),)),
        (
            {
                "states": ((0, _HALF, 48213), (_HALF + 1, MAX_KEY_HASH, None)),
                "done_through": ((0, _HALF, 99), (_HALF + 1, MAX_KEY_HASH, -1)),
                "ranges": ((105, 109),),
            },
            ((_HALF + 1, MAX_KEY_HASH),),
        ),
    ],
)
def test_of_which_keys_nothing_is_done(changed: dict[str, Any], untouched: tuple[Any, ...]) -> None:
    assert restored(**changed).untouched == untouched
