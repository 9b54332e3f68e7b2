"""Small scope of shares and open messages: every order of a few records, product beside oracle; a difference is found.

``make exhaustive`` is the long form; KAFKA_MARSHAL_THOROUGH makes this one a record deeper.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rationalizer import Progress, codes
from rationalizer.holes import NO_OWNER, Hole
from rationalizer.leases.shares import Shares
from rationalizer.settling import Reach
from tests.campaigns.small_scope import records as exhaustive
from tests.campaigns.small_scope.search import BrokenError
from tests.campaigns.small_scope.sharing import BEGINNINGS, explore_sharing
from tests.rationalizer.strategies import many

#: Of these, every order of two records; of the others each record.
DEEPER = ("nothing", "by batches", "by keys, at the limit", "a group")
#: These take three records: the members leave, a checkpoint begins; or what is done is opened, of several keys.
LATER = {
    ("SettleOffsets", codes.WRONG_MODE),
    ("entry of SettleOffsets", codes.INDIVIDUAL_COMMIT_TOO_OLD),
}

Plant = Callable[[pytest.MonkeyPatch], None]


def test_every_order_of_a_few_records() -> None:
    met: set[tuple[str, str]] = set()
    for name in BEGINNINGS:
        found = explore_sharing(name, (2 if name in DEEPER else 1) + (many(2) > 1))
        met |= set(found.transitions)
        assert found.states > 8
    assert set.union(*(set(scope.wanted) for scope in BEGINNINGS.values())) - met <= LATER


def test_the_command_searches_shares_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exhaustive.main(["--sharing", "--depth", "1", "--most", "1", "--jobs", "1"]) == 1
    told = capsys.readouterr().out
    assert "by batches, given back" in told
    assert "not met: SettleOffsets WRONG_MODE" in told


def _on(where: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(where, name, value)


def _has(self: Reach, hole: Hole, seen: int) -> bool:
    return hole.owner == self.owner if hole.owner != NO_OWNER else self.has_key(hole.key_hash)


PLANTED: dict[str, tuple[Plant, str]] = {
    "what was seen makes no difference": (_on(Reach, "has", _has), "whole, with tries"),
    "what is done is opened again": (_on(Progress, "has_passed_some", lambda *_: False), "whole, with tries"),
    "silence is no silence": (_on(Shares, "all_stale", lambda self, log_time: False), "by batches"),
    "all fits beside all": (_on(Shares, "overlapping", lambda self, *_: []), "by keys"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_difference_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, beginning = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(BrokenError, match="product and oracle differ"):
        explore_sharing(beginning, 2)
