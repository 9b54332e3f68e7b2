"""Pieces continue with the end of their cut, whatever the threads that want messages wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import GroupConsumer, Message
from kafka_marshal.client import fetching, tries
from tests.client.test_checkpoints import ON_DEMAND, WAYS, Team


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team()
    yield made
    made.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_fetched_continues_with_the_end_of_a_cut(team: Team, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the end of a wait for new messages: here it takes a minute."""
    for module, name in ((fetching, "SLICE_S"), (tries, "LOOK_S")):
        monkeypatch.setattr(module, name, 60.0)
    first, begun, looked = threading.Lock(), threading.Event(), threading.Event()

    def work(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
        def first_asks(message: Message) -> None:
            if first.acquire(blocking=False):
                consumer.checkpoint()
                if way != "run":  # there another thread reads, and waits already
                    looked.clear()
                begun.set()
            begun.wait(10)
            handle(message)

        WAYS[way](consumer, first_asks)

    def fill(self: fetching.Fetcher, *about: Any) -> int:
        found = filled(self, *about)
        looked.set()
        return found

    def save_when_waited_for(*state: Any) -> None:
        looked.wait(10)
        save(*state)

    filled, save = fetching.Fetcher.fill, team.store.save
    monkeypatch.setattr(fetching.Fetcher, "fill", fill)
    monkeypatch.setattr(team.store, "save", save_when_waited_for)
    team.produce(10)
    a = team.start("a", work, ON_DEMAND)
    team.await_counted(a)
    assert "saved" in [what for what, _ in a.said]
    monkeypatch.undo()
    team.produce(1)  # ends such a wait
    team.await_counted(a)
