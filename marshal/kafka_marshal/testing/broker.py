"""A real Kafka on this machine, without containers: KRaft brokers that end with this process.

::

    from kafka_marshal.testing import LocalBroker

    with LocalBroker() as broker:
        run_my_test(broker.bootstrap_servers)

Brokers listen on the loopback interface only, keep their data in a temporary folder, and end with the process that
started them, even if it is killed with -9; then the data is removed, too (unless ``keep``). One broker takes about two
seconds to start and 300 MB of memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from kafka_marshal import arguments
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing import layout, supervisor
from kafka_marshal.testing.errors import BrokerDiedError, LocalBrokerError, PortTakenError
from kafka_marshal.testing.jars import broker_jars, find_java
from kafka_marshal.testing.layout import LOOPBACK, is_free


class Processes:
    """Processes started by a supervisor, which kills them and removes their folder when this process ends.

    Any thread may call any method; a forked child may call none.
    """

    def __init__(self, folder: Path, *, keep: bool) -> None:
        """Start the supervisor. folder exists; unless keep, it is removed at any end.

        Raises:
            LocalBrokerError: another supervisor uses the folder, or none could be started.
        """
        self._lock = threading.Lock()
        self._pending = b""
        self._pids: dict[str, int] = {}
        self._exits: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._first_event: str | None = None
        program = [sys.executable, "-I", "-S", supervisor.__file__]
        self._supervisor = subprocess.Popen(
            [*program, str(os.getpid()), str(folder), "keep" if keep else "remove"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it
        )
        self._wait(lambda: self._first_event is not None, 30.0)
        first_event = self._answer()
        if first_event != "ready":
            reason = "another broker is using it" if first_event == "locked" else "its supervisor did not start"
            self.end()
            raise LocalBrokerError(
                f"A local Kafka can't run in {folder}: {reason}. Its data is as it was. Stop the other one, or name "
                "another folder."
            )

    def start(self, name: str, argv: Sequence[str], log: Path) -> None:
        """Start a process; its output is appended to log.

        Raises:
            LocalBrokerError: the system could not start it.
        """
        with self._lock:
            self._pids.pop(name, None)
            self._exits.pop(name, None)
            self._failures.pop(name, None)
        self._ask({"do": "start", "name": name, "argv": list(argv), "log": str(log)})
        if not self._wait(lambda: name in self._pids or name in self._failures, 30.0):
            raise LocalBrokerError(f"The supervisor did not start {argv[0]} within 30 s. Nothing runs.")
        if name in self._failures:
            raise LocalBrokerError(f"Could not start {argv[0]}: {self._failures[name]}. Nothing runs.")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, if it still runs."""
        self._ask({"do": "signal", "name": name, "signal": int(number)})

    def exit_status(self, name: str, timeout_s: float = 0.0) -> int | None:
        """Wait up to timeout_s for a process to end; returns its status (minus the signal that killed it) or None."""
        self._wait(lambda: name in self._exits, timeout_s)
        return self._exits.get(name)

    def pid(self, name: str) -> int:
        """The latest process id of name."""
        return self._pids[name]

    def end(self, grace_s: float = 0.0) -> None:
        """Kill everything (after grace_s seconds for a clean end), remove the folder unless it is kept, and wait."""
        assert self._supervisor.stdin is not None
        if self._supervisor.stdin.closed:
            return
        try:
            self._ask({"do": "end", "grace_s": grace_s})
        except LocalBrokerError:
            pass  # it has already ended, and its processes with it
        finally:
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(grace_s + 30.0)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        assert self._supervisor.stdout is not None
        self._supervisor.stdout.close()

    def _answer(self) -> str | None:
        return self._first_event

    def _ask(self, request: dict[str, object]) -> None:
        assert self._supervisor.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                self._supervisor.stdin.write(line)
                self._supervisor.stdin.flush()
            except (OSError, ValueError) as error:
                raise LocalBrokerError(
                    "The supervisor of the local Kafka is gone, and its brokers with it. Start a new one."
                ) from error

    def _wait(self, met: Callable[[], bool], timeout_s: float) -> bool:
        """Read events until met() or the time-out."""
        until = time.monotonic() + timeout_s
        assert self._supervisor.stdout is not None
        stdout = self._supervisor.stdout
        while True:
            with self._lock:
                if stdout.closed:
                    return met()
                # Short slices, so that threads waiting for different events take turns.
                left = max(0.0, min(until - time.monotonic(), 0.05)) if not met() else 0.0
                if select.select([stdout], [], [], left)[0] and not self._take_in(stdout.fileno()):
                    return met()
                if met():
                    return True
            if time.monotonic() >= until:
                return False

    def _take_in(self, fd: int) -> bool:
        """Read available events; False if the supervisor has ended."""
        chunk = os.read(fd, 65536)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            kind, name = event["event"], event.get("name")
            if kind == "started":
                self._pids[name] = event["pid"]
            elif kind == "exited":
                self._exits[name] = event["status"]
            elif kind == "failed":
                self._failures[name] = event["error"]
            else:
                self._first_event = kind
        return bool(chunk)


