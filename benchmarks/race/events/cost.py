"""The cost of coordination without work: processor time of an idle worker, and its records."""

from __future__ import annotations

from time import sleep
from typing import ClassVar

from benchmarks.race.contestants import CLASSIC_FAST, KIP848, MARSHAL, Contestant, Side
from benchmarks.race.events.balance import wait_until_stable
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.events.crash import read_log
from benchmarks.race.grounds import Grounds, new_name
from benchmarks.race.hosts import Host
from rationalizer import HeartbeatBatch, decode

__all__ = ["Cost"]

LEASES = 100
WINDOW_S = 10.0

#: A member is idle after this time: kafka-marshal polls less often the longer nothing arrives.
REST_S = 20.0


class Cost(Event):
    """A single worker with 100 empty partitions."""

    name = "cost"
    title = "an idle worker with 100 leases"
    units: ClassVar = {
        "processor": "% of a core",
        "appended": "bytes/s per 1,000 leases",
        "records": "records/s per 1,000 leases",
        "leases a record": "leases",
    }

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        contestants = (MARSHAL, CLASSIC_FAST, KIP848)
        aims = (Aim("processor", MARSHAL.name, "", 1.0),)
        conditions = {
            "leases": LEASES,
            "window": f"{window_s:g} s",
            "nothing came before for": f"{REST_S:g} s",
            "heartbeat interval": "3 s",
        }
        super().__init__(contestants, aims, conditions)

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """Let it become idle, then measure for a while."""
        topic, group = grounds.topic(LEASES), new_name("group")
        coordination = grounds.coordination() if contestant.side is Side.MARSHAL else ""
        with Host() as host:
            host.open(contestant, "a", grounds.bootstrap, topics=[topic], group=group, coordination=coordination)
            wait_until_stable(host, 1, LEASES)
            sleep(REST_S)
            before = sum(1 for _ in read_log(grounds.bootstrap, coordination)) if coordination else 0
            used, began = host.cpu_s()
            sleep(self._window_s)
            used_after, ended = host.cpu_s()
            found = {"processor": [(used_after - used) / (ended - began) * 100]}
            if coordination:
                # All records are of this worker, so their order across CPs does not matter.
                values = [value for _, _, _, value in read_log(grounds.bootstrap, coordination) if value is not None]
                found |= self._appended(values, before, ended - began)
        return found

    @staticmethod
    def _appended(values: list[bytes], before: int, seconds: float) -> dict[str, list[float]]:
        """The rate of heartbeats; the number of records in the window is known, which ones does not matter."""
        beats = [
            (len(value), len(record.entries)) for value in values if isinstance(record := decode(value), HeartbeatBatch)
        ]
        count = len(values) - before
        size = sum(length for length, _ in beats) / max(1, len(beats))
        per_thousand = 1000 / LEASES / seconds
        return {
            "records": [count * per_thousand],
            "appended": [count * size * per_thousand],
            "leases a record": [sum(entries for _, entries in beats) / max(1, len(beats))],
        }
