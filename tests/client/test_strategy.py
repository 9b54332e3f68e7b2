"""A group's strategy as a setting (R5 to R7, R11): a rolling deploy with another one, under load."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Admin, Group, Marshal
from kafka_marshal.errors import ConfigurationError, InconsistentPartitioningStrategyError
from kafka_marshal.testing import MemoryKafka
from kafka_marshal.types import Key
from rationalizer import ConfigureGroup, Settings, Upgrade, World, codes, encode, route_group
from rationalizer.groups.history import Assignments
from tests.admin.test_open_messages import Place

LOG, GROUP, CPS = "__marshal", "billing", 2
HOME = route_group(GROUP, CPS)
TOPICS = ("orders", "returns")
MEMBERS = ("m0", "m1", "m2", "m3", "m4")


class Deploy:
    """Five members that handle what a producer never stops to send."""

    def __init__(self, kafka: MemoryKafka) -> None:
        self.kafka = kafka
        self.handled: Counter[tuple[str, bytes]] = Counter()
        self.sent = 0
        self.marshals: dict[str, Marshal] = {}
        self.workers: dict[str, Any] = {}
        for topic in TOPICS:
            kafka.create_topic(topic, 6)

    def _work(self, bootstrap_servers: str, client_id: str, strategy: Any) -> None:
        with (
            Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id) as marshal,
            marshal.consumer(list(TOPICS), mode=Group(strategy=strategy)) as consumer,
        ):
            self.marshals[client_id] = marshal
            consumer.run(lambda message: self.handled.update([(message.topic(), message.value())]))

    def start(self, client_id: str, strategy: str) -> None:
        """Start it, and wait until it is a member and nothing is on its way."""
        self.workers[client_id] = self.kafka.start(self._work, client_id, strategy, name=client_id)
        self.settle(lambda: client_id in self.owners().values())

    def restart(self, client_id: str, strategy: str) -> None:
        self.workers.pop(client_id).stop()
        self.settle(lambda: client_id not in self.owners().values())
        self.start(client_id, strategy)

    def settle(self, is_there: Callable[[], bool] = lambda: True) -> None:
        """Send some, and wait until every piece has its owner, and all is handled, while more is sent."""
        self.kafka.wait_until(lambda: self.send() and is_there() and self.is_steady(), 60)

    def send(self) -> bool:
        self.sent += 1
        for topic in TOPICS:
            self.kafka.produce(topic, b"%d" % self.sent)
        return True

    def records(self) -> Iterator[tuple[int, int, bytes | None]]:
        with self.kafka._broker.changed:
            messages = list(self.kafka._broker.existing[LOG].partitions[HOME].messages)
        return ((message.offset(), message.timestamp()[1], message.value()) for message in messages)

    def world(self) -> World:
        world = World(HOME, CPS)
        world.apply_many(self.records())
        return world

    def group(self) -> Any:
        found = self.world().group(GROUP)
        assert found is not None
        return found

    def pieces(self) -> list[Any]:
        return [info for info in self.kafka.admin.progress(GROUP) if info.topic in TOPICS]

    def owners(self) -> dict[Key, str]:
        return {(each.topic, each.partition): each.client_id for each in self.pieces() if each.client_id}

    def is_steady(self) -> bool:
        group = self.group()
        moving = [span for key in group.partitions() for span in _moving(group, *key)]
        return not moving and len(self.owners()) == 12

    def history(self) -> tuple[list[Any], list[tuple[str, str]], list[int]]:
        """The rebalances; type and code of each record; how many members there were after each one."""
        world, fold = World(HOME, CPS), Assignments(GROUP, keep=1_000)
        answers, members = [], []
        for record in self.records():
            outcome = world.apply(*record)
            fold.see(world, outcome)
            group = world.group(GROUP)
            members.append(0 if group is None else len(group.members))
            answers.append((outcome.type or "", outcome.code))
        return fold.rebalances, answers, members


def _moving(group: Any, topic: str, partition: int) -> list[Any]:
    from rationalizer.groups.group import pieces_of

    return [piece for piece in pieces_of(group, topic, partition) if piece.owner != piece.target]


@pytest.fixture
def deploy(memory_marshal: MemoryKafka) -> Deploy:
    return Deploy(memory_marshal)


def test_r6_a_rolling_deploy_with_another_strategy_under_load(deploy: Deploy) -> None:
    for name in MEMBERS:
        deploy.start(name, "range")
    before = deploy.owners()
    assert sorted(Counter(before.values()).values()) == [2, 2, 2, 2, 4], "range deals out each topic by itself"
    known = len(deploy.history()[0])
    found = deploy.kafka.admin.configure_group(GROUP, strategy="sticky")
    assert found == Settings(strategy="sticky")
    deploy.settle(lambda: deploy.owners() != before)
    for name in MEMBERS:
        deploy.restart(name, "sticky")
    deploy.kafka.admin.configure_group(GROUP, strategy=None)
    deploy.settle()
    for topic in TOPICS:
        deploy.kafka.wait_until_done(topic, GROUP, 30)
    rebalances, answers, members = deploy.history()
    first, *others = rebalances[known:]
    assert first.configured
    assert len(first.moved) == 1, "one piece more than sticky's balance needs"
    assert len(others) == 2 * len(MEMBERS), "one for each that leaves, one for each that joins"
    for each in others:
        assert each.moved
        if each.left:
            assert {moved.before.client_id for moved in each.moved} == set(each.left), "only what it had"
        else:
            assert {moved.after.client_id for moved in each.moved} == set(each.joined), "only what it gets"
            assert len(each.moved) in (2, 3)
    started = members.index(len(MEMBERS))
    assert min(members[started:]) == len(MEMBERS) - 1
    assert codes.INCONSISTENT_PARTITIONING_STRATEGY not in {code for _, code in answers}
    assert sum(kind == "JoinGroup" for kind, _ in answers) == 2 * len(MEMBERS), "no member joins again because of it"
    assert set(deploy.handled.values()) == {1}, "all stops were graceful"
    assert len(deploy.handled) == deploy.sent * len(TOPICS)


def test_without_the_setting_the_first_new_member_is_refused_with_the_way_out(deploy: Deploy) -> None:
    deploy.start("m0", "range")
    worker = deploy.kafka.start(deploy._work, "m1", "sticky")
    deploy.kafka.wait_until(lambda: worker.error is not None)
    assert isinstance(worker.error, InconsistentPartitioningStrategyError)
    assert "kafka-marshal group billing --set strategy=sticky" in str(worker.error)


def test_r11_a_member_that_names_another_says_so_once_and_works(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kafka_marshal")

    def lines() -> list[str]:
        return [each.message for each in caplog.records if "by a setting" in each.message]

    deploy.start("m0", "range")
    admin = deploy.kafka.admin
    admin.configure_group(GROUP, strategy="range")
    deploy.settle()
    assert (lines(), deploy.marshals["m0"].health().other_strategy) == ([], "")
    admin.configure_group(GROUP, strategy="sticky")
    deploy.kafka.wait_until(lambda: deploy.marshals["m0"].health().other_strategy)
    admin.configure_group(GROUP, max_individual_commits=50_000)
    deploy.start("m1", "sticky")
    health = deploy.marshals["m0"].health()
    assert health.ok
    assert "names 'range': the setting counts" in health.other_strategy
    assert health.other_strategy in str(health)
    assert deploy.marshals["m1"].health().other_strategy == ""
    assert lines() == [health.other_strategy]
    admin.configure_group(GROUP, strategy=None)
    deploy.kafka.wait_until(lambda: not deploy.marshals["m0"].health().other_strategy)
    deploy.settle()
    assert {*deploy.owners().values()} == {"m0", "m1"}


def test_r5_a_name_that_this_release_does_not_know_ends_no_member(deploy: Deploy) -> None:
    deploy.start("m0", "range")
    record = ConfigureGroup("x", "newer", GROUP, (("strategy", "magic"),))
    deploy.kafka._broker.produce(LOG, HOME, encode(record))
    deploy.settle()
    assert ("ConfigureGroup", codes.UNKNOWN_PARTITIONING_STRATEGY) in deploy.history()[1]
    assert deploy.workers["m0"].error is None


def test_r11_it_goes_to_the_home_alone_after_the_marks(memory_marshal: MemoryKafka) -> None:
    admin = memory_marshal.admin
    admin.configure_group(GROUP, strategy="range")
    admin.configure_group(GROUP, strategy="sticky", max_individual_commits=9)
    kept: dict[int, list[object]] = {}
    for cp, log in enumerate(memory_marshal._broker.existing[LOG].partitions):
        world = World(cp, CPS)
        for message in log.messages:
            outcome = world.apply(message.offset(), message.timestamp()[1], message.value())
            if outcome.is_a(ConfigureGroup):
                kept.setdefault(cp, []).append(outcome.message.settings)
        assert world.group(GROUP) is not None
    assert len(kept[HOME]) == 2
    assert kept[1 - HOME] == [[]]


@pytest.mark.parametrize("wanted", ["magic", "", 7])
def test_an_unknown_strategy_is_refused_before_anything_is_written(wanted: object) -> None:
    with pytest.raises(ConfigurationError, match="'sticky'"):
        Admin("127.0.0.1:1").configure_group("g", strategy=wanted)


def test_r11_below_level_5_it_names_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.admin.test_open_messages.SUPPORTED_LEVEL", 4)
    place = Place("coordinated")
    with pytest.raises(ConfigurationError, match=r"level 5 .* which is at level 4\..*kafka-marshal upgrade"):
        place.admin.configure_group(place.ids[2], strategy="range")
    assert place.admin.configure_group(place.ids[2], max_individual_commits=7).max_individual_commits == 7
    place.append(Upgrade("m", "m", "m", 5), place.cp)
    assert place.admin.configure_group(place.ids[2], strategy="range").strategy == "range"
