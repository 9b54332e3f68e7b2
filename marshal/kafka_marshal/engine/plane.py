"""The interface between the code that holds partitions and the code that works on them.

Work (:mod:`.work`) delivers messages and tracks which are done; it does not know why a partition is held. Claims
(:mod:`.claims`) and groups (:mod:`.groups`) hold partitions, and know nothing of messages. Each uses of the other only
what is defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from kafka_marshal.engine.effects import SavedPiece
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.types import Key
from rationalizer import Progress
from rationalizer.holes import Hole
from rationalizer.wire.records import Done, Opened, Parked

#: Why a partition is released when an admin pauses the group.
PAUSED = "the group is paused"

#: Why all partitions are released when an operator asks for it (C19).
DRAINED = "an operator asked this member to hand over (kafka-marshal drain)"

#: Why all partitions are released when no thread of the user comes back.
HUNG = "no handler of this member has come back within handler_timeout"

#: Reasons that end for all partitions at once; a partition that is not released by then is kept.
PASSING = frozenset({PAUSED, DRAINED, HUNG})

#: Why a partition is released if we may want it back at once (``Wishes.surplus``).
SURPLUS = "others are waiting and this member holds more than its share"

#: Why a partition is released if we do not want it back.
UNWANTED = "the policy of this member lets it go"

#: Why a partition is released whose topic the program reads no more (``subscribe``).
UNSUBSCRIBED = "the program reads other topics now"

#: Why a partition is released although messages of it are in flight.
OVERDUE = "what is in hand was not done in time"


class Loss(StrEnum):
    """Why a partition was lost: a text for people, and what decides the next step."""

    FENCED = "another holder or epoch stands in the log"
    UNPROVEN = "not confirmed within two heartbeat intervals, by this process's own clock"
    HANDLER_TIMEOUT = "a message was in hand for longer than handler_timeout"
    POSITION = "the stored position is not in the partition's log"
    KAFKA_OFFSET = "the group's offset in Kafka stands in the way"
    OPEN = "messages of it are open, which this consumer does not handle"
    TOPIC_GONE = "the topic was deleted"
    EVICTED = "an operator took it away (kafka-marshal evict)"
    ENDED = "this Marshal has ended"
    HANDED_OVER = "it was handed over at a checkpoint"
    RESET = "the group goes back to a checkpoint"
    LEFT = "this member leaves without a checkpoint"
    NOT_SAVED = "this member has left at a checkpoint that does not have what was done of it since its last cut"


class CheckpointState(StrEnum):
    """What a member of a group with checkpoints does (``consumer.checkpoints.state``)."""

    SUBSCRIBED = "SUBSCRIBED"
    POLLING = "POLLING"
    DRAINING = "DRAINING"
    SAVING = "SAVING"
    REACHED = "REACHED"
    CR_RESET_INITIATED = "CR_RESET_INITIATED"
    RESET_COMPLETE = "RESET_COMPLETE"


class ReplicaView(Protocol):
    """The partitions of a group, as our replica knows them. All methods only read."""

    def progress(self, key: Key) -> Progress | None:
        """The progress of the group; None: no member ever held it."""

    def whole_progress(self, key: Key) -> Progress | None:
        """The progress of all keys, not only of this member's."""

    def open(self, key: Key) -> Sequence[Hole]:
        """Its open messages, of the keys that this member has (H1)."""

    def is_held(self, key: Key) -> bool:
        """Whether a member holds it, and so reports its own progress."""

    def is_first(self, key: Key) -> bool:
        """Whether no member of the group ever held it (P9)."""

    def is_left(self, key: Key) -> bool:
        """Whether its last holder, or a sharer of it, went silent or was evicted, and did not release it."""

    def came_later(self, key: Key) -> bool:
        """Whether it was added to a topic that the group already works on: it starts at the earliest offset (P9)."""

    def hole_count(self, cp: int) -> int:
        """How many holes all groups have in a CP (H1)."""

    def log_time(self, cp: int, now: float) -> float:
        """What the log time of a CP is by now (ms), if our clock and the brokers' run alike."""

    def is_stopped(self, cp: int) -> bool:
        """Whether a CP is at a level that this release does not know (E4)."""

    def closed(self, cp: int, now: float) -> str:
        """Why no partition of a CP can be held now; "": they can."""


