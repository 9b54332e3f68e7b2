"""A state machine drives the real world and the oracle with the same records and compares them after each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from rationalizer import World
from tests.rationalizer.oracle import OracleLease, OracleOutcome, OracleWorld, shortest
from tests.rationalizer.oracle.compare import same_counts, same_outcome, same_state
from tests.rationalizer.oracle.world import LeaseKey, Who
from tests.rationalizer.strategies import (
    CLIENTS,
    EVERYBODY,
    GROUPS,
    INTERVALS,
    LARGEST,
    TEST_TIMEOUT_S,
    Author,
    Entry,
    by_draw,
    effort,
    home_keys,
    key_elsewhere,
    record,
)

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

instance_ids = st.sampled_from(("1", "2", "3", "Ω"))


class OracleMachine(RuleBasedStateMachine):
    """Rules append one record each; the values that matter are drawn from the oracle's view of the moment."""

    clients = Bundle("clients")
    instances = Bundle("instances")
    leases = Bundle("leases")
    epochs = Bundle("epochs")
    pausers = Bundle("pausers")

    @initialize(target=leases, partitions=st.sampled_from((1, 2, 8)), data=st.data())
    def start(self, partitions: int, data: st.DataObject) -> MultipleResults[LeaseKey]:
        cp = data.draw(st.integers(0, partitions - 1))
        self.real = World(cp, partitions)
        self.oracle = OracleWorld(cp, partitions)
        self.log: list[Entry] = []
        self.restored = False
        return multiple(*home_keys(cp, partitions, 1))

    def append(self, value: bytes | None, data: st.DataObject) -> OracleOutcome:
        """Put one record at the log's end and compare what both say of it."""
        gap = data.draw(st.sampled_from((0, 0, 0, 1, 1000)), "gap")
        entry = (self.oracle.next_offset + gap, self.author(data).stamp(), value)
        self.log.append(entry)
        wanted = self.oracle.apply(*entry)
        same_outcome(self.real.apply(*entry), wanted)
        return wanted

    def author(self, data: st.DataObject) -> Author:
        return Author(by_draw(data.draw), self.oracle)

    def held(self) -> list[OracleLease]:
        return [lease for lease in self.oracle.leases() if lease.holder]

    def some_held(self, data: st.DataObject) -> OracleLease | None:
        """A lease that is held; if there is none, a client claims one first. None: an Upgrade ended it all."""
        if not self.held():
            key = data.draw(st.sampled_from(self.author(data).keys), "key")
            pause = self.oracle.pause(key[0])
            self.append(record(2, (pause.client if pause else "a", "1"), *key, 1000), data)
        held = self.held()
        return data.draw(st.sampled_from(held), "lease") if held else None

    def right_epoch(self, key: LeaseKey) -> int:
        lease = self.oracle.lease(key)
        return lease.epoch if lease else 0

    # Who and what there is.

    @initialize(target=clients)
    def some_clients(self) -> MultipleResults[str]:
        return multiple(*CLIENTS)

    @initialize(target=epochs)
    def some_epochs(self) -> MultipleResults[int]:
        return multiple(0, 1)

    @initialize(target=pausers, group=st.sampled_from(GROUPS))
    def a_pauser(self, group: str) -> tuple[str, str]:
        return ("admin", group)

    @initialize(target=instances, one=st.sampled_from(EVERYBODY), other=st.sampled_from(EVERYBODY))
    def some_instances(self, one: Who, other: Who) -> MultipleResults[Who]:
        return multiple(one, other)

    @rule(target=instances, client=clients, instance=instance_ids)
    def an_instance_starts(self, client: str, instance: str) -> Who:
        return (client, instance)

    # What holders, heirs and strangers do, with epochs that were once granted.

    @rule(target=epochs, who=instances, key=leases, interval=st.sampled_from(INTERVALS), data=st.data())
    def claims(self, who: Who, key: LeaseKey, interval: int, data: st.DataObject) -> int:
        self.append(record(2, who, *key, interval), data)
        return self.right_epoch(key)

    @rule(who=instances, key=leases, epoch=epochs, data=st.data())
    def beats(self, who: Who, key: LeaseKey, epoch: int, data: st.DataObject) -> None:
        last = self.author(data).last_offset(self.oracle.lease(key))
        self.append(record(1, who, *key, epoch, last), data)

    @rule(target=epochs, client=clients, instance=instance_ids, key=leases, data=st.data())
    def restarts(self, client: str, instance: str, key: LeaseKey, data: st.DataObject) -> int:
        last = self.author(data).last_offset(self.oracle.lease(key))
        self.append(record(1, (client, instance), *key, None, last), data)
        return self.right_epoch(key)

    @rule(who=instances, key=leases, epoch=epochs, data=st.data())
    def releases(self, who: Who, key: LeaseKey, epoch: int, data: st.DataObject) -> None:
        last = self.author(data).last_offset(self.oracle.lease(key))
        self.append(record(3, who, *key, epoch, last), data)

    def work(self, kind: int, data: st.DataObject) -> None:
        """A record of the holder of some lease, with its right epoch."""
        author, lease = self.author(data), self.some_held(data)
        if lease is None or lease.holder is None:
            return
        what: Any
        if kind == 7:
            what = author.spans(lease)
        elif kind == 4:
            what = author.offset(lease)
        else:
            what = author.last_offset(lease)
        self.append(record(kind, lease.holder, *lease.key, lease.epoch, what), data)

    @rule(data=st.data())
    def a_holder_beats(self, data: st.DataObject) -> None:
        self.work(1, data)

    @rule(data=st.data())
    def a_holder_takes_messages(self, data: st.DataObject) -> None:
        self.work(4, data)

    @rule(data=st.data())
    def a_holder_commits(self, data: st.DataObject) -> None:
        self.work(7, data)

    @rule(data=st.data())
    def a_holder_commits_more(self, data: st.DataObject) -> None:
        self.work(7, data)

    @rule(data=st.data())
    def a_holder_hands_in(self, data: st.DataObject) -> None:
        self.work(3, data)

    @rule(target=epochs, instance=instance_ids, data=st.data())
    def a_holder_restarts(self, instance: str, data: st.DataObject) -> int:
        lease = self.some_held(data)
        if lease is None or lease.holder is None:
            return 0
        who, last = (lease.holder[0], instance), self.author(data).last_offset(lease)
        self.append(record(1, who, *lease.key, None, last), data)
        return self.right_epoch(lease.key)

    @rule(who=instances, group=st.sampled_from(GROUPS), data=st.data())
    def beats_for_several(self, who: Who, group: str, data: st.DataObject) -> None:
        author = self.author(data)
        held = [lease for lease in self.held() if lease.key[0] == group]
        holders = [lease.holder for lease in held if lease.holder]
        entries = [[*lease.key[1:], lease.epoch, author.last_offset(lease)] for lease in held]
        extra = data.draw(st.lists(st.sampled_from(author.keys), max_size=2), "extra")
        entries += [[*key[1:], author.epoch(self.oracle.lease(key)), None] for key in extra]
        if entries:
            sender = data.draw(st.sampled_from((who, *holders)), "sender")
            self.append(record(6, sender, group, data.draw(st.permutations(entries), "order")), data)

    # Admins.

    @rule(target=pausers, client=clients, group=st.sampled_from(GROUPS), data=st.data())
    def pauses(self, client: str, group: str, data: st.DataObject) -> tuple[str, str]:
        ahead = data.draw(st.sampled_from((-1, 0, 1, 250, 250, 10_000, LARGEST - self.oracle.log_time)), "ahead")
        self.append(record(5, (client, "1"), group, max(0, self.oracle.log_time + ahead)), data)
        return (client, group)

    @rule(pauser=pausers, key=leases, instance=instance_ids, kind=st.sampled_from((1, 2, 3, 6)), data=st.data())
    def the_pauser_repositions(
        self, pauser: tuple[str, str], key: LeaseKey, instance: str, kind: int, data: st.DataObject
    ) -> None:
        client, group = pauser
        key = (group, *key[1:])
        lease = self.oracle.lease(key)
        if kind == 2 or lease is None:
            self.append(record(2, (client, instance), *key, 100), data)
            return
        same = lease.holder is not None and lease.holder[0] == client
        who = lease.holder if same and lease.holder else (client, instance)
        last = self.author(data).last_offset(lease)
        if kind == 6:
            self.append(record(6, who, group, [[*key[1:], lease.epoch, last]]), data)
        else:
            self.append(record(kind, who, *key, lease.epoch, last), data)

    @rule(target=leases, who=instances, what=st.integers(0, 5), data=st.data())
    def something_rare(self, who: Who, what: int, data: st.DataObject) -> MultipleResults[LeaseKey]:
        """One rule for all that would crowd out the rest if each had its own."""
        cp, partitions = self.oracle.partition, self.oracle.partitions
        if what == 0:
            self.append(record(8, who, data.draw(st.sampled_from(GROUPS), "group")), data)
        elif what == 1:
            self.append(record(32, who, "anything"), data)
        elif what == 2:
            level = data.draw(st.sampled_from((1, 1, 1, 1, 1, 1, 3, 2**31 - 1)), "level")
            self.append(record(33, who, "g", level), data)
        elif what == 3:
            numbers = (-1, 0, 1, 2, 9, 16, 27, 34, 2**64 - 1)
            head = [data.draw(st.sampled_from(numbers), "number") for _ in ("version", "type")]
            self.append(shortest([*head, "1", "a", "g", {"x": []}]), data)
        elif what == 4:
            return multiple(data.draw(st.sampled_from(home_keys(cp, partitions)), "key"))
        else:
            return multiple(key_elsewhere(cp, partitions))
        return multiple()

    @rule(data=st.data())
    def anything(self, data: st.DataObject) -> None:
        self.append(self.author(data).value(), data)

    # The reader.

    @rule()
    def the_reader_starts_from_a_snapshot(self) -> None:
        if self.oracle.required_level is not None:  # what a snapshot does not hold: it will stop again
            return
        self.real = World.restore(self.real.snapshot(), self.oracle.partitions)
        self.restored = True

    @rule()
    def everything_is_compared(self) -> None:
        same_state(self.real, self.oracle)

    @invariant()
    def digests_agree(self) -> None:
        if hasattr(self, "real"):
            assert self.real.digest() == self.oracle.digest()

    def teardown(self) -> None:
        if not hasattr(self, "real"):
            return
        same_state(self.real, self.oracle)
        again = World(self.oracle.partition, self.oracle.partitions)
        again.apply_many(self.log)
        same_state(again, self.oracle)
        same_counts(again, self.oracle)
        if not self.restored:
            same_counts(self.real, self.oracle)


TestOracleMachine = OracleMachine.TestCase
TestOracleMachine.settings = effort(100, stateful_step_count=60)
