"""The seam between those who say what is held and those who work on it.

Work (:mod:`.work`) hands messages out and hears what is done; it does not know why a partition is its own. Claims
(:mod:`.claims`) hold leases, and know nothing of messages. Each sees of the other what stands here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kafka_marshal.engine.effects import Key
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import Message
from rationalizer import Progress

__all__ = [
    "DRAINED",
    "HUNG",
    "OVERDUE",
    "PASSING",
    "PAUSED",
    "SURPLUS",
    "UNWANTED",
    "HandIn",
    "Loss",
    "Owner",
    "Ownership",
    "Part",
    "PartitionReports",
    "PartitionSource",
    "PartitionView",
    "Work",
]

#: Why a partition is let go when an admin pauses the group.
PAUSED = "the group is paused"

#: Why all is let go when an operator asks for it (C19).
DRAINED = "an operator asked this member to hand over (kafka-marshal drain)"

#: Why all is let go when no thread of the user's comes back.
HUNG = "no handler of this member has come back within handler_timeout"

#: What ends without a word about the single partition, which then stays.
PASSING = frozenset({PAUSED, DRAINED, HUNG})

#: Why it is let go where we may want it back at once (Wishes.surplus).
SURPLUS = "others are waiting and this member holds more than its share"

#: Why a partition is let go where we do not want it back.
UNWANTED = "the policy of this member lets it go"

#: Why it is released though something of it is in hand.
OVERDUE = "what is in hand was not done in time"


class Loss(StrEnum):
    """Why a partition was lost, for people and for what to do next."""

    FENCED = "another holder or epoch stands in the log"
    UNPROVEN = "not confirmed within two heartbeat intervals, by this process's own clock"
    HANDLER_TIMEOUT = "a message was in hand for longer than handler_timeout"
    POSITION = "the stored position is not in the partition's log"
    TOPIC_GONE = "the topic was deleted"
    EVICTED = "an operator took it away (kafka-marshal evict)"
    ENDED = "this Marshal has ended"


@dataclass(frozen=True, slots=True)
class HandIn:
    """Our release as our replica applied it, accepted."""

    last_offset: int | None
    code: str
    #: We had the group paused at that very place of the log: last_offset replaced the progress (C11).
    pausing: bool


class Owner(Protocol):
    """Whom a partition is held for: a consumer's assignment, or a user who claimed by hand."""

    def granted(self, now: float) -> None:
        """The log granted it."""

    def refused(self, code: str, now: float) -> None:
        """A claim was rejected (HELD, PAUSED, NOT_FRESH …)."""

    def lost(self, reason: str, now: float) -> None:
        """It is over, not by our will."""

    def released(self, now: float) -> None:
        """The log shows our release."""

    def handed_in(self, hand_in: HandIn) -> None:
        """A release of ours was applied as accepted."""

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        """A beat of ours was applied."""

    def answered(self, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """A ClaimingMessages of ours was applied (C12)."""

    def progress_to_report(self) -> int | None:
        """The last_offset for the next beat; None: nothing new."""


class Ownership(Protocol):
    """A partition that is ours, wanted, or being let go: a lease."""

    @property
    def key(self) -> Key: ...

    @property
    def cp(self) -> int:
        """The CP that tells of it (L3)."""

    @property
    def epoch(self) -> int:
        """The fencing token (C9)."""

    @property
    def keys(self) -> Keys | None:
        """Which keys of the partition are ours; None: all of them, and none has more done than others."""

    @property
    def heartbeat_interval_ms(self) -> int: ...

    @property
    def claim_expires(self) -> float:
        """When a claim that the log has not answered counts as lost (own clock, ms); inf: none is under way."""

    @property
    def most_intervals(self) -> int:
        """How many intervals the log keeps beyond what is done without a gap (P5)."""

    @property
    def held(self) -> bool:
        """Whether the log granted it, and nothing ended it since."""

    @property
    def hand_out_until(self) -> float:
        """Until when messages may be handed out (T4; own clock, ms); 0: not at all. Read without a lock."""

    @property
    def hand_out_until_s(self) -> float:
        """The same in seconds."""

    @property
    def proven_until(self) -> float:
        """The same (ms) for what was granted before (at most once): its being let go does not end it."""

    def is_ending(self, now: float) -> bool:
        """Whether nothing more is handed out: it is over, being let go, or in doubt."""

    def may_hand_over(self, now: float) -> bool:
        """Whether what was taken earlier, and granted (C12), may go out: not when it may be over (T4)."""

    def stop(self) -> None:
        """Nothing more is handed out: it is being let go."""

    def resume(self) -> None:
        """It is not let go after all: messages are handed out again."""


class Keys(Protocol):
    """Keys of a partition that is, or was, shared by key (K1)."""

    lo: int
    hi: int

    @property
    def is_part(self) -> bool:
        """Whether others have other keys."""

    def wants(self, message: Message) -> bool:
        """Whether a message is of these keys, and not done."""


class PartitionView(Protocol):
    """What the log shows of the partitions of a group, as our replica knows it. Nothing here changes anything."""

    def progress(self, key: Key) -> Progress | None:
        """What the group has done; None: no member ever held it."""

    def is_held(self, key: Key) -> bool:
        """Whether a member holds it, and will report itself how far it is."""

    def is_first(self, key: Key) -> bool:
        """Whether no member of the group ever held it (P9)."""

    def came_later(self, key: Key) -> bool:
        """Whether it is new in a topic that the group works on already: it starts at the earliest offset (P9)."""

    def is_stopped(self, cp: int) -> bool:
        """Whether a CP is at a level that this release does not know (E4)."""

    def closed(self, cp: int, now: float) -> str:
        """Why nothing in a CP can be held now; "": it can."""


class PartitionReports(Protocol):
    """What is reported to the log. ``own``: a partition of the same source."""

    #: Whether each partition's start is reported, wherever it is (G22).
    needs_start: bool

    def beat(self, own: Ownership, last_offset: int, now: float) -> None:
        """Out of turn: where a partition starts (P9), or what was granted (C12)."""

    def commit(self, own: Ownership, ranges: Sequence[tuple[int, int]]) -> None:
        """What is done beyond a gap (P3)."""

    def grant(self, own: Ownership, last_offset: int, now: float) -> None:
        """Claim messages up to last_offset (C12)."""

    def let_go(self, own: Ownership, last_offset: int | None, why: str, now: float) -> None:
        """Release it (C8)."""

    def give_back(self, own: Ownership, last_offset: int | None) -> None:
        """What was done of a partition that is over for us: the log says whether it counts (C17)."""


class PartitionSource(Protocol):
    """Why one consumer holds what it works on: leases, or membership of a coordinated group."""

    @property
    def view(self) -> PartitionView: ...

    @property
    def reports(self) -> PartitionReports: ...

    #: Why nothing of the group will be held any more, which every call of the user raises; None: it may be.
    failure: MarshalError | None

    def lets_all_go(self) -> str:
        """Why everything is to be let go; "": it is not."""

    def still_lets_go(self, own: Ownership, why: str, now: float) -> bool:
        """Whether a partition that is let go for this reason is still to go, for all that this source knows."""

    def lose(self, own: Ownership, reason: Loss, now: float) -> None:
        """It is over; its owner is notified."""

    def drop(self, own: Ownership) -> None:
        """It is wanted no longer, and was not granted."""

    def look_again(self, key: Key | None = None) -> None:
        """Something may have changed: about a partition, or (None) about any."""

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        """A partition is lost; whether nothing is taken up before what is in hand of it has come back (C18, G20)."""

    def measured(self, own: Ownership, done: int, log_end: int, now: float) -> None:
        """How far a partition of ours is."""

    def step(self, now: float) -> None:
        """Reach for what is wanted, let go what is not."""

    def deadline(self, now: float) -> float:
        """When something is due again."""

    @property
    def has_left(self) -> bool:
        """Whether no other member waits for this one any more, once nothing is held."""


class Part(Protocol):
    """A partition that a consumer has to do with, as the source sees it."""

    @property
    def is_claiming(self) -> bool:
        """The claim is under way."""

    @property
    def is_kept(self) -> bool:
        """Claimed or held, and not being let go."""

    @property
    def releasing(self) -> str:
        """Why it is being let go; "": it is not."""

    @property
    def over(self) -> bool:
        """Released, or lost."""


class Work(Protocol):
    """A consumer, as its source sees it."""

    @property
    def subscription(self) -> Subscription: ...

    @property
    def parts(self) -> Mapping[Key, Part]: ...

    @property
    def blocked(self) -> Collection[Key]:
        """Left alone until somebody sets their positions (P11)."""

    @property
    def owes(self) -> bool:
        """Whether something that was taken away is in hand still: nothing is claimed (C18)."""

    @property
    def takes_on(self) -> bool:
        """Whether it wants partitions: it does not close, nor let all go."""

    def take_on(
        self,
        key: Key,
        is_first: bool,
        want: Callable[[Owner], Ownership],
        claims_before: Mapping[int, int] | None = None,
    ) -> None:
        """A partition is reached for; want: called once with its owner.

        claims_before: by CP, an offset that tells how old the group is (P9).
        """

    def let_go(self, key: Key, why: str, now: float) -> None:
        """Finish what is in hand, then release; why is "": do not release it after all."""
