"""Whole logs: however they are cut, wherever they are read, the same state, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import World, decode, encode
from rationalizer.levels import SUPPORTED_LEVEL
from tests.rationalizer.group_author import write_group_log
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.oracle.compare import same_after, same_counts, same_outcome, same_state
from tests.rationalizer.strategies import (
    GROUPS,
    LARGEST,
    TEST_TIMEOUT_S,
    Entry,
    by_seed,
    effort,
    logs,
    long_logs,
    record,
    write_log,
)

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@given(written=logs())
@effort(60)
def test_each_record_of_a_log(written: tuple[list[Entry], OracleWorld]) -> None:
    log, wanted = written
    same_after(log, World(wanted.partition, wanted.partitions), OracleWorld(wanted.partition, wanted.partitions))


@given(written=long_logs())
@effort(40)
def test_each_record_of_a_long_log(written: tuple[list[Entry], OracleWorld]) -> None:
    log, wanted = written
    real = World(wanted.partition, wanted.partitions)
    for entry, expected in zip(log, wanted.outcomes, strict=True):
        same_outcome(real.apply(*entry), expected)
        for group in GROUPS:  # the oracle is at the end already: the list and the look-up have to agree
            listed = [pause for pause in real.pauses() if pause.group_id == group]
            assert listed == [pause for pause in [real.pause(group)] if pause is not None]
    same_state(real, wanted)
    same_counts(real, wanted)


@given(written=long_logs(longest=150), data=st.data())
@effort(60)
def test_however_the_log_is_cut(written: tuple[list[Entry], OracleWorld], data: st.DataObject) -> None:
    """apply, apply_many of lists and of generators, and snapshots in between, in any mix."""
    log, wanted = written
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=6), "cuts"))
    real = World(wanted.partition, wanted.partitions)
    accepted: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for first, last in zip([0, *cuts], [*cuts, len(log)], strict=True):
        part = log[first:last]
        manner = data.draw(st.sampled_from(("one by one", "list", "generator", "restored first")), "manner")
        if manner == "restored first":
            accepted.update(real.accepted)
            rejected.update(real.rejected)
            snapshot = real.snapshot()
            real = World.restore(snapshot, wanted.partitions)
            assert real.snapshot() == snapshot
        if manner in ("one by one", "restored first"):
            for entry in part:
                real.apply(*entry)
        else:
            real.apply_many(part if manner == "list" else (entry for entry in part))
    same_state(real, wanted)
    assert +(accepted + Counter(real.accepted)) == Counter(wanted.accepted)
    assert +(rejected + Counter(real.rejected)) == Counter(wanted.rejected)


@given(written=long_logs(longest=80), data=st.data())
@effort(40)
def test_an_upgrade_stops_every_reader_at_the_same_place(
    written: tuple[list[Entry], OracleWorld], data: st.DataObject
) -> None:
    """E4: the world stands before the record, whatever is applied after it and in whatever way."""
    log, wanted = written
    at = data.draw(st.integers(0, len(log) - 1), "at")
    level = data.draw(st.sampled_from((SUPPORTED_LEVEL + 1, SUPPORTED_LEVEL + 2, LARGEST >> 32)), "level")
    offset, stamp, _ = log[at]
    stopped = [*log[:at], (offset, stamp, record(33, ("a", "1"), "g", level)), *log[at:]]
    before = OracleWorld(wanted.partition, wanted.partitions)
    for entry in log[:at]:
        before.apply(*entry)
    slow, fast = (World(wanted.partition, wanted.partitions) for _ in range(2))
    for entry in stopped:
        slow.apply(*entry)
    fast.apply_many(stopped)
    fast.apply_many(stopped)
    before.required_level = level
    for real in (slow, fast):
        same_state(real, before)
        same_counts(real, before)


def test_the_last_offset_and_the_last_moment() -> None:
    """E2: offsets, epochs and times up to 2^63−1; a log that ends there is a log like any other."""
    who, key = ("a", "1"), ("g", "t", 0)
    log: list[Entry] = [
        (0, LARGEST - 1, record(5, ("admin", "1"), "g", LARGEST)),
        (1, LARGEST - 1, record(2, who, *key, 600_000)),
        (LARGEST - 1, LARGEST, record(2, who, *key, 600_000)),
        (LARGEST, LARGEST, record(4, who, *key, LARGEST - 1, LARGEST)),
    ]
    real, wanted = World(0, 1), OracleWorld(0, 1)
    same_after(log, real, wanted)
    assert [outcome.code for outcome in wanted.outcomes] == ["OK", "PAUSED", "OK", "OK"]
    restored = World.restore(real.snapshot(), 1)
    same_state(restored, wanted)


@given(written=long_logs(longest=150))
@effort(30)
def test_records_say_what_their_bytes_say(written: tuple[list[Entry], OracleWorld]) -> None:
    """The oracle's author writes shortest forms, so decoding and encoding again gives the same bytes (E1)."""
    log, wanted = written
    real = World(wanted.partition, wanted.partitions)
    for offset, stamp, value in log:
        outcome = real.apply(offset, stamp, value)
        if outcome.record is not None:
            assert value is not None
            assert encode(outcome.record) == value
            assert decode(value) == outcome.record


