"""The command kafka-marshal, as a process: what it does with the coordination log of a run.

``python -m flights.tool FD …`` is that process: the command, which ends with its parent, as ``child`` does.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from flights.child import PARENT_GONE
from flights.errors import DemoError
from flights.publish import Scene
from flights.supervisor import ENVIRONMENT

__all__ = ["Command"]


class Command:
    """One command on the coordination topic, at work. A context manager: at its end nothing of it runs."""

    def __init__(self, scene: Scene, log: Path, *arguments: str, java: str = "") -> None:
        """Start it; its errors go to the log. java: options for a JVM that it starts."""
        self._name = arguments[0]
        self._log = log
        # Not as arguments: config may hold a password.
        properties = "".join(f"{name}={value}\n" for name, value in scene.config.items())
        reach = ("--bootstrap", scene.bootstrap, "--topic", scene.coordination, "--config", "/dev/stdin")
        # Nothing is ever written: the pipe ends when this process does.
        pipe, self._ours = os.pipe()
        try:
            with log.open("wb") as errors:
                # In its own session: a terminal's Ctrl-C is for this process, which ends all that the command started.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flights.tool", str(pipe), *reach, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**ENVIRONMENT, "JDK_JAVA_OPTIONS": java} if java else ENVIRONMENT,
                    start_new_session=True,
                    pass_fds=(pipe,),
                )
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(pipe)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.write(properties.encode())
            self._process.stdin.close()
        self._process.stdin = None

    def output(self, timeout_s: float) -> str:
        """What it printed, at its end (*blocking*). DemoError if that is nothing, or does not come within timeout_s."""
        process, log = self._process, self._log
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self._name} did not end within {timeout_s:.0f} s; {log} says more.") from None
        if process.returncode not in (0, 1) or (process.returncode == 1 and not out):
            lines = log.read_text(errors="replace").strip().splitlines()
            raise DemoError(f"{self._name} failed: {lines[-1] if lines else 'no word'}. {log} says more.")
        return out.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._ours)


def _end_with_parent(pipe: int) -> None:
    """However the parent went; a JVM below us ends with this process."""
    os.read(pipe, 1)
    os._exit(PARENT_GONE)


def main() -> None:
    """The process: python -m kafka_marshal, with the arguments after the first."""
    pipe = int(sys.argv.pop(1))
    threading.Thread(target=_end_with_parent, args=(pipe,), name="parent", daemon=True).start()
    runpy.run_module("kafka_marshal", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
