"""apply_many's fast path never has another state, count or answer than the slow one."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgpack import ExtType, packb

from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    Heartbeat,
    HeartbeatBatch,
    ReleasingPartition,
    Tick,
    World,
    encode,
)
from rationalizer.leases import machine
from rationalizer.leases.lease import Lease
from rationalizer.plane import Pauses
from tests.rationalizer.log import A1, A2, ADMIN, B1, COMPILED, HI, Log

TOP = 2**63 - 1
ONE = packb(1)


def _prepared() -> Log:
    """Leases of every sort. There is an epoch 1 and a partition 1: True and 1.0 are equal to them."""
    log = Log(now=0)
    log.tick()
    log.claim(A1, partition=1, ok=True)  # epoch 1
    log.claim(A1, partition=0, ok=True)  # epoch 2
    log.claim(B1, partition=2, ok=True)
    log.claim(A1, group="h", partition=1, ok=True)  # epoch 4, with ranges
    lease = log.world.lease("h", "t", 1)
    assert lease is not None
    lease.progress.commit([(10, 12), (20, 30)])
    log.claim(A1, group="p", partition=1, ok=True)  # epoch 5, paused by another client
    log.pause(ADMIN, 10**6, group="p")
    log.claim(A1, group="q", partition=1, ok=True)  # epoch 7, by itself
    log.pause(A1, 10**6, group="q")
    log.claim(A1, group="o", partition=1, ok=True)  # epoch 9, a pause that is over
    log.pause(ADMIN, 1, group="o")
    log.claim(A1, group="k", partition=1, ok=True)  # epoch 11, shared by key
    lease = log.world.lease("k", "t", 1)
    assert lease is not None
    lease.progress.commit_key_range(0, 99, 15)
    log.claim(A1, group="r", partition=1, ok=True)  # epoch 12, with one range
    lease = log.world.lease("r", "t", 1)
    assert lease is not None
    lease.progress.commit([(10, 12)])
    return log


def _twins() -> tuple[World, World]:
    return _prepared().world, _prepared().world


def _same(left: World, right: World) -> None:
    assert left.snapshot() == right.snapshot()
    assert (left.accepted, left.rejected) == (right.accepted, right.rejected)
    assert (left.next_offset, left.log_time, left.required_level) == (
        right.next_offset,
        right.log_time,
        right.required_level,
    )


def _compare(records: list[tuple[int, bytes | None]]) -> None:
    """The same records: one by one, all at once, each in a separate run, and all but plain heartbeats one by one."""
    long_way, at_once = _twins()
    one_by_one, in_bulk = _twins()
    log = [(long_way.next_offset + n, stamp, value) for n, (stamp, value) in enumerate(records)]
    beaten: dict[tuple[str, str, str], tuple[int, int]] = {}
    for record in log:
        outcome = long_way.apply(*record)
        if outcome.type in ("Heartbeat", "HeartbeatBatch") and outcome.code == "OK" and outcome.message is not None:
            message = outcome.message
            sender = (message.group_id, message.client_id, message.instance_id)
            beaten[sender] = outcome.log_time, record[0]
        one_by_one.apply_many([record])
        _same(long_way, one_by_one)
    at_once.apply_many(log)
    _same(long_way, at_once)
    heard: dict[tuple[str, str, str], tuple[int, int]] = {}
    remaining = iter(log)
    while (rest := in_bulk.apply_beats(remaining, heard)) is not None:
        in_bulk.apply(*rest)
    _same(long_way, in_bulk)
    assert heard.keys() <= beaten.keys()
    assert [sender for sender in heard if heard[sender] > beaten[sender]] == []


def _int_forms(value: int) -> list[bytes]:
    forms = [packb(value)]
    if value >= 0:
        forms.append(b"\xcf" + struct.pack(">Q", value))
    if -(2**63) <= value < 2**63:
        forms.append(b"\xd3" + struct.pack(">q", value))
    return forms


#: Values that may replace any field.
ODD = [packb(thing) for thing in (None, True, False, 0, 1, 1.0, -1, "", "1", "a", b"a", [], [1], ["t"], {}, {"a": 1})]
ODD += [packb(ExtType(1, b"x")), b"\xc1", b"\xd9\x01t", b"\xca\x3f\x80\x00\x00", packb(2**64 - 1), packb("x" * 300)]

FIELDS: list[list[bytes]] = [
    [ONE, b"\xcc\x01", packb(2), packb(True), packb(1.0), packb(0)],
    [ONE, b"\xcc\x01", packb(32), packb(True), packb(3)],
    [packb("1"), packb("2"), b"\xd9\x011"],
    [packb("a"), packb("b"), packb("admin")],
    [packb(group) for group in ("g", "h", "p", "q", "o", "k", "r", "nobody's")],
    [packb("t"), packb("u"), b"\xda\x00\x01t"],
    [form for value in (0, 1, 2, 3, 2**31) for form in _int_forms(value)] + [packb(True), packb(1.0), packb(1.5)],
    [form for value in (1, 2, 3, 4, 5, 7, 9, 11, 12) for form in _int_forms(value)]
    + [packb(None), packb(True), packb(1.0)],
    [form for value in (-2, -1, 0, 5, 9, 13, 15, 40, TOP, TOP + 1) for form in _int_forms(value)]
    + [packb(None), packb(True), packb(5.0)],
]
HEADS = [b"\x99", b"\x99", b"\x99", b"\xdc\x00\x09", b"\xdd\x00\x00\x00\x09", b"\x98", b"\x9a", b"\x89"]
TAILS = [b"", b"", b"", b"", b"\x00", b"\xc1"]

beats = st.builds(
    lambda head, fields, tail: head + b"".join(fields) + tail,
    st.sampled_from(HEADS),
    st.tuples(*(st.sampled_from(pool) | st.sampled_from([pool[0]] * 3 + ODD) for pool in FIELDS)),
    st.sampled_from(TAILS),
)
#: Valid in most fields, so that the fast path is reached in all ways, and sometimes with one wrong byte.
good_beats = st.builds(
    lambda group, partition, epoch, done: encode(Heartbeat(*A1, group, "t", partition, epoch, done)),
    st.sampled_from(["g", "h", "p", "q", "o", "k", "r"]),
    st.sampled_from([1, 1, 1, 0]),
    st.sampled_from([1, 1, 2, 4, 5, 7, 9, 11, 12]),
    st.integers(-1, 40) | st.none() | st.integers(TOP - 1, TOP),
)


#: Entries of one group, of leases that are simple and of such as are not, some of them twice.
good_entries = st.builds(
    lambda partition, epoch, done: BeatEntry("t", partition, epoch, done),
    st.sampled_from([0, 1, 1, 1]),
    st.sampled_from([1, 1, 2, 2, 4, 5, 7, 9, 11, 12]),
    st.integers(-1, 40) | st.none() | st.integers(TOP - 1, TOP),
)
good_batches = st.builds(
    lambda group, entries: encode(HeartbeatBatch(*A1, group, tuple(entries))),
    st.sampled_from(["g", "g", "h", "p", "q", "o", "k", "r"]),
    st.lists(good_entries, min_size=1, max_size=4),
)
odd_entries = st.builds(
    lambda head, fields: head + b"".join(fields),
    st.sampled_from([b"\x94"] * 4 + [b"\x93", b"\x95", b"\xdc\x00\x04", b"\x84", b"\xa4"]),
    st.tuples(*(st.sampled_from([pool[0]] * 9 + ODD) for pool in FIELDS[5:])),
)
odd_batches = st.builds(
    lambda fields, head, entries, tail: b"\x96\x01\x06" + b"".join(fields) + head + b"".join(entries) + tail,
    st.tuples(*(st.sampled_from([pool[0]] * 9 + ODD) for pool in FIELDS[2:5])),
    st.sampled_from([b"\x92"] * 4 + [b"\x91", b"\x93", b"\xdc\x00\x02", b"\x82", b"\xc4\x02", b"\xa2"]),
    st.tuples(odd_entries, odd_entries),
    st.sampled_from(TAILS),
)


def _spoil(value: bytes, place: int, change: Callable[[bytes, int], bytes]) -> bytes:
    return change(value, place % len(value))


spoilt_beats = st.builds(
    _spoil,
    good_beats | good_batches,
    st.integers(0, 10**6),
    st.sampled_from(
        [
            lambda value, at: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :],
            lambda value, at: value[:at] + bytes([(value[at] + 0x80) % 256]) + value[at + 1 :],
            lambda value, at: value[:at] + value[at + 1 :],
            lambda value, at: value[:at] + b"\x01" + value[at:],
            lambda value, at: value[:at],
        ]
    ),
)
anything = st.one_of(
    good_beats, good_batches, beats, odd_batches, spoilt_beats, st.just(None), st.just(encode(Tick(*A1, "g")))
)
stamps = st.integers(-5, 4 * HI) | st.sampled_from([-1, 0, HI, 2 * HI, 2 * HI + 1, TOP])


@settings(max_examples=400, deadline=None)  # also run where no profile says so
@given(records=st.lists(st.tuples(stamps, anything), max_size=12))
def test_any_bytes_end_the_same_both_ways(records: list[tuple[int, bytes | None]]) -> None:
    _compare(records)


@pytest.mark.parametrize(
    ("group", "partition", "epoch", "done"), [("r", 1, 12, 9), ("r", 1, 12, 11), ("g", 0, 1, 20), ("g", 0, 3, 20)]
)
def test_a_beat_that_meets_one_range_or_another_epoch_ends_the_same_both_ways(
    group: str, partition: int, epoch: int, done: int
) -> None:
    _compare([(5, encode(Heartbeat(*A1, group, "t", partition, epoch, done)))])
    _compare([(5, encode(HeartbeatBatch(*A1, group, (BeatEntry("t", partition, epoch, done),))))])


@pytest.mark.parametrize("instance", [None, "1"])
@pytest.mark.parametrize("client", [None, "a"])
def test_none_is_not_the_holder_of_a_free_lease(instance: str | None, client: str | None) -> None:
    long_way, at_once = _prepared(), _prepared()
    value = packb([1, 1, instance, client, "g", "t", 1, 1, 5])
    for log in (long_way, at_once):
        log.append(ReleasingPartition(*A1, "g", "t", 1, 1, None))
    long_way.append(value)
    at_once.world.apply_many([(at_once.world.next_offset, 0, value)])
    _same(long_way.world, at_once.world)
    assert at_once.world.rejected == {"MALFORMED" if None in (instance, client) else "NOT_HELD": 1}


def _forbid_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this went the long way")

    monkeypatch.setattr(World, "_replay", refuse)


@pytest.mark.skipif(COMPILED, reason="a compiled method can't be replaced")
def test_a_plain_beat_takes_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _prepared().world
    world_before = world.next_offset
    _forbid_the_long_way(monkeypatch)
    values = [encode(Heartbeat(*A1, "g", "t", 1, 1, done)) for done in (-1, 5, 5, 6, 70_000, TOP)]
    world.apply_many([(world_before + n, 10 + n, value) for n, value in enumerate(values)])
    lease = world.lease("g", "t", 1)
    assert lease is not None
    assert (lease.progress.stable, lease.last_beat, world.log_time) == (TOP, 15, 15)


@pytest.mark.skipif(COMPILED, reason="a compiled method can't be replaced")
def test_a_plain_batch_takes_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _prepared().world
    _forbid_the_long_way(monkeypatch)
    entries = BeatEntry("t", 1, 1, 5), BeatEntry("t", 0, 2, None), BeatEntry("t", 1, 1, 3), BeatEntry("t", 1, 1, 9)
    world.apply_many([(world.next_offset, 10, encode(HeartbeatBatch(*A1, "g", entries)))])
    one, none = world.lease("g", "t", 1), world.lease("g", "t", 0)
    assert one is not None and none is not None
    assert (one.progress.stable, one.last_beat, none.progress.stable, none.last_beat) == (9, 10, -1, 10)


@pytest.mark.skipif(COMPILED, reason="a compiled method can't be replaced")
@pytest.mark.parametrize(
    ("who", "beat"),
    [
        (A1, ("g", 1, 1, None)),  # nil
        (A1, ("g", 1, None, 5)),  # a takeover
        (A1, ("g", 1, 2, 5)),  # fenced
        (A2, ("g", 1, 1, 5)),
        (B1, ("g", 1, 1, 5)),
        (A1, ("g", 9, 1, 5)),  # not held
        (A1, ("h", 1, 4, 5)),  # has ranges
        (A1, ("k", 1, 11, 5)),  # has pieces
        (A1, ("p", 1, 5, 5)),  # paused
        (A1, ("q", 1, 7, 5)),  # repositions
    ],
)
def test_what_is_not_plain_goes_the_long_way(
    monkeypatch: pytest.MonkeyPatch, who: tuple[str, str], beat: tuple[str, int, int | None, int | None]
) -> None:
    world = _prepared().world
    group, partition, epoch, done = beat
    _forbid_the_long_way(monkeypatch)
    with pytest.raises(AssertionError, match="long way"):
        world.apply_many([(world.next_offset, 5, encode(Heartbeat(*who, group, "t", partition, epoch, done)))])
    if epoch is not None and done is not None:
        batch = HeartbeatBatch(*who, group, (BeatEntry("t", partition, epoch, done),))
        with pytest.raises(AssertionError, match="long way"):
            world.apply_many([(world.next_offset, 5, encode(batch))])


#: Of lease g/t/0, and all of a Heartbeat but its last_offset: after a long run, a lease is known by these bytes.
HEAD = encode(Heartbeat(*A1, "g", "t", 0, 2, 0))[:-1]
LONG_RUN = [(0, HEAD + packb(-1))] * (machine._LONG_RUN + 1)
OFFSETS = (
    -1,
    0,
    5,
    2**16 - 1,
    2**16,
    70_000,
    70_001,
    2**31,
    2**32 - 1,
    2**32,
    0xCE << 32,
    0xCE_0001_2345,
    TOP,
    TOP + 1,
)
LAST = [
    *(form for offset in OFFSETS for form in _int_forms(offset)),
    *ODD,
    packb("four"),
    packb([1] * 4),
    b"\xce\x00\x01",
]


@pytest.mark.parametrize("last", LAST, ids=bytes.hex)
def test_whatever_follows_known_bytes_ends_the_same_both_ways(last: bytes) -> None:
    learned, again = HEAD + packb(70_000), HEAD + packb(70_002)
    _compare([*LONG_RUN, (5, learned), (9, HEAD + last), (7, again)])
    _compare([*LONG_RUN, (5, HEAD + last), (9, learned), (9, HEAD + last), (7, again)])


def test_a_lease_is_not_known_by_bytes_that_end_within_its_epoch() -> None:
    """Of nine bytes of an epoch and one of an offset, the last five could be an offset of four bytes."""
    short, at_once = Log(), Log()
    epoch = 2**32 + 0xCE00_0000
    claim = encode(ClaimingPartition(*A1, "g", "t", 0, HI))
    beats = [encode(Heartbeat(*A1, "g", "t", 0, epoch, 1))] * len(LONG_RUN)
    fenced = encode(Heartbeat(*A1, "g", "t", 0, epoch + 1, 5))
    log = [(epoch + n, 0, value) for n, value in enumerate([claim, *beats, fenced])]
    for record in log:
        short.world.apply(*record)
    at_once.world.apply_many(log)
    _same(short.world, at_once.world)
    assert at_once.world.rejected == {"FENCED": 1}


@pytest.mark.skipif(COMPILED, reason="a compiled method can't be replaced")
def test_in_a_long_run_a_lease_is_known_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    world, judged = _prepared().world, list[bytes]()
    judge = machine.LeasePlane._simple_beat

    def note(plane: machine.LeasePlane, value: bytes, pauses: Pauses) -> tuple[Lease, int] | None:
        judged.append(value)
        return judge(plane, value, pauses)

    monkeypatch.setattr(machine.LeasePlane, "_simple_beat", note)
    beats = [HEAD + packb(70_000 + n) for n in range(9)]
    values = [*(value for _, value in LONG_RUN), *beats]
    world.apply_many([(world.next_offset + n, 0, value) for n, value in enumerate(values)])
    assert judged == [*(value for _, value in LONG_RUN), beats[0]]
    lease = world.lease("g", "t", 0)
    assert lease is not None and lease.progress.stable == 70_008
