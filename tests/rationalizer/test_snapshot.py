"""Canonical state and digest (S1), and what is refused as a snapshot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgpack import Timestamp, packb, unpackb
from xxhash import xxh3_128

from rationalizer import SnapshotError, World
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.limits import MAX_PART_BYTES, MAX_SNAPSHOT_PARTS, MAX_VALUE_BYTES, MAX_WRITTEN_BYTES
from rationalizer.snapshot_log import (
    MAX_UNFINISHED,
    MalformedPartError,
    SnapshotPart,
    SnapshotParts,
    StoredSnapshot,
    decode_part,
    due,
    encode_state,
    interval,
    next_due,
)
from tests.rationalizer.log import A1, ADMIN, B1, Log, held
from tests.rationalizer.strategies import effort
from tests.stored_snapshot import encode_snapshot

ROOT = Path(__file__).parents[2]
TOP = 2**63 - 1


def _busy() -> Log:
    """A log whose state has something in every part of S1."""
    log = held()
    log.claim(B1, partition=1)
    log.commit(A1, (0, 4), (8, 9), (300, 70_000))
    log.grant(A1, 6)
    log.claim(A1, group="é", topic="日")
    log.pause(ADMIN, 10**6, group="a")
    log.pause(ADMIN, 1001, group="soon over")
    log.release(A1)
    log.now = 1001
    log.tick()
    return log


def test_s1_the_state_is_this_array() -> None:
    assert unpackb(_busy().world.snapshot()) == [
        1,
        0,
        9,
        1001,
        1,
        [
            ["g", "t", 0, None, None, 0, 1000, 1000, [[0, TOP, 6]], [[8, 9], [300, 70_000]], 6],
            ["g", "t", 1, "b", "1", 1, 1000, 1000, [[0, TOP, -1]], [], -1],
            ["é", "日", 0, "a", "1", 4, 1000, 1000, [[0, TOP, -1]], [], -1],
        ],
        [["a", "admin", 10**6]],
        [],
    ]


def test_s1_shortest_forms_and_the_digest_is_xxh3_128_of_them() -> None:
    world = _busy().world
    assert world.snapshot() == packb(unpackb(world.snapshot()))
    assert world.digest() == xxh3_128(world.snapshot(), seed=0).hexdigest()
    assert len(world.digest()) == 32


def test_s1_an_empty_world() -> None:
    assert World(3, 8).snapshot() == packb([1, 3, 0, 0, 1, [], [], []])


def test_s1_a_pause_is_state_only_while_it_is_in_force() -> None:
    log = Log()
    log.pause(ADMIN, 2000)
    log.now = 1999
    log.tick()
    assert unpackb(log.world.snapshot())[6] == [["g", "admin", 2000]]
    log.now = 2000
    log.tick()
    assert unpackb(log.world.snapshot())[6] == []


def test_s1_two_histories_of_one_state_have_one_digest() -> None:
    left, right = held(), held()
    left.commit(A1, (10, 11), (12, 13))
    left.commit(A1, (14, 14))
    left.tick()
    right.commit(A1, (14, 14))
    right.commit(A1, (13, 13), (10, 12))
    right.pause(ADMIN, 1)
    assert left.world.digest() == right.world.digest()


def test_restoring_gives_the_same_world_and_the_same_future() -> None:
    log = _busy()
    restored = World.restore(log.world.snapshot(), 1)
    assert restored.snapshot() == log.world.snapshot()
    twin = Log(now=1002)
    twin.world = restored
    log.now = 1002
    for both in (log, twin):
        both.claim(B1)
        both.commit(B1, (7, 7))
        both.pause(ADMIN, 0, group="a")
        both.forget(ADMIN, group="é")
    assert twin.world.digest() == log.world.digest()
    assert twin.world.accepted == {"OK": 3}
    assert twin.world.rejected == {"GROUP_ACTIVE": 1}


def test_restoring_keeps_pieces_of_the_key_space() -> None:
    log = held()
    log.lease.progress.commit_key_range(0, 99, 30)
    log.lease.progress.commit([(40, 45)])
    restored = World.restore(log.world.snapshot(), 1).lease("g", "t", 0)
    assert restored is not None
    assert restored.progress.done_through == [(0, 99, 30), (100, TOP, -1)]
    assert (restored.progress.ranges, restored.progress.stable) == ([(40, 45)], -1)


def _lease(**changes: Any) -> list[Any]:
    names = ["group", "topic", "partition", "client", "instance", "epoch", "hi", "beat", "done", "ranges", "granted"]
    row = dict(zip(names, ["g", "t", 0, "a", "1", 0, 1000, 1000, [[0, TOP, 6]], [[8, 9]], 6], strict=True))
    return list({**row, **changes}.values())


def _state(**changes: Any) -> list[Any]:
    names = ["form", "cp", "next", "time", "level", "leases", "pauses", "groups"]
    row = dict(zip(names, [1, 0, 9, 1000, 1, [_lease()], [["g", "admin", 2000]], []], strict=True))
    return list({**row, **changes}.values())


def test_the_state_that_the_next_test_spoils_is_good() -> None:
    assert World.restore(packb(_state()), 1).snapshot() == packb(_state())


def _two(left: list[Any], right: list[Any]) -> list[Any]:
    return _state(leases=[left, right])


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ([], "eight parts"),
        (_state()[:-1], "eight parts"),
        ([*_state(), 1], "eight parts"),
        ({"a": 1}, "no array"),
        (_state(form=2), "format"),
        (_state(form=True), "format"),
        (_state(cp=1), "no CP"),
        (_state(cp=-1), "no CP"),
        (_state(cp=False), "no CP"),
        (_state(level=True), "level"),
        (_state(leases=[_lease(beat=-1)]), "last_beat of a lease"),
        (_state(leases=[_lease(beat=False)]), "last_beat of a lease"),
        (_state(pauses=[["", "admin", 2000]]), "group_id of a pause"),
        (_state(next=-1), "next offset"),
        (_state(next=2**63 + 1), "next offset"),
        (_state(next=True), "next offset"),
        (_state(time=-1), "log time"),
        (_state(time=1.0), "MALFORMED"),
        (_state(level=0), "level"),
        (_state(level=SUPPORTED_LEVEL + 1), f"supports {SUPPORTED_LEVEL}"),
        (_state(leases={}), "arrays"),
        (_state(pauses=None), "arrays"),
        (_state(groups=[1]), "below level 2"),
        (_state(groups=None), "must be arrays"),
        (_state(leases=[7]), "11 parts"),
        (_state(leases=[_lease()[:-1]]), "11 parts"),
        (_state(leases=[_lease(group="")]), "group_id of a lease"),
        (_state(leases=[_lease(topic="\n")]), "topic of a lease"),
        (_state(leases=[_lease(partition=-1)]), "partition of a lease"),
        (_state(leases=[_lease(partition=False)]), "partition of a lease"),
        (_state(leases=[_lease(client=None)]), "half a holder"),
        (_state(leases=[_lease(instance=None)]), "half a holder"),
        (_state(leases=[_lease(client="")]), "client_id of a lease"),
        (_state(leases=[_lease(epoch=9)]), "after the snapshot"),
        (_state(leases=[_lease(epoch=-1)]), "epoch of a lease"),
        (_state(leases=[_lease(hi=99)]), "interval"),
        (_state(leases=[_lease(beat=1001)]), "after the log time"),
        (_state(leases=[_lease(done=[])]), "list of pieces"),
        (_state(leases=[_lease(done=[[0, TOP, None]])]), "list of pieces"),
        (_state(leases=[_lease(done=[[0, TOP, -2]])]), "list of pieces"),
        (_state(leases=[_lease(done=[[0, TOP]])]), "list of pieces"),
        (_state(leases=[_lease(done=[[0, 5, 6]])]), "cover all"),
        (_state(leases=[_lease(done=[[1, TOP, 6]])]), "gaps or overlap"),
        (_state(leases=[_lease(done=[[0, 5, 6], [5, TOP, 7]])]), "gaps or overlap"),
        (_state(leases=[_lease(done=[[0, 5, 6], [6, TOP, 6]])]), "one form"),
        (_state(leases=[_lease(ranges=7)]), "ranges of a lease"),
        (_state(leases=[_lease(ranges=[[8]])]), "are invalid"),
        (_state(leases=[_lease(ranges=[[9, 8]])]), "are invalid"),
        (_state(leases=[_lease(ranges=[[8, -1]])]), "are invalid"),
        (_state(leases=[_lease(ranges=[[7, 9]])]), "one form"),
        (_state(leases=[_lease(ranges=[[3, 4]])]), "one form"),
        (_state(leases=[_lease(ranges=[[8, 9], [10, 11]])]), "one form"),
        (_state(leases=[_lease(ranges=[[20, 21], [8, 9]])]), "one form"),
        (_state(leases=[_lease(ranges=[[2 * n, 2 * n] for n in range(4, 60_005)])]), "60,000"),
        (_state(leases=[_lease(granted=7)]), "above stable"),
        (_state(leases=[_lease(granted=-2)]), "granted of a lease"),
        (_state(leases=[_lease(granted=None)]), "granted of a lease"),
        (_two(_lease(), _lease()), "not sorted"),
        (_two(_lease(partition=10), _lease(partition=9)), "not sorted"),
        (_two(_lease(topic="é"), _lease(topic="z")), "not sorted"),
        (_state(pauses=[["g", "admin"]]), "3 parts"),
        (_state(pauses=[["g", "", 2000]]), "client_id of a pause"),
        (_state(pauses=[["g", "admin", 1000]]), "is over"),
        (_state(pauses=[["g", "admin", 2**63]]), "expires of a pause"),
        (_state(pauses=[["h", "admin", 2000], ["g", "admin", 2000]]), "not sorted"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_s1_what_no_replay_could_have_reached_is_refused(state: Any, why: str) -> None:
    with pytest.raises(SnapshotError, match=why):
        World.restore(packb(state), 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: good + b"\x00",
        lambda good: good[:-1],
        lambda good: b"",
        lambda good: b"\xc1",
        lambda good: b"\xdc\x00\x08" + good[1:],
        lambda good: good.replace(b"\xa1g", b"\xd9\x01g", 1),
        lambda good: b"\x91" * 5000,
    ],
)
def test_s1_bytes_in_another_form_are_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SnapshotError):
        World.restore(spoil(_busy().world.snapshot()), 1)


def test_l3_a_lease_of_another_cp_is_refused() -> None:
    assert World.restore(packb(_state()), 1).leases()
    refused = 0
    for cp in range(8):
        try:
            World.restore(packb(_state(cp=cp)), 8)
        except SnapshotError as error:
            assert "belongs to another" in str(error)
            refused += 1
    assert refused == 7


def test_flipping_any_byte_of_a_snapshot_gives_another_state_or_none() -> None:
    good = _busy().world.snapshot()
    for place in range(len(good)):
        spoilt = bytearray(good)
        spoilt[place] ^= 0x01
        try:
            world = World.restore(bytes(spoilt), 1)
        except SnapshotError:
            continue
        assert world.snapshot() == bytes(spoilt)


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from tests.rationalizer.test_snapshot import _busy\n"
        "log = _busy()\n"
        "for n in range(50): log.claim(('1', 'a'), group=f'group {n}'); log.pause(('1', 'x'), 9999, group=f'p{n}')\n"
        "import sys; sys.stdout.write(log.world.digest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "424242")
    }
    assert len(digests) == 1


# -- The log of snapshots: its records, what is not one, and where a snapshot is due (S2) -------------------------


GOOD: tuple[Any, ...] = (1, 3, 20_000, 1, 2, "0123456789abcdef" * 2, b"state")


def _part(**changes: Any) -> bytes:
    names = ("form", "partition", "next_offset", "part", "parts", "digest", "data")
    value: bytes = packb([changes.get(name, field) for name, field in zip(names, GOOD, strict=True)])
    return value


def _collect(values: Iterable[bytes | None], partition: int = 0) -> list[StoredSnapshot]:
    parts = SnapshotParts(partition)
    return [whole for value in values if (whole := parts.add(value)) is not None]


def test_s2_a_record_is_this_array() -> None:
    world = held().world
    (value,) = encode_snapshot(world)
    assert unpackb(value) == [1, 0, 1, 0, 1, world.digest(), world.snapshot()]
    assert value == packb(unpackb(value))  # shortest forms


def test_s2_a_state_comes_back_as_it_was() -> None:
    log = held()
    log.commit(A1, (3, 4))
    (stored,) = _collect(encode_snapshot(log.world))
    assert stored == StoredSnapshot(0, 2, log.world.digest(), log.world.snapshot())
    assert stored.holds()
    assert stored.restore(1).snapshot() == log.world.snapshot()


def test_s2_parts_are_of_at_most_900_kb_with_all_that_is_around_them_below_the_topics_limit() -> None:
    state = bytes(range(256)) * 8_000
    values = encode_state(7, 2**63, state)
    parts = [decode_part(value) for value in values]
    assert [len(part.data) for part in parts] == [900_000, 900_000, 248_000]
    assert [(part.part, part.parts) for part in parts] == [(0, 3), (1, 3), (2, 3)]
    assert max(map(len, values)) < MAX_VALUE_BYTES
    assert MAX_PART_BYTES == MAX_WRITTEN_BYTES == 900_000
    (stored,) = _collect(values, 7)
    assert stored.data == state
    assert stored.holds()


@pytest.mark.parametrize("size", [1, 899_999, 900_000, 900_001, 1_800_000])
def test_s2_every_size_is_cut_and_put_together(size: int) -> None:
    (stored,) = _collect(encode_state(0, 5, b"x" * size))
    assert stored.data == b"x" * size


def test_s2_what_can_not_be_stored_is_refused() -> None:
    with pytest.raises(SnapshotError):
        encode_state(0, 5, b"")


@given(order=st.permutations(range(6)))
def test_s2_parts_may_come_in_any_order_and_from_several_writers(order: list[int]) -> None:
    first, second = encode_state(0, 10, b"a" * 1_800_001), encode_state(0, 20, b"b" * 1_800_001)
    values = [*first, *second]
    assert {stored.next_offset: stored.data[:1] for stored in _collect(values[at] for at in order)} == {
        10: b"a",
        20: b"b",
    }


def test_q26_a_writer_killed_half_way_is_finished_by_the_next() -> None:
    values = encode_state(0, 10, b"a" * 1_800_001)
    parts = SnapshotParts(0)
    assert [parts.add(value) for value in values[:2]] == [None, None]
    assert parts.unfinished == 1
    (stored,) = [whole for value in values if (whole := parts.add(value)) is not None]
    assert stored.holds()


def test_s2_a_state_that_differs_is_never_mixed_with_another_of_the_same_place() -> None:
    ours, theirs = encode_state(0, 10, b"a" * 900_001), encode_state(0, 10, b"b" * 900_001)
    found = _collect([ours[0], theirs[0], theirs[1], ours[1]])
    assert [stored.data[:1] for stored in found] == [b"b", b"a"]
    assert all(stored.holds() for stored in found)


def test_s2_what_was_never_finished_is_dropped_in_the_end() -> None:
    parts = SnapshotParts(0)
    for at in range(100):
        parts.add(encode_state(0, at, b"a" * 900_001)[0])
    assert parts.unfinished == MAX_UNFINISHED
    assert parts.junk == 0


def test_q27_junk_and_other_cps_are_passed_over_and_counted() -> None:
    (good,) = encode_snapshot(held().world)
    parts = SnapshotParts(0)
    assert [parts.add(value) for value in (None, b"", b"\xc1", packb([1]), _part())] == [None] * 5
    assert parts.junk == 5
    assert parts.add(good) is not None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"form": 2}, "format"),
        ({"form": True}, "format"),
        ({"form": 1.0}, "format"),
        ({"partition": -1}, "CP"),
        ({"partition": 2**31}, "CP"),
        ({"partition": None}, "CP"),
        ({"next_offset": -1}, "next offset"),
        ({"next_offset": 2**63 + 1}, "next offset"),
        ({"next_offset": 1.0}, "next offset"),
        ({"parts": 0}, "number of parts"),
        ({"parts": MAX_SNAPSHOT_PARTS + 1}, "number of parts"),
        ({"part": 2}, "not below that of the parts"),
        ({"part": -1}, "not below that of the parts"),
        ({"part": False}, "not below that of the parts"),
        ({"digest": "0" * 31}, "digest"),
        ({"digest": "0" * 33}, "allowed here"),
        ({"digest": "A" * 32}, "digest"),
        ({"digest": b"0" * 32}, "digest"),
        ({"data": b""}, "no bytes"),
        ({"data": "text"}, "no bytes"),
        ({"data": b"x" * 900_001}, "allowed"),
        ({"data": []}, "no bytes"),
        ({"data": {}}, "no bytes"),
        ({"data": {"a": 1}}, "allowed here"),
        ({"data": Timestamp(1)}, "allowed here"),
    ],
)
def test_s2_a_record_with_this_in_it_is_no_part(changes: dict[str, Any], why: str) -> None:
    assert decode_part(_part()) == SnapshotPart(*GOOD[1:])
    with pytest.raises(MalformedPartError, match=why):
        decode_part(_part(**changes))


@pytest.mark.parametrize(
    "value", [None, b"", packb(GOOD) + b"\0", packb(GOOD[:6]), packb((*GOOD, 1)), packb(7), b"\xdd\xff\xff\xff\xff"]
)
def test_s2_what_is_no_array_of_seven_is_no_part(value: bytes | None) -> None:
    with pytest.raises(MalformedPartError):
        decode_part(value)


_msgpack = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@effort(500)
@given(
    value=st.binary(max_size=200)
    | _msgpack.map(packb)
    | st.lists(_msgpack, min_size=7, max_size=7).map(packb)
    | st.tuples(st.integers(0, 60), st.binary(max_size=3)).map(
        lambda cut: encode_snapshot(held().world)[0][: cut[0]] + cut[1]
    )
)
@example(value=b"\x91" * 2_000)
@example(value=b"\x97" + b"\xc7\x00\x01" * 7)
def test_s2_hostile_bytes_raise_nothing_else(value: bytes) -> None:
    parts = SnapshotParts(0)
    found = parts.add(value)
    try:
        part = decode_part(value)
    except MalformedPartError:
        assert (found, parts.junk) == (None, 1)
    else:
        assert 0 <= part.part < part.parts


@effort(200)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_s2_one_bit_turned_is_never_taken_for_the_state(at: int, bit: int) -> None:
    log = held()
    (value,) = encode_snapshot(log.world)
    forged = bytearray(value)
    forged[at % len(forged)] ^= 1 << bit
    for stored in _collect([bytes(forged)]):
        with pytest.raises(SnapshotError):
            stored.restore(1)


def test_s2_a_digest_that_is_not_that_of_the_bytes_does_not_hold() -> None:
    world = held().world
    stored = StoredSnapshot(0, 1, World(0, 1).digest(), world.snapshot())
    assert not stored.holds()
    with pytest.raises(SnapshotError, match="digest"):
        stored.restore(1)


@pytest.mark.parametrize(("partition", "next_offset"), [(0, 2), (1, 1)])
def test_s2_a_state_of_another_place_is_refused(partition: int, next_offset: int) -> None:
    world = held().world
    stored = StoredSnapshot(partition, next_offset, world.digest(), world.snapshot())
    with pytest.raises(SnapshotError, match="stored as"):
        stored.restore(2 if partition else 1)


def test_s1_bytes_that_are_no_state_are_refused_though_their_digest_holds() -> None:
    (stored,) = _collect(encode_state(0, 1, b"anything"))
    assert stored.holds()
    with pytest.raises(SnapshotError):
        stored.restore(1)


@pytest.mark.parametrize(
    ("before", "after", "every", "is_due"),
    [
        (0, 9_999, 10_000, False),
        (9_999, 10_000, 10_000, True),
        (10_000, 10_001, 10_000, False),
        (9_999, 10_005, 10_000, True),  # offsets have gaps: the first place at or above
        (10_000, 20_000, 20_000, True),
        (9_999, 10_000, 20_000, False),
        (0, 0, 10_000, False),
    ],
)
def test_q25_a_snapshot_is_due_where_a_multiple_is_first_reached(
    before: int, after: int, every: int, is_due: bool
) -> None:
    assert due(before, after, every) is is_due


@pytest.mark.parametrize(
    ("leases", "every"), [(0, 10_000), (10_000, 10_000), (10_001, 20_000), (20_000, 20_000), (95_000, 100_000)]
)
def test_q24_the_interval_is_10000_and_no_less_than_the_number_of_leases(leases: int, every: int) -> None:
    assert interval(leases) == every
    assert every % interval(0) == 0  # so that next_due passes every place


@given(next_offset=st.integers(0, 2**63 - 1))
def test_s2_the_next_place_to_check_is_the_first_that_may_be_due(next_offset: int) -> None:
    place = next_due(next_offset)
    assert place > next_offset
    assert due(next_offset, place, interval(0))
    assert not due(next_offset, place - 1, interval(0))