class Settles(Protocol):
    """Entries of one record about open messages, as types 28 and 29 have them."""

    @property
    def done(self) -> Done: ...

    @property
    def open(self) -> Opened: ...

    @property
    def parked(self) -> Parked: ...


class PartitionReports(Protocol):
    """Writes to the log. ``own``: a partition of the same source."""

    #: Whether the start of each partition is reported, even the earliest offset (G22).
    needs_start: bool

    def beat(self, own: Holding, last_offset: int, now: float) -> None:
        """Report out of turn: where a partition starts (P9), or what was granted (C12)."""

    def prove(self, own: Holding, now: float) -> int:
        """Send a heartbeat now. Returns its number: once ``proven_by`` reaches it, the log accepted a later record."""

    def commit(self, own: Holding, ranges: Sequence[tuple[int, int]]) -> None:
        """Commit what is done beyond a gap (P3)."""

    def settle(self, own: Holding, entries: Settles, now: float) -> None:
        """Report what is done of open messages, what waits for its next try, and what is set aside (H3, H4)."""

    def grant(self, own: Holding, last_offset: int, now: float) -> None:
        """Claim messages up to last_offset (C12)."""

    def let_go(self, own: Holding, last_offset: int | None, why: str, now: float) -> None:
        """Release it (C8); why: one of the reasons above."""

    def give_back(self, own: Holding, last_offset: int | None) -> None:
        """Report what was done of a partition that is over for us: the log decides whether it counts (C17)."""


