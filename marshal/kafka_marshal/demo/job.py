"""The whole job: publish, process, check, report; and that nothing is left behind, however it ends."""

from __future__ import annotations

import fcntl
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Final

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.demo.check import check
from kafka_marshal.demo.errors import DemoError
from kafka_marshal.demo.flights import ROWS, find_file
from kafka_marshal.demo.follow import Follower, read_log
from kafka_marshal.demo.options import DemoOptions, ProcessSettings, WorkerSettings
from kafka_marshal.demo.ownership import History, history_of, read_dump, write_dump
from kafka_marshal.demo.publish import Published, Scene, make_topics, publish
from kafka_marshal.demo.sink import carriers, create, write_state
from kafka_marshal.demo.supervisor import Crew
from kafka_marshal.testing import open_kafka

if TYPE_CHECKING:
    from kafka_marshal.demo.findings import Findings
    from kafka_marshal.demo.process import Manner, Story
    from kafka_marshal.demo.screen import Screen

__all__ = ["Job"]

#: What a run leaves in its folder; files of an earlier run are removed first.
DATABASE: Final = "delays.sqlite"
DUMP: Final = "coordination.jsonl"
LOG: Final = "demo.log"
KAFKA: Final = "kafka"

#: How long a Kafka may take to give its first answer.
ANSWER_S: Final = 15.0


_OURS: Final = ("report.html", "ownership.png", DUMP, LOG, "worker-*.log", "driver-*.log", "audit.log")


