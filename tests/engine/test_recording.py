"""A run that was written down is fed in again: the same effects, one by one, and the same state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from kafka_marshal.engine.policies import Balanced, MaxClaims, Policy, View, Wishes
from kafka_marshal.engine.recording import EngineRecorder, line_of
from kafka_marshal.types import Key
from tests.engine.harness import HI, Net
from tests.engine.replay import Lines, RecordingError, Replay, ReplayDiffersError, read_lines

RELEASE = "0"


class Own(Policy):
    """A policy of the user's, which no replay could make again."""

    def __init__(self) -> None:
        self.asked = 0

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("now and then")
        return Balanced().wishes(view, own, now)


def recorded(policy: Policy | None = None, at_most_once: bool = False) -> bytes:
    """Two members share four partitions; one is killed, and the one that is recorded takes over, and closes."""
    lines: list[str] = []
    net = Net(cps=2)
    net.topic("t", 4, end=400)
    member = net.member("a", write=lines.append)
    member.consumer("t", policy=policy, at_most_once=at_most_once, policy_raised=lambda error: None)
    other = net.member("b")
    other.consumer("t", at_most_once=at_most_once)
    for turn in range(40):
        net.run(HI / 5)
        if not at_most_once:
            member.work()
            other.work()
        if turn == 20:
            other.kill()
    assert len(member.held()) == 4
    member.close()
    assert member.recorder is not None
    member.recorder.state(net.now)
    return "".join(lines).encode()


def replayed(data: bytes) -> Replay:
    replay = Replay(read_lines(data, RELEASE))
    replay.run()
    return replay


@pytest.mark.parametrize("policy", [None, Balanced() & MaxClaims(4), Own()], ids=["balanced", "combined", "own"])
def test_a_recorded_run_is_the_same_when_it_is_fed_in_again(policy: Policy | None) -> None:
    replay = replayed(recorded(policy))
    assert replay.inputs > 300
    assert replay.effects > 40
    assert replay.states > 5


@pytest.fixture(scope="module")
def data() -> bytes:
    return recorded()


def test_what_the_process_had_not_written_to_its_end_is_left_out(data: bytes) -> None:
    lines = read_lines(data[:-20], RELEASE)
    assert lines.is_cut
    assert len(lines.entries) == data.count(b"\n") - 2
    Replay(lines).run()


def damaged(data: bytes) -> bytes:
    place = data.index(b"acked")
    return data[:place] + b"Acked" + data[place + 5 :]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (damaged, r"line \d+ of \d+ is damaged: .* the \d+ lines before it can"),
        (lambda data: b"", "the recording is empty"),
        (lambda data: b"hello\n" + data, "not a recording of KAFKA_MARSHAL_RECORD"),
        (lambda data: line_of({"format": 99}).encode(), "its first line is no header"),
    ],
    ids=["damaged", "empty", "no recording", "another form"],
)
def test_what_is_no_whole_recording_is_refused(data: bytes, change: Callable[[bytes], bytes], told: str) -> None:
    with pytest.raises(RecordingError, match=told):
        read_lines(change(data), RELEASE)


def test_a_recording_of_another_release_is_refused(data: bytes) -> None:
    with pytest.raises(RecordingError, match=r"recorded with release 0, protocol level 5; this is release 9\.9"):
        read_lines(data, "9.9")


def test_an_engine_that_decides_otherwise_is_found(data: bytes) -> None:
    found = read_lines(data, RELEASE)
    (place, *_) = (at for at, entry in enumerate(found.entries) if isinstance(entry, list) and "done_run" in entry[1])
    entries = [*found.entries[:place], *found.entries[place + 1 :]]
    with pytest.raises(ReplayDiffersError, match=r"line \d+ of the recording: (effect|state) \d+ is .*; it was "):
        Replay(Lines(found.header, entries)).run()


def test_offsets_of_messages_that_handlers_have_are_written_and_read_as_they_are() -> None:
    assert EngineRecorder._found(cast("Any", None), (), [3, 5]) == [3, 5]
    replay = object.__new__(Replay)
    replay._readings = deque([("with_handlers", [3, 5])])
    assert replay.reading("with_handlers", list, (object(),)) == [3, 5]
