"""`broker`: a local Kafka for as long as the command runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.harness import process, start


@pytest.mark.slow
@pytest.mark.skipif("KAFKA_MARSHAL_BROKER" in os.environ, reason="another kind of broker was asked for")
def test_broker_runs_until_ctrl_c(tmp_path: Path, kafka_bootstrap: str) -> None:
    """Waits for the session's broker first, which has fetched the jars."""
    kept = tmp_path / "data"
    with start("broker", "--json", "--keep", str(kept), env={"KAFKA_MARSHAL_BROKER": "native"}) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        announced = json.loads(running.stdout.readline())
        assert announced["brokers"] == 1
        assert process("init", "--bootstrap", announced["bootstrap"]).returncode == 0
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(40) == 0
    assert b"Traceback" not in said
    assert kept.is_dir()
    assert any(kept.iterdir()), "the data stays where --keep says"
    assert process("status", "--bootstrap", announced["bootstrap"], "--timeout", "0.5").returncode == 3
