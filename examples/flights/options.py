"""What can be chosen about a run of the demo, and what its workers and drivers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from kafka_marshal import Marshal
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.watchdog import is_supported

__all__ = [
    "FAILURE",
    "PARTITIONS",
    "DemoOptions",
    "DriverSettings",
    "ProcessSettings",
    "WorkerSettings",
]

#: Of the topic of flights.
PARTITIONS = 12

#: What a worker reports to its parent before it ends because of an error.
FAILURE = "failed"


#: At least this number of rounds; and the most messages in one, whose planning takes Spark as long as 5,000 rows.
_ROUNDS = 16
_ROUND = 20_000


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """A run of the demo. ConfigurationError, with nothing done, for what can't work."""

    #: How many flights, from the beginning of the file; None: all 336,776.
    rows: int | None = None
    #: Plain worker processes, without Spark: one is killed on the way, one is added.
    plain: bool = False
    #: Spark drivers or worker processes at the start, 1 … 11, one of which is killed. None: 2 drivers, or 3 workers.
    workers: int | None = None
    #: Where the report, the database and the workers' logs go; files of an earlier run are replaced.
    directory: Path = Path("out/demo")
    #: Keep the topics: the local broker's data in directory/kafka, or the topics on the Kafka that was named.
    keep: bool = False
    #: host:port of a Kafka that runs already; None: one is started.
    bootstrap: str | None = None
    #: librdkafka properties for that Kafka (TLS, SASL).
    config: Mapping[str, object] = field(default_factory=dict, repr=False)
    #: Decides when whom the kill hits. None: another one every time; it is shown.
    seed: int | None = None
    #: The result goes to standard output as one JSON object; what is for people, to standard error.
    json: bool = False
    #: HI of the workers: a silent one is replaced after twice this.
    heartbeat_interval_ms: int = 1_000
    #: Each worker has a watchdog, which releases at its death what it held. False: none has; nor where the system has
    #: none (see ``watched``).
    watchdog: bool = True
    #: The most messages in one transaction: a plain worker's batch, or a driver's round over all its partitions. None:
    #: 1,000, or 20,000 (less of a few rows, so that there are some rounds to be killed in).
    batch_size: int | None = None
    #: Rows a second that one plain worker takes its time for, as if the work were harder; 0: as fast as it can.
    pace: int = 6_000

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 0:
            raise ConfigurationError(f"rows must be at least 0, not {self.rows}. Nothing was started.")
        if not 1 <= self.crew_size < PARTITIONS:
            raise ConfigurationError(
                f"workers must be 1 … {PARTITIONS - 1}, not {self.workers}: there are {PARTITIONS} partitions to share "
                "out, and one worker more may join on the way. Nothing was started."
            )
        if self.round_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, not {self.batch_size}. Nothing was started.")
        if self.pace < 0:
            raise ConfigurationError(f"pace must be at least 0, not {self.pace}. Nothing was started.")

    @property
    def crew_size(self) -> int:
        """Processes at the start."""
        return (3 if self.plain else 2) if self.workers is None else self.workers

    @property
    def watched(self) -> bool:
        """Whether the workers have watchdogs."""
        return self.watchdog and is_supported()

    @property
    def round_size(self) -> int:
        """The most messages in one transaction."""
        if self.batch_size is not None:
            return self.batch_size
        return 1_000 if self.plain else min(_ROUND, max(500, (self.rows or _ROUND * _ROUNDS) // _ROUNDS))


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What every process of a run gets, as one line of JSON."""

    #: The module that it runs.
    program: ClassVar[str]

    bootstrap: str
    config: Mapping[str, object] = field(repr=False)
    #: The topic of flights, the coordination topic, the group, and this process's name in it.
    topic: str
    coordination: str
    group_id: str
    client_id: str
    #: The SQLite file.
    database: str
    #: The folder with the tables that flights are joined with.
    tables: str
    heartbeat_interval_ms: int
    #: The most messages in a batch, or a round.
    batch_size: int
    #: It has a watchdog: a waiting worker gets its partitions at its death, and not after 2 · HI.
    watchdog: bool

    def join(self) -> Marshal:
        """Become a member of the group (*blocking*)."""
        return Marshal(
            self.bootstrap,
            group_id=self.group_id,
            client_id=self.client_id,
            topic=self.coordination,
            heartbeat_interval=self.heartbeat_interval_ms / 1000,
            config=self.config,
            watchdog=self.watchdog,
        )


@dataclass(frozen=True, slots=True)
class WorkerSettings(ProcessSettings):
    """What a plain worker gets."""

    program: ClassVar[str] = "flights.worker"

    #: Rows a second, at most (0: no limit).
    pace: int


@dataclass(frozen=True, slots=True)
class DriverSettings(ProcessSettings):
    """What a Spark driver gets."""

    program: ClassVar[str] = "flights.driver"

    #: The topic for messages that are no flights.
    dead_letters: str
