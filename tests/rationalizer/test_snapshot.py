"""Canonical state and digest (S1), and what is refused as a snapshot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgpack import packb, unpackb
from xxhash import xxh3_128

from rationalizer import SnapshotError, World
from rationalizer.levels import SUPPORTED_LEVEL
from tests.rationalizer.log import A1, ADMIN, B1, Log, held

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
