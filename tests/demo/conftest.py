"""Runs of the demo that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.demo.helpers import Run


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