def _cases() -> tuple[list[dict[str, Any]], list[OracleWorld]]:
    cases, worlds = [], []
    for seed in range(6):
        partitions = (1, 2, 8)[seed % 3]
        write = write_group_log if SUPPORTED_LEVEL >= 2 and seed % 2 else write_log
        log, world = write(by_seed(seed), 300, seed % partitions, partitions)
        lines = [[offset, stamp, None if value is None else value.hex()] for offset, stamp, value in log]
        cases.append({"partition": world.partition, "partitions": partitions, "log": lines})
        worlds.append(world)
    return cases, worlds


def _listed(entries: Sequence[str] | None) -> list[str] | None:
    return None if entries is None else list(entries)


def _expected(worlds: list[OracleWorld]) -> list[Any]:
    return [
        [
            world.digest(),
            world.snapshot().hex(),
            dict(sorted(world.accepted.items())),
            dict(sorted(world.rejected.items())),
            [[each.code, each.epoch, _listed(each.entries), each.generation, each.member] for each in world.outcomes],
        ]
        for world in worlds
    ]


def _run(python: str, hash_seed: str) -> None:
    """Replay the fixed logs in a new interpreter and compare with the oracle's answers."""
    cases, worlds = _cases()
    script = Path(__file__).parent / "oracle" / "digests.py"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-P", str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == _expected(worlds)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295", "random"])
def test_the_same_for_every_hash_seed(hash_seed: str) -> None:
    _run(sys.executable, hash_seed)


@cache
def _interpreters() -> dict[str, str]:
    """Interpreters that have what rationalizer needs, by version.

    KAFKA_MARSHAL_PYTHONS lists interpreters (as PATH lists folders); those on PATH come after them.
    """
    listed = [path for path in os.environ.get("KAFKA_MARSHAL_PYTHONS", "").split(os.pathsep) if path]
    on_path = [path for version in PYTHONS if (path := shutil.which(f"python{version}"))]
    probe = "import sys, msgpack, xxhash; print('%d.%d' % sys.version_info[:2])"
    found: dict[str, str] = {}
    for path in (*listed, sys.executable, *on_path):
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), path)
        elif path in listed:  # asked for by name: never skip that silently
            raise AssertionError(f"KAFKA_MARSHAL_PYTHONS: {path} has no msgpack and xxhash: {done.stderr}")
    return found


@pytest.mark.parametrize("version", PYTHONS)
def test_the_same_for_every_python(version: str) -> None:
    python = _interpreters().get(version)
    if python is None:
        pytest.skip(f"no Python {version} with msgpack and xxhash; name one in KAFKA_MARSHAL_PYTHONS")
    _run(python, "7")
