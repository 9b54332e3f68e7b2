"""The audit of a broker's log: sharers by batches, one of them killed, messages parked, redriven and discarded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from kafka_marshal import Batches
from kafka_marshal.admin import Admin
from kafka_marshal.pipeline.audit import audit as audit_module
from kafka_marshal.pipeline.audit.invariants import Breach
from tests.audit import broken_holes, broken_sharing
from tests.cli.harness import Command
from tests.client.conftest import Scene, scene, wait_until
from tests.client.test_shared_batches import handled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["scene"]

# It may be the one that starts Spark.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES = 100
PARKED = 7


def tell_a_story(scene: Scene, folder: Path) -> set[int]:
    """Returns which offsets the other worker handled after the killed one had been given them."""
    topic = scene.topic(1, MESSAGES)
    with scene.member("parks") as member, member.consumer([topic], mode=Batches()) as consumer:
        for batch in consumer.batches(max_messages=PARKED + 1):
            for message in batch:
                if message.offset() == PARKED:
                    batch.park(message, "Bad")
            batch.done()
            if batch.last >= PARKED:
                break
    workers = [scene.worker(f"w{n}", topic, folder, how="shared", pause_s=0.01, max_messages=10) for n in range(2)]
    wait_until(lambda: all(worker.offsets() for worker in workers), 180)
    scene.publish(topic, 1, MESSAGES)
    victim, other = workers
    before = len(victim.lines())
    wait_until(lambda: len(victim.lines()) > before + 2, 180)
    victim.kill()
    wait_until(lambda: any(line["count"] == 2 for line in handled([other])), 180)
    with Admin(scene.bootstrap, topic=scene.coordination) as admin:
        admin.redrive(scene.group, [(topic, 0, PARKED)])
        wait_until(lambda: PARKED in {line["offset"] for line in handled([other])}, 180)
    wait_until(lambda: len({x["offset"] for x in handled(workers)}) > MESSAGES, 180)
    again = {line["offset"] for line in handled([other]) if line["count"] == 2}
    other.terminate()
    scene.publish(topic, 1, 1)
    with scene.member("gives-up") as member, member.consumer([topic], mode=Batches()) as consumer:
        batch = next(iter(consumer.batches()))
        aside = batch.messages[-1]
        batch.park(aside, "Worse")
        batch.done()
        with Admin(scene.bootstrap, topic=scene.coordination) as admin:
            wait_until(lambda: admin.open_messages(scene.group, parked=True), 180)
            admin.discard(scene.group, [(topic, 0, aside.offset() or 0)])
    return again


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / name).to_pylist()
    return found


def test_the_tables_say_what_happened_and_a_broken_rationalizer_is_found(
    spark: SparkSession, scene: Scene, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import cloudpickle

    again = tell_a_story(scene, tmp_path)
    kafka = ("--bootstrap", scene.bootstrap, "--topic", scene.coordination)
    ran = command(*kafka, "audit", "--from-kafka", "--out", tmp_path / "out", "--json")
    assert ran.status == 0, ran.err
    shares = {row["client"]: row for row in table(tmp_path / "out", "shares")}
    assert set(shares) == {"parks", "w0", "w1", "gives-up"}
    assert all(row["to_offset"] is not None for row in shares.values()), "also that of the killed one"
    holes = table(tmp_path / "out", "holes")
    assert {row["ended"] for row in holes} <= {"done", "discarded", "open"}, "open: given back at the end"
    [redriven] = [row for row in holes if row["first"] == PARKED and row["parks"]]
    assert (redriven["parks"], redriven["redrives"], redriven["ended"], redriven["client"]) == (1, 1, "done", "w1")
    [given_up] = [row for row in holes if row["ended"] == "discarded"]
    assert (given_up["parks"], given_up["redrives"], given_up["reason"]) == (1, 0, "Worse")
    tried = {at for row in holes if row["tries"] == 2 for at in range(row["first"], row["last"] + 1)}
    assert again <= tried
    of_w0 = [row for row in holes if row["tries"] == 2 and again & set(range(row["first"], row["last"] + 1))]
    assert {row["client"] for row in of_w0} == {"w1"}, "what w0 had is w1's"

    dump = tmp_path / "log.jsonl"
    assert command(*kafka, "dump", "--output", dump).status == 0
    monkeypatch.setattr(audit_module, "DEFAULT_WORLD", broken_holes.Careless)
    modules = (broken_sharing, broken_holes)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        ran = command("audit", dump)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]
    assert ran.status == 1
    assert str(Breach.LOST) in ran.lines[0]
