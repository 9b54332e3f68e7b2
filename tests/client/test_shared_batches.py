"""Members that share a partition by batches, as processes on a real broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Scene, Worker, wait_until

MESSAGES = 200


def handled(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    return [line for worker in workers for line in worker.lines() if line["what"] == "handled"]


def everything(workers: Iterable[Worker], messages: int) -> bool:
    return {line["offset"] for line in handled(workers)} >= set(range(messages))


def test_three_workers_do_each_message_of_one_partition_once_and_what_a_killed_one_had_comes_again(
    scene: Scene, tmp_path: Path
) -> None:
    topic = scene.topic(1, MESSAGES)
    workers = [scene.worker(f"w{n}", topic, tmp_path, how="shared", pause_s=0.004, max_messages=20) for n in range(3)]
    wait_until(lambda: everything(workers, MESSAGES), 90)
    first = handled(workers)
    assert Counter(line["offset"] for line in first) == Counter(range(MESSAGES))
    assert {line["count"] for line in first} == {1}
    assert sum(bool(worker.offsets()) for worker in workers) >= 2, "one did all"

    scene.publish(topic, 1, MESSAGES)
    victim = workers[0]
    wait_until(lambda: any(offset >= MESSAGES for _, offset in victim.offsets()), 60)
    victim.kill()
    wait_until(lambda: everything(workers, 2 * MESSAGES), 90)
    for worker in workers[1:]:
        worker.terminate()
    again = [line for line in handled(workers) if line["count"] == 2]
    twice = {offset for offset, times in Counter(line["offset"] for line in handled(workers)).items() if times > 1}
    assert again, "the batch of the killed worker did not come again"
    assert twice <= {line["offset"] for line in again}
    assert min(line["token"] for line in again) > max(line["token"] for line in handled([victim]))


@pytest.mark.campaign
def test_a_sharer_that_was_stopped_for_long_hands_out_nothing_that_others_have(scene: Scene, tmp_path: Path) -> None:
    topic = scene.topic(1, MESSAGES)
    workers = [scene.worker(f"w{n}", topic, tmp_path, how="shared", pause_s=0.01, max_messages=20) for n in range(2)]
    zombie = workers[0]
    wait_until(lambda: bool(zombie.offsets()), 60)
    zombie.stop()
    wait_until(lambda: everything(workers, MESSAGES), 90)
    zombie.go_on()
    scene.publish(topic, 1, MESSAGES)
    wait_until(lambda: everything(workers, 2 * MESSAGES), 90)
    counts = Counter(line["offset"] for line in handled(workers))
    owned = {line["offset"]: line["count"] for line in handled(workers)}
    assert [offset for offset, times in counts.items() if times > 1 and owned[offset] < 2] == []
