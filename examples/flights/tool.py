"""The command kafka-marshal, as a process: what it does with the coordination log of a run.

``python -m flights.tool FD …`` is that process: the command, which ends with its parent, as ``child`` does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from flights.child import PARENT_GONE
from flights.errors import DemoError
from flights.publish import Scene
from flights.supervisor import ENVIRONMENT

__all__ = ["kafka_marshal"]


def kafka_marshal(scene: Scene, log: Path, *arguments: str, timeout_s: float, java: str = "") -> str:
    """Run a command on the coordination topic to its end; what it printed (*blocking*). Its errors go to the log.

    java: options for a JVM that it starts. Raises DemoError if it printed nothing, or has not ended within timeout_s.
    """
    # Not as arguments: config may hold a password.
    properties = "".join(f"{name}={value}\n" for name, value in scene.config.items())
    reach = ("--bootstrap", scene.bootstrap, "--topic", scene.coordination, "--config", "/dev/stdin")
    environment = {**ENVIRONMENT, "JDK_JAVA_OPTIONS": java} if java else ENVIRONMENT
    # Nothing is ever written: the pipe ends when this process does.
    parent, ours = os.pipe()
    command = [sys.executable, "-P", "-m", "flights.tool", str(parent), *reach, *arguments]
    try:
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
                pass_fds=(parent,),
            ) as process,
        ):
            try:
                out, _ = process.communicate(properties.encode(), timeout_s)
            except subprocess.TimeoutExpired:
                raise DemoError(f"{arguments[0]} did not end within {timeout_s:.0f} s; {log} says more.") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(parent)
        os.close(ours)
    if process.returncode not in (0, 1) or (process.returncode == 1 and not out):
        lines = log.read_text(errors="replace").strip().splitlines()
        raise DemoError(f"{arguments[0]} failed: {lines[-1] if lines else 'no word'}. {log} says more.")
    return out.decode()


def _end_with_parent(pipe: int) -> None:
    """However the parent went; a JVM below us ends with this process."""
    os.read(pipe, 1)
    os._exit(PARENT_GONE)


def main() -> int:
    """The process, from its first line to its exit status."""
    pipe, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(int(pipe),), name="parent", daemon=True).start()
    from kafka_marshal.cli import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
