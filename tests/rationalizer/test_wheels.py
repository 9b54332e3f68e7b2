"""The two wheels, as `make dist` and `make dist-compiled` build them, come to the same state by the same log."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.rationalizer.group_author import write_group_log
from tests.rationalizer.strategies import by_seed, write_log, write_odd_log

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]

#: Replays logs record by record and as a whole; says which core it was, and all that they concluded.
REPLAY = """
import json, sys
import rationalizer.world
from rationalizer import World
found = []
for log in json.load(sys.stdin):
    log = [(offset, stamp, None if value is None else bytes.fromhex(value)) for offset, stamp, value in log]
    one, whole = World(0, 1), World(0, 1)
    outcomes = [repr(one.apply(*entry)) for entry in log]
    whole.apply_many(log)
    counts = [sorted(whole.accepted.items()), sorted(whole.rejected.items())]
    found.append([outcomes, one.digest(), whole.digest(), counts])
print(json.dumps([rationalizer.world.__file__, found]))
"""


def test_both_wheels_conclude_the_same_from_the_same_logs(tmp_path: Path) -> None:
    wheels = [built("dist", tmp_path, "none-any"), built("dist-compiled", tmp_path, "cp3")]
    writers = (write_log, write_group_log, write_odd_log)
    written = [write(by_seed(seed), 1_000) for write in writers for seed in (1, 2)]
    logs = [[(at, stamp, None if value is None else value.hex()) for at, stamp, value in log] for log, _ in written]
    (pure_file, pure), (compiled_file, compiled) = (replayed(wheel, logs) for wheel in wheels)
    assert pure_file.endswith("world.py") and compiled_file.endswith(".so")
    assert compiled == pure
    assert [digest for _, digest, _, _ in pure] == [oracle.digest() for _, oracle in written]


def built(target: str, folder: Path, tag: str) -> Path:
    """What is in the wheel that this target of the Makefile builds."""
    dist = folder / target
    subprocess.run(["make", "-s", target, f"DIST={dist}"], cwd=ROOT, check=True)
    [wheel] = dist.glob("*.whl")
    assert tag in wheel.name
    with ZipFile(wheel) as archive:
        archive.extractall(folder / f"{target}-unpacked")
    return folder / f"{target}-unpacked"


def replayed(package: Path, logs: list[list[tuple[int, int, str | None]]]) -> tuple[str, list[list[object]]]:
    """The file of the core, and what it concludes of each log."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", REPLAY],
        input=json.dumps(logs),
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=package,
        capture_output=True,
        text=True,
        check=True,
    )
    file, found = json.loads(run.stdout)
    assert Path(file).is_relative_to(package), "another core was imported"
    return file, found
