"""What a member computes while others join: no more than each join changes."""

from __future__ import annotations

from collections import Counter

import pytest

from kafka_marshal.engine.groups.holdings import Holdings
from kafka_marshal.engine.groups.member import TopicReports
from rationalizer import JoinGroup
from tests.engine.groups.test_members import SESSION, join, net_of, source, works_on

PARTITIONS, JOINS = 60, 12


def test_a_member_follows_what_a_join_moved_and_not_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first member of a fleet has everything: a join of another must not cost a check of each of them."""
    net = net_of(PARTITIONS)
    first = join(net, "a")
    net.run_until(lambda: len(works_on(first)) == PARTITIONS)
    calls: Counter[Holdings | TopicReports] = Counter()
    follow, compare = Holdings.follow, TopicReports._lacks

    def followed(self: Holdings, *about: object) -> None:
        calls[self] += 1
        follow(self, *about)  # type: ignore[arg-type]

    def compared(self: TopicReports, *about: object) -> bool:
        calls[self] += 1
        return compare(self, *about)  # type: ignore[arg-type]

    monkeypatch.setattr(Holdings, "follow", followed)
    monkeypatch.setattr(TopicReports, "_lacks", compared)
    holdings, reports = source(first).holdings, source(first).member._reports
    others = [join(net, f"m{number:02}", session=10 * SESSION) for number in range(JOINS)]
    net.run_until(lambda: len(works_on(first)) <= PARTITIONS // (JOINS + 1) + 1)
    net.run_until(lambda: sum(len(works_on(member)) for member in [first, *others]) == PARTITIONS)
    assert len(net.records(JoinGroup)) == JOINS + 1
    moved = PARTITIONS - len(works_on(first))
    assert moved <= calls[holdings] <= 4 * moved, "each is revoked, released, and no more"
    calls.clear()
    net.run(3 * SESSION)
    assert calls[reports] == calls[holdings] == 0, "nothing has changed since"
