"""The whole job with Spark: drivers claim the flights, and the coordination log is audited."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.demo import bad_records, ledger
from kafka_marshal.demo.check import ask
from kafka_marshal.demo.dead_letters import read_letters
from kafka_marshal.demo.errors import DemoError
from kafka_marshal.demo.flights import read
from kafka_marshal.demo.job import Job
from kafka_marshal.demo.options import AuditorSettings, DemoOptions, DriverSettings, ProcessSettings
from kafka_marshal.demo.publish import Published, Scene, publish
from kafka_marshal.demo.reference import compute
from kafka_marshal.demo.spark_check import check_drivers
from kafka_marshal.demo.supervisor import Event, WorkerProcess
from kafka_marshal.demo.tables import find_folder, read_tables

if TYPE_CHECKING:
    from kafka_marshal.demo.findings import Findings
    from kafka_marshal.demo.process import Story
    from kafka_marshal.demo.report import Section
    from kafka_marshal.demo.screen import Screen
    from kafka_marshal.demo.spark_findings import Audited, SparkFindings

__all__ = ["SparkJob"]

#: Where the audit's tables and report go, in the run's folder.
AUDIT: Final = "audit"

#: An audit of a log of this size takes seconds; this is a machine that does nothing else for us any more.
_AUDIT_S: Final = 180.0

_COMMANDS: Final = (
    ("kafka-marshal audit coordination.jsonl", "the audit again, without Kafka"),
    ("kafka-marshal replay coordination.jsonl", "every record, with its outcome"),
    ("sqlite3 delays.sqlite 'SELECT * FROM batches'", "every transaction: offsets, epoch, driver"),
    ("sqlite3 delays.sqlite 'SELECT * FROM kafka_marshal_progress'", "the fence: last offset and epoch"),
)

#: Routes with fewer flights than this say little about themselves.
_ENOUGH: Final = 30


class SparkJob(Job):
    """One run, with Spark drivers."""

    STEPS = 6

    def __init__(self, options: DemoOptions, screen: Screen) -> None:
        super().__init__(options, screen)
        self.tables = find_folder()

    # The steps.

    def _create(self) -> None:
        ledger.create(self.database)
        if (self.folder / AUDIT / "audit.json").is_file():  # an earlier run's; nothing else is removed
            shutil.rmtree(self.folder / AUDIT)

    def _open_kafka(self, stack: ExitStack) -> Scene:
        from kafka_marshal.pipeline.session import check_setup

        check_setup()  # before anything is started
        return super()._open_kafka(stack)

    def _publish(self, stack: ExitStack, cluster: KafkaCluster, scene: Scene) -> Published:
        dead = bad_records.count(self.flights)
        flights = f"{self.flights:,} flight{'' if self.flights == 1 else 's'}"
        more = f", and {dead:,} message{'s that are none' if dead > 1 else ' that is none'}" if dead else ""
        self._make_topics(stack, cluster, scene, dead_letters=True)
        total = self.flights + dead
        self.step(2, f"Publish: {flights} to the topic {scene.topic!r}, keys are tail numbers{more}", total)
        report = self.screen.rows
        return publish(
            cluster, scene, self.file, self.options.rows, lambda done: report(done, total), bad_records.messages
        )

    def _process(self, cluster: KafkaCluster, scene: Scene, published: Published) -> Story:
        from kafka_marshal.demo.process import DRIVERS

        size = self.options.crew_size
        drivers = f"{size} Spark driver{'s' if size > 1 else ''}"
        text = f"Process: {drivers} claim partitions, parse, join, add up; one will be killed"
        self.step(3, text, published.rows)
        return self._run_crew(cluster, scene, published, DRIVERS)

    def _settings(self, scene: Scene, client_id: str) -> ProcessSettings:
        return DriverSettings(
            bootstrap=scene.bootstrap,
            config=scene.config,
            topic=scene.topic,
            coordination=scene.coordination,
            group_id=scene.group_id,
            client_id=client_id,
            database=str(self.database),
            heartbeat_interval_ms=self.options.heartbeat_interval_ms,
            batch_size=self.options.round_size,
            watchdog=self.options.watched,
            dead_letters=scene.dead_letters,
            tables=str(self.tables),
        )

    def _check(self, cluster: KafkaCluster, scene: Scene, published: Published, story: Story) -> SparkFindings:
        from kafka_marshal.demo.spark_findings import SparkFindings

        self.step(4, "Check: the files are added up in plain Python and compared; the dead letters are read back")
        history = self._replayed(cluster, scene)
        wanted = compute(read(self.file, self.options.rows), read_tables(self.tables))
        there = bad_records.planted(read(self.file, self.options.rows))
        letters = read_letters(cluster, scene.dead_letters)
        verdict = check_drivers(self.database, wanted, there, letters, published.ends)
        quality = [
            (str(check), int(flights))
            for check, flights in ask(
                self.database, "SELECT failed, flights FROM quality ORDER BY flights DESC, failed"
            )
        ]
        return SparkFindings(
            scene.topic,
            verdict,
            story,
            history,
            self.seed,
            self.options.heartbeat_interval_ms,
            0,
            self.options.watched,
            letters,
            quality,
            self._audit(scene),
        )

    def _audit(self, scene: Scene) -> Audited:
        from kafka_marshal.demo.spark_findings import Audited

        self.step(5, f"Audit: the whole coordination log is replayed by Spark, from the topic {scene.coordination!r}")
        settings = AuditorSettings(
            bootstrap=scene.bootstrap,
            config=scene.config,
            topic=scene.topic,
            coordination=scene.coordination,
            group_id=scene.group_id,
            client_id="audit",
            out=str(self.folder / AUDIT),
        )
        told: list[Event] = []
        process = WorkerProcess(settings, self.folder / "audit.log", told.append)
        try:
            ended = process.wait(_AUDIT_S)
        finally:
            if process.running:
                process.kill()
            process.end_rest()
        if not ended or not told:
            raise DemoError(
                f"The log could not be audited: {process.last_words() or f'no end after {_AUDIT_S:.0f} s'}. The result "
                f"is compared, and stands; {self.folder / 'audit.log'} says more."
            )
        said = told[0].said
        return Audited(said["verdict"], said["clean"], said["violations"], said["records"], AUDIT)

    def _report(self, findings: Findings) -> Path:
        from kafka_marshal.demo.report import CarrierLine, write_report

        self.step(self.STEPS, "Report")
        question = """
            SELECT carrier || ' ' || coalesce(carrier_name, '(unknown)'), sum(flights), sum(cancelled),
                   1.0 * sum(arrival_delay_sum) / nullif(sum(arrivals), 0) AS mean, max(arrival_delay_max)
            FROM delays GROUP BY carrier ORDER BY mean DESC, carrier
        """
        lines = [CarrierLine(*line) for line in ask(self.database, question)]
        page, _ = write_report(findings, lines, self.folder, self._sections(findings), _COMMANDS)
        return page

    def _sections(self, findings: Findings) -> list[Section]:
        from kafka_marshal.demo.report import Section
        from kafka_marshal.demo.spark_findings import SparkFindings

        assert isinstance(findings, SparkFindings)
        audit, letters = findings.audit, findings.letters
        numbers = frozenset({1})
        troubles = [(trouble, f"{count:,}") for trouble, count in letters.troubles.most_common()]
        return [
            Section(
                "Audit of the coordination log",
                (),
                (),
                note=f"{audit.verdict}, replayed by Spark out of the topic, each with its outcome.",
                link=("The audit's own report", f"{audit.page}/report.html"),
            ),
            Section(
                "Messages that are no flights",
                ("what is wrong", "messages"),
                troubles,
                numbers,
                "Each went to the dead-letter topic with whence it came, and all of them were found there.",
            )
            if findings.verdict.equal
            else Section("Messages that are no flights", ("what is wrong", "messages"), troubles, numbers),
            Section(
                "Flights that fail a check",
                ("check", "flights"),
                [(check, f"{flights:,}") for check, flights in findings.quality],
                numbers,
                "They count all the same.",
            ),
            *self._delay_sections(),
        ]

    def _delay_sections(self) -> list[Section]:
        from kafka_marshal.demo.report import Section

        routes = ask(
            self.database,
            f"""
            SELECT origin || ' to ' || coalesce(max(destination), dest), sum(flights),
                   1.0 * sum(arrival_delay_sum) / sum(arrivals) AS mean
            FROM delays GROUP BY origin, dest HAVING sum(arrivals) >= {_ENOUGH}
            ORDER BY mean DESC, origin, dest LIMIT 10
            """,  # noqa: S608 - a constant of ours
        )
        hours = ask(
            self.database,
            """
            SELECT hour, sum(flights), 1.0 * sum(departure_delay_sum) / nullif(sum(departures), 0),
                   1.0 * sum(wet_departure_delay_sum) / nullif(sum(wet_departures), 0)
            FROM delays GROUP BY hour ORDER BY hour
            """,
        )
        return [
            Section(
                "The routes that were latest",
                ("route", "flights", "arrival delay, mean"),
                [(route, f"{flights:,}", _minutes(mean)) for route, flights, mean in routes],
                frozenset({1, 2}),
            ),
            Section(
                "By hour of the planned departure",
                ("hour", "flights", "departure delay, mean", "when it rained"),
                [(f"{hour}:00", f"{flights:,}", _minutes(mean), _minutes(wet)) for hour, flights, mean, wet in hours],
                frozenset({0, 1, 2, 3}),
            ),
        ]


def _minutes(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.1f} min"
