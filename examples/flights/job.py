"""The whole job: publish, process, check, audit, report; and that nothing is left behind, however it ends."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from shlex import quote
from typing import Any, Final

from rich.text import Text

from flights import bad_records, ledger
from flights.check import ask, check
from flights.data import ROWS, find_file, read
from flights.dead_letters import Letters, collect
from flights.errors import DemoError
from flights.findings import Audited, Findings
from flights.kafka import Kafka
from flights.options import DemoOptions, DriverSettings, ProcessSettings
from flights.ownership import History, history_of, read_dump
from flights.process import DRIVERS, KillPlan, Manner, Process, Story
from flights.publish import Published, Scene, flights_alone, make_topics, publish
from flights.reference import compute
from flights.report import write_report
from flights.screen import Screen, table
from flights.sections import carriers, delay_sections, spark_sections
from flights.supervisor import Crew
from flights.tables import find_folder, read_tables
from flights.tool import Command
from kafka_marshal import Marshal
from kafka_marshal.testing import open_kafka

__all__ = ["Job"]

#: What a run leaves in its folder; files of an earlier run are removed first.
DATABASE: Final = "delays.sqlite"
DUMP: Final = "coordination.jsonl"
LOG: Final = "demo.log"
KAFKA: Final = "kafka"
AUDIT: Final = "audit"

#: How long a Kafka may take to give its first answer.
ANSWER_S: Final = 15.0

#: A dump or an audit of a log of this size takes seconds; this is a machine that does nothing else for us any more.
_DUMP_S: Final = 60.0
_AUDIT_S: Final = 180.0

#: A JVM that lives for some seconds: compiling less, and with one thread, takes half the time.
_JAVA_OF_AUDIT: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_OURS: Final = ("report.html", "ownership.png", DUMP, LOG, "worker-*.log", "driver-*.log", "audit.log", "dump.log")

#: Held while a run works in the folder; it stays there.
_LOCK: Final = ".demo.lock"

_QUALITY: Final = "SELECT failed, flights FROM quality ORDER BY flights DESC, failed"


class Job:
    """One run, with Spark drivers; plain has the one with worker processes in plain Python."""

    #: How many steps are shown.
    STEPS = 6
    MANNER: Manner = DRIVERS
    #: Messages that are no flights are published among the flights, and read back as dead letters.
    BAD_RECORDS = True
    CHECK = "Check: the files are added up in plain Python and compared; the dead letters are read back"
    #: For the report: what anybody can do with the files beside it, and what it shows.
    COMMANDS: tuple[tuple[str, str], ...] = (
        ("kafka-marshal audit coordination.jsonl", "the audit again, without Kafka"),
        ("kafka-marshal replay coordination.jsonl", "every record, with its outcome"),
        ("sqlite3 delays.sqlite 'SELECT * FROM batches'", "every transaction: offsets, epoch, driver"),
        ("sqlite3 delays.sqlite 'SELECT * FROM kafka_marshal_progress'", "the fence: last offset and epoch"),
    )

    def __init__(self, options: DemoOptions, screen: Screen) -> None:
        self.options = options
        self.screen = screen
        self.file: Path = find_file()
        self.tables: Path = find_folder()
        self.folder: Path = options.directory.absolute()
        self.database: Path = self.folder / DATABASE
        #: How many are published.
        self.flights: int = ROWS if options.rows is None else min(options.rows, ROWS)
        self.seed: int = SystemRandom().randrange(10_000) if options.seed is None else options.seed

    def run(self) -> int:
        """All steps; the exit status."""
        begun = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self._own_folder())
            ledger.create(self.database)
            stack.enter_context(self._state())
            stack.enter_context(_log_to(self.folder / LOG))
            self._check_setup()
            scene = self._open_kafka(stack)
            kafka = Kafka(scene.bootstrap, scene.config)
            published = self._publish(stack, kafka, scene)
            story = self._process(scene, published)
            findings = self._check(kafka, scene, published, story)
            page = self._report(findings)
            ledger.write_state(self.database, "equal" if findings.equal else "not equal")
        seconds = time.monotonic() - begun
        self._conclude(findings, page, seconds)
        if self.options.json:
            sys.stdout.write(
                json.dumps({**findings.summary(), "report": str(page), "seconds": round(seconds, 1)}) + "\n"
            )
        return 0 if findings.equal else 1

    def step(self, number: int, text: str, total: int | None = None) -> None:
        """Show that a step begins."""
        self.screen.step(number, text, total, steps=self.STEPS)

    # What the run with plain workers does otherwise.

    def _check_setup(self) -> None:
        """Raise before anything is started if it can't work."""
        from kafka_marshal.pipeline.session import check_setup

        check_setup()

    def _crew_text(self) -> str:
        size = self.options.crew_size
        drivers = f"{size} Spark driver{'s' if size > 1 else ''}"
        return f"{drivers} claim partitions, parse, join, add up; one will be killed"

    def _settings(self, scene: Scene, common: dict[str, Any]) -> ProcessSettings:
        return DriverSettings(**common, dead_letters=scene.dead_letters)

    def _begin_audit(self, scene: Scene) -> AbstractContextManager[Command | None]:
        """It starts Spark while the check runs."""
        arguments = ("audit", "--from-kafka", "--out", str(self.folder / AUDIT), "--master", "local[2]", "--json")
        return Command(scene, self.folder / "audit.log", *arguments, java=_JAVA_OF_AUDIT)

    def _audit(self, scene: Scene, begun: Command) -> Audited:
        self.step(5, f"Audit: the whole coordination log is replayed by Spark, from the topic {scene.coordination!r}")
        self.screen.doing("the audit begun with the check; waiting for its result")
        said = json.loads(begun.output(_AUDIT_S))
        return Audited(said["verdict"], said["clean"], sum(said["violations"].values()), said["records"], AUDIT)

    # The steps.

    def _open_kafka(self, stack: ExitStack) -> Scene:
        options = self.options
        if options.bootstrap is not None:
            self.step(1, f"Kafka: the one at {options.bootstrap}; this run uses topics of its own there")
            return Scene.on_named_kafka(options.bootstrap, options.config)
        self.step(1, "Kafka: a real broker is started on this machine")
        self.screen.doing("its Java starts")
        kafka = open_kafka(1, keep=self.folder / KAFKA if options.keep else None, controllable=True)
        stack.callback(kafka.stop)
        return Scene.on_own_kafka(kafka.bootstrap_servers, kafka.client_config)

    def _publish(self, stack: ExitStack, kafka: Kafka, scene: Scene) -> Published:
        dead = bad_records.count(self.flights) if self.BAD_RECORDS else 0
        total = self.flights + dead
        flights = f"{self.flights:,} flight{'' if self.flights == 1 else 's'}"
        more = f", and {dead:,} message{'s that are none' if dead > 1 else ' that is none'}" if dead else ""
        kafka.brokers(ANSWER_S)
        if self.options.bootstrap is not None and not self.options.keep:
            stack.callback(kafka.delete_topics, scene.topics)
        make_topics(kafka, scene, dead_letters=self.BAD_RECORDS)
        self.step(2, f"Publish: {flights} to the topic {scene.topic!r}, keys are tail numbers{more}", total)
        messages = bad_records.messages if self.BAD_RECORDS else flights_alone
        report = self.screen.rows
        return publish(kafka, scene, self.file, self.options.rows, lambda done: report(done, total), messages)

    def _process(self, scene: Scene, published: Published) -> Story:
        self.step(3, f"Process: {self._crew_text()}", published.rows)
        with (
            self._watch(scene) as marshal,
            Crew(lambda client_id: self._settings(scene, self._common(scene, client_id)), self.folder) as crew,
        ):
            step = Process(
                crew,
                lambda: _holders(marshal, scene.topic),
                self.database,
                published,
                KillPlan.drawn(self.seed, self.MANNER),
                self.options.pace if self.options.plain else 0,
                self.screen.working,
                self.screen.say,
                self.MANNER,
            )
            return step.run(self.options.crew_size)

    def _watch(self, scene: Scene) -> Marshal:
        """A member of the group that asks for nothing: it sees in the log who holds what."""
        return Marshal(
            scene.bootstrap,
            group_id=scene.group_id,
            client_id="demo",
            topic=scene.coordination,
            heartbeat_interval=self.options.heartbeat_interval_ms / 1000,
            config=scene.config,
        )

    def _common(self, scene: Scene, client_id: str) -> dict[str, Any]:
        """What every process that works on the topic gets."""
        return {
            **_address(scene, client_id),
            "database": str(self.database),
            "tables": str(self.tables),
            "heartbeat_interval_ms": self.options.heartbeat_interval_ms,
            "batch_size": self.options.round_size,
            "watchdog": self.options.watched,
        }

    def _check(self, kafka: Kafka, scene: Scene, published: Published, story: Story) -> Findings:
        self.step(4, self.CHECK)
        with self._begin_audit(scene) as audit:
            self.screen.doing("the coordination log is dumped and replayed")
            history = self._replayed(scene)
            self.screen.doing("the files are added up in plain Python")
            wanted = compute(read(self.file, self.options.rows), read_tables(self.tables))
            planted, letters = Counter[bad_records.Planted](), Letters(0, {})
            if self.BAD_RECORDS:
                planted = bad_records.planted(read(self.file, self.options.rows))
                self.screen.doing("the dead letters are read back")
                letters = collect(kafka.read(scene.dead_letters))
            self.screen.doing("the numbers are compared")
            verdict = check(self.database, wanted, planted, letters, published.ends)
            quality = [(str(failed), int(flights)) for failed, flights in ask(self.database, _QUALITY)]
            beat_ms, watched = self.options.heartbeat_interval_ms, self.options.watched
            run = (scene.topic, verdict, story, history, self.seed, beat_ms, watched, self.MANNER)
            return Findings(*run, letters, quality, None if audit is None else self._audit(scene, audit))

    def _replayed(self, scene: Scene) -> History:
        """Who owned what, by the log; from the file that stays, so that anybody can conclude the same from it."""
        with Command(scene, self.folder / "dump.log", "dump", "--output", str(self.folder / DUMP)) as dump:
            dump.output(_DUMP_S)
        return history_of(*read_dump(self.folder / DUMP), scene.group_id, scene.topic)

    def _report(self, findings: Findings) -> Path:
        self.step(self.STEPS, "Report")
        self.screen.doing("the picture is drawn, the page written")
        sections = [] if findings.audit is None else spark_sections(findings, findings.audit)
        sections += delay_sections(self.database)
        page, _ = write_report(findings, carriers(self.database), self.folder, sections, self.COMMANDS)
        return page

    def _conclude(self, findings: Findings, page: Path, seconds: float) -> None:
        show, say = self.screen.show, self.screen.say
        show("")
        self.screen.headline(findings.verdict_text(), "bold green" if findings.equal else "bold red")
        for line in [*findings.differences(), *findings.sentences()]:
            say(line)
        takeovers = findings.rows_of(findings.takeovers())
        if takeovers:
            made = table(
                ("partition", False),
                ("from", False),
                ("to", False),
                ("when", True),
                ("freed by", False),
                ("after its last beat", True),
                ("after the kill", True),
                title="Takeovers, by the replayed log",
            )
            for row in takeovers:
                made.add_row(*map(Text, row))
            show("")
            show(made)
        show("")
        self.screen.show_line(f"Report: {_shown(page)}   ({seconds:.0f} s in all)")
        if self.options.keep and self.options.bootstrap is None:
            kept = _shown(self.folder / KAFKA)
            self.screen.show_line(f"Kafka's data: {kept}   (kafka-marshal broker --keep {quote(kept)})")

    # Around them.

    @contextmanager
    def _own_folder(self) -> Iterator[None]:
        """The folder is there, is this run's alone, and holds nothing of an earlier one."""
        try:
            self._refuse_foreign()
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / _LOCK).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise DemoError(
                        f"Another demo runs in {self.folder}. Nothing was started. Wait for it, or name another folder "
                        "with --dir."
                    ) from None
                if self.options.keep and (self.folder / KAFKA).exists():
                    raise DemoError(
                        f"{self.folder / KAFKA} holds the data of an earlier run. Nothing was started. Remove it, or "
                        "name another folder with --dir."
                    )
                for pattern in _OURS:
                    for path in self.folder.glob(pattern):
                        path.unlink()
                if (self.folder / AUDIT / "audit.json").is_file():  # an earlier run's; nothing else is removed
                    shutil.rmtree(self.folder / AUDIT)
                yield
        except OSError as error:
            if error.filename is None:
                raise
            raise DemoError(
                f"{error.filename}: {error.strerror}. Name a folder that can be written with --dir."
            ) from error

    def _refuse_foreign(self) -> None:
        """Files with our names are removed only in a folder that a demo has worked in before."""
        if (self.folder / _LOCK).exists():
            return
        for pattern in (*_OURS, DATABASE):
            for path in self.folder.glob(pattern):
                raise DemoError(
                    f"{path} was not written by a demo, and would be replaced. Nothing was started. Name another "
                    "folder with --dir."
                )

    @contextmanager
    def _state(self) -> Iterator[None]:
        """The database says how the run goes; "running" in one without a process: it was killed hard."""
        ledger.write_state(self.database, "running")
        try:
            yield
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error}"
            # The error itself is what counts, and the database may be its cause.
            with suppress(DemoError):
                ledger.write_state(self.database, state)
            raise


def _holders(marshal: Marshal, topic: str) -> dict[int, str]:
    """Partition → who holds it now, by the log."""
    leases = marshal.world.leases()
    return {each.partition: each.client_id for each in leases if each.topic == topic and each.client_id is not None}


def _address(scene: Scene, client_id: str) -> dict[str, Any]:
    """What every process of the run gets."""
    return {
        "bootstrap": scene.bootstrap,
        "config": scene.config,
        "topic": scene.topic,
        "coordination": scene.coordination,
        "group_id": scene.group_id,
        "client_id": client_id,
    }


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """What the library warns about goes to a file: the screen shows the story, and errors are raised."""
    loggers = [logging.getLogger("kafka_marshal"), logging.getLogger("flights")]
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
        handler.close()


def _shown(path: Path) -> str:
    """Relative to where the user is, if it lies there."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