class Job:
    """One run, with plain workers; spark_job has the one with Spark drivers."""

    #: How many steps are shown.
    STEPS = 5

    def __init__(self, options: DemoOptions, screen: Screen) -> None:
        self.options = options
        self.screen = screen
        self.file = find_file()
        self.folder = options.directory.absolute()
        self.database = self.folder / DATABASE
        #: How many are published.
        self.flights = ROWS if options.rows is None else min(options.rows, ROWS)
        self.seed = SystemRandom().randrange(10_000) if options.seed is None else options.seed

    def run(self) -> int:
        """All steps; the exit status."""
        begun = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self._own_folder())
            self._create()
            stack.enter_context(self._state())
            stack.enter_context(_log_to(self.folder / LOG))
            scene = self._open_kafka(stack)
            cluster = stack.enter_context(closing(KafkaCluster(scene.bootstrap, scene.config)))
            published = self._publish(stack, cluster, scene)
            story = self._process(cluster, scene, published)
            findings = self._check(cluster, scene, published, story)
            page = self._report(findings)
            write_state(self.database, "equal" if findings.equal else "not equal")
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

    # The steps.

    def _create(self) -> None:
        """An empty database."""
        create(self.database)

    def _open_kafka(self, stack: ExitStack) -> Scene:
        options = self.options
        if options.bootstrap is not None:
            self.step(1, f"Kafka: the one at {options.bootstrap}; this run uses topics of its own there")
            return Scene.on_named_kafka(options.bootstrap, options.config)
        self.step(1, "Kafka: a real broker is started on this machine")
        kafka = open_kafka(1, keep=self.folder / KAFKA if options.keep else None, controllable=True)
        stack.callback(kafka.stop)
        return Scene.on_own_kafka(kafka.bootstrap_servers, kafka.client_config)

    def _remove_topics(self, scene: Scene) -> None:
        Probe(scene.bootstrap, scene.config).delete_topics(scene.topics, timeout_s=10.0)

    def _publish(self, stack: ExitStack, cluster: KafkaCluster, scene: Scene) -> Published:
        total = self.flights
        flights = f"{total:,} flight{'' if total == 1 else 's'}"
        text = f"Publish: {flights} to the topic {scene.topic!r}, keys are tail numbers"
        self._make_topics(stack, cluster, scene)
        self.step(2, text, total)
        return publish(cluster, scene, self.file, self.options.rows, lambda done: self.screen.rows(done, total))

    def _make_topics(
        self, stack: ExitStack, cluster: KafkaCluster, scene: Scene, *, dead_letters: bool = False
    ) -> None:
        """Make them, and see to it that they go again where they are to."""
        brokers = cluster.broker_count(ANSWER_S)
        if self.options.bootstrap is not None and not self.options.keep:
            stack.callback(self._remove_topics, scene)
        make_topics(cluster, scene, brokers, dead_letters=dead_letters)

    def _process(self, cluster: KafkaCluster, scene: Scene, published: Published) -> Story:
        from kafka_marshal.demo.process import WORKERS

        options = self.options
        pace = f", {options.pace:,} rows a second each" if options.pace else ""
        workers = f"{options.crew_size} worker{'s' if options.crew_size > 1 else ''}"
        text = f"Process: {workers}{pace}; one will be killed, one added"
        self.step(3, text, published.rows)
        return self._run_crew(cluster, scene, published, WORKERS)

    def _run_crew(self, cluster: KafkaCluster, scene: Scene, published: Published, manner: Manner) -> Story:
        from kafka_marshal.demo.process import KillPlan, Process

        with (
            Follower(cluster, scene.coordination, scene.group_id, scene.topic) as follower,
            Crew(lambda client_id: self._settings(scene, client_id), self.folder) as crew,
        ):
            step = Process(
                crew,
                follower,
                self.database,
                published,
                KillPlan.drawn(self.seed, manner),
                self.options.pace if self.options.plain else 0,
                self.screen.working,
                self.screen.say,
                manner,
            )
            return step.run(self.options.crew_size)

    def _settings(self, scene: Scene, client_id: str) -> ProcessSettings:
        return WorkerSettings(
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
            pace=self.options.pace,
        )

    def _check(self, cluster: KafkaCluster, scene: Scene, published: Published, story: Story) -> Findings:
        from kafka_marshal.demo.findings import Findings

        self.step(4, "Check: the file is added up by itself and compared; the coordination log is replayed")
        history = self._replayed(cluster, scene)
        verdict = check(self.database, self.file, self.options.rows, published.ends)
        options = self.options
        return Findings(
            scene.topic,
            verdict,
            story,
            history,
            self.seed,
            options.heartbeat_interval_ms,
            options.pace,
            options.watched,
        )

    def _replayed(self, cluster: KafkaCluster, scene: Scene) -> History:
        """Who owned what, by the log; from the file that stays, so that anybody can conclude the same from it."""
        write_dump(self.folder / DUMP, *read_log(cluster, scene.coordination))
        return history_of(*read_dump(self.folder / DUMP), scene.group_id, scene.topic)

    def _report(self, findings: Findings) -> Path:
        from kafka_marshal.demo.report import CarrierLine, write_report

        self.step(self.STEPS, "Report")
        lines = [CarrierLine(*line) for line in carriers(self.database)]
        page, _ = write_report(findings, lines, self.folder)
        return page

    def _conclude(self, findings: Findings, page: Path, seconds: float) -> None:
        from rich.text import Text

        from kafka_marshal.demo.screen import table

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
            self.screen.show_line(f"Kafka's data: {kept}   (kafka-marshal broker --keep {kept})")

    # Around them.

    @contextmanager
    def _own_folder(self) -> Iterator[None]:
        """The folder is there, is this run's alone, and holds nothing of an earlier one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".demo.lock").open("w") as lock:
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
                yield
        except OSError as error:
            if error.filename is None:
                raise
            raise DemoError(
                f"{error.filename}: {error.strerror}. Name a folder that can be written with --dir."
            ) from error

    @contextmanager
    def _state(self) -> Iterator[None]:
        """The database says how the run goes; "running" in one that nobody works on: it was killed hard."""
        write_state(self.database, "running")
        try:
            yield
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error}"
            # The error itself is what counts, and the database may be its cause.
            with suppress(DemoError):
                write_state(self.database, state)
            raise


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """What the library warns about goes to a file: the screen tells the story, and errors are raised."""
    logger = logging.getLogger("kafka_marshal")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.close()


def _shown(path: Path) -> str:
    """Relative to where the user is, if it lies there."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
