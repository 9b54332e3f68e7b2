"""What a policy accepts, and which keys a piece has."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from random import Random
from typing import Any

import pytest

from kafka_marshal import CheckpointPolicy, ConfigurationError
from kafka_marshal.checkpoints import Checkpoint, CheckpointPiece, Store
from kafka_marshal.files import Files
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


# Shares that are cut again and again, saves that fail, members that die: state fits position, key by key.


States = list[tuple[int, int, int | None]]

_KEYS = {f"key {number}": key_hash(b"key %d" % number, 0) for number in range(60)}


class InMemory(Files):
    """The logic of a store, without one."""

    name: str = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def check(self) -> None: ...

    def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self.files if path.startswith(f"{folder}/")]

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            self.files.pop(path, None)


class Partition:
    """One partition of a group: what its checkpoints say, and members that count messages by key."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.files = InMemory()
        self.store = Store(self.files)
        self.id = 0
        #: Of the newest checkpoint and of one before it: (lo, hi, id) of all keys, and what is done of each key.
        self.newest: tuple[States, Counter[str]] = ([(0, MAX_KEY_HASH, None)], Counter())
        self.pinned = self.newest
        self.pieces: dict[tuple[int, int], Counter[str]] = {(0, MAX_KEY_HASH): Counter()}
        self.done: Counter[str] = Counter()

    def cut_shares_again(self) -> None:
        """Every piece is restored from the newest checkpoint; its shares are others."""
        bounds = sorted({self.random.randrange(1, 8) * 2**60 for _ in range(self.random.randrange(4))})
        self.pieces = {
            piece: self.restored(*piece)
            for piece in zip([0, *bounds], [*(x - 1 for x in bounds), MAX_KEY_HASH], strict=True)
        }
        self.done = self.newest[1].copy()
        held = Counter[str]()
        for counts in self.pieces.values():
            held += counts
        assert held == self.done

    def restored(self, lo: int, hi: int) -> Counter[str]:
        found = tuple(each for each in self.newest[0] if each[0] <= hi and lo <= each[1])
        done_through = tuple((first, last, 9 if id_ else -1) for first, last, id_ in found)
        counts = Counter[str]()
        for part in self.store.load_parts(restored(lo=lo, hi=hi, states=found, done_through=done_through)):
            counts.update({key: number for key, number in json.loads(part.state).items() if part.holds(key)})
        return counts

    def work(self) -> None:
        for key in self.random.choices(list(_KEYS), k=self.random.randrange(20)):
            [counts] = [counts for (lo, hi), counts in self.pieces.items() if lo <= _KEYS[key] <= hi]
            counts[key] += 1
            self.done[key] += 1

    def checkpoint(self) -> None:
        """Of some pieces, since others are busy; some are saved, and then not answered for."""
        self.id += self.random.randrange(1, 5)
        states, done = self.newest
        done = done.copy()
        for lo, hi in self.pieces:
            cut = CheckpointPiece("flights", 3, lo, hi, group_id="delays")
            busy, answered = self.random.random() < 0.2, self.random.random() < 0.8
            if not busy:
                self.store.save(self.id, cut, json.dumps(self.pieces[lo, hi]).encode())
                needed = {id_ for of, _ in (self.newest, self.pinned) for _, _, id_ in of if id_}
                self.store.collect(Checkpoint(self.id, (cut,), needed={("flights", 3): frozenset(needed)}))
            if not busy and answered:
                states = with_part(states, lo, hi, self.id)
                done.update({key: self.done[key] - done[key] for key, at in _KEYS.items() if lo <= at <= hi})
        self.newest = states, +done
        if self.random.random() < 0.2:
            self.pinned = self.newest

    def roll_back(self) -> None:
        self.newest = self.pinned


def with_part(states: States, lo: int, hi: int, id_: int) -> States:
    cut = [(first, min(last, lo - 1), of) for first, last, of in states if first < lo]
    cut += [(lo, hi, id_), *((max(first, hi + 1), last, of) for first, last, of in states if last > hi)]
    return cut


@pytest.mark.parametrize("seed", range(40))
def test_each_key_has_the_state_of_its_position(seed: int) -> None:
    partition = Partition(seed)
    steps = [partition.work, partition.checkpoint, partition.cut_shares_again]
    for _ in range(60):
        partition.random.choices(steps, weights=[5, 4, 2])[0]()
        if partition.random.random() < 0.05:
            partition.roll_back()
            partition.cut_shares_again()
    assert len(partition.files.names("delays/flights/3")) < 60
