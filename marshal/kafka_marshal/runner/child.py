"""One worker process: ``main``, with the arguments NAME PARENT OUTPUT.

PARENT is a socket: it brings the Worker, and takes a JSON object a line: how this member is, once a second, or why it
can't work. Its end means that the parent is gone. OUTPUT is the other end of standard output.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread, get_ident
from typing import TYPE_CHECKING, Any

from kafka_marshal import errors

if TYPE_CHECKING:
    from kafka_marshal.client.marshal import Marshal
    from kafka_marshal.runner.settings import WorkerSettings

#: Another process would fail in the same way.
FINAL = (
    *(errors.AuthenticationError, errors.AuthorizationError, errors.ClientReplacedError, errors.ConfigurationError),
    *(errors.TopicMissingError, errors.TopicUnsafeError, errors.UpgradeRequiredError),
)

#: How often the parent gets to know how this member is (s).
EVERY_S = 1.0

_FIELDS = ("event", "group", "client", "topic", "partition", "partitions", "offset", "reason", "seconds")


class JsonLines(logging.Formatter):
    """A line of JSON; the parent adds the process's name."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        found: dict[str, Any] = {"time": int(record.created * 1000), "level": record.levelname, "event": "log"}
        found |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        found["text"] = record.getMessage()
        if record.exc_info:
            found["trace"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def formatter(json_logs: bool) -> logging.Formatter:
    """How lines are written, by the parent, too."""
    return JsonLines() if json_logs else logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class WholeLines(io.TextIOWrapper):
    """Standard output line by line, each whole whichever threads print: ``print`` writes a line and its end apart."""

    def __init__(self, output: Any) -> None:
        super().__init__(output.buffer, output.encoding, output.errors, write_through=True)
        #: Thread → what it has written of a line.
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        """Write what is whole."""
        whole, end, rest = (self._begun.pop(get_ident(), "") + text).rpartition("\n")
        if rest:
            self._begun[get_ident()] = rest
        if end:
            super().write(whole + end)
            self.buffer.flush()
        return len(text)

    def flush(self) -> None:
        """Write what this thread has begun, too."""
        super().write(self._begun.pop(get_ident(), ""))
        super().flush()

    def end(self) -> None:
        """Write what threads have left."""
        while self._begun:
            super().write(f"{self._begun.popitem()[1]}\n")
        super().flush()


def main() -> int:
    """Be one member until SIGTERM, or until the parent is gone; returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # while it starts it holds nothing
    name, parent, output = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    parent.set_inheritable(False)
    os.set_inheritable(output, False)
    sys.stdout = lines = WholeLines(sys.stdout)
    sys.path[:], packed, shown, json_logs = pickle.load(parent.makefile("rb"))  # noqa: S301 - from the parent
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(json_logs))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    lock, is_imported = Lock(), False

    def say(**facts: object) -> None:
        with lock:
            parent.sendall(json.dumps(facts).encode() + b"\n")

    def end_with_the_parent(marshal: Marshal) -> None:
        parent.recv(1)
        marshal.stop()
        while os.read(output, 65_536):  # a print must neither fail nor wait
            pass

    try:
        worker: WorkerSettings = pickle.loads(packed)  # noqa: S301 - from the parent
        handle = worker.handle()
        is_imported = True
        _work(worker, handle, name, (end_with_the_parent, lambda marshal: _report(marshal, say, shown)))
    except Exception as error:
        trace: BaseException | None = None if isinstance(error, errors.MarshalError) else error
        trace = trace if is_imported else error.__cause__ or error
        logging.getLogger("kafka_marshal").error("%s", error, exc_info=trace)
        if isinstance(error, FINAL) or not is_imported:
            wrong_use = isinstance(error, errors.ConfigurationError) or not is_imported
            status = 2 if wrong_use else 3 if isinstance(error, errors.KafkaUnavailableError) else 1
            say(refused=str(error), status=status, importing=not is_imported)
        return 1
    finally:
        lines.end()
    return 0


def _work(
    worker: WorkerSettings, handle: Callable[..., object], name: str, tasks: tuple[Callable[[Marshal], None], ...]
) -> None:
    from kafka_marshal.client.marshal import Marshal
    from kafka_marshal.watchdog import is_supported

    with Marshal(
        worker.bootstrap_servers,
        group_id=worker.group,
        client_id=name,
        topic=worker.topic,
        config=worker.config,
        watchdog=is_supported() if worker.watchdog is None else worker.watchdog,
        **worker.marshal,
    ) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        for task in tasks:
            Thread(target=task, args=(marshal,), daemon=True).start()
        with marshal.consumer(worker.topics, **worker.consumer) as consumer:
            hooks = [*worker.settings.get("hooks", ()), marshal.timing()]
            more = {**worker.settings, "hooks": hooks, "concurrency": worker.concurrency}
            consumer.run(handle, drain_timeout=worker.drain, **more)


def _report(marshal: Marshal, say: Callable[..., None], shown: bool) -> None:
    """Report to the parent how this member is; shown: with figures for a terminal."""
    with suppress(errors.ClosedError, BrokenPipeError):  # it ends already; the parent is gone
        port, is_ill = marshal.serve(0).port, False
        while not (health := marshal.health()).closed:
            figures = {}
            if shown:
                found = marshal.metrics()
                figures["done"] = sum(one.processed for one in found.messages)
                figures["lag"] = sum(one.lag or 0 for one in found.partitions)
            was_ill, is_ill = is_ill, health.needs_restart  # twice, as it may end by itself with a better reason
            say(port=port, live=not (is_ill and was_ill), ready=health.ready, text=str(health), **figures)
            time.sleep(EVERY_S)
