"""Type checkers know the types of handlers, for asyncio's Marshal as for the plain one."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Consumer, Marshal, aio

CALLS = Path(__file__).with_name("calls.py")
ROOT = CALLS.parents[2]


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_good_calls_are_accepted_and_bad_ones_refused(checker: str) -> None:
    env = {**os.environ, "PYTHONPATH": "marshal:.", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    told = subprocess.run(
        [str(Path(sys.executable).with_name(checker)), str(CALLS)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        (Marshal.__init__, aio.Marshal.__init__),
        (Marshal.on_cluster, aio.Marshal.on_cluster),
        (Marshal.consumer, aio.Marshal.consumer),
        (Consumer.run, aio.Consumer.run),
    ],
    ids=lambda function: function.__name__,
)
def test_the_arguments_for_asyncio_are_the_same(plain: Callable[..., Any], other: Callable[..., Any]) -> None:
    known, found = (inspect.signature(each).parameters for each in (plain, other))
    assert [(x.name, x.kind, x.default) for x in known.values()] == [
        (x.name, x.kind, x.default) for x in found.values()
    ]


def test_help_says_what_a_marshal_takes() -> None:
    assert "heartbeat_interval" in (Marshal.__init__.__doc__ or "")
