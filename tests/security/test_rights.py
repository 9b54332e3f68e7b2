"""Least rights: with the rights of docs/security.md a role works; without any one of them, the error names it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import MarshalError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import LocalBroker
from tests.cli.harness import Command
from tests.secured import broker_properties, login
from tests.security.rights import IMPLY_DESCRIBE, PAGE, Right, give, roles_of
from tests.security.roles import ACTIONS, MESSAGES, OWN_TOPIC, RefusedError, Trial, prepare

pytestmark = [pytest.mark.broker, pytest.mark.slow]

ROLES = roles_of(PAGE.read_text(encoding="utf-8"))

#: Covered by Spark's tests (tests/pipeline/test_secured.py).
ELSEWHERE = {"spark"}

#: Names on the page → names on this module's broker, for trials that need no separate topics.
SHARED = {"__marshal": "__marshal", "__marshal_snapshots": "__marshal_snapshots", "orders": "orders"}


@dataclass(frozen=True)
class Case:
    """A role, and the withheld right; None: none."""

    role: str
    without: Right | None
    #: DESCRIBE stays allowed if the right implies it, so that the operation itself fails.
    may_look: bool = False

    @property
    def rights(self) -> set[Right]:
        """The rights of this trial's user, with the page's names."""
        left = {right for right in ROLES[self.role] if right != self.without}
        if self.may_look and self.without is not None:
            left.add(Right(self.without.kind, self.without.name, "DESCRIBE"))
        return left

    @property
    def user(self) -> str:
        """A separate user: changed rights of an existing user take effect at an unknown moment."""
        return f"u{CASES.index(self)}"

    def __str__(self) -> str:
        may_look = "-but-look" if self.may_look else ""
        return self.role if self.without is None else f"{self.role}-without-{self.without}{may_look}".replace(" ", "-")


def without_one(role: str) -> Iterator[Case]:
    rights = ROLES[role]
    for right in rights:
        yield Case(role, right)
        others = {each.operation for each in rights if (each.kind, each.name) == (right.kind, right.name)}
        if right.operation in IMPLY_DESCRIBE and not (others - {right.operation}) & IMPLY_DESCRIBE:
            yield Case(role, right, may_look=True)


WITH_ALL = [Case(role, None) for role in ACTIONS]
WITHOUT_ONE = [case for role in ACTIONS for case in without_one(role)]
CASES = [*WITH_ALL, *WITHOUT_ONE]

#: Cases without one right that run every time. (All of them: make campaign.)
IN_EVERY_RUN = {
    "member-without-DESCRIBE_CONFIGS-on-topic-'__marshal'",
    "member-without-WRITE-on-topic-'__marshal'",
    "member-without-READ-on-topic-'orders'-but-look",
    "mirror-without-READ-on-group-'billing'",
    "sharer-without-WRITE-on-topic-'__marshal'",
    "open-without-READ-on-topic-'orders'-but-look",
    "settle-without-WRITE-on-topic-'__marshal'",
    "redrive-without-DESCRIBE-on-topic-'orders'",
    "redo-without-READ-on-topic-'orders'-but-look",
    "dead-letters-without-WRITE-on-topic-'orders-dead'-but-look",
    "transactions-without-WRITE-on-transactional-id-'billing/'",
    "transactions-without-READ-on-group-'billing'",
    "looker-without-DESCRIBE-on-topic-'orders'",
    "history-without-READ-on-topic-'__marshal'-but-look",
    "after-prune-without-READ-on-topic-'__marshal_snapshots'",
    "init-without-CREATE-on-topic-'__marshal_snapshots'",
    "prune-without-DELETE-on-topic-'__marshal'",
    "import-without-DESCRIBE-on-group-'billing'",
    "export-without-READ-on-topic-'orders'-but-look",
}

#: Roles that take too long to run every time.
SLOW = {"snapshots"}


def marked(case: Case) -> ParameterSet:
    is_often = case.role not in SLOW and (case.without is None or str(case) in IN_EVERY_RUN)
    return pytest.param(case, id=str(case), marks=() if is_often else (pytest.mark.campaign,))


def names_of(case: Case) -> dict[str, str]:
    topic = f"__own-{case.user}" if case.role in OWN_TOPIC else "__marshal"
    own = {"__marshal": topic, "__marshal_snapshots": f"{topic}_snapshots", "billing": f"billing-{case.user}"}
    own["billing.redrive"] = f"{own['billing']}.redrive"
    own |= {f"{name}/": f"{own[name]}/" for name in ("billing", "billing.redrive")}
    return {**own, "orders": "orders", "orders-dead": "orders-dead", "looked-at": "looked-at"}


@dataclass(frozen=True)
class Secured:
    bootstrap: str
    cluster: KafkaCluster


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    """A broker with all users of this module, whose rights are in force before the first test."""
    root = login("root")
    users = [case.user for case in CASES]
    with LocalBroker(properties=broker_properties(*users), client_config=root) as broker:
        bootstrap = broker.bootstrap_servers
        cluster = KafkaCluster(bootstrap, root)
        create_topic(cluster, "__marshal", 1, 30)
        for topic in ("orders", "orders-dead"):
            cluster.create_topic(topic, 1, 1, {}, 30)
        producer = Producer({"bootstrap.servers": bootstrap, **root})
        for number in range(MESSAGES):
            producer.produce("orders", b"%d" % number)
        producer.produce("orders-dead", b"written by hand")
        assert producer.flush(30) == 0
        give(
            bootstrap,
            {case.user: [Right(x.kind, names_of(case)[x.name], x.operation) for x in case.rights] for case in CASES},
        )
        with (
            Marshal(bootstrap, group_id="looked-at", client_id="one", heartbeat_interval=0.6, config=root) as one,
            one.consumer(["orders"]) as consumer,
        ):
            working = threading.Thread(target=lambda: sum(1 for _ in consumer))
            working.start()
            yield Secured(bootstrap, cluster)
            one.stop()
            working.join()
        cluster.close()


Try = Callable[[Case], Trial]


@pytest.fixture
def trial(secured: Secured, command: Command, tmp_path: Path) -> Try:
    def make(case: Case) -> Trial:
        path = tmp_path / "client.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in login(case.user).items()))
        names = names_of(case)
        if names["__marshal"] != "__marshal":  # of an earlier try of this test
            admin = AdminClient({**login("root"), "bootstrap.servers": secured.bootstrap})
            found = {names["__marshal"], names["__marshal_snapshots"]} & admin.list_topics(timeout=30).topics.keys()
            for deleted in admin.delete_topics(sorted(found)).values() if found else ():
                deleted.result(30)
        prepare(case.role, secured.cluster, secured.bootstrap, names["__marshal"])
        return Trial(secured.bootstrap, case.user, names, command, str(path), secured.cluster)

    return make


def test_the_page_has_a_row_for_each_role_and_the_tests_an_action() -> None:
    assert ROLES.keys() == ACTIONS.keys() | ELSEWHERE
    assert {str(case) for case in WITHOUT_ONE} > IN_EVERY_RUN


@pytest.mark.parametrize("case", [marked(case) for case in WITH_ALL])
def test_with_these_rights_it_works(trial: Try, case: Case) -> None:
    ACTIONS[case.role](trial(case))


@pytest.mark.parametrize("case", [marked(case) for case in WITHOUT_ONE])
def test_without_one_of_them_it_says_which(trial: Try, case: Case) -> None:
    assert case.without is not None
    tried = trial(case)
    with pytest.raises((MarshalError, RefusedError)) as refused:
        ACTIONS[case.role](tried)
    text = f"{refused.value}\n" + "\n".join(tried.said)
    if (case.role, case.without.name) == ("import", "orders"):  # Kafka omits such topics without naming them
        assert "lacks the right DESCRIBE" in text
        return
    name = tried.names[case.without.name]
    # Without READ or WRITE even the first DESCRIBE is refused, which they would imply.
    looks = [] if case.may_look else ["DESCRIBE"]
    looks += ["DESCRIBE_CONFIGS"] if case.without.operation == "ALTER_CONFIGS" else []
    wanted = "|".join([case.without.operation, *looks])
    assert re.search(rf"needs the right ({wanted}) on {case.without.kind} (prefix )?'{re.escape(name)}'", text), text
    assert "docs/security.md" in text
    assert "report it" not in text