class Checkpointing(Protocol):
    """The checkpoints of a member whose group takes some (X11 to X18)."""

    @property
    def drain_seconds(self) -> float:
        """How long (s) the last drain took, from the first sight of the barrier to the last cut."""

    @property
    def drain_seconds_max(self) -> float:
        """The longest one."""

    @property
    def state(self) -> CheckpointState:
        """What the member does, for display only."""

    @property
    def failed(self) -> Exception | None:
        """Why the program can't take up its state; None: it can."""

    @property
    def lacking(self) -> tuple[int, float, bool]:
        """How many checkpoints in succession this member left a piece out of, and since when (own clock, ms).

        And whether that is because a state could not be saved.
        """

    @property
    def newest(self) -> int | None:
        """The newest complete checkpoint; None: the group takes none."""

    @property
    def kept(self) -> Sequence[tuple[int, int, int]]:
        """(id, log time of its completion, kind) of those that are kept, ascending."""

    def returned(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        """on_checkpoint has returned, or raised."""

    def safe(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        """The states of these pieces are safe, or can't be saved."""

    def restored(self, attempt: int, error: Exception | None, is_outdated: bool, now: float) -> None:
        """on_restore has returned, or raised."""

    @property
    def is_draining(self) -> bool:
        """Whether a piece waits for what is in flight (any thread)."""

    @property
    def is_idle(self) -> bool:
        """Whether no barrier is open, nothing is to be restored, and nothing is held up (any thread)."""

    def came_back(self, key: Key | None, now: float) -> None:
        """Messages of a partition (None: of any) are no longer in flight."""

    def close(self, leave_by: float) -> None:
        """The consumer closes: leave at a barrier until then (own clock, ms)."""

    def take(self, now: float) -> None:
        """The program asks for a checkpoint."""

    def go_back(self, to: int | None, now: float) -> None:
        """The program asks for a rollback."""


class PartitionSource(Protocol):
    """How one consumer holds its partitions: by leases, or as a member of a coordinated group."""

    @property
    def view(self) -> ReplicaView: ...

    @property
    def reports(self) -> PartitionReports: ...

    @property
    def checkpoints(self) -> Checkpointing | None:
        """None: the member has no policy for checkpoints."""

    @property
    def takes_checkpoints(self) -> bool:
        """Whether the group takes checkpoints: partitions are not released one by one."""

    @property
    def failure(self) -> Exception | None:
        """Why no partition of the group will be held again; every call of the user raises it. None: no such error."""

    def lets_all_go(self) -> str:
        """Why all partitions are to be released; "": they are not."""

    def still_lets_go(self, own: Holding, why: str, now: float) -> bool:
        """Whether this source still wants to release a partition that is being released for this reason."""

    def lose(self, own: Holding, reason: Loss, now: float) -> None:
        """End it as lost, and notify its owner."""

    def drop(self, own: Holding) -> None:
        """Stop wanting it; it was not granted."""

    def look_again(self, key: Key | None = None) -> None:
        """A partition (None: any partition) may have changed."""

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        """A partition is lost. Returns whether to claim nothing until its messages in flight come back (C18, G20)."""

    def measured(self, own: Holding, done: int, log_end: int, now: float) -> None:
        """Record how far our partition is, and where its log ends."""

    def step(self, now: float) -> None:
        """Claim what is wanted, release what is not."""

    def deadline(self, now: float) -> float:
        """When (own clock, ms) something is due again."""

    @property
    def has_left(self) -> bool:
        """Whether, once it holds nothing, no other member waits for it."""


class Cuttable(Protocol):
    """Partitions of a consumer whose group takes checkpoints."""

    def take_back(self, key: Key) -> None:
        """Take back what was delivered to no thread yet; messages in lanes wait there."""

    def close_gaps(self, key: Key, is_on: bool) -> None:
        """Handle what waits in lanes below something that is done, though nothing else of it is delivered."""

    def is_in_hand(self, key: Key) -> bool:
        """Whether something of it was delivered and is not done; what waits for its try is not."""

    def is_in_doubt(self, key: Key) -> bool:
        """Whether a message was delivered, and given up before it was done: state may have it, and it comes again."""

    def done_of(self, key: Key) -> Progress:
        """What is done of it."""

    def awaits_restore(self, key: Key) -> bool:
        """Whether it is where its state is to be restored, and nothing of before is in flight."""

    def begin(self, key: Key) -> int:
        """Begin with the progress in the log. Returns the next offset."""

    def restored(self, key: Key) -> None:
        """Its state is restored: deliver."""

    def has_handed_out(self, key: Key, stable: int) -> bool:
        """Whether something of it was delivered since it was at this offset."""


class SourcePart(Protocol):
    """A partition that a consumer claims, holds or releases, as the source sees it."""

    @property
    def is_claiming(self) -> bool:
        """Whether its claim is in flight."""

    @property
    def is_kept(self) -> bool:
        """Whether it is claimed or held, and not being released."""

    @property
    def releasing(self) -> str:
        """Why it is being released; "": it is not."""

    @property
    def over(self) -> bool:
        """Whether it is released or lost."""


class Work(Protocol):
    """A consumer, as its source sees it."""

    #: Its number, by which effects name it.
    number: int
    #: Whether it was closed.
    closing: bool

    @property
    def cutting(self) -> Cuttable: ...

    @property
    def is_hung(self) -> bool:
        """Whether no thread of the user comes back within handler_timeout."""

    @property
    def subscription(self) -> Subscription: ...

    @property
    def parts(self) -> Mapping[Key, SourcePart]: ...

    @property
    def blocked(self) -> Collection[Key]:
        """Partitions that are left alone until an offset is set for them (P11)."""

    @property
    def owes(self) -> bool:
        """Whether messages of an evicted partition are still in flight: nothing is claimed then (C18)."""

    @property
    def takes_on(self) -> bool:
        """Whether it wants partitions: it neither closes nor releases everything."""

    def take_on(
        self,
        key: Key,
        is_first: bool,
        want: Callable[[Owner], Holding],
        claims_before: Mapping[int, int] | None = None,
    ) -> None:
        """A partition is being claimed. want: called once with its owner.

        claims_before: CP → offset of an old claim, which shows how old the group is (P9).
        """

    def let_go(self, key: Key, why: str, now: float) -> None:
        """Finish the messages in flight, then release; why "": do not release it after all."""
