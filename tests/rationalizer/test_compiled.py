"""The compiled core is the same source, and behaves the same: the core's own tests, run against it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled import build

ROOT = Path(__file__).parents[2]
HERE = "tests/rationalizer"
TESTS = ["codec", "progress", "world", "snapshot", "dump", "clarifications", "fast_path"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]


def test_the_compiled_core_passes_the_cores_tests(tmp_path: Path) -> None:
    folder = build(tmp_path / "compiled", level="0")
    probe = "import rationalizer.world as w; assert not w.__file__.endswith('.py'), w.__file__"
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", probe], env=environment, check=True)
    tests = ["tests/scripts", *(f"{HERE}/test_{name}.py" for name in [*TESTS, "oracle_examples"])]
    path = f"pythonpath={folder} marshal ."  # the folder comes first
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", path, *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "a compiled method can't be replaced" in run.stdout, "it was not the compiled core that was tested"
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
