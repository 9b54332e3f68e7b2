"""What health() says of a handler that hangs while most tries fail; it and `check` of one that can't be cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kafka_marshal import Retry
from kafka_marshal.observe import problems
from tests.cli.conftest import command, environment
from tests.cli.harness import Command
from tests.client.conftest import wait_until
from tests.client.running import QUICK, Crew, Running, publish

__all__ = ["command", "environment"]


def check(command: Command, crew: Crew) -> str:
    ran = command("--bootstrap", crew.bootstrap, "--topic", crew.coordination, "check")
    assert ran.status in (0, 1), ran.err
    return ran.out


def test_a_handler_that_hangs_while_most_tries_fail_is_named_and_after_ten_seconds_others_continue(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, [f"k{number}" for number in range(80)])
    member, consumer = crew.consumer("a", topic)
    end, later = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        if message.offset() == 3:
            if any("tries of run(…) in a row failed" in problem for problem in member.health().problems):
                end.wait(60)
                return
        elif end.is_set():
            return
        elif any("has not returned" in problem for problem in member.health().problems):
            later.set()
        raise TimeoutError("the database is away")

    running = Running(consumer, handle, concurrency=4, retry=Retry(attempts=500, backoff=(0.01, 0.02)), park=True)
    try:
        wait_until(lambda: "offset 3 has not returned for" in str(member.health()), 90)
        assert "the others wait for it for 10 s, and then continue without it" in str(member.health())
        assert not later.is_set()
        wait_until(later.is_set, 90, what="others are tried")
    finally:
        end.set()
        running.stop(member)


def test_a_coroutine_that_swallows_its_cancellation_is_named_and_so_is_what_waits_for_it(
    crew: Crew, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partition is taken up again, its key waits, and all others are done."""
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b", "bad", "c"])
    member, consumer = crew.consumer("a", topic, handler_timeout=1.0)
    monkeypatch.setattr(problems, "STUCK_BATCH_MS", 500)
    done: set[int] = set()
    may_end = threading.Event()

    async def handle(message: Any) -> None:
        while message.offset() == 1 and not may_end.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        done.add(message.offset())

    running = Running(consumer, handle, concurrency=4, retry=QUICK, park=True)
    try:
        wait_until(lambda: {0, 2, 4} <= done)
        wait_until(
            lambda: "a handler has had this message since before the partition was taken" in str(member.health())
        )
        assert 3 not in done
        (held,) = member.health().held_back
        assert (held.topic, held.offset, held.key) == (topic, 1, b"bad")
        wait_until(lambda: "for the next try, for up to" in check(command, crew))
    finally:
        may_end.set()
        wait_until(lambda: {1, 3} <= done)
        running.stop(member)
