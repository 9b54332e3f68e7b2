"""A test that takes its process with it, or hangs in each try, fails alone: the others run, and the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """\
from tests.scheduling import pytest_runtest_setup, pytest_xdist_make_scheduler
"""

TESTS = """\
import os
import time
import pytest

@pytest.mark.xdist_group("first")
@pytest.mark.parametrize("n", range(4))
def test_first(n):
    assert n != 1 or os._exit(1)

@pytest.mark.xdist_group("second")
@pytest.mark.parametrize("n", range(3))
def test_second(n):
    assert n != 2 or os._exit(1)

def test_alone():
    os._exit(1)

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(1000)

def test_last():
    pass
"""


def test_a_process_that_dies_is_replaced_and_each_try_has_its_time(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dying.py").write_text(TESTS)
    root = Path(__file__).parent.parent
    plugins = [f"-p{name}" for name in ("no:cacheprovider", "xdist", "pytest_timeout", "pytest_rerunfailures")]
    of_xdist = ["-n2", "--dist=loadgroup", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *of_xdist, "--reruns=1", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    ran = subprocess.run(
        [*command, "--rootdir", ".", "."],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout.rstrip().splitlines()[-1].startswith("4 failed, 6 passed, 1 rerun in "), ran.stdout + ran.stderr
    for name in ("first[1]@first", "second[2]@second", "alone"):
        assert f"crashed while running 'test_dying.py::test_{name}'" in ran.stdout
