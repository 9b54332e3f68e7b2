"""Runs of the demo that end with their test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.demo.helpers import Run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with hardly any space."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if done.returncode != 0:
        pytest.skip("file systems can't be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start the demo as a process."""
    runs: list[Run] = []

    def start(**options: object) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
