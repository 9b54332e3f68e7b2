"""The other things that are read and were written by anybody: the log of snapshots (S2) and dumps (section 9)."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Sequence
from typing import Any, Final

from msgpack import packb, unpackb

from rationalizer import SnapshotError, World
from rationalizer.dump import DumpError, Replay
from rationalizer.snapshot_log import MalformedPartError, SnapshotParts, decode_part, encode_snapshot, encode_state
from tests.campaigns.fuzz.author import RAW, TELLING, WILD

__all__ = ["attack_dumps", "attack_snapshots"]

#: Attacks on each, a story.
PARTS: Final = 30
STATES: Final = 30
DUMPS: Final = 3
#: Records in a dump, at most.
LINES: Final = 60

#: Invalid JSON, or not what is wanted.
ODD_JSON: Final = (
    *("NaN", "Infinity", "-0", "1e5", "1" * 5_000, "-1", "9223372036854775808", "true", "null", '""', '"\\ud800"'),
    *("[]", "{}", "[" * 2_000, '{"a":' * 2_000, '"AA"', '"AAA="', '"AA==\\n"', '"\\u0000"', "0", "1", "8", '"é"'),
    *("", "{", "\ufeff{}"),
)


def _mutated(value: bytes, rng: random.Random) -> bytes:
    changed = bytearray(value)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                changed[at : at + 1] = bytes((rng.choice(TELLING),))
            case 2:
                del changed[at : at + rng.randrange(1, 9)]
            case 3:
                del changed[at:]
            case _:
                changed[at:at] = rng.choice(RAW)
    return bytes(changed)


def attack_snapshots(world: World, partitions: int, rng: random.Random) -> int:
    """Parts and states that were tampered with; returns how many. AssertionError if an invalid one is taken.

    Each is a part, or is passed over (S2); each state with a digest that holds is one that a replay could have led to
    and is written in the same bytes again, or SnapshotError (S1). Anything else that is raised is a finding.
    """
    values = encode_snapshot(world)
    shelf = SnapshotParts(world.partition)
    for _ in range(PARTS):
        value: bytes | None = _mutated(rng.choice(values), rng)
        if rng.random() < 0.3:
            fields: list[Any] = list(unpackb(values[0]))
            fields[rng.randrange(len(fields))] = rng.choice(WILD)
            value = packb(fields, unicode_errors="surrogatepass")
        with contextlib.suppress(MalformedPartError):
            decode_part(value)
        whole = shelf.add(value)
        if whole is not None and whole.holds():
            _restore(whole.data, partitions)
    state = world.snapshot()
    for _ in range(STATES):
        forged = _forged(state, rng) if rng.random() < 0.6 else _mutated(state, rng)
        _restore(forged, partitions)
        if forged:
            (part, *_) = encode_state(world.partition, world.next_offset, forged)
            decode_part(part)
    return PARTS + STATES


def _forged(state: bytes, rng: random.Random) -> bytes:
    """The same state with one thing in it, however deep, put in another's place."""
    top = unpackb(state, strict_map_key=False)
    place, within = top, rng.randrange(len(top))
    while isinstance(place[within], list) and place[within] and rng.random() < 0.9:
        place = place[within]
        within = rng.randrange(len(place))
    match rng.randrange(4):
        case 0:
            place[within] = rng.choice(WILD)
        case 1:
            place.insert(within, place[rng.randrange(len(place))])
        case 2:
            del place[within]
        case _:
            number = place[within]
            place[within] = number + rng.choice((-1, 1)) if type(number) is int else rng.choice(WILD)
    forged: bytes = packb(top, unicode_errors="surrogatepass")
    return forged


def _restore(state: bytes, partitions: int) -> None:
    try:
        found = World.restore(state, partitions)
    except SnapshotError:
        return
    assert found.snapshot() == state, f"a state that is written otherwise was taken: {state[:200].hex()}"


def attack_dumps(records: Sequence[tuple[int, int, bytes | None]], cp: int, partitions: int, rng: random.Random) -> int:
    """Dumps of this log with lines that were tampered with; returns how many lines. Each replays, or DumpError."""
    lines = 0
    for _ in range(DUMPS):
        begin = rng.randrange(len(records))
        dump = [json.dumps({"topic": "__marshal", "partitions": partitions, "format": 1}).encode()]
        for offset, stamp, value in records[begin : begin + LINES]:
            if value is not None and len(value) > 4_096:
                continue
            text = None if value is None else base64.b64encode(value).decode()
            dump.append(
                json.dumps(
                    {"partition": cp, "offset": offset, "timestamp": max(-(2**63), stamp), "value": text}
                ).encode()
            )
        tampered = rng.randrange(len(dump)) if rng.random() < 0.8 else -1
        if tampered >= 0:
            dump[tampered] = _odd_line(dump[tampered], rng)
        lines += len(dump)
        for way in ("outcomes", "state"):
            try:
                replay = Replay(iter(dump))
                if way == "state":
                    json.dumps(replay.state())
                else:
                    for outcome in replay.outcomes():
                        json.dumps(outcome)
            except DumpError as error:
                if tampered < 0:
                    raise AssertionError(f"a dump that nobody touched is refused: {error}") from error
    return lines


def _odd_line(line: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return _mutated(line, rng)
    text = line.decode()
    found: dict[str, Any] = json.loads(text)
    name = rng.choice(list(found))
    odd = rng.choice(ODD_JSON)
    pairs = [f"{json.dumps(key)}: {odd if key == name else json.dumps(value)}" for key, value in found.items()]
    return ("{" + ", ".join(pairs) + "}").encode("utf-8", "surrogatepass")
