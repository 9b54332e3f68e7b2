"""The ranges of each batch, and when they are done: the source's driver side, without Spark."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from kafka_marshal.admin import Admin
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.engine.work.stuck import Stuck
from kafka_marshal.errors import (
    ConfigurationError,
    KafkaUnavailableError,
    MarshalError,
    PositionLostError,
    RangeGoneError,
    TopicAbsentError,
)
from kafka_marshal.pipeline.source import (
    IS_TOLD_OF_AVAILABLE_NOW,
    NOTHING,
    ClaimedStream,
    KafkaMarshalReader,
    KafkaMarshalSource,
    ReadAllAvailable,
    ReadMaxRows,
    SourceOptions,
    SourcePiece,
    cut,
    read_piece,
    rows_of,
)
from tests.client.conftest import HI, Scene, wait_until
from tests.pipeline.conftest import wait_until_takeable


def options(scene: Scene, topic: str, **more: str) -> SourceOptions:
    return SourceOptions.parse(
        {
            "bootstrap_servers": scene.bootstrap,
            "group_id": scene.group,
            "client_id": "query",
            "topics": topic,
            "coordination_topic": scene.coordination,
            "heartbeat_interval": str(HI / 1000),
            **more,
        }
    )


class Driver:
    """A stream queried as by Spark: every answer passes through JSON."""

    def __init__(self, settings: SourceOptions) -> None:
        self.stream = ClaimedStream.open(settings)

    def latest(self) -> Any:
        return json.loads(json.dumps(self.stream.latest()))

    def next(self) -> Any:
        """The end of the next non-empty batch."""
        before = self.latest()
        return before if before["ranges"] and self.stream._taken else wait_until(self._new)

    def _new(self) -> Any:
        end = self.latest()
        return end if self.stream._taken else None

    def stables(self) -> dict[int, int]:
        """Partition → last offset done, -1 for none."""
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
    """At its start, Spark asks for the ranges of its last batch, whether it will run them or not."""
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
    # A newer instance of the same client takes over the lease (C7).
    _kept = scene.member("query").consumer([topic])
    wait_until(lambda: not driver.stream._consumer.assignment(), what="the lease is gone")
    driver.stream._finish()
    assert "nothing of this batch is committed" in caplog.text
    assert driver.stables() == {0: -1}


def test_one_lease_lost_commits_nothing_of_the_batch_and_the_rest_comes_again(scene: Scene, drivers: Any) -> None:
    """The sink rejected all of it: if the others counted as done, their rows would be lost."""
    topic = scene.topic(2, 10)
    driver = drivers(options(scene, topic))
    wait_until_takeable(driver.stream._consumer, 2)
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


def offsets(settings: SourceOptions, piece: SourcePiece) -> list[int]:
    return [offset for batch in read_piece(settings, piece) for offset in batch.column("offset").to_pylist()]


def test_a_task_reads_its_offsets_and_leaves_out_what_is_done(scene: Scene) -> None:
    topic = scene.topic(1, 100)
    settings = options(scene, topic)
    assert offsets(settings, SourcePiece(topic, 0, 20, 29, 5)) == list(range(20, 30))
    assert offsets(settings, SourcePiece(topic, 0, 95, 99, 5)) == list(range(95, 100))
    done = ((0, 2), (5, 5), (9, 12))
    assert offsets(settings, SourcePiece(topic, 0, 0, 9, 5, done)) == [3, 4, 6, 7, 8]


def test_a_range_that_the_log_does_not_hold_is_an_error(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    settings = options(scene, topic, read_timeout_s="1")
    with pytest.raises(RangeGoneError, match="ends at 10") as caught:
        offsets(settings, SourcePiece(topic, 0, 5, 20, 5))
    assert caught.value.gone == ((topic, 0, 10, 20),)
    with pytest.raises(RangeGoneError, match="not in the log any more"):
        offsets(settings, SourcePiece(topic, 0, 500, 520, 5))


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


# -- limits and ends: Spark 4.2 passes them; older releases use the default --------------------------------------------


def test_a_limit_of_sparks_is_kept(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 20)
    stream = drivers(options(scene, topic, max_records_per_batch="5")).stream
    wait_until(lambda: stream.latest(None, rows_of(ReadMaxRows(3), 5))["ranges"])
    assert spans(stream.plan(stream._last)) == [(0, 0, 2)]
    assert spans(stream.plan(stream.latest(stream._last))) == [(0, 3, 7)]
    assert spans(stream.plan(stream.latest(stream._last, rows_of(ReadAllAvailable(), 5)))) == [(0, 8, 19)]
    assert KafkaMarshalReader(stream._settings).getDefaultReadLimit() == ReadMaxRows(5)


def test_the_start_that_spark_names_is_the_answer_where_there_is_nothing_new(scene: Scene, drivers: Any) -> None:
    """Else a restarted query would take the difference for a batch."""
    earlier = {"run": "an earlier one", "batch": 7, "ranges": []}
    stream = drivers(options(scene, scene.topic(1))).stream
    assert stream.latest(earlier, 5) == earlier
    assert stream.latest(earlier, 5) == earlier


def test_available_now_ends_with_what_was_there(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(2, 10)
    stream = drivers(options(scene, topic, max_records_per_batch="8")).stream
    stream.end_with_what_is_there()
    scene.publish(topic, 2, 10)
    seen, start = list[tuple[int, int, int]](), dict[str, Any](NOTHING)
    while (end := stream.latest(start, 8)) != start:
        assert end["batch"] == start["batch"] + 1, "it waits for its leases, and for the log, and never gives up early"
        seen += spans(stream.plan(end))
        start = end
    assert sorted((p, offset) for p, first, last in seen for offset in range(first, last + 1)) == [
        (p, offset) for p in range(2) for offset in range(10)
    ]
    leases = stream._marshal.world.leases()
    assert {lease.partition: lease.stable for lease in leases} == {0: 9, 1: 9}, "the last batch is done, too"


def test_available_now_waits_for_what_another_member_does(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 10)
    lease = scene.member("other").claim(topic, 0, timeout=20)
    stream = drivers(options(scene, topic)).stream
    stream.end_with_what_is_there()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream.latest, dict(NOTHING), 5)
        lease.release(7)
        end = answer.result(60)
    assert spans(stream.plan(end)) == [(0, 8, 9)]
    assert stream.latest(end, 5) == end


def test_available_now_does_not_take_a_lost_position_for_done(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(1, 10)
    stream = drivers(options(scene, topic)).stream
    stream.end_with_what_is_there()
    lost = Stuck(topic, 0, 99, "position_lost", "position lost")
    stream._consumer = Mock(take=lambda *_, timeout: [], wait_done=lambda *_: True, lost_positions=[lost])
    with pytest.raises(PositionLostError, match="position lost"):
        stream.latest(dict(NOTHING), 5)


def test_a_lost_position_ends_the_query_unless_it_is_to_be_left(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(2, 10)
    with Admin(scene.bootstrap, topic=scene.coordination).pause(scene.group, expires_in=60) as pause:
        pause.reposition({(topic, 0): 99, (topic, 1): 0}, force=True)
    left = drivers(options(scene, topic, position_lost="leave"))
    assert {given.partition for given in left.stream.plan(left.next())} == {1}
    wait_until(lambda: left.latest() and left.stream._consumer.lost_positions)
    left.stream.close()
    raising = drivers(options(scene, topic))
    with pytest.raises(PositionLostError, match="release-group"):
        wait_until(lambda: raising.latest() is None)


@pytest.mark.skipif(IS_TOLD_OF_AVAILABLE_NOW, reason="from Spark 4.2 on a Python source is told of availableNow")
def test_before_spark_4_2_the_first_answer_names_nothing_and_a_query_that_ends_then_says_so(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(1, 10)
    for asked in (1, 3):
        reader = KafkaMarshalReader(options(scene, topic, client_id=f"query-{asked}"))
        try:
            assert reader.latestOffset() == dict(NOTHING)
            for _ in range(asked - 1):
                reader.latestOffset()
        finally:
            reader.stop()
        assert ("nothing was read or committed" in caplog.text) is (asked == 1)
        caplog.clear()


def test_a_batch_that_no_one_confirmed_is_named_when_the_query_ends(
    scene: Scene, drivers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(1, 10)
    driver = drivers(options(scene, topic))
    driver.stream.plan(driver.next())
    driver.stream.close()
    assert f"has not confirmed batch 1, which was delivered: {topic} [0] offsets 0 to 9" in caplog.text
    again = drivers(options(scene, topic))
    again.stream.commit(again.stream.plan(end := again.next()) and end)
    caplog.clear()
    again.stream.close()
    assert "has not confirmed" not in caplog.text


def test_where_the_logs_end_is_said_for_the_querys_progress(scene: Scene, drivers: Any) -> None:
    topic = scene.topic(2, 10)
    stream = drivers(options(scene, topic)).stream
    scene.publish(topic, 1, 3)
    assert stream.log_ends() == {topic: {"0": 13, "1": 10}}
    stream._consumer = Mock(ends=Mock(side_effect=KafkaUnavailableError("no leader")))
    assert stream.log_ends() is None, "the query goes on without"
