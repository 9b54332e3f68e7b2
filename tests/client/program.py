"""What test programs share: ``python PROGRAM '{"bootstrap": …}'`` is a member that writes JSON lines of its actions."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from kafka_marshal import Marshal


class Program:
    """This process, as its arguments want it (``Worker`` of conftest.py starts it)."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = json.loads(sys.argv[1])
        self._out = os.open(self.arguments["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, what: str, **more: object) -> None:
        """Write a line at once, so that it survives a kill; several processes may write to one file."""
        os.write(self._out, json.dumps({"what": what, "at": time.time(), **more}).encode() + b"\n")

    def marshal(self, **options: Any) -> Marshal:
        """Its Marshal, which SIGTERM stops."""
        arguments = self.arguments
        marshal = Marshal(
            arguments["bootstrap"],
            group_id=arguments["group"],
            client_id=arguments["client_id"],
            topic=arguments["coordination"],
            heartbeat_interval=arguments["hi"] / 1000,
            **options,
        )
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        return marshal
