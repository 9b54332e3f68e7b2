"""A process of the demo: it reads its task from one line, reports its progress, and ends with its parent.

It reads one line of JSON from its standard input and works until SIGTERM, or until that pipe closes because its parent
is gone, however it went. On its standard output it reports what is in flight, for the process that chooses the
moment to kill it; nothing is concluded from it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flights.options import FAILURE, ProcessSettings
from kafka_marshal.errors import MarshalError

__all__ = ["FAILED", "PARENT_GONE", "Tell", "run_child"]

#: Exit statuses: an error (said on standard error), and the parent's end.
FAILED = 1
PARENT_GONE = 4

S = TypeVar("S", bound=ProcessSettings)

Tell = Callable[[Mapping[str, object]], None]


def run_child(
    kind: type[S], work: Callable[[S, Tell], None], lasts: Callable[[Exception], bool] = lambda error: True
) -> int:
    """The process, from its first line to its exit status.

    lasts: whether another process would run into this error as well, so that it is no use to start one.
    """
    # Ctrl-C goes to the parent, which ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = kind(**json.loads(_first_line()))
    # Reports go to the parent alone: a JVM below us would hold the pipe open, and may print.
    told = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: Mapping[str, Any]) -> None:
        """One line, at once: what a killed process reported is kept."""
        os.write(told, json.dumps(event).encode() + b"\n")

    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    name = settings.client_id.replace("%", "%%")
    logging.basicConfig(format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # Before there is anything to stop, there is nothing to release either.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        work(settings, tell)
    except MarshalError as error:
        logging.error("%s", error)
        why, again = str(error), not lasts(error)
    except Exception as error:
        logging.exception("The batch in flight is not done; another worker gets it.")
        why = f"{type(error).__name__}: {error}. The batch in flight is not done; another worker gets it"
        again = not lasts(error)
    else:
        return 0
    # To the parent itself, too: the log may lie on a disk that is full.
    tell({"event": FAILURE, "why": why, "lasts": not again})
    return FAILED


def _first_line() -> bytes:
    """Unbuffered: the thread that watches the pipe must find the rest of it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            sys.exit(PARENT_GONE)
        line += byte
    return line


def _end_with_parent() -> None:
    """Nothing more is ever sent: the pipe ends when the parent does."""
    os.read(sys.stdin.fileno(), 1)
    # What is in flight is neither written nor done, so nothing is lost: there is nothing to wait for.
    os._exit(PARENT_GONE)
