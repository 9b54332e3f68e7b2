"""``KAFKA_MARSHAL_RECORD=file``: the run of this process's engine, written down for a replay (HACKING.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import count
from random import Random

from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.recording import Recorder
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.instance import release
from kafka_marshal.logs import log

#: The environment variable.
RECORD = "KAFKA_MARSHAL_RECORD"

#: Lines are handed to the system when they make this many bytes, and at each step of the engine: what a kill -9 takes
#: is the last few milliseconds.
FLUSH_AT = 64 * 1024


class RecordFile:
    """One file; it is not there before, and only its owner may read it."""

    def __init__(self, path: str) -> None:
        self.path: str
        self._file, self.path = _opened(path)
        self._lines: list[bytes] = []
        self._bytes = 0
        #: Called once if it can't be written.
        self.failed: Callable[[Exception], object] = lambda error: None

    def write(self, line: str) -> None:
        """Append a line; the engine's lock is held."""
        data = line.encode()
        self._lines.append(data)
        self._bytes += len(data)
        if self._bytes >= FLUSH_AT or '"step"' in line:
            self.flush()

    def flush(self) -> None:
        """Hand over to the system what is written so far."""
        data, self._lines, self._bytes = b"".join(self._lines), [], 0
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.failed(error)


def _opened(path: str) -> tuple[int, str]:
    """A new file of this name, or with a number behind it: several Marshals may begin at once."""
    for number in count(1):
        name = path if number == 1 else f"{path}.{number}"
        try:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), name
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(
                f"{RECORD}={path}: this file can't be written: {error.strerror}. Nothing was started. Name one that "
                "can, or unset it"
            ) from error
    raise AssertionError("there is always another number")


def record(engine: Engine, rng: Random) -> Recorder | None:
    """Write down this engine's run, if the environment says where; None: it does not."""
    if not (path := os.environ.get(RECORD)):
        return None
    file = RecordFile(path)

    def failed(error: Exception) -> None:
        engine.recorder = None
        text = "%s can't be written any more, and the recording ends here; the worker continues: %s"
        log(logging.ERROR, "recording_ended", text, file.path, error)

    file.failed = failed
    recorder = Recorder(engine, rng, file.write, failed, release())
    log(
        logging.WARNING,
        "recording",
        "this process writes down what its engine does, to %s (%s is set): it is slower, and the file grows without "
        "limit. It holds names, offsets and coordination records, and no key, value or header of a message",
        file.path,
        RECORD,
    )
    return recorder
