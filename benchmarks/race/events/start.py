"""A new process: from its constructor to its first record."""

from __future__ import annotations

import signal
from time import sleep
from typing import ClassVar

from benchmarks.race.contestants import (
    CLASSIC,
    CLASSIC_SLOW,
    GROUP,
    KIP848,
    MARSHAL,
    Contestant,
    Side,
)
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.grounds import Grounds, new_name
from benchmarks.race.hosts import Host

__all__ = ["RECLAIM", "Start"]

PARTITIONS = 2
RECORDS = 200

#: Pause after topics were created, so that the broker's work on them is not measured.
CALM_S = 0.5

#: The same worker, killed and restarted within HI, takes over its leases (C7).
RECLAIM = Contestant("kafka-marshal, reclaim", Side.MARSHAL, "delay 0")


class Start(Event):
    """Without interpreter and imports; the log has a history, the group is new (reclaim: it holds everything)."""

    name = "start"
    title = "new process → first record"
    units: ClassVar = {"start": "ms", "constructor": "ms"}

    def __init__(self, history: int = 1_000) -> None:
        self._history = history
        contestants = (MARSHAL, RECLAIM, GROUP, CLASSIC, CLASSIC_SLOW, KIP848)
        aims = (
            Aim("start", MARSHAL.name, CLASSIC.name, 0.5),
            Aim("start", RECLAIM.name, MARSHAL.name, 1.0),
            Aim("start", GROUP.name, MARSHAL.name, 1.5),
        )
        conditions = {"records of history": history, "partitions": PARTITIONS}
        super().__init__(contestants, aims, conditions)

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """A new topic, a new group, a new process."""
        topic, coordination, group = grounds.topic(PARTITIONS), "", new_name("group")
        if contestant.side is Side.MARSHAL:
            coordination = grounds.coordination(self._history)
        grounds.fill(topic, PARTITIONS, RECORDS)
        if contestant is RECLAIM:
            with Host() as host:
                host.open(contestant, "a", grounds.bootstrap, topics=[topic], group=group, coordination=coordination)
                host.wait("first", "a")
                while len(host.report()["a"]["held"]) < PARTITIONS:
                    pass
                host.signal(signal.SIGKILL)
            grounds.fill(topic, PARTITIONS, RECORDS)
        with Host() as host:
            sleep(CALM_S)
            host.open(contestant, "a", grounds.bootstrap, topics=[topic], group=group, coordination=coordination)
            first = float(host.wait("first", "a")["at"])
            made = host.wait("made", "a")
            host.close("a")
            host.closed("a")
        began = float(made["began"])
        return {"start": [(first - began) * 1000], "constructor": [(float(made["at"]) - began) * 1000]}
