"""Operators who open what is done: some redo the same twice, some records come late, and copies of them come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kafka_marshal.admin import Admin
from kafka_marshal.admin.redo import RedoPlan
from kafka_marshal.testing.simulation.process import Job, Process
from kafka_marshal.types import Key
from rationalizer import SettleOffsets, SettlingMessages, encode, key_hash, route_group, route_lease
from rationalizer.wire.records import Opened

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.checks import Checks
    from kafka_marshal.testing.simulation.scenario import Scenario

#: The share of records that are sent long after their operator has looked; of plans carried out twice, and undone.
LATE, TWICE, UNDONE = 0.3, 0.3, 0.1
#: The share of plans of one message key, of single messages, and of whole partitions.
KEYED, SINGLE, WHOLE = 0.15, 0.25, 0.05
#: Partitions of a plan, messages of each, and how many may be open at once.
PARTITIONS, MESSAGES, RATES = 3, 8, (2, 5, 1_000)
#: Copies of a record at most, and how much later (HI).
COPIES, LATER_INTERVALS = 2, 12.0


class RedoOperator:
    """What one process of an operator does."""

    def __init__(
        self,
        process: Process,
        job: Job,
        scenario: Scenario,
        checks: Checks,
        later: Callable[[float, Callable[[], object]], object],
    ) -> None:
        self._process = process
        self._job = job
        self._scenario = scenario
        self._checks = checks
        self._later = later
        self._chance = Random(f"{scenario.seed}/{process.name}")
        #: Whether it sends one record, long after it has looked.
        self.is_late: bool = self._chance.random() < LATE and not scenario.transactions

    def redo(self, admin: Admin, plans: list[RedoPlan]) -> tuple[int, int, int]:
        """Open some done messages, or carry on with the plan that is there; what was opened, worked off, left."""
        chance = self._chance
        if not plans:
            plans.append(self._plan(admin))
        done = admin.redo(plans[0], rate=chance.choice(RATES))
        self._copy(plans[0])
        if chance.random() < UNDONE:
            admin.undo_redo(plans[0])
        elif chance.random() < TWICE:
            self._job.sleep(chance.random() * LATER_INTERVALS * self._job.heartbeat_interval_ms / 1000)
            if not self._job.is_calm:
                done = admin.redo(replace(plans[0], records=[]))
                self._copy(done.plan)
        return done.opened, done.worked_off, len(done.left)

    def _plan(self, admin: Admin) -> RedoPlan:
        chance = self._chance
        chosen = [each for each in (self._span() for _ in range(chance.randint(1, PARTITIONS))) if each is not None]
        keyed = self._scenario.order is not None and chance.random() < KEYED
        if not keyed and chance.random() < SINGLE:
            return admin.plan_redo(self._job.group_id, {}, messages=[(*key, first) for key, first, _ in chosen])
        whole = keyed or chance.random() < WHOLE
        spans = {key: None if whole else (first, last) for key, first, last in chosen}
        return admin.plan_redo(self._job.group_id, spans, keys=[chance.choice((b"a", b"b"))] if keyed else None)

    def _span(self) -> tuple[Key, int, int] | None:
        """Some offsets of a partition, which are done mostly; None: nothing is done of it."""
        known = sorted(key for key, seen in self._checks.accounts.seen.items() if key[0] in self._scenario.data_topics)
        key = self._chance.choice(known) if known else ("", 0)
        end = self._checks.stable(key)
        first = self._chance.randint(max(0, end - 40), end) if end >= 0 and self._chance.random() < 0.5 else 0
        first = first or self._chance.randint(0, max(0, end))
        return (key, first, min(end, first + self._chance.randint(0, MESSAGES - 1))) if end >= 0 else None

    def _copy(self, plan: RedoPlan) -> None:
        """The records of a plan come again, some of them after what they opened was done again."""
        for record in plan.records:
            cp = self._cp(record.key)
            log = self._process.network.broker.log(self._scenario.topic, cp)
            at = 0 if log is None or record.offset is None else log.index(record.offset)
            if log is not None and at < len(log.offsets) and log.offsets[at] == record.offset:
                self._arrive(cp, log.messages[at].value() or b"", 0)

    def _arrive(self, cp: int, value: bytes, at_least: int) -> None:
        """Have the log get a record, this often at least."""
        write = partial(self._process.network.arrive, self._scenario.topic, cp, value, self._process, 0.0)
        for _ in range(at_least + self._chance.randint(0, COPIES)):
            self._later(self._chance.uniform(0.1, LATER_INTERVALS), write)

    def send_late(self) -> None:
        """Look, and have the record for it written later, and copies of it."""
        found, process, scenario = self._span(), self._process, self._scenario
        if found is None:
            return
        key, first, last = found
        cp, is_claimed = self._cp(key), scenario.strategy is None
        seen, ids = self._checks.log.worlds[cp].next_offset, (f"{process.name}.0", process.client_id, scenario.group_id)
        log = process.network.broker.log(*key)
        keys = (
            {} if log is None else {m.offset(): m.key() for m in log.messages[log.index(first) : log.index(last + 1)]}
        )
        opened: Opened = tuple((offset, offset, key_hash(name, offset), 0) for offset, name in keys.items())
        if is_claimed and self._chance.random() < 0.5:
            opened = ((first, last, None, 0),)
        if not opened:
            return  # no message is there
        self._arrive(
            cp,
            encode(
                SettlingMessages(*ids, *key, None, seen, open=opened, redo=True)
                if is_claimed
                else SettleOffsets(*ids, "", 0, seen, *key, open=opened, redo=True)
            ),
            1,
        )

    def _cp(self, key: Key) -> int:
        scenario = self._scenario
        cps = scenario.coordination_partitions
        return route_lease(*key, cps) if scenario.strategy is None else route_group(scenario.group_id, cps)
