"""Exit statuses, and the status of each error of the library.

====  ==============================================================================================
0     done; the answer is yes
1     the answer is no: not allowed, not there, not safe, stopped at an Upgrade
2     wrong use: an option, a file, a configuration
3     Kafka was not reachable, or refused us
4     no violation, but records that no hash vouches for where one should (audit)
70    a fault of this program
130   interrupted (Ctrl-C)
141   the reader of standard output is gone (`| head`)
====  ==============================================================================================
"""

from __future__ import annotations

from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError, MarshalError
from kafka_marshal.secret import visible

DONE = 0
NO = 1
WRONG_USE = 2
UNREACHABLE = 3
UNVOUCHED = 4
BUG = 70
INTERRUPTED = 130
PIPE_CLOSED = 141


class CommandError(Exception):
    """Ends a command: `message` says what happened, what it means and what to do; `status` is the exit status."""

    def __init__(self, message: str, status: int = NO) -> None:
        super().__init__(message)
        self.status = status


def explain(error: Exception) -> tuple[int, str] | None:
    """Exit status and text, safe for a terminal, of an error that users can act on; else None."""
    if isinstance(error, CommandError):
        return error.status, _lines(str(error))
    from rationalizer.dump import DumpError, UntilError

    if isinstance(error, (ConfigurationError, DumpError, UntilError)):
        return WRONG_USE, _lines(str(error))
    if isinstance(error, KafkaUnavailableError):
        return UNREACHABLE, _lines(str(error))
    if isinstance(error, MarshalError):
        return NO, _lines(str(error))
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return WRONG_USE, _lines(f"{where}{error.strerror}")
    return None


def _lines(text: str) -> str:
    return "\n".join(visible(line) for line in text.split("\n"))
