"""The inputs for one consumer of an engine; their first field is its number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.checkpoint_inputs import GoBack, StateRestored, StateReturned, StateSafe, TakeCheckpoint
from kafka_marshal.engine.effects import Key, TakeOver
from kafka_marshal.engine.share_inputs import GiveBackRun, ParkMessage, WantBatches
from kafka_marshal.engine.work.assignment import Grant, Run
from kafka_marshal.engine.work.behind import HeldBack
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.pull import Pull, Wanted
from kafka_marshal.engine.work.purgatory import Finished
from kafka_marshal.engine.work.ranges import OffsetRange, RangeRun
from kafka_marshal.ports import Message, TopicInfo

__all__ = [
    "Abandon",
    "Abort",
    "Answered",
    "CheckStuck",
    "Close",
    "CloseBlocks",
    "CollectRange",
    "Commit",
    "CommittedBlock",
    "ConsumerInput",
    "Decide",
    "Done",
    "DoneRanges",
    "DoneRun",
    "EndsFound",
    "FailedBlock",
    "Fetched",
    "Finish",
    "GiveBack",
    "GiveBackRanges",
    "GiveBackRun",
    "GoBack",
    "Heard",
    "HoldUp",
    "HoldUpStuck",
    "LackingIds",
    "LanesReturned",
    "LearnIds",
    "LogEnds",
    "LoseRanges",
    "Next",
    "NextBlock",
    "NoteHeldBack",
    "OpenBlocks",
    "OpenLanes",
    "OpenRanges",
    "OutOfRange",
    "Park",
    "ParkMessage",
    "Pause",
    "Reached",
    "Read",
    "ReadFailed",
    "Reclaim",
    "Recreated",
    "Regather",
    "RemoveConsumer",
    "Room",
    "Say",
    "Seek",
    "SettleHand",
    "Spread",
    "StateRestored",
    "StateReturned",
    "StateSafe",
    "TakeCheckpoint",
    "TakeError",
    "TakeOverFailed",
    "TakeRanges",
    "TookOver",
    "TooLarge",
    "Turn",
    "UndoRun",
    "Untake",
    "WantBatches",
]

# A consumer's reader.


class Read(NamedTuple):
    """A read has returned this many messages, of this mean size (bytes; 0: none). Comes before their ``Fetched``."""

    consumer: int
    messages: int
    mean_bytes: float


class Fetched(NamedTuple):
    """Consecutive messages of one partition came from the reader."""

    consumer: int
    key: Key
    messages: list[Message]


class Reached(NamedTuple):
    """The reader has passed everything below end (P6)."""

    consumer: int
    key: Key
    end: int


class LogEnds(NamedTuple):
    """The reader knows where a partition's log ends."""

    consumer: int
    key: Key
    end: int


class OutOfRange(NamedTuple):
    """The reader's position is not in the log (P9, P11)."""

    consumer: int
    key: Key


class Recreated(NamedTuple):
    """The reader found another topic of this name, with this id, and returned none of its messages (P11)."""

    consumer: int
    topic: str
    topic_id: str


class ReadFailed(NamedTuple):
    """Reading a partition failed at its next offset. is_forbidden: an ACL forbids it; the text says which."""

    consumer: int
    key: Key
    text: str
    is_forbidden: bool = False


class TooLarge(NamedTuple):
    """A connection broke because an answer was larger than the reader may receive."""

    consumer: int
    text: str


class CheckStuck(NamedTuple):
    """Find stuck partitions. drained_at: when (own clock, ms) a read last took all messages that had arrived."""

    consumer: int
    drained_at: float


class HoldUp(NamedTuple):
    """``max_bytes_in_flight`` leaves room for this many more messages: fetch fewer partitions, or more again.

    fetched: the partitions being fetched; held_up: those that are not, for lack of room. Returns the changes:
    partition → offset to fetch from; None: stop fetching it.
    """

    consumer: int
    fetched: Collection[Key]
    held_up: Collection[Key]
    room: int


class HoldUpStuck(NamedTuple):
    """Stop fetching partitions that wait for messages in lanes. Returns the changes, as ``HoldUp``."""

    consumer: int
    fetched: Collection[Key]


# Transactions (M2 to M5).


class TookOver(NamedTuple):
    """A step of taking over is done. offset, metadata: Kafka's committed offset, if it was read and there is one."""

    consumer: int
    asked: TakeOver
    offset: int | None = None
    metadata: str = ""


