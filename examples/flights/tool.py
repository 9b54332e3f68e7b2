"""The command kafka-marshal, as a process: what it does with the coordination log of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from flights.errors import DemoError
from flights.publish import Scene

__all__ = ["kafka_marshal"]


def kafka_marshal(scene: Scene, log: Path, *arguments: str, timeout_s: float, java: str = "") -> str:
    """Run a command on the coordination topic to its end; what it printed (*blocking*). Its errors go to the log.

    java: options for a JVM that it starts. Raises DemoError if it printed nothing, or has not ended within timeout_s.
    """
    # Not as arguments: config may hold a password.
    properties = "".join(f"{name}={value}\n" for name, value in scene.config.items())
    reach = ("--bootstrap", scene.bootstrap, "--topic", scene.coordination, "--config", "/dev/stdin")
    command = [sys.executable, "-P", "-m", "kafka_marshal", *reach, *arguments]
    environment = {**os.environ, "JDK_JAVA_OPTIONS": java} if java else None
    # In its own session: a terminal's Ctrl-C is for this process, which ends all that the command started.
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            out, _ = process.communicate(properties.encode(), timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{arguments[0]} did not end within {timeout_s:.0f} s; {log} says more.") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode not in (0, 1) or (process.returncode == 1 and not out):
        lines = log.read_text(errors="replace").strip().splitlines()
        raise DemoError(f"{arguments[0]} failed: {lines[-1] if lines else 'no word'}. {log} says more.")
    return out.decode()
