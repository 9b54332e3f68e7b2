"""Which batch holds which ranges, and when they are done: the source's driver side, without Spark."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal.admin import Admin
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.errors import ConfigurationError, MarshalError, RangeGoneError, TopicAbsentError
from kafka_marshal.pipeline.source import (
    NOTHING,
    ClaimedStream,
    KafkaMarshalReader,
    KafkaMarshalSource,
    Piece,
    cut,
    read_piece,
)
from kafka_marshal.pipeline.source_options import SourceOptions
from tests.client.conftest import HI, Scene, wait_until


def options(scene: Scene, topic: str, **more: str) -> SourceOptions:
    return SourceOptions.parse(
        {
            "bootstrap_servers": scene.bootstrap,
            "group_id": scene.group,
            "client_id": "query",
            "topics": topic,
            "coordination_topic": scene.coordination,
            "heartbeat_interval_ms": str(HI),
            **more,
        }
    )


class Driver:
    """A stream asked as Spark asks: every answer goes through JSON."""

    def __init__(self, settings: SourceOptions) -> None:
        self.stream = ClaimedStream.open(settings)

    def latest(self) -> Any:
        return json.loads(json.dumps(self.stream.latest()))

    def next(self) -> Any:
        """The end of a batch with something in it."""
        before = self.latest()
        return before if before["ranges"] and self.stream._taken else wait_until(self._new)

    def _new(self) -> Any:
        end = self.latest()
        return end if self.stream._taken else None

    def stables(self) -> dict[int, int]:
        """The last offset done of each partition, -1: none."""
        leases = self.stream._marshal.world.leases()
        return {lease.partition: -1 if lease.stable is None else lease.stable for lease in leases}


@pytest.fixture
def drivers() -> Iterator[Any]:
    made: list[Driver] = []

    def make(settings: SourceOptions) -> Driver:
        made.append(Driver(settings))
        return made[-1]

    yield make
    for each in made:
        each.stream.close()


def spans(ranges: list[OffsetRange]) -> list[tuple[int, int, int]]:
    return sorted((x.partition, x.first, x.last) for x in ranges)


def test_a_batch_is_done_when_the_next_one_is_asked_for(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 10)
    driver = drivers(options(scene, topic, max_records_per_batch="4"))
    first = driver.next()
    assert spans(driver.stream.plan(first)) == [(0, 0, 3)]
    assert driver.stream.plan(first) == driver.stream.plan(first), "a batch that is read twice is the same"
    assert driver.stables() == {0: -1}
    second = driver.latest()
    wait_until(lambda: driver.stables() == {0: 3})
    assert second["batch"] == first["batch"] + 1
    assert spans(driver.stream.plan(second)) == [(0, 4, 7)]
    driver.stream.commit(first)
    assert driver.stables() == {0: 3}, "Spark tells of the first one late"
    driver.stream.commit(second)
    wait_until(lambda: driver.stables() == {0: 7})


def test_a_topic_that_is_named_and_does_not_exist_ends_the_query(scene: Scene) -> None:
    with pytest.raises(TopicAbsentError, match="'nowhere' does not exist"):
        ClaimedStream.open(options(scene, f"{scene.topic(1, 1)},nowhere"))


def test_with_nothing_new_the_end_stays_the_same(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 0)
    driver = drivers(options(scene, topic))
    assert driver.latest() == dict(NOTHING)
    scene.publish(topic, 1, 3)
    end = driver.next()
    driver.stream.plan(end)
    assert driver.latest() == end
    assert driver.latest() == end
    wait_until(lambda: driver.stables() == {0: 2})


def test_a_batch_that_was_named_and_not_planned_is_not_taken_twice(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 10)
    driver = drivers(options(scene, topic, max_records_per_batch="4"))
    end = driver.next()
    assert driver.latest() == end
    assert spans(driver.stream.plan(end)) == [(0, 0, 3)]


def test_what_runs_when_the_query_ends_is_not_done(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 10)
    driver = drivers(options(scene, topic))
    end = driver.next()
    driver.stream.plan(end)
    driver.stream.close()
    again = drivers(options(scene, topic))
    assert spans(again.stream.plan(again.next())) == [(0, 0, 9)]


def test_batches_of_an_earlier_run_are_empty_and_never_make_anything_done(scene: Scene, drivers: Any) -> None:
    """When it starts, Spark asks for the ranges of its last batch, whether it will run them or not."""
    topic = scene.topic(1, 10)
    old = drivers(options(scene, topic))
    end = old.next()
    old.stream.close()
    driver = drivers(options(scene, topic))
    assert driver.stream.plan(end) == []
    driver.stream.commit(end)
    mine = driver.next()
    assert driver.stables() == {0: -1}
    assert spans(driver.stream.plan(mine)) == [(0, 0, 9)]


def test_a_batch_that_is_over_cannot_be_had_again(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 10)
    driver = drivers(options(scene, topic, max_records_per_batch="4"))
    first = driver.next()
    driver.stream.plan(first)
    driver.stream.plan(driver.next())
    with pytest.raises(MarshalError, match="which is done"):
        driver.stream.plan(first)
    reader = KafkaMarshalReader(options(scene, topic))
    assert reader.partitions(first, first) == []


def test_a_lease_lost_meanwhile_commits_nothing(scene: Scene, drivers: Any, caplog: pytest.LogCaptureFixture) -> None:
    topic = scene.topic(1, 10)
    driver = drivers(options(scene, topic))
    driver.stream.plan(driver.next())
    # A newer instance of the same client takes the lease over (C7).
    scene.member("query").consumer([topic])
    wait_until(lambda: not driver.stream._consumer.assignment(), what="the lease is gone")
    driver.stream._finish()
    assert "nothing of this batch is committed" in caplog.text
    assert driver.stables() == {0: -1}


def test_one_lease_lost_commits_nothing_of_the_batch_and_the_rest_comes_again(scene: Scene, drivers: Any) -> None:
    """The sink refused all of it: had the others been done, their rows would be nowhere."""
    topic = scene.topic(2, 10)
    driver = drivers(options(scene, topic))
    wait_until(lambda: len(driver.stream._consumer.assignment()) == 2)
    batch = driver.stream.plan(driver.next())
    assert spans(batch) == [(0, 0, 9), (1, 0, 9)]
    with Admin(scene.bootstrap, topic=scene.coordination) as admin:
        admin.evict(scene.group, topic, 0, force=True)
    wait_until(lambda: [x.epoch for x in driver.stream._consumer.assignment()] != [x.epoch for x in batch])
    assert driver.stables() == {0: -1, 1: -1}
    seen: set[tuple[int, int, int]] = set()
    while len(seen) < 2:
        seen.update(spans(driver.stream.plan(driver.next())))
    assert seen == {(0, 0, 9), (1, 0, 9)}
    wait_until(lambda: driver.latest() and driver.stables() == {0: 9, 1: 9})


# -- tasks --------------------------------------------------------------------------------------------------------


def test_ranges_are_cut_evenly_into_tasks() -> None:
    ranges = [OffsetRange("t", 0, 0, 99, 5), OffsetRange("t", 1, 10, 19, 6)]
    assert [(p.partition, p.first, p.last, p.epoch) for p in cut(ranges, 0)] == [(0, 0, 99, 5), (1, 10, 19, 6)]
    pieces = cut(ranges, 4)
    assert [(p.partition, p.first, p.last) for p in pieces] == [
        (0, 0, 24),
        (0, 25, 49),
        (0, 50, 74),
        (0, 75, 99),
        (1, 10, 19),
    ]
    assert len(cut([OffsetRange("t", 0, 7, 8, 5)], 100)) == 2, "no task without an offset"
    assert cut([], 4) == []


def test_each_task_gets_the_done_intervals_that_touch_it() -> None:
    given = OffsetRange("t", 0, 0, 99, 5, ((10, 20), (45, 55), (90, 95)))
    assert [piece.done for piece in cut([given], 2)] == [((10, 20), (45, 55)), ((45, 55), (90, 95))]


def offsets(settings: SourceOptions, piece: Piece) -> list[int]:
    return [offset for batch in read_piece(settings, piece) for offset in batch.column("offset").to_pylist()]


def test_a_task_reads_its_offsets_and_leaves_out_what_is_done(scene: Scene) -> None:
    topic = scene.topic(1, 100)
    settings = options(scene, topic)
    assert offsets(settings, Piece(topic, 0, 20, 29, 5)) == list(range(20, 30))
    assert offsets(settings, Piece(topic, 0, 95, 99, 5)) == list(range(95, 100))
    done = ((0, 2), (5, 5), (9, 12))
    assert offsets(settings, Piece(topic, 0, 0, 9, 5, done)) == [3, 4, 6, 7, 8]


def test_a_range_that_the_log_does_not_hold_is_an_error(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    settings = options(scene, topic, read_timeout_s="1")
    with pytest.raises(RangeGoneError, match="ends at 10") as caught:
        offsets(settings, Piece(topic, 0, 5, 20, 5))
    assert caught.value.gone == ((topic, 0, 10, 20),)
    with pytest.raises(RangeGoneError, match="not in the log any more"):
        offsets(settings, Piece(topic, 0, 500, 520, 5))


def test_a_reader_can_be_sent_to_an_executor_while_it_works(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    before = signal.getsignal(signal.SIGTERM)
    reader = KafkaMarshalReader(options(scene, topic))
    wait_until(lambda: reader.latestOffset()["ranges"])
    again: KafkaMarshalReader = pickle.loads(pickle.dumps(reader))
    assert again.settings == reader.settings
    assert again._stream is None, "the copy is no second member"
    assert signal.getsignal(signal.SIGTERM) != before, "Spark's signal ends it in order"
    reader.stop()
    reader.stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_batch_read_is_refused() -> None:
    source = KafkaMarshalSource({"bootstrap_servers": "a:1", "group_id": "g", "topics": "t"})
    with pytest.raises(ConfigurationError, match="ClaimedBatches"):
        source.reader(source.schema())  # type: ignore[arg-type]
