"""A recorded worker beside one that is killed: both recordings are replayed, to where each was written."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from kafka_marshal import ConfigurationError
from kafka_marshal.instance import release
from kafka_marshal.node.driver import RECORD, RecordFile
from tests.client.conftest import Scene, Worker, wait_until
from tests.engine.replay import Replay, read_lines

PARTITIONS = 4

#: Set RECORDED_ROUNDS to 300 for a minute of it.
ROUNDS = int(os.environ.get("RECORDED_ROUNDS", "5"))


def have(workers: list[Worker], least: int) -> bool:
    return sum(len(worker.offsets()) for worker in workers) >= least


def replayed(path: Path) -> Replay:
    replay = Replay(read_lines(path.read_bytes(), release()))
    replay.run()
    return replay


KINDS: dict[str, dict[str, object]] = {"claimed": {}, "coordinated": {"session": 1_000}, "shared": {"how": "shared"}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_worker_is_replayed_to_the_same_effects_and_state(
    kind: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = scene.topic(PARTITIONS)
    monkeypatch.setenv(RECORD, str(tmp_path / "a"))
    a = scene.worker("a", topic, tmp_path, **KINDS[kind])
    monkeypatch.setenv(RECORD, str(tmp_path / "b"))
    b = scene.worker("b", topic, tmp_path, **KINDS[kind])

    def both() -> bool:
        scene.publish(topic, PARTITIONS, 20)
        return bool(a.offsets() and b.offsets())

    wait_until(both, 180)
    for _ in range(ROUNDS):
        least = len(a.offsets()) + len(b.offsets()) + 100
        scene.publish(topic, PARTITIONS, 100)
        wait_until(partial(have, [a, b], least))

    def is_enough() -> bool:
        scene.publish(topic, PARTITIONS, 20)
        found = replayed(tmp_path / "b")
        return found.inputs > 100 and found.effects > 20 and found.states > 1

    wait_until(is_enough, 180)
    b.kill()
    before = len(a.offsets())
    scene.publish(topic, PARTITIONS, 20)
    wait_until(lambda: len({partition for partition, _ in a.offsets()[before:]}) == PARTITIONS, 180, "a takes over")
    assert a.terminate() == 0
    whole, killed = replayed(tmp_path / "a"), replayed(tmp_path / "b")
    assert whole.engine.consumers == {}, "it was recorded to its end"
    for replay in (whole, killed):
        assert replay.inputs > 100
        assert replay.effects > 20
        assert replay.states > 1
    text = (tmp_path / "a").read_text()
    assert topic in text
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_file_that_can_not_be_written_is_named_before_anything_starts(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORD, str(tmp_path / "missing" / "file"))
    with pytest.raises(ConfigurationError, match=r"missing/file: this file can't be written"):
        scene.member("a")


def test_a_second_recording_of_the_same_name_gets_a_number(tmp_path: Path) -> None:
    files = [RecordFile(str(tmp_path / "file")) for _ in range(3)]
    assert [Path(file.path).name for file in files] == ["file", "file.2", "file.3"]
