"""The processes of a story: each client's worker is started, and restarted after it ends, as by a supervisor."""

from __future__ import annotations

from collections.abc import Callable

from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.living import Host
from kafka_marshal.testing.simulation.network import Network
from kafka_marshal.testing.simulation.process import Job, Process, Store, Worker, is_expected
from kafka_marshal.testing.simulation.scenario import Scenario
from kafka_marshal.testing.simulation.workers import built_in, host_of

#: An ended worker is restarted after this many HI.
RESTART_INTERVALS = 0.5


class Clients:
    """All processes of a story, of workers and of admins."""

    def __init__(self, scenario: Scenario, network: Network, checks: Checks, worker: Worker | None) -> None:
        self._scenario = scenario
        self._hi = float(scenario.heartbeat_interval_ms)
        self._scheduler = network.scheduler
        self._network = network
        self._checks = checks
        self._worker = worker
        self.store: Store = Store()
        self._clients = {client.name: client for client in scenario.clients}
        self.hosts: dict[str, Host] = {client.name: host_of(client, self._hi) for client in scenario.clients}
        for name, host in self.hosts.items():
            host.is_interrupted = scenario.is_interrupted(name)
        self.processes: list[Process] = []
        self._started: dict[str, int] = {}
        #: Virtual time (ms) until which a client is not restarted.
        self.away: dict[str, float] = {}
        #: Current slowdown of a client's work (1: none).
        self.slowness: Callable[[str], float] = lambda _: 1.0

    def new_process(self, host: Host) -> Process:
        """A new process on a host."""
        number = self._started[host.name] = self._started.get(host.name, 0) + 1
        interval_ms = self._scenario.interval_of(host.name, number)
        process = Process(f"{host.name}#{number}", host, self._network, self._checks, self._scenario.seed, interval_ms)
        self.processes.append(process)
        return process

    def start(self, name: str) -> None:
        """Start a client's worker unless one runs or the client must stay away."""
        if self.running(name) is not None or self._scheduler.now < self.away.get(name, 0.0):
            return
        client = self._clients[name]
        process = self.new_process(self.hosts[name])
        job = process.work.job = Job(process, self._scenario, self.store)
        job.slowness = self.slowness(name)
        job.on_death = self._dies
        worker = (
            self._worker
            if client.worker == "yours" and self._worker is not None
            else built_in(client, self._scenario.checkpoints)
        )
        self.note("start", process.name)
        process.run(lambda: worker(job), lambda: self._ended(process, name))

    def _ended(self, process: Process, name: str) -> None:
        self.note("end", process.name, type(process.end.error).__name__)
        if not is_expected(process.end.error):
            self._checks.fail("worker", f"{process.name} raised {process.end.error!r}")
        self._checks.forget(process)
        self.later(RESTART_INTERVALS, lambda: self.start(name))

    def running(self, name: str) -> Process | None:
        """The newest process of a client that has not died, ended or been stopped."""
        alive = [p for p in self.processes if p.client_id == name and not p.dead and not p.end.ended]
        return next((p for p in reversed(alive) if p.stopped_until <= self._scheduler.now or not p.end.replaced), None)

    def _dies(self, process: Process) -> None:
        """A message kills it; it is restarted."""
        self.note("dies", process.name)
        self.kill(process)
        self.later(RESTART_INTERVALS, lambda: self.start(process.client_id))

    def kill(self, process: Process) -> None:
        """kill -9."""
        process.kill()
        self._checks.forget(process)

    def later(self, intervals: float, function: Callable[[], object]) -> None:
        """Call this after ``intervals`` HI."""
        self._scheduler.call_at(self._scheduler.now + intervals * self._hi, function)

    def note(self, name: str, *what: object) -> None:
        """Add a line to the story's history."""
        self._checks.events.append((name, self._scheduler.now, *what))
