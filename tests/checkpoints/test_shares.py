"""Shares that are cut again and again, saves that fail, members that die: state fits position, key by key."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from kafka_marshal.checkpoints import Checkpoint, CheckpointPiece, Store
from kafka_marshal.files import Files
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.routing import key_hash
from tests.checkpoints.conftest import restored

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