#: Attempts to start: another program may take a port between our choice and the broker's bind.
_ATTEMPTS = 5

#: Time-out for the thread dump of a hanging JVM.
_THREAD_DUMP_S = 2.0

#: Interval of progress lines while waiting for a broker.
_TELL_EVERY_S = 5.0


def _silent(text: str) -> None:
    """No progress is wanted."""


class LocalCluster:
    """One to several brokers, each also a controller, on this machine.

    Topics of a cluster of three or more are replicated three times and need two replicas in sync
    (``min.insync.replicas`` 2): they survive the kill of one broker. Any thread may call any method. A forked
    child may use the brokers, but not control them.
    """

    def __init__(
        self,
        brokers: int = 3,
        *,
        port: int | None = None,
        advertised_ports: Mapping[int, int] | None = None,
        properties: Mapping[str, str] | None = None,
        client_config: Mapping[str, object] | None = None,
        keep: str | os.PathLike[str] | None = None,
        jvm_options: Sequence[str] = (),
        start_timeout_s: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Describe the cluster; :meth:`start` (or ``with``) starts it.

        Args:
            brokers: their number; their ids are 1, 2, …
            port: broker 1 listens here, broker 2 on the next port, …; None: free ports.
            advertised_ports: broker id → the port advertised to clients, if a
                :class:`~kafka_marshal.testing.proxy.TcpProxy` is in front of the broker.
            properties: further broker settings. Listeners are called CLIENT, INTERNAL and CONTROLLER.
            client_config: librdkafka properties for the CLIENT listener (TLS, SASL), if properties require them.
            keep: a folder for the data, which is kept; an existing cluster there is continued.
            jvm_options: such as ``-Xmx1g``.
            start_timeout_s: how long the brokers may take to answer.
            progress: called with lines of text during the start.
        """
        brokers = arguments.a_whole("brokers", brokers, 1)
        if port is not None:
            arguments.a_whole("port", port, 1, arguments.MAX_PORT)
        self._ids = tuple(range(1, brokers + 1))
        self._first_port = port
        self._advertised = arguments.a_mapping("advertised_ports", advertised_ports)
        self._properties = arguments.a_mapping("properties", properties)
        self._client_config = arguments.a_mapping("client_config", client_config)
        if keep is not None:
            arguments.an_instance("keep", keep, (str, os.PathLike), "the path of a folder")
        self._keep = Path(keep).absolute() if keep is not None else None
        self._jvm_options = tuple(arguments.several("jvm_options", jvm_options, "a list such as ['-Xmx1g']"))
        self._start_timeout_s = arguments.seconds("start_timeout_s", start_timeout_s, above=0)
        self._progress = _silent if progress is None else progress
        self._owner = os.getpid()
        self._folder: Path | None = None
        self._processes: Processes | None = None
        self._layouts: dict[int, layout.BrokerLayout] = {}
        self._java: tuple[str, ...] = ()

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start all brokers and wait until each answers and knows all others.

        Raises:
            LocalBrokerError: (or a subclass) the start failed; nothing is left running.
        """
        if self._processes is not None:
            return self
        self._progress("looking for Java and the broker's files (40 MB, downloaded the first time)")
        java, jars = find_java(), broker_jars()
        self._java = (str(java.path), *layout.JVM_OPTIONS, *layout.heap(len(self._ids)), *self._jvm_options)
        ready = layout.ready_classes(java, jars)
        self._java += (f"-XX:SharedArchiveFile={ready}",) if ready.exists() else ()
        self._java += ("-cp", os.pathsep.join(map(str, jars)))
        self._folder = layout.make_folder(self._keep)
        self._owner = os.getpid()
        try:
            self._processes = Processes(self._folder, keep=self._keep is not None)
            atexit.register(self.stop)
            self._start_brokers(self._processes)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all brokers and remove the data unless it is kept. Has no effect if nothing runs."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.end(grace_s=10.0 if self._keep else 0.0)
        elif self._folder is not None and self._keep is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every broker, separated by commas."""
        return ",".join(f"{LOOPBACK}:{self._layout(broker_id).advertised_port}" for broker_id in self._ids)

    @property
    def client_config(self) -> dict[str, object]:
        """librdkafka properties that clients need besides bootstrap.servers."""
        return dict(self._client_config)

    @property
    def broker_ids(self) -> tuple[int, ...]:
        """Ids: 1, 2 and so on."""
        return self._ids

    @property
    def folder(self) -> Path:
        """Where data and logs are."""
        if self._folder is None:
            raise LocalBrokerError("This local Kafka does not run: call start() first.")
        return self._folder

    def port_of(self, broker_id: int) -> int:
        """The port that the broker listens on (for a proxy's port see bootstrap_servers)."""
        return self._layout(broker_id).port

    def pid_of(self, broker_id: int) -> int:
        """The broker's process id."""
        return self._running().pid(str(broker_id))

    def log_tail(self, broker_id: int = 1, lines: int = 40) -> str:
        """The last lines that a broker logged (warnings and errors) or printed."""
        return self._layout(broker_id).log_tail(lines)

    # -- bad days -----------------------------------------------------------------------------------------------

    def kill(self, broker_id: int = 1) -> None:
        """Kill a broker with -9 and wait until it has ended. Its data stays; :meth:`restart` starts it again."""
        processes = self._running()
        processes.signal(str(broker_id), signal.SIGKILL)
        if processes.exit_status(str(broker_id), 30.0) is None:
            raise LocalBrokerError(f"Broker {broker_id} did not end within 30 s of kill -9.")

    def pause(self, broker_id: int = 1) -> None:
        """SIGSTOP: it keeps its connections but does not answer, like a hanging machine."""
        self._running().signal(str(broker_id), signal.SIGSTOP)

    def resume(self, broker_id: int = 1) -> None:
        """SIGCONT after :meth:`pause`."""
        self._running().signal(str(broker_id), signal.SIGCONT)

    def restart(self, broker_id: int = 1) -> None:
        """End the broker cleanly if it runs, start it with the same ports and data, wait until it answers."""
        processes = self._running()
        name = str(broker_id)
        if processes.exit_status(name) is None:
            processes.signal(name, signal.SIGCONT)
            processes.signal(name, signal.SIGTERM)
            if processes.exit_status(name, 15.0) is None:
                self.kill(broker_id)
        self._launch(processes, broker_id)
        self._wait_until_up(processes, {broker_id})

    def check(self) -> None:
        """Raise BrokerDiedError if a broker has ended unexpectedly."""
        for broker_id in self._ids:
            status = self._running().exit_status(str(broker_id))
            if status is not None:
                raise self._died(broker_id, status)

    # -- within -------------------------------------------------------------------------------------------------

    def _start_brokers(self, processes: Processes) -> None:
        fixed = [] if self._first_port is None else [self._first_port + i for i in range(len(self._ids))]
        for port in fixed:
            if not is_free(port):
                raise PortTakenError(
                    f"Port {port} of {LOOPBACK} is in use by another program. Nothing was started. End it (who it is: "
                    f"`ss -ltnp 'sport = :{port}'`), or name another port, or none to have a free one chosen."
                )
        cluster_id = layout.cluster_id(self.folder, len(self._ids))
        for attempt in range(1, _ATTEMPTS + 1):
            self._layouts = layout.lay_out(self.folder, self._ids, fixed, self._advertised, self._properties)
            if attempt == 1:
                self._progress("preparing the folder of its data")
                _format(processes, self._layouts.values(), self._java, cluster_id, self._start_timeout_s)
            self._progress(f"starting {len(self._ids)} broker{'s' if len(self._ids) > 1 else ''}")
            for broker_id in self._ids:
                self._launch(processes, broker_id)
            try:
                self._wait_until_up(processes, set(self._ids))
            except BrokerDiedError:
                if attempt == _ATTEMPTS or not any(each.bind_failed() for each in self._layouts.values()):
                    raise
                for broker_id in self._ids:
                    self.kill(broker_id)
            else:
                return

    def _launch(self, processes: Processes, broker_id: int) -> None:
        each = self._layout(broker_id)
        program = [*self._java[:1], f"-Dlog4j2.configurationFile=file:{each.log4j_file}", *self._java[1:]]
        processes.start(str(broker_id), [*program, "kafka.Kafka", str(each.properties_file)], each.console)

    def _wait_until_up(self, processes: Processes, wanted: set[int]) -> None:
        """Wait until each wanted broker answers, and a fresh cluster's brokers know each other."""
        until = time.monotonic() + self._start_timeout_s
        for broker_id in sorted(wanted):
            each = self._layout(broker_id)
            # Wait for a listener before the probe: librdkafka backs off after a refused connection.
            self._await(processes, broker_id, until, functools.partial(_listens, each.port))
            if each.advertised_port == each.port:
                probe = Probe(f"{LOOPBACK}:{each.port}", self._client_config)
            else:  # a client would follow the advertised port, where no proxy may listen yet
                probe = Probe(f"{LOOPBACK}:{each.internal_port}")
            self._await(processes, broker_id, until, functools.partial(_knows, probe, wanted))

    def _await(self, processes: Processes, broker_id: int, until: float, met: Callable[[], bool]) -> None:
        told = time.monotonic()
        while not met():
            if time.monotonic() >= told + _TELL_EVERY_S:
                told = time.monotonic()
                self._progress(f"broker {broker_id} does not answer yet; at most {max(0.0, until - told):.0f} s more")
            status = processes.exit_status(str(broker_id))
            if status is not None:
                raise self._died(broker_id, status)
            if time.monotonic() >= until:
                raise self._hangs(processes, broker_id)
            time.sleep(0.02)

    def _hangs(self, processes: Processes, broker_id: int) -> BrokerDiedError:
        """The error of a hanging broker, with the JVM's thread dump (SIGQUIT), which alone shows what it waits for."""
        processes.signal(str(broker_id), signal.SIGQUIT)
        processes.exit_status(str(broker_id), _THREAD_DUMP_S)  # it does not end: this gives it time to print
        return BrokerDiedError(
            f"Broker {broker_id} of the local Kafka did not answer on {LOOPBACK}:{self.port_of(broker_id)} "
            f"within {self._start_timeout_s:.0f} s. It is ended. It said last:\n{self.log_tail(broker_id)}\n"
            f"It was here:\n{self._layout(broker_id).start_waits_at()}"
        )

    def _died(self, broker_id: int, status: int) -> BrokerDiedError:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return BrokerDiedError(
            f"Broker {broker_id} of the local Kafka ended {how}. What it held in memory is lost, its data is in "
            f"{self.folder}. It said last:\n{self.log_tail(broker_id) or '  (nothing)'}"
        )

    def _layout(self, broker_id: int) -> layout.BrokerLayout:
        if not self._layouts:
            raise LocalBrokerError("This local Kafka does not run: call start() first.")
        if broker_id not in self._layouts:
            raise ValueError(f"there is no broker {broker_id}, only {', '.join(map(str, self._ids))}")
        return self._layouts[broker_id]

    def _running(self) -> Processes:
        if self._processes is None or os.getpid() != self._owner:
            raise LocalBrokerError("This local Kafka does not run, or was started by another process.")
        return self._processes


class LocalBroker(LocalCluster):
    """A cluster of one broker. The internal topics are not replicated."""

    def __init__(
        self,
        *,
        port: int | None = None,
        advertised_port: int | None = None,
        properties: Mapping[str, str] | None = None,
        client_config: Mapping[str, object] | None = None,
        keep: str | os.PathLike[str] | None = None,
        jvm_options: Sequence[str] = (),
        start_timeout_s: float = 60.0,
    ) -> None:
        """As for :class:`LocalCluster`. advertised_port: of a proxy in front of the broker."""
        super().__init__(
            1,
            port=port,
            advertised_ports=None if advertised_port is None else {1: advertised_port},
            properties=properties,
            client_config=client_config,
            keep=keep,
            jvm_options=jvm_options,
            start_timeout_s=start_timeout_s,
        )

    @property
    def port(self) -> int:
        """The port that the broker listens on."""
        return self.port_of(1)


def _format(
    processes: Processes,
    layouts: Iterable[layout.BrokerLayout],
    java: Sequence[str],
    cluster_id: str,
    timeout_s: float,
) -> None:
    """Format new data folders."""
    fresh = [each for each in layouts if not each.formatted]
    for each in fresh:
        tool = ("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(each.properties_file))
        processes.start(f"format-{each.broker_id}", [*java, *tool], each.console)
    for each in fresh:
        status = processes.exit_status(f"format-{each.broker_id}", timeout_s)
        if status is None:
            raise BrokerDiedError(
                f"Kafka did not prepare its data folder within {timeout_s:g} s. Nothing was started. A machine that is "
                f"busy needs longer: give it more time to start. It said:\n{each.log_tail(30) or '  (nothing)'}"
            )
        if status != 0:
            raise BrokerDiedError(
                f"Kafka could not prepare its data folder (status {status}). Nothing was started. It said:\n"
                f"{each.log_tail(30) or '  (nothing)'}"
            )


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False


def _knows(probe: Probe, wanted: set[int]) -> bool:
    return wanted <= (probe.broker_ids(2.0) or set())
