"""Ten workers and 900 partitions: the last start until each has 90; one joins; one leaves; which partitions pause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any, ClassVar

from benchmarks.race.contestants import (
    BYSTANDER,
    CLASSIC,
    CLASSIC_FAST,
    CLASSIC_SLOW,
    COOPERATIVE,
    GROUP,
    KIP848,
    KIP848_FAST,
    MARSHAL,
    Contestant,
    Side,
)
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.events.crash import read_log
from benchmarks.race.gaps import beyond_ms, first_seen, longest_ms
from benchmarks.race.grounds import CPS, Grounds, new_name
from benchmarks.race.hosts import Host, RaceError
from rationalizer import World

__all__ = ["Balance", "Gaps", "wait_until_stable"]

WORKERS = 10
PARTITIONS = 900

#: Every 90th partition gets a record each FEED_S: gaps are measured on these. A producer sends a request for each
#: record then, and 500 a second leave the broker time to answer; at 1,500, records were seconds old on two cores and
#: the gaps were the producer's.
FED = 90
FEED_S = 0.02

#: Unchanged for this long is stable (longer than any contestant's heartbeat interval except KIP-848's 5 s).
QUIET_S = 2.2
STEADY_S = 2.0

#: Limit on the additional gap of a partition that does not move. Gaps are compared with those of a bystander, which
#: reads the same records at the same time in another process and in no group. The usual additional gap is the longest
#: in the same round while nothing moved. (The longest gap alone says little on two cores: beside a producer, a broker
#: and ten workers it is 50 to 280 ms while nothing moves.)
ADDED_GAP_MS = 30.0
TIMEOUT_S = 90.0


#: Worker → its partitions.
Held = Mapping[str, frozenset[int]]


class Balance(Event):
    """All workers are threads of one process, on all sides; callbacks report the partitions of each."""

    name = "balance"
    title = "10 workers, 900 partitions"
    units: ClassVar = {
        "start": "ms",
        "leave": "ms",
        "join": "ms",
        "longest gap, steady": "ms",
        "longest gap, leave": "ms",
        "longest gap, join": "ms",
        "beyond a bystander's gap, steady": "ms",
        "beyond a bystander's gap, leave": "ms",
        "beyond a bystander's gap, join": "ms",
        "added to the usual gap, leave": "ms",
        "added to the usual gap, join": "ms",
        "moved, leave": "partitions",
        "moved, join": "partitions",
        "records appended, start": "records",
        "records appended, leave": "records",
        "records appended, join": "records",
    }

    def __init__(self, workers: int = WORKERS, partitions: int = PARTITIONS) -> None:
        self._workers = workers
        self._partitions = partitions
        contestants = (MARSHAL, GROUP, CLASSIC, CLASSIC_SLOW, CLASSIC_FAST, COOPERATIVE, KIP848, KIP848_FAST)
        aims = (
            Aim("start", MARSHAL.name, CLASSIC.name, 0.5),
            Aim("start", GROUP.name, CLASSIC.name, 0.5),
            Aim("leave", MARSHAL.name, CLASSIC.name, 0.2),
            Aim("added to the usual gap, join", GROUP.name, "", ADDED_GAP_MS),
            Aim("added to the usual gap, leave", MARSHAL.name, "", ADDED_GAP_MS),
            Aim("added to the usual gap, join", MARSHAL.name, "", ADDED_GAP_MS),
        )
        conditions = {
            "workers": workers,
            "partitions": partitions,
            "a record": f"every {FEED_S * 1000:g} ms in every {FED}th partition",
            "stable": f"no change for {QUIET_S:g} s",
        }
        super().__init__(contestants, aims, conditions)

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """Start them all, then let one leave, then let one join."""
        topic, group = grounds.topic(self._partitions), new_name("group")
        coordination = grounds.coordination() if contestant.side is Side.MARSHAL else ""
        names = [f"w{number}" for number in range(self._workers)]
        arguments: dict[str, Any] = {"topics": [topic], "group": group, "coordination": coordination}
        found: dict[str, list[float]] = {}
        log = _Appended(grounds.bootstrap, coordination)
        fed = [(topic, partition) for partition in range(0, self._partitions, FED)]
        with Host() as bystander, Host() as host, grounds.feed(fed, FEED_S):
            alone = {**arguments, "coordination": "", "partitions": [partition for _, partition in fed]}
            bystander.open(BYSTANDER, "bystander", grounds.bootstrap, **alone)
            for name in names:
                host.open(contestant, name, grounds.bootstrap, **arguments)
            began = [float(host.wait("made", name)["began"]) for name in names]
            stable_at = wait_until_stable(host, self._workers, self._partitions)
            found["start"] = [(stable_at - max(began)) * 1000]
            found["records appended, start"] = log.since_last()
            sight = Gaps(host, bystander)
            sleep(STEADY_S)
            before = sight.measure(found, "steady")
            log.since_last()
            began_at = host.close(names[-1])
            stable_at = wait_until_stable(host, self._workers - 1, self._partitions)
            before = sight.measure(found, "leave", before)
            self._change(found, "leave", (stable_at - began_at) * 1000, log)
            host.closed(names[-1])
            log.since_last()
            host.open(contestant, "joiner", grounds.bootstrap, **arguments)
            began_at = float(host.wait("made", "joiner")["began"])
            stable_at = wait_until_stable(host, self._workers, self._partitions)
            sight.measure(found, "join", before)
            self._change(found, "join", (stable_at - began_at) * 1000, log)
        grounds.remove(topic)
        return found

    def _change(self, found: dict[str, list[float]], what: str, took_ms: float, log: _Appended) -> None:
        found[what] = [took_ms]
        found[f"records appended, {what}"] = log.since_last()


def wait_until_stable(host: Host, workers: int, partitions: int) -> float:
    """Wait until all have an even share and nothing moves any more; returns the time of the last change."""
    share = partitions // workers
    deadline = monotonic() + TIMEOUT_S
    sizes: list[int] = []
    while monotonic() < deadline:
        report = host.report()
        sizes = sorted(len(x["held"]) for x in report.values())
        changed = max(float(x["changed_at"]) for x in report.values())
        even = len(sizes) >= workers and all(share <= size <= share + 1 for size in sizes[-workers:])
        if even and sum(sizes) == partitions and monotonic() - changed > QUIET_S:
            return changed
        sleep(0.1)
    raise RaceError(f"not even after {TIMEOUT_S:g} s: {sizes}")


class Gaps:
    """The gaps of partitions that don't move, since the last measurement."""

    def __init__(self, host: Host, bystander: Host) -> None:
        self._host = host
        self._bystander = bystander
        self._usual: list[tuple[int, int, float]] = []
        _, self._asked_at = self._take()

    def _take(self) -> tuple[Mapping[str, Any], float]:
        at = monotonic()
        workers = self._host.report(seen=True)
        self._usual += self._bystander.report(seen=True)["bystander"]["seen"]
        return workers, at

    def measure(self, found: dict[str, list[float]], what: str, held: Held | None = None) -> Held:
        """Record the gaps of partitions held before and still (None: of all); returns those held now."""
        (workers, at), began = self._take(), self._asked_at
        self._asked_at = at
        usual = first_seen(self._usual)
        now = {name: frozenset(x["held"]) for name, x in workers.items()}
        before = now if held is None else held
        stays = {name: kept for name, partitions in now.items() if (kept := partitions & before.get(name, frozenset()))}
        seen = {name: first_seen(workers[name]["seen"]) for name in stays}
        fed = {name: kept & usual.keys() for name, kept in stays.items()}
        kept_by = {name: kept for name, kept in fed.items() if kept}  # empty if a contestant moved all fed partitions
        longest = [longest_ms(seen[name], kept, began, at) for name, kept in kept_by.items()]
        found[f"longest gap, {what}"] = [max(longest)] if longest else []
        beyond = [beyond_ms(seen[name], usual, kept, began, at) for name, kept in kept_by.items()]
        found[f"beyond a bystander's gap, {what}"] = [max(beyond)] if beyond else []
        if held is not None:
            found[f"added to the usual gap, {what}"] = [
                max(beyond) - usual_ms for usual_ms in found["beyond a bystander's gap, steady"] if beyond
            ]
            found[f"moved, {what}"] = [sum(map(len, held.values())) - sum(map(len, stays.values()))]
        return now


class _Appended:
    """Number of coordination records except heartbeats since the last call, by type."""

    def __init__(self, bootstrap: str, coordination: str) -> None:
        self._bootstrap = bootstrap
        self._coordination = coordination
        self._seen = 0
        self._before: Counter[str] = Counter()
        #: The last answer, by type and code.
        self.last: Counter[str] = Counter()

    def since_last(self) -> list[float]:
        """One sample, or none without a coordination topic."""
        if not self._coordination:
            return []
        worlds = {cp: World(cp, CPS) for cp in range(CPS)}
        kinds: Counter[str] = Counter()
        for cp, offset, stamp, value in read_log(self._bootstrap, self._coordination):
            outcome = worlds[cp].apply(offset, stamp, value)
            kinds[f"{outcome.type} {outcome.code}"] += 1
        self.last, self._before = kinds - self._before, kinds
        return [float(sum(count for kind, count in self.last.items() if not kind.startswith("Heartbeat")))]
