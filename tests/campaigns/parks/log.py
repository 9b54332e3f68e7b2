"""What the log says of each open message, record by record: how often it was set aside, and who ended that."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.replica import Replica
from rationalizer import Progress, SettleOffsets, SettlingMessages, codes
from rationalizer.outcome import Outcome

#: The reason of what an operator has set aside: its handler may end it all the same.
BY_HAND = "OPERATOR"

Place = tuple[int, int]


class OpenLog:
    """Read a coordination log from its beginning to its end."""

    def __init__(self, bootstrap: str, log: str) -> None:
        #: Group → (partition, offset) → how often it was set aside, and freed by an operator.
        self.parks: dict[str, Counter[Place]] = defaultdict(Counter)
        self.redrives: dict[str, Counter[Place]] = defaultdict(Counter)
        #: How often each that was done was opened, or asked for while it was open (R2).
        self.redone: dict[str, Counter[Place]] = defaultdict(Counter)
        self._reasons: dict[tuple[str, Place], str] = {}
        self._violations: dict[str, list[str]] = defaultdict(list)
        with closing(KafkaCluster(bootstrap)) as cluster:
            self._replica = Replica(cluster, log, 30.0)
            with closing(self._replica):
                until = time.monotonic() + 60.0
                while not self._replica.caught_up and time.monotonic() < until:
                    self._replica.apply(self._replica.read(1.0), self._applied, history=True)

    def violations(self, group: str) -> Iterator[str]:
        """What was set aside and came back, or was done, though no operator said so."""
        yield from self._violations[group]

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        message = outcome.record
        if not outcome.accepted or not isinstance(message, SettlingMessages | SettleOffsets):
            return
        if message.redo and outcome.entries is not None:
            for (first, last, *_), code in zip(message.open, outcome.entries, strict=True):
                for at in range(first, last + 1):
                    self.redone[message.group_id][message.partition, at] += code == codes.OK
        progress = self._progress(cp, message)
        holes = None if progress is None else progress.holes
        spans = [*message.done, *((first, last) for first, last, *_ in message.open)]
        spans += [(each[0], each[0]) for each in message.parked]
        group = message.group_id
        is_operator = not message.member_id if isinstance(message, SettleOffsets) else message.epoch is None
        for at in sorted({x for first, last in spans for x in range(first, last + 1)}):
            place = (message.partition, at)
            hole = None if holes is None else holes.at(at)
            before = self._reasons.pop((group, place), None)
            if hole is not None and hole.is_parked:
                self._reasons[group, place] = hole.reason or ""
                self.parks[group][place] += before is None
            elif before is not None and is_operator:
                self.redrives[group][place] += hole is not None
            elif before is not None and before != BY_HAND:
                what = "done" if hole is None else "open"
                text = f"{place} was set aside ({before}), and is {what} by {message.client_id}, at {cp}:{offset}"
                self._violations[group].append(text)

    def _progress(self, cp: int, message: SettlingMessages | SettleOffsets) -> Progress | None:
        world = self._replica.worlds[cp]
        if isinstance(message, SettlingMessages):
            lease = world.lease(message.group_id, message.topic, message.partition)
            return None if lease is None else lease.progress
        group = world.group(message.group_id)
        kept = None if group is None else group.progress.get(message.topic, {}).get(message.partition)
        return None if kept is None else kept.progress
