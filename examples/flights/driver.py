"""One Spark driver: claims partitions, lets Spark add up what is in them, writes each round in one fenced transaction.

``python -m flights.driver`` is started and ended as ``child`` says; its line is a DriverSettings.
:func:`work` and :class:`Rounds` are what a user of kafka-marshal writes; what is computed stands in
``on_spark.py``.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Final

from flights.child import Tell, run_child
from flights.errors import DemoError
from flights.ledger import MovedError, write_round
from flights.on_spark import Records, Tables, above, load_tables, summarize
from flights.options import DriverSettings
from flights.supervisor import READY
from kafka_marshal.errors import (
    ConfigurationError,
    ConnectorMissingError,
    SinkError,
    SparkJavaError,
    SparkMissingError,
    SparkVersionError,
    StaleEpochError,
)
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.session import kafka_options, spark_session
from kafka_marshal.sinks import SqliteSink

__all__ = ["Rounds", "main", "work"]

logger: logging.Logger = logging.getLogger("flights")

#: Two cores, for the time when it is alone, and little memory; one task after a shuffle, and no planning between
#: stages, which pays for large tables only.
SPARK: Final = {
    "spark.driver.memory": "512m",
    # A JVM that lives for a minute: compiling less, and with one thread, takes half the time.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    # A round's rows are read twice, and dropped.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    "spark.ui.showConsoleProgress": "false",
    # Else it warns that its plans are long.
    "spark.sql.debug.maxToStringFields": "200",
}

#: Errors that a successor would meet as well; and those of their kinds that only ask for the round to be done again.
#: (A SparkSetupError of no special kind is a JVM that did not come up: the next one may.)
_LASTING: Final = (
    *(SinkError, DemoError, ConfigurationError),
    *(SparkMissingError, SparkJavaError, SparkVersionError, ConnectorMissingError),
)
_PASSING: Final = (StaleEpochError, MovedError)


class Rounds:
    """What is done with each round of claimed ranges: at most one transaction, whatever happens when."""

    def __init__(self, settings: DriverSettings, tables: Tables, sink: SqliteSink, tell: Tell) -> None:
        self._settings = settings
        self._tables = tables
        self._sink = sink
        self._tell = tell
        self._letters = {
            **kafka_options(settings.bootstrap, settings.config),
            "topic": settings.dead_letters,
            "includeHeaders": "true",
        }

    def __call__(self, records: Records, batch: ClaimedBatch) -> None:
        """Add up the records of a round (claimed.ClaimedBatches calls it), and write the sums.

        Raises StaleEpochError where another driver owns one of the partitions by now; nothing is written then.
        """
        starts = {(each.topic, each.partition): each.first for each in batch.ranges}
        named = [(each.partition, each.first, each.last) for each in batch.ranges]
        self._tell({"event": "begun", "ranges": named})
        try:
            done = self._fence(batch)
            # Only where it is needed: each other filter is another plan, and code that Spark compiles again.
            overlap = {key: last for key, last in done.items() if last >= starts[key]}
            with summarize(above(records, overlap), self._tables) as found:
                self._tell({"event": "computed", "ranges": named})
                if found.troubles:
                    # Before the transaction: a crash in between repeats dead letters, which can be recognised, and
                    # loses none.
                    found.dead.write.format("kafka").options(**self._letters).save()
                self._tell({"event": "lettered", "ranges": named})
                with self._sink.transaction(self._settings.group_id, batch.leases) as tx:
                    epochs = {(topic, partition): epoch for topic, partition, epoch, _ in batch.leases}
                    parts = [
                        (
                            each.topic,
                            each.partition,
                            epochs[each.topic, each.partition],
                            each.first,
                            each.last,
                            each.rows,
                        )
                        for each in found.parts
                    ]
                    name = self._settings.client_id
                    write_round(tx, name, done, parts, found.groups, found.quality, found.troubles)
        except StaleEpochError as error:
            self._tell({"event": "fenced", "ranges": named})
            logger.warning("%s", error)
            raise
        written = sum(part.rows for part in found.parts)
        handed_out = sum(last - first + 1 for _, first, last in named)
        self._tell({"event": "written", "ranges": named, "skipped": handed_out - written})

    def _fence(self, batch: ClaimedBatch) -> dict[tuple[str, int], int]:
        """(topic, partition) → the last offset that the sink has; no driver with an older epoch can move it now.

        A separate transaction, before the sums are made: a predecessor that is late could otherwise still commit rows
        while Spark adds them up again.
        """
        fence = [(topic, partition, epoch, -1) for topic, partition, epoch, _ in batch.leases]
        with self._sink.transaction(self._settings.group_id, fence) as tx:
            return {(topic, partition): tx.last_offset(topic, partition) for topic, partition, _, _ in fence}


def work(settings: DriverSettings, tell: Tell) -> None:
    """Claim, compute, write: the whole driver."""
    spark = spark_session(f"flights {settings.client_id}", master="local[2]", config=SPARK)
    tables = load_tables(spark, Path(settings.tables))
    sink = SqliteSink(Path(settings.database))
    try:
        with settings.join() as marshal:
            signal.signal(signal.SIGTERM, lambda *_: marshal.stop())  # the round is finished, leases are released
            tell({"event": READY})
            with ClaimedBatches(spark, marshal, [settings.topic], max_records_per_batch=settings.batch_size) as batches:
                batches.foreach_batch(Rounds(settings, tables, sink, tell))
    finally:
        sink.close()
        spark.stop()


def _lasts(error: Exception) -> bool:
    return isinstance(error, _LASTING) and not isinstance(error, _PASSING)


def main() -> int:
    """The process, from its first line to its exit status."""
    return run_child(DriverSettings, work, _lasts)


if __name__ == "__main__":
    sys.exit(main())
