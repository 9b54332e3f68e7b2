"""At most once in Spark: each part of a batch is read by one task, once.

Spark repeats reads at a second action and, whatever ``spark.task.maxFailures``, if an executor or its shuffle files
are lost. So each reading task asks the driver with the place of its first row, and the driver says yes once. A task
that gets a no fails the job before it passes on a row.

::

    executor: scan ─▶ first row of a part (topic, partition, offset) ──asks──▶ driver: Gate
                   ◀──────────────── yes (the first time), no (ever after) ───┘
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.pandas.functions import pandas_udf

from kafka_marshal.logs import log

if TYPE_CHECKING:
    import pandas as pd

#: Marks the message of a refused task, so that the driver recognizes it.
ALREADY_READ = "this batch was read already"

#: Time-out of the driver's answer.
ANSWER_TIMEOUT_S = 30.0

_SECRET_BYTES = 32
_LENGTH = struct.Struct("!H")


class Gate:
    """Lets every part of a batch be read once. Listens on the address of Spark's driver."""

    def __init__(self, spark: SparkSession) -> None:
        self._host = spark.sparkContext.getConf().get("spark.driver.host") or "127.0.0.1"
        bind = spark.sparkContext.getConf().get("spark.driver.bindAddress") or self._host
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._lock = threading.Lock()
        #: Running batch → parts read so far.
        self._open: dict[str, set[str]] = {}
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._server = _Server((bind, 0), self._answer, family)
        threading.Thread(target=self._server.serve_forever, name="kafka-marshal-gate", daemon=True).start()

    def _answer(self, request: socket.socket) -> None:
        request.settimeout(ANSWER_TIMEOUT_S)
        if not hmac.compare_digest(_receive(request, _SECRET_BYTES), self._secret):
            return
        (length,) = _LENGTH.unpack(_receive(request, _LENGTH.size))
        batch_id, _, part = _receive(request, length).decode().partition("/")
        request.sendall(b"1" if self.admit(batch_id, part) else b"0")

    def admit(self, batch_id: str, part: str) -> bool:
        """Whether this part of a batch may be read: once, while the batch runs."""
        with self._lock:
            read = self._open.get(batch_id)
            if read is None or part in read:
                return False
            read.add(part)
            return True

    @contextmanager
    def letting_in(self, batch_id: str) -> Iterator[None]:
        """Let a batch be read within the block."""
        with self._lock:
            self._open[batch_id] = set()
        try:
            yield
        finally:
            with self._lock:
                del self._open[batch_id]

    def guarded(self, df: DataFrame, batch_id: str) -> DataFrame:
        """The same rows; each part can be read only once."""
        address = (self._host, self._server.server_address[1])
        asking: Any = _asking(address, self._secret, batch_id)  # Spark infers its kind
        ask = pandas_udf(asking, "boolean").asNondeterministic()  # type: ignore[call-overload]
        return df.where(ask(F.xxhash64("topic", "partition", "offset")))

    def close(self) -> None:
        """Stop listening: tasks that ask fail."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Answers each task on a separate thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], answer: Callable[[socket.socket], None], family: int) -> None:
        self._answer = answer
        self.address_family = family
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._answer(request)

    def handle_error(self, request: object, client_address: object) -> None:
        text = "a task's question at %s got no answer; it fails"
        log(logging.WARNING, "task_not_answered", text, client_address, error=sys.exception())


def _asking(
    address: tuple[str, int], secret: bytes, batch_id: str
) -> Callable[[Iterator[pd.Series]], Iterator[pd.Series]]:
    """The function of a task. Executors don't need this package for it: a nested function is pickled by value."""
    length, timeout_s, message = _LENGTH.format, ANSWER_TIMEOUT_S, ALREADY_READ

    def ask(rows: Iterator[pd.Series]) -> Iterator[pd.Series]:
        import socket
        import struct

        import pandas as pd

        asked = False
        for places in rows:
            if not asked and len(places):
                asked = True
                part = f"{batch_id}/{places.iloc[0]}".encode()
                with socket.create_connection(address, timeout_s) as driver:
                    driver.sendall(secret + struct.pack(length, len(part)) + part)
                    answer = driver.recv(1)
                if answer != b"1":
                    raise RuntimeError(
                        f"{message}, its time is over, or Spark repeated what it had lost with an executor: at most "
                        "once means that no row is read a second time, and no row of this read was passed on. Do all "
                        "in one action; for several, write the rows somewhere first, or cache them: df = df.cache()"
                    )
            yield pd.Series(True, index=places.index)

    import pandas as pd

    # Spark infers the kind of function from these; as text they would name imports that only type checkers have.
    ask.__annotations__ = {"rows": Iterator[pd.Series], "return": Iterator[pd.Series]}
    return ask


def _receive(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = source.recv(count - len(found))
        if not more:
            raise ConnectionError("the task hung up")
        found += more
    return found
