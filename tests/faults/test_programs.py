"""Whole programs on a real broker: alarms at any moment, and every way to end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.client.conftest import Scene
from tests.faults.conftest import Program
from tests.faults.stories import offsets

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["BrokerDiedError"])

#: A program ends within this time, whatever it does.
END_S = 5.0

#: Heartbeat interval (ms) of programs that must say nothing.
SILENT_HI = 3_000


def ranges_of(found: set[int]) -> str:
    return offsets((0, offset) for offset in found)


def alarms(
    scene: Scene, messages: int, seed: int, longest_s: float, loop: str, within_s: float = 100.0, **options: Any
) -> dict[str, Any]:
    topic = scene.topic(1, messages)
    at_most_once = options.get("delivery") == "at-most-once"
    program = Program(
        scene,
        "alarms",
        topic,
        loop=loop,
        messages=messages,
        seed=seed,
        longest_s=longest_s,
        quiet_s=6.0 if at_most_once else 20.0,
        options=options,
        hangs_s=within_s,
        quiet=True,
    )
    found = program.result(within_s + 10.0)
    print(f"{found['rings']} alarms")
    assert found["rings"] > 0
    return found


def check_at_least_once(found: dict[str, Any], messages: int) -> None:
    seen = set(found["seen"])
    done = set(range(found["stable"] + 1)) | {x for first, last in found["ranges"] for x in range(first, last + 1)}
    told = f"after {found['rings']} alarms, most of them at {found['places']}"
    assert not done - seen, f"done in the log and never handed out: {ranges_of(done - seen)}, {told}"
    missing = set(range(messages)) - seen
    assert not missing, f"never handed out: {ranges_of(missing)}, {told}"


def check_at_most_once(found: dict[str, Any], messages: int) -> None:
    told = f"after {found['rings']} alarms, most of them at {found['places']}"
    assert not found["twice"], f"handed out twice: {ranges_of(set(found['twice']))}, {told}"
    unprocessed = {x for *_, first, last in found["unprocessed"] for x in range(first, last + 1)}
    lost = set(range(found["granted"] + 1)) - set(found["seen"]) - unprocessed
    assert not lost, f"granted, and neither handed out nor in unprocessed: {ranges_of(lost)}, {told}"
    missing = set(range(messages)) - set(found["seen"]) - unprocessed
    assert not missing, f"never granted: {ranges_of(missing)}, {told}"


@pytest.mark.parametrize("loop", ["iterate", "poll", "batches"])
def test_alarms_lose_nothing(scene: Scene, loop: str) -> None:
    found = alarms(scene, 1_000, seed=1, longest_s=0.003, loop=loop)
    check_at_least_once(found, 1_000)


@pytest.mark.parametrize("loop", ["iterate", "poll", "batches"])
def test_alarms_repeat_nothing(scene: Scene, loop: str) -> None:
    found = alarms(scene, 1_000, seed=2, longest_s=0.01, loop=loop, delivery="at-most-once", batch_size=50)
    check_at_most_once(found, 1_000)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("longest_s", [0.0005, 0.003])
@pytest.mark.parametrize("loop", ["iterate", "poll", "batches"])
def test_many_alarms(scene: Scene, loop: str, longest_s: float, seed: int) -> None:
    found = alarms(scene, 20_000, seed, longest_s, loop)
    check_at_least_once(found, 20_000)
    found = alarms(scene, 5_000, seed, longest_s, loop, delivery="at-most-once", claim_ahead=bool(seed % 2))
    check_at_most_once(found, 5_000)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("loop", ["iterate", "poll", "batches"])
def test_a_hundred_thousand_alarms(scene: Scene, loop: str, delivery: str) -> None:
    """The six of these together: an alarm every quarter of a millisecond, from the first call to the last message."""
    messages = 2_000_000
    found = alarms(scene, messages, 1, 0.0005, loop, within_s=1_100.0, delivery=delivery)
    (check_at_least_once if delivery == "at-least-once" else check_at_most_once)(found, messages)


@pytest.mark.parametrize("loop", ["iterate", "poll", "batches"])
@pytest.mark.parametrize("closes", ["marshal", "consumer"])
def test_a_handler_of_sigterm_may_close(scene: Scene, loop: str, closes: str) -> None:
    program = Program(scene, "sigterm", scene.topic(2), loop=loop, closes=closes, times=2)
    program.await_line("waiting")
    os.kill(program.process.pid, signal.SIGTERM)
    status, out, err = program.end(END_S + 5.0)
    assert (status, "in order" in out) == (0, True), f"exit status {status}: {out}{err}"
    assert "Traceback" not in err


def test_ctrl_c_ends_with_blocks(scene: Scene) -> None:
    program = Program(scene, "interrupt", scene.topic(2))
    program.await_line("waiting")
    program.process.send_signal(signal.SIGINT)
    assert program.result(END_S + 5.0) == {"ended": "by Ctrl-C"}


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("by", ["end", "exit", "iterating", "polling", "error"])
def test_a_program_may_end_without_close(scene: Scene, by: str, delivery: str) -> None:
    """Without output from us and without a remaining lease that others would have to wait for."""
    program = Program(
        scene, "leave", scene.topic(1, 20), by=by, hi=SILENT_HI, options={"delivery": delivery, "batch_size": 5}
    )
    status, _, err = program.end(10.0 + END_S)
    assert status == int(by == "error"), err
    assert err.count("Traceback") == int(by == "error"), err
    assert by == "error" or err == ""
    with scene.member("other") as other:
        held = other.world.lease(program.topic, 0)
        assert held is not None
        assert held.holder is None


@pytest.mark.parametrize(
    ("by", "wanted"), [("atexit", "revoked"), ("destructor", "revoked\nfinalizing: 1"), ("stuck", "")], ids=lambda x: x
)
def test_the_interpreters_end_waits_for_no_thread(scene: Scene, by: str, wanted: str) -> None:
    program = Program(scene, "ends", scene.topic(1), by=by, hi=SILENT_HI)
    status, out, err = program.end(10.0 + END_S)
    assert (status, out.strip(), err) == (0, wanted, "")
    if by == "atexit":  # its leases were released, too
        with scene.member("other") as other:
            other.claim(program.topic, 0, timeout=0).release()


def test_a_call_that_waits_ends_in_a_forked_child(scene: Scene) -> None:
    program = Program(scene, "forks", scene.topic(1), hi=SILENT_HI)
    status, _, err = program.end(10.0 + END_S)
    assert (status, err) == (0, "")
