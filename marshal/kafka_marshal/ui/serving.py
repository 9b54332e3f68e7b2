"""The page's server, and the threads that read the log for it."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Final

import uvicorn

from kafka_marshal.ui.archive import Archive, read_around_moments, read_dump, read_kafka
from kafka_marshal.ui.live import Live
from rationalizer.dump import DumpError

if TYPE_CHECKING:
    import socket
    from pathlib import Path
    from types import FrameType

    from starlette.types import ASGIApp

    from kafka_marshal.observe.log import Source
    from kafka_marshal.ui.kept import KeptIndex

#: The interval at which threads take turns: a request does not wait long for the thread that reads the history.
SWITCH_S: Final = 0.001

#: Reading threads have this long to end (s); then the process ends without them.
JOIN_S: Final = 5.0


class Serving:
    """One server, from its first thread to its end."""

    def __init__(self, stack: ExitStack, archive: Archive) -> None:
        """stack: ends the threads."""
        sys.setswitchinterval(SWITCH_S)
        self.archive = archive
        self.live: Live | None = None
        self._stack = stack
        self._stop = threading.Event()
        self._failed: list[Exception] = []
        self._server: uvicorn.Server | None = None

    def start_live(self, source: Source, kept: KeptIndex | None = None) -> None:
        """Read the log of a cluster, from now on. kept: the file of its history."""
        self.archive.kept = kept
        live = self.live = Live(source, self.archive)
        for thread in (
            threading.Thread(target=live.run, args=(self._stop,), name="kafka-marshal-live", daemon=True),
            threading.Thread(
                target=read_kafka, args=(self.archive, source, self._stop), name="kafka-marshal-history", daemon=True
            ),
            threading.Thread(
                target=read_around_moments,
                args=(self.archive, source, self._stop),
                name="kafka-marshal-moments",
                daemon=True,
            ),
        ):
            thread.start()
            self._stack.callback(thread.join, JOIN_S)
        self._stack.callback(self._stop.set)

    def start_dump(self, path: Path) -> None:
        """Read a dump. Raises DumpError, OSError if it is not one."""
        begun = threading.Event()
        self.archive.on_change = begun.set

        def read() -> None:
            try:
                with path.open("rb") as file:
                    read_dump(self.archive, file, self._stop)
            except (DumpError, OSError) as error:
                self._failed.append(error)
                self._end()
            finally:
                begun.set()

        threading.Thread(target=read, name="kafka-marshal-dump", daemon=True).start()
        self._stack.callback(self._stop.set)
        begun.wait()
        if self.archive.whole is None:
            raise self._failed[0]

    def run(self, app: ASGIApp, listener: socket.socket) -> None:
        """Serve until Ctrl-C or SIGTERM; both end it in order. Raises what reading a dump raised (*blocking*)."""
        server = self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )
        if self._failed:
            raise self._failed[0]

        def end(number: int, frame: FrameType | None) -> None:
            self._end()

        before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
            server.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                with suppress(TypeError):
                    signal.signal(number, handler)
        if self._failed:
            raise self._failed[0]

    def _end(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self.live is not None:
            self.live.end()


def _no_signals() -> nullcontext[None]:
    """uvicorn would raise the signal again after its end, and the command would be interrupted."""
    return nullcontext()
