"""Commands that the demo starts end with it, however it goes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from flights.supervisor import ENVIRONMENT
from tests.demo.helpers import alive, descendants, eventually

#: A demo in its fifth step, with a broker that never answers.
PROGRAM = """
import sys
from pathlib import Path
from flights.publish import Scene
from flights.tool import Command
with Command(Scene(sys.argv[1], {}, "t", "log", "g"), Path(sys.argv[2]), "--timeout", "60", "status") as command:
    command.output(60.0)
"""


def test_kill_9_of_the_demo_ends_the_command_that_it_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", PROGRAM, address, str(tmp_path / "log")], env=ENVIRONMENT) as demo:
            deaf.accept()  # the command is at work
            below = list(descendants(demo.pid))
            assert below
            demo.kill()
    eventually(lambda: not [pid for pid in below if alive(pid)], 30, "the end of the command")