class TakeOverFailed(NamedTuple):
    """A step of taking over failed; the text says why. error: what the user's next call is to raise; None: nothing."""

    consumer: int
    asked: TakeOver
    text: str
    error: Exception | None = None


class Untake(NamedTuple):
    """The partition's producer is gone, or the result of its commit unknown: take over again (M2).

    is_known: it was closed with no transaction in progress; what is in flight stays so if nothing else has committed.
    """

    consumer: int
    key: Key
    token: int
    is_known: bool = False


class Turn(NamedTuple):
    """Whether a run may be committed now. None: it was dropped, and comes again; False: it waits for earlier runs."""

    consumer: int
    run: Run


class Abort(NamedTuple):
    """The transaction of a run has failed: drop it and all later ones of its partition; they come again (M5)."""

    consumer: int
    run: Run


# A consumer's user threads.


class Next(NamedTuple):
    """Messages are wanted. Returns the next step of this pull (None: the consumer's own pull)."""

    consumer: int
    wanted: Wanted
    pull: Pull | None = None


class Room(NamedTuple):
    """Returns how many messages are worth reading while this pull waits for its grant."""

    consumer: int
    pull: Pull


class Answered(NamedTuple):
    """The log has answered a grant that this pull waits for, or it never will."""

    consumer: int
    pull: Pull
    grant: Grant


class Heard(NamedTuple):
    """A thread of the user came back: its handlers do not hang."""

    consumer: int


class Done(NamedTuple):
    """Messages are done."""

    consumer: int
    messages: Sequence[Message]


class Park(NamedTuple):
    """A message in flight is set aside: where it is, its key hash, how many tries it has had, and why.

    token: −1: under whichever assignment it is in flight. attempts: 0: one more than the log shows.
    """

    consumer: int
    key: Key
    token: int
    offset: int
    key_hash: int
    attempts: int
    reason: str


class DoneRun(NamedTuple):
    """A whole run (a batch) is done."""

    consumer: int
    run: Run


class UndoRun(NamedTuple):
    """A run did not reach the thread that asked for it: deliver it again."""

    consumer: int
    run: Run


class Reclaim(NamedTuple):
    """Deliver again what the user received before that time (own clock, ms) and has dropped without ``done``.

    since: not what it received earlier; but of partitions that are being released, all.
    """

    consumer: int
    before: float
    since: float = -inf


class Regather(NamedTuple):
    """An exception may have kept a message from leaving the library: deliver it next."""

    consumer: int


class SettleHand(NamedTuple):
    """A thread wants a run: first put back messages of the last run that were lost on their way.

    is_collecting: the thread has messages of the last run, to deliver with those of the next. in_doubt: that of the
    hand, at this moment.
    """

    consumer: int
    is_collecting: bool
    in_doubt: bool


class LanesReturned(NamedTuple):
    """A handler returned without a result: a partition being revoked does not wait for its next try."""

    consumer: int


class OpenLanes(NamedTuple):
    """A run with many handlers begins; it delivers through these lanes."""

    consumer: int
    lanes: Lanes


class Spread(NamedTuple):
    """A run goes to the lanes. Returns the lanes that have become ready."""

    consumer: int
    run: Run


class GiveBack(NamedTuple):
    """Messages that wait in lanes are no longer in flight: they are delivered again."""

    consumer: int


class NoteHeldBack(NamedTuple):
    """Partitions whose progress waits for one message. Returns those that deliver no more messages."""

    consumer: int
    found: tuple[HeldBack, ...]


class OpenBlocks(NamedTuple):
    """A run with transactions begins: messages in lanes are done when their transaction is committed."""

    consumer: int


class CloseBlocks(NamedTuple):
    """It has ended, and no transaction follows: what is finished is delivered again."""

    consumer: int


class Finish(NamedTuple):
    """Handlers have finished these messages; they wait for a transaction."""

    consumer: int
    finished: Sequence[Finished]


class NextBlock(NamedTuple):
    """Returns the ``Block`` for the next transaction, or when to ask again (own clock, ms).

    is_urgent: take what there is, the run ends.
    """

    consumer: int
    is_urgent: bool


class CommittedBlock(NamedTuple):
    """The transaction of a block is committed. Returns whether its messages were still in flight here."""

    consumer: int
    run: Run


class FailedBlock(NamedTuple):
    """It is not committed: its messages are for the next one, of at most this many; 0: they are handled again."""

    consumer: int
    run: Run
    most: int


