"""One of two workers closes: time from its close() to the first record of its partition at the other."""

from __future__ import annotations

from random import Random
from time import sleep
from typing import ClassVar

from benchmarks.race.contestants import (
    CLASSIC,
    CLASSIC_FAST,
    COOPERATIVE,
    GROUP,
    KIP848,
    KIP848_FAST,
    MARSHAL,
    Contestant,
    Side,
)
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.grounds import Grounds, new_name
from benchmarks.race.hosts import Host, RaceError

__all__ = ["Handover", "hand_over", "settled_pair"]

PARTITIONS = 2
FEED_S = 0.005

#: The pair runs for a random time in this range before a member leaves, so that heartbeats' phase is random.
PHASE_S = (0.5, 2.5)


def settled_pair(first: Host, second: Host, names: tuple[str, str], timeout_s: float = 60.0) -> dict[str, int]:
    """Wait until two workers stably hold one partition each; returns the partitions."""
    quiet_s, slice_s = 0.6, 0.05
    waited, since = 0.0, 0.0
    found: list[list[int]] = []
    while waited < timeout_s:
        now = [host.report()[name]["held"] for host, name in zip((first, second), names, strict=True)]
        since = since + slice_s if now == found and [len(held) for held in now] == [1, 1] else 0.0
        if since >= quiet_s:
            return {name: held[0] for name, held in zip(names, now, strict=True)}
        found = now
        sleep(slice_s)
        waited += slice_s
    raise RaceError(f"two workers did not come to hold a partition each within {timeout_s:g} s: {found}")


class Handover(Event):
    """Both have their own process, and records arrive every 5 ms."""

    name = "handover"
    title = "close() of one worker → first record of its partition at another"
    units: ClassVar = {"handover": "ms"}

    def __init__(self) -> None:
        self._chance = Random(5)
        self._coordination: dict[str, str] = {}
        contestants = (MARSHAL, GROUP, CLASSIC, CLASSIC_FAST, COOPERATIVE, KIP848, KIP848_FAST)
        aims = (
            Aim("handover", MARSHAL.name, "", 25.0),
            Aim("handover", MARSHAL.name, CLASSIC.name, 0.02),
            Aim("handover", GROUP.name, MARSHAL.name, 1.5),
            Aim("handover", MARSHAL.name, CLASSIC_FAST.name, 1.0),
            Aim("handover", MARSHAL.name, KIP848_FAST.name, 1.0),
        )
        conditions = {"a record every": f"{FEED_S * 1000:g} ms", "partitions": PARTITIONS}
        super().__init__(contestants, aims, conditions)

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """A new topic, a new group, two workers."""
        if contestant.side is Side.MARSHAL and grounds.bootstrap not in self._coordination:
            self._coordination[grounds.bootstrap] = grounds.coordination()
        coordination = self._coordination.get(grounds.bootstrap, "")
        with Host() as leaver, Host() as stayer:
            phase_s = self._chance.uniform(*PHASE_S)
            return {"handover": [hand_over(grounds, contestant, coordination, leaver, stayer, phase_s)]}


def hand_over(
    grounds: Grounds, contestant: Contestant, coordination: str, leaver: Host, stayer: Host, phase_s: float
) -> float:
    """Milliseconds from close() to the first record, with a new topic and a new group."""
    topic, group = grounds.topic(PARTITIONS), new_name("group")
    with grounds.feed([(topic, p) for p in range(PARTITIONS)], FEED_S):
        for host, name in ((leaver, "a"), (stayer, "b")):
            host.open(contestant, name, grounds.bootstrap, topics=[topic], group=group, coordination=coordination)
            host.wait("first", name)
        partition = settled_pair(leaver, stayer, ("a", "b"))["a"]
        sleep(phase_s)
        stayer.watch("b", [partition])
        began = leaver.close("a")
        seen = float(stayer.wait("seen", "b")["at"])
        leaver.closed("a")
        stayer.close("b")
        stayer.closed("b")
    return (seen - began) * 1000
