"""Fixed logs: almost valid heartbeats, odd names, lengths at their limits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from msgpack import packb, unpackb
from xxhash import xxh64

from rationalizer import InvalidRecordError, SnapshotError, World, encode
from rationalizer.routing import key_hash, key_range, route_group
from rationalizer.wire.records import (
    BeatEntry,
    ClaimingPartition,
    CommitRanges,
    HeartbeatBatch,
    ReleasingPartition,
    Tick,
)
from tests.mutants.oracle import difference, state_difference
from tests.rationalizer.oracle import OracleWorld

Log = list[tuple[int, int, bytes]]

WHO = ("1", "a", "g")
#: Of P5, and of E2.
RANGES, BYTES = 10_000, 1_048_576
#: Names that a format string would interpret, and partitions of each.
TOPICS, PARTITIONS = ("a%d", "100%", "%s%%", "t"), 6
CPS = 3


def _beats_that_are_nearly_right() -> Iterator[Log]:
    """Of a held and of a free lease: in Python, True and 1.0 equal 1."""
    head: Log = [(0, 1_000, encode(Tick(*WHO))), (1, 1_000, encode(ClaimingPartition(*WHO, "t", 1, 1_000)))]
    free = (2, 1_000, encode(ReleasingPartition(*WHO, "t", 1, 1, None)))
    ids = [("1", "a"), (None, None)]
    alike, done = (1, True, 1.0), (7, True, 7.0, 1.5, None)
    for held, (instance, client), partition, epoch, last in product((True, False), ids, alike, alike, done):
        beat = packb([1, 1, instance, client, "g", "t", partition, epoch, last])
        yield [*head, *([] if held else [free]), (3, 1_500, beat), (4, 1_600, encode(Tick(*WHO)))]


def _levels() -> Iterator[Log]:
    for level in (0, 1, True, 1.0):
        yield [(0, 1_000, packb([1, 33, *WHO, level])), (1, 1_000, encode(Tick(*WHO)))]


def _limits() -> Iterator[Log]:
    claim = (0, 1_000, encode(ClaimingPartition(*WHO, "t", 0, 1_000)))
    for count in (RANGES, RANGES + 1):
        ranges = [(2 * n, 2 * n) for n in range(count)]
        yield [claim, (1, 1_000, packb([1, CommitRanges.TYPE, *WHO, "t", 0, 0, ranges]))]
    bare = len(packb([1, 99, *WHO, "x" * 70_000])) - 70_000
    for length in (4_200, BYTES, BYTES + 1):
        yield [(0, 1_000, packb([1, 99, *WHO, "x" * (length - bare)]))]
    # Letters whose first byte begins a sequence that E2 forbids, in strings of both long forms.
    for letters in (3_000, 40_000):
        yield [(0, 1_000, packb([1, 99, *WHO, "\u0120" * letters]))]


def _names_in_batches() -> Iterator[Log]:
    """Invalid topics (E2) before a valid entry, after it, and twice."""
    claim = (0, 1_000, encode(ClaimingPartition(*WHO, "t", 0, 1_000)))
    good = ["t", 0, 0, None]
    topics: tuple[object, ...] = ("", None, 0, True, [], "x" * 250, "a\x7f", "a\x85")
    for topic in topics:
        bad = [topic, 0, 0, None]
        for entries in ([bad], [bad, good], [good, bad], [bad, bad]):
            yield [claim, (1, 1_500, packb([1, 6, *WHO, entries])), (2, 1_600, encode(Tick(*WHO)))]


def _batches() -> Iterator[tuple[int, Log]]:
    """HeartbeatBatches of leases of one CP, and of one of another CP: (CP, log)."""
    for cp, topic in product(range(CPS), TOPICS):
        mine = [p for p in range(64) if _is_routed(topic, p, cp)][:PARTITIONS]
        other = next(p for p in range(64) if p not in mine and not _is_routed(topic, p, cp))
        log: Log = [(n, 1_000, encode(ClaimingPartition(*WHO, topic, p, 1_000))) for n, p in enumerate(mine)]
        entries = [[topic, p, n, None] for n, p in enumerate(mine)]
        for wrong in ([], [[topic, other, 0, None]]):
            log.append((len(log), 1_500, packb([1, 6, *WHO, [*entries, *wrong]])))
        yield cp, log


def _is_routed(topic: str, partition: int, cp: int) -> bool:
    oracle = OracleWorld(cp, CPS)
    return oracle.apply(0, 1_000, encode(ClaimingPartition(*WHO, topic, partition, 1_000))).code == "OK"


def _places() -> Iterator[str]:
    """P7 and L3, computed here independently: places of keys, splits of their space, and routes of groups."""
    for key, offset in product((None, b"", b"N14228", "clé".encode(), bytes(range(256))), (0, 1, 255, 256, 2**40)):
        digest = int.from_bytes(xxh64(offset.to_bytes(8, "big") if key is None else key).digest(), "big")
        wrong = key_hash(key, offset) != digest // 2
        yield f"the key {key!r} at offset {offset} does not lie at {digest // 2}" if wrong else ""
    for parts in (1, 2, 3, 7, 1_000):
        cuts = [part * 2**63 // parts for part in range(parts + 1)]
        wrong = [key_range(part, parts) for part in range(parts)] != [(a, b - 1) for a, b in pairwise(cuts)]
        yield f"{parts} parts of the key space are not those of P7" if wrong else ""
    for group, partitions in product(("g", "gé", ""), (1, 3, 8)):
        place = int.from_bytes(xxh64(group.encode()).digest(), "big") % partitions
        yield f"the group {group!r} is not routed to {place}" if route_group(group, partitions) != place else ""


def _longest_written() -> Iterator[str]:
    """E2: a record of the largest accepted size is written, and a byte more is not."""
    count = BYTES // 246  # bytes of an entry whose topic has 240 letters
    short = BYTES - len(encode(HeartbeatBatch(*WHO, (BeatEntry("t" * 240, 0, 0, None),) * count)))
    for length in (BYTES, BYTES + 1):
        longer, rest = divmod(short + length - BYTES, 9)
        letters = [249] * longer + [240 + rest] + [240] * (count - longer - 1)
        try:
            written = len(encode(HeartbeatBatch(*WHO, tuple(BeatEntry("t" * n, 0, 0, None) for n in letters))))
        except InvalidRecordError:
            written = 0
        wanted = length if length <= BYTES else 0
        yield f"a record of {length} bytes is written as {written}, not as {wanted}" if written != wanted else ""


def _epoch_to_come() -> Iterator[str]:
    """S1: a lease's epoch is the offset of a record before the snapshot."""
    world = World(0, 1)
    world.apply(0, 1_000, encode(ClaimingPartition(*WHO, "t", 0, 1_000)))
    state = unpackb(world.snapshot())
    state[5][0][5] = state[2]
    try:
        World.restore(packb(state), 1)
    except SnapshotError:
        return
    yield "a state with an epoch that is to come is taken"


def edges() -> Iterator[str]:
    """Differences between the rationalizer and the oracle, log by log."""
    yield from _places()
    yield from _epoch_to_come()
    yield from _longest_written()
    written = (_beats_that_are_nearly_right(), _levels(), _limits(), _names_in_batches())
    alone = [(0, 1, log) for logs in written for log in logs]
    for cp, cps, log in [*alone, *((cp, CPS, log) for cp, log in _batches())]:
        oracle, slow, fast = OracleWorld(cp, cps), World(cp, cps), World(cp, cps)
        for entry in log:
            wrong = difference(slow.apply(*entry), oracle.apply(*entry))
            yield f"{_short(entry[2])}: {wrong}" if wrong else ""
        fast.apply_many(log)
        for name, world in (("apply", slow), ("apply_many", fast)):
            wrong = state_difference(world, oracle)
            yield f"{name}, after {_short(log[-2 % len(log)][2])}: {wrong}" if wrong else ""


def _short(value: bytes) -> str:
    return value[:60].hex(" ", 4) + ("…" if len(value) > 60 else "")
