"""An operator's process that opens the messages of a plan, and is killed at one of its steps: python -m … JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from kafka_marshal import Admin
from kafka_marshal.admin import RedoPlan, redo
from tests.campaigns.frame import AWAY

#: No broker answered, or no worker works anything off: it can be carried on.
INTERRUPTED = 3


def main(job: dict[str, Any]) -> int:
    """Returns the exit status. job["dies"]: before and after each record, at which of these (0: never)."""
    left = [job["dies"]]

    def step() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    redo.passed = step
    path = Path(job["plan"])
    try:
        with Admin(job["bootstrap"], topic=job["log"]) as admin:
            found = admin.redo(RedoPlan.read(path), path=path, rate=job["rate"])
    except AWAY as error:
        sys.stderr.write(f"{error}\n")
        return INTERRUPTED
    sys.stdout.write(json.dumps([str(each) for each in found.left.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
