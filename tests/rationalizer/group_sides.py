"""Logs of coordinated groups, replayed by the real world and by the oracle: their differences."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

import xxhash

from rationalizer import SnapshotError, World
from tests.rationalizer.group_author import GroupAuthor, write_group_log
from tests.rationalizer.oracle import OracleWorld, parse
from tests.rationalizer.oracle.compare import same_outcome, same_state
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, paths, replaced, spell
from tests.rationalizer.strategies import by_seed

#: (CP, CPs) of the logs, in turn.
PLACES = ((0, 1), (0, 1), (1, 2), (5, 8))


def record_by_record(seed: int, length: int, every: int = 1, takes: bool | None = None) -> None:
    """Outcomes after each record, the state after every `every`-th; sometimes the world is a restored snapshot."""
    cp, cps = PLACES[seed % len(PLACES)]
    source = Random(seed)
    author = GroupAuthor(by_seed(seed), OracleWorld(cp, cps), takes)
    real = World(cp, cps)
    for number in range(length):
        entry = author.entry()
        wanted = author.world.apply(*entry)
        note = f"seed {seed}, offset {entry[0]}, {wanted.type} {wanted.code}: {_shown(entry[2])}"
        try:
            same_outcome(real.apply(*entry), wanted)
            if number % every == 0:
                same_bytes(real, author.world)
            if number % (10 * every) == 0:
                same_state(real, author.world)
        except AssertionError as error:
            error.add_note(note)
            raise
        if source.random() < 0.1:
            real = restored(real)
    same_state(real, author.world)


def same_bytes(real: World, wanted: OracleWorld) -> None:
    """The state and its digest; fails with the first row that differs."""
    snapshot, other = real.snapshot(), wanted.snapshot()
    if snapshot != other:
        assert parse(snapshot, len(snapshot)) == parse(other, len(other))
    assert snapshot == other
    assert real.digest() == digest_of(other)


def digest_of(state: bytes) -> str:
    """S1."""
    return f"{xxhash.xxh3_128_intdigest(state, 0):032x}"


def _shown(value: bytes | None) -> object:
    try:
        return None if value is None else parse(value)
    except ValueError:
        return value


def restored(real: World) -> World:
    """The world of a replica that starts from its snapshot."""
    snapshot = real.snapshot()
    again = World.restore(snapshot, real.partitions)
    assert again.snapshot() == snapshot
    return again


def in_one_go(seed: int, length: int, takes: bool | None = None) -> None:
    """`apply_many` of the whole log, and of its second half from a snapshot, leads to the oracle's state."""
    cp, cps = PLACES[seed % len(PLACES)]
    log, wanted = write_group_log(by_seed(seed), length, cp, cps, takes)
    whole, half = World(cp, cps), World(cp, cps)
    whole.apply_many(log)
    half.apply_many(log[: length // 2])
    half = restored(half)
    half.apply_many(entry for entry in log[length // 2 :])
    same_state(whole, wanted)
    same_state(half, wanted)
    counted = [{code: count for code, count in counts.items() if count} for counts in (whole.accepted, whole.rejected)]
    assert counted == [wanted.accepted, wanted.rejected]


def some_group_dump(seed: int, length: int) -> list[str]:
    """A dump of three CPs, interleaved."""
    choose = by_seed(seed)
    logs = {cp: write_group_log(choose, length, cp, 3)[0] for cp in range(3)}
    lines = [json.dumps({"topic": "__marshal", "partitions": 3, "format": 1})]
    while any(logs.values()):
        cp = choose([number for number, log in logs.items() if log])
        offset, stamp, value = logs[cp].pop(0)
        text = None if value is None else base64.b64encode(value).decode()
        lines.append(json.dumps({"partition": cp, "offset": offset, "timestamp": stamp, "value": text}))
    return lines


def forged(seed: int, forgeries: int, takes: bool | None = None) -> None:
    """A state with one change is refused or accepted as it is; nothing else is raised (Q23)."""
    cp, cps = PLACES[seed % len(PLACES)]
    source = Random(seed)
    _, world = write_group_log(by_seed(seed), 80, cp, cps, takes)
    tree: Any = parse(world.snapshot())
    inside = [path for path in paths(tree) if path[:1] == (7,)]
    for _ in range(forgeries):
        path = source.choice(inside)
        old: Any = tree
        for step in path:
            old = old[step]
        near = [old + 1, old - 1] if isinstance(old, int) and not isinstance(old, bool) else [None]
        data = spell(replaced(tree, path, source.choice([*near, source.choice(EVERYTHING_ODD)])))
        try:
            taken = World.restore(data, cps)
        except SnapshotError:
            continue
        assert taken.snapshot() == data, f"seed {seed}: taken, and written otherwise, with {path} changed"
