"""The process that hosts workers: orders as JSON lines on stdin, events as JSON lines on stdout.

    {"do": "open", "worker": NAME, "side": …, …}    make a worker on its own thread; reports "made", then "first"
    {"do": "watch", "worker": NAME, "partitions": […] or null}    report the next record of these: "seen" (or "first")
    {"do": "close", "worker": NAME}    leave; reports "closing" (the moment it begins) and "closed"
    {"do": "report", "seen": true | false}    reports "report": held partitions, last change, and (true) what was seen
    {"do": "cpu"}    reports "cpu": seconds of processor time this process has used

It ends with stdin. Everything is imported before "ready", after which orders are read.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from time import monotonic
from typing import Any

from benchmarks.race.loops import Loop, loop_for
from benchmarks.race.sight import Sight

_out = threading.Lock()


def tell(event: str, worker: str, **more: object) -> None:
    """One line to the parent."""
    line = json.dumps({"event": event, "worker": worker, **more})
    with _out:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Host:
    """All workers of this process."""

    def __init__(self) -> None:
        self._sights: dict[str, Sight] = {}
        self._loops: dict[str, Loop] = {}

    def obey(self, order: dict[str, Any]) -> None:
        """Execute one order; slow ones on a thread."""
        match order["do"]:
            case "open":
                threading.Thread(target=self._open, args=(order,), daemon=True).start()
            case "watch":
                self._sights[order["worker"]].watch(order["partitions"])
                tell("watching", order["worker"])
            case "close":
                threading.Thread(target=self._close, args=(order["worker"],), daemon=True).start()
            case "report":
                self._report(order["seen"])
            case "cpu":
                used = os.times()
                tell("cpu", "", seconds=used.user + used.system, at=monotonic())
            case other:
                raise ValueError(f"no such order: {other}")

    def _open(self, order: dict[str, Any]) -> None:
        name = order["worker"]
        sight = self._sights[name] = Sight(name, tell)
        try:
            began = monotonic()
            loop = self._loops[name] = loop_for(order["side"], sight, order)
            tell("made", name, began=began, at=monotonic())
            loop.run()
        except Exception:  # noqa: BLE001 - reported to the parent
            tell("failed", name, why=traceback.format_exc())

    def _close(self, name: str) -> None:
        sight, loop = self._sights[name], self._loops.pop(name)
        if type(loop).__name__ != "GroupLoop":
            sight.closing()
        try:
            loop.close()
        except Exception:  # noqa: BLE001 - reported to the parent
            tell("failed", name, why=traceback.format_exc())
        self._sights.pop(name)
        tell("closed", name, at=monotonic())

    def _report(self, seen: bool) -> None:
        workers = {}
        for name, sight in list(self._sights.items()):
            workers[name] = sight.report()
            if seen:
                workers[name]["seen"] = sight.take()
        tell("report", "", workers=workers, at=monotonic())


def serve(host: Host) -> None:
    """Execute orders until stdin ends."""
    tell("ready", "")
    for line in sys.stdin:
        host.obey(json.loads(line))
    os._exit(0)  # ends the process, whatever its threads are doing


if __name__ == "__main__":
    serve(Host())