class Pause(NamedTuple):
    """Pause delivery of these partitions (None: of all), or resume it. Returns those for the reader."""

    consumer: int
    keys: Collection[Key] | None
    is_paused: bool


class Seek(NamedTuple):
    """Go forward: everything below offset is done elsewhere. Returns False if not assigned, or backwards."""

    consumer: int
    key: Key
    offset: int


class Commit(NamedTuple):
    """Commit at once what is done, in a coordinated group."""

    consumer: int


class TakeError(NamedTuple):
    """Returns the oldest error that the user's call is to raise, once; None: there is none."""

    consumer: int


class Say(NamedTuple):
    """Warn the user."""

    consumer: int
    text: str


class LackingIds(NamedTuple):
    """Returns the topics with done messages whose ids neither the log nor the cluster has reported (P12)."""

    consumer: int


class LearnIds(NamedTuple):
    """The ids of some topics, looked up out of turn."""

    consumer: int
    topics: Mapping[str, TopicInfo]


class Close(NamedTuple):
    """Release everything at once; messages in flight stay not done.

    leave_by: with checkpoints, the member leaves at a barrier, and by LeaveGroup from this time on (own clock, ms): at
    once where its state is unknown (−inf), as after an exception in the program's block (X16).
    """

    consumer: int
    leave_by: float = inf


class Abandon(NamedTuple):
    """Deliver no more messages, and release nothing (for a fast restart, C7)."""

    consumer: int


class Decide(NamedTuple):
    """Report which granted messages were not delivered, and will not be. is_final: deliver no more of them (C13)."""

    consumer: int
    is_final: bool = False


class RemoveConsumer(NamedTuple):
    """The consumer has ended; partitions of a running callback are released when it returns."""

    consumer: int


# A consumer of ranges.


class OpenRanges(NamedTuple):
    """Returns the partitions from which ranges can be taken now, if their logs hold any."""

    consumer: int


class EndsFound(NamedTuple):
    """The logs end at these offsets; a position beyond the end is lost (P11)."""

    consumer: int
    ends: Mapping[Key, int]


class TakeRanges(NamedTuple):
    """Returns runs of at most max_records in total, within these (log start, end). only_full: all or none."""

    consumer: int
    marks: Mapping[Key, tuple[int, int]]
    max_records: int
    only_full: bool


class CollectRange(NamedTuple):
    """Returns whether an answered range was granted, and so belongs to the caller (C13)."""

    consumer: int
    run: RangeRun


class LoseRanges(NamedTuple):
    """``granted``: these reach no caller; ``waiting``: these no longer wait for their grants (C13)."""

    consumer: int
    granted: Sequence[RangeRun]
    waiting: Sequence[RangeRun]


class DoneRanges(NamedTuple):
    """These ranges are done. flush: commit at once; together: all or none. Returns those that counted."""

    consumer: int
    ranges: Sequence[OffsetRange]
    flush: bool
    together: bool


class GiveBackRanges(NamedTuple):
    """These ranges are no longer in flight, and not done."""

    consumer: int
    ranges: Iterable[OffsetRange]


ConsumerInput = (
    Read
    | Fetched
    | Reached
    | GiveBackRun
    | LogEnds
    | ParkMessage
    | WantBatches
    | OutOfRange
    | Recreated
    | ReadFailed
    | TookOver
    | TakeOverFailed
    | Untake
    | Turn
    | Abort
    | StateReturned
    | StateSafe
    | StateRestored
    | TakeCheckpoint
    | GoBack
    | TooLarge
    | CheckStuck
    | HoldUp
    | HoldUpStuck
    | Next
    | Room
    | Answered
    | Heard
    | Done
    | DoneRun
    | Park
    | UndoRun
    | Reclaim
    | Regather
    | SettleHand
    | LanesReturned
    | OpenLanes
    | Spread
    | GiveBack
    | NoteHeldBack
    | OpenBlocks
    | CloseBlocks
    | Finish
    | NextBlock
    | CommittedBlock
    | FailedBlock
    | Pause
    | Seek
    | Commit
    | TakeError
    | Say
    | LackingIds
    | LearnIds
    | Close
    | Abandon
    | Decide
    | RemoveConsumer
    | OpenRanges
    | EndsFound
    | TakeRanges
    | CollectRange
    | LoseRanges
    | DoneRanges
    | GiveBackRanges
)
