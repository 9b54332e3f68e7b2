"""A second, deliberately naive reading of the coordination protocol, to test the real one against.

It shares no code with `rationalizer`: its own msgpack parser (byte by byte), its own field checks, its own
state. Nothing is updated in place. A world here is a list of things that were accepted, and every answer
(holder, epoch, last beat, progress, pause, log time) is worked out again from that list whenever a test
asks. That is slow, and easy to hold against the text of the protocol, which is the point.

Only hashing is borrowed (the `xxhash` package), because the protocol names the hash and nothing else.
"""

from tests.rationalizer.oracle.layout import Judged, judge
from tests.rationalizer.oracle.msgpack_by_hand import NotMsgpackError, parse, shortest
from tests.rationalizer.oracle.progress import OracleProgress, SetProgress, progress_from
from tests.rationalizer.oracle.states import is_state
from tests.rationalizer.oracle.world import OracleLease, OracleOutcome, OraclePause, OracleWorld

__all__ = [
    "Judged",
    "NotMsgpackError",
    "OracleLease",
    "OracleOutcome",
    "OraclePause",
    "OracleProgress",
    "OracleWorld",
    "SetProgress",
    "is_state",
    "judge",
    "parse",
    "progress_from",
    "shortest",
]
