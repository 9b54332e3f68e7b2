"""The audit of a run, as a process of its own: Spark replays the whole coordination log out of Kafka.

``python -m flights.auditor`` is started and ended as ``child`` says; its line is an AuditorSettings. It does
what ``kafka-marshal audit --from-kafka --out DIR`` does.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Final

from flights.child import Tell, run_child
from flights.options import AuditorSettings
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.kafka import KafkaSource
from kafka_marshal.pipeline.audit.report import write_report
from kafka_marshal.pipeline.session import spark_session

__all__ = ["main", "work"]

_SPARK: Final = {
    "spark.driver.memory": "768m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.showConsoleProgress": "false",
}


def work(settings: AuditorSettings, tell: Tell) -> None:
    """Audit, write the tables and the page, tell what was found."""
    out = Path(settings.out)
    spark = spark_session("kafka-marshal demo: audit", master="local[2]", config=_SPARK)
    try:
        source = KafkaSource(settings.bootstrap, settings.config, settings.coordination)
        with Audit(source, spark=spark, out=out) as audit:
            found = audit.run(partial(write_report, log_ends=source.log_ends))
            tell(
                {
                    "event": "audited",
                    "verdict": found.verdict,
                    "clean": found.is_clean,
                    "violations": found.violation_count,
                    "records": found.records,
                }
            )
    finally:
        spark.stop()


def main() -> int:
    """The process, from its first line to its exit status."""
    return run_child(AuditorSettings, work)


if __name__ == "__main__":
    sys.exit(main())
