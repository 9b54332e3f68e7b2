"""Dead letters redriven into a topic: each once, also by several runs, and after one that was killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kafka_marshal import Admin
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.memory.broker import MemoryMessage
from kafka_marshal.admin import dead_letters
from kafka_marshal.admin.dead_letters import RedrivenLetters
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.errors import AdminError, ConfigurationError
from tests.faults.stories import memory_cluster

DEAD, RETRY, GROUP = "orders.dead", "orders.retry", "billing"
HI = 200


class Place:
    def __init__(self) -> None:
        self.cluster: MemoryCluster = memory_cluster(1, 0)
        self.cluster.broker.create_topic(DEAD, 2)
        self.cluster.broker.create_topic(RETRY, 1)
        self.admin = Admin.on_cluster(lambda: self.cluster.connect("admin"), heartbeat_interval=HI / 1000)

    def letter(self, offset: int, error: Exception, *, group: str = GROUP, partition: int = 0) -> None:
        key, value = b"k%d" % offset, b"v%d" % offset
        source: Any = MemoryMessage("orders", 3, offset, key, value, (1, 0), [("trace", b"x")])
        headers = headers_of(source, group, 7, 5, error)
        self.cluster.broker.produce(DEAD, partition, value, key=key, headers=headers)

    def fill(self) -> None:
        """Ten letters with two reasons, a copy, one of another group, and another record."""
        for offset in range(10):
            self.letter(offset, ValueError("bad") if offset % 2 else KeyError("k"), partition=offset % 2)
        self.letter(4, KeyError("k"))
        self.letter(50, KeyError("k"), group="other")
        self.cluster.broker.produce(DEAD, 0, b"no letter")

    def out(self) -> list[tuple[bytes | None, bytes | None, object]]:
        """What readers of committed messages see."""
        reader = self.cluster.data_reader("reader", {})
        reader.assign({(RETRY, 0): 0})
        found: list[Any] = []
        while messages := reader.read(1000, 0.05)[0]:
            found += messages
        reader.close()
        return [(each.key(), each.value(), each.headers()) for each in found]


@pytest.fixture
def place() -> Place:
    made = Place()
    made.fill()
    return made


def counts(found: RedrivenLetters) -> tuple[int, int, int, int]:
    return found.redriven, found.repeats, found.passed_over, found.others


def test_each_letter_is_redriven_once_with_key_value_and_headers(place: Place) -> None:
    planned = place.admin.redrive_letters(GROUP, DEAD, RETRY, dry_run=True)
    assert (counts(planned), planned.group, place.out()) == ((10, 1, 1, 1), "billing.redrive", [])
    shown: list[tuple[int, int]] = []
    done = place.admin.redrive_letters(GROUP, DEAD, RETRY, progress=lambda *at: shown.append(at))
    assert done.redriven == 10
    assert shown[-1] == (10, 10)
    assert sorted(map(repr, place.out())) == [repr((b"k%d" % n, b"v%d" % n, [("trace", b"x")])) for n in range(10)]
    assert counts(place.admin.redrive_letters(GROUP, DEAD, RETRY))[0] == 0
    place.letter(11, ValueError())
    place.letter(3, ValueError(), partition=1)  # a copy of one of the first run
    assert counts(place.admin.redrive_letters(GROUP, DEAD, RETRY)) == (1, 1, 0, 0)
    assert len(place.out()) == 11


def test_those_of_one_reason(place: Place) -> None:
    done = place.admin.redrive_letters(GROUP, DEAD, RETRY, reason="ValueError")
    assert (done.redriven, done.passed_over) == (5, 7)
    assert {value for _, value, _ in place.out()} == {b"v%d" % n for n in (1, 3, 5, 7, 9)}


@pytest.mark.parametrize("at", [1, 2, 4])
def test_one_that_is_killed_is_continued(place: Place, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    monkeypatch.setattr(dead_letters, "MOST_LETTERS", 2)
    calls = 0

    def killed(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Killed

    with pytest.raises(Killed):
        place.admin.redrive_letters(GROUP, DEAD, RETRY, progress=killed)
    before = len(place.out())
    assert 0 < before < 10
    assert place.admin.redrive_letters(GROUP, DEAD, RETRY).redriven == 10 - before
    assert Counter(value for _, value, _ in place.out()) == Counter(b"v%d" % n for n in range(10))


def test_what_makes_no_sense_is_refused(place: Place) -> None:
    with pytest.raises(AdminError, match=r"no topic 'gone'\. Nothing was changed"):
        place.admin.redrive_letters(GROUP, DEAD, "gone")
    with pytest.raises(AdminError, match=r"no topic 'gone'"):
        place.admin.redrive_letters(GROUP, "gone", RETRY)
    for arguments in (("", RETRY), (DEAD, "a b")):
        with pytest.raises(ConfigurationError):
            place.admin.redrive_letters(GROUP, *arguments)
    with pytest.raises(ConfigurationError):
        place.admin.redrive_letters(GROUP, DEAD, RETRY, rate=-1)
