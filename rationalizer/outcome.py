"""The outcome of one record."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rationalizer import codes
from rationalizer.levels import REDO_LEVEL
from rationalizer.wire.codec import build
from rationalizer.wire.records import (
    CommitOffsets,
    DuringPause,
    JoinGroup,
    Kind,
    Record,
    SettleOffsets,
    SettlingMessages,
)
from rationalizer.wire.unpacking import Message


class Added(NamedTuple):
    """What few records have: those of level 3 the first two, of level 4 the others (D2)."""

    checkpoint: int | None = None
    barrier: int | None = None
    share: int | None = None
    taken: tuple[int, int] | None = None


NOTHING_ADDED: Final = Added()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `World.apply` concluded about one record (D2).

    `accepted`: whether it took effect. `code`: one of `rationalizer.codes`. `type`: the record's name, None
    where it was rejected at or before the check for a known type. `epoch`: that of the one lease it names, as
    this CP knows it afterwards, else None. `log_time`: the CP's, in ms. `entries`: the entries' codes, for a
    HeartbeatBatch that passed the pause, and for CommitOffsets that counts as its sender's. `of_group`: whether it was
    judged by the rules of coordinated groups; then `generation` is the group's afterwards, None where the CP knows no
    such group, `member` the id of the member that a JoinGroup made, or joined again as, and `silent` who was found
    overdue and is no member any more (G8): (client_id, for how many ms it had been silent). `added` is what few types
    have besides: `checkpoint`, `barrier`, `share`, `taken`.
    """

    accepted: bool
    code: str
    type: str | None
    epoch: int | None
    log_time: int
    entries: tuple[str, ...] | None = None
    of_group: bool = False
    generation: int | None = None
    member: str | None = None
    silent: tuple[tuple[str, int], ...] = ()
    #: One field, not four: an outcome is made for every record that a member reads.
    added: Added = NOTHING_ADDED
    _read: tuple[Kind, Message] | None = field(default=None, repr=False, compare=False)

    @property
    def checkpoint(self) -> int | None:
        """The group's newest checkpoint, of a record about checkpoints."""
        return self.added.checkpoint

    @property
    def barrier(self) -> int | None:
        """The group's open barrier, of a record about checkpoints."""
        return self.added.barrier

    @property
    def share(self) -> int | None:
        """The epoch of the share that a ClaimingShare was granted, or held already."""
        return self.added.share

    @property
    def taken(self) -> tuple[int, int] | None:
        """(first, last) of what a SettlingMessages took."""
        return self.added.taken

    @property
    def message(self) -> Any:
        """The record's fields as on the wire, by name (`message.group_id`); None if they are not well formed (E6).

        Cheaper than `record`; built at every call.
        """
        return None if self._read is None else self._read[0].named(self._read[1])

    @property
    def group_id(self) -> str:
        """The group that the record is about; "": none (it is not well formed, or is about the whole log)."""
        if self._read is None or self._read[0].during_pause is DuringPause.NOT_OF_THE_GROUP:
            return ""
        return str(self._read[1][4])

    @property
    def lease(self) -> tuple[str, str, int] | None:
        """The lease that the record names, as (group, topic, partition); None: it names none, or several."""
        if self._read is None or not self._read[0].names_lease:
            return None
        _, _, _, _, group_id, topic, partition, *_ = self._read[1]
        return group_id, topic, partition

    @property
    def by_operator(self) -> bool:
        """Whether it sets positions or settles messages for a client that is no member and no holder (G21, H3, H4)."""
        message = self.message
        if message is None or not self.is_a(CommitOffsets, SettleOffsets, SettlingMessages):
            return False
        return message.epoch is None if self.is_a(SettlingMessages) else not message.member_id

    @property
    def redoes(self) -> bool:
        """Whether an operator's record may open what is done (R2)."""
        return self._read is not None and self._read[1][0] >= REDO_LEVEL and self.by_operator

    @property
    def redone(self) -> list[tuple[int, int]]:
        """The first and the last offset of each range that an operator's record opened again (R2)."""
        if not self.redoes or self.entries is None:
            return []
        message = self.message
        answers = zip(message.open, self.entries[len(message.done) :], strict=False)
        return [(entry[0], entry[1]) for entry, code in answers if code == codes.OK]

    @property
    def leases(self) -> list[tuple[tuple[str, str, int], str]]:
        """The leases that it took effect on, as (group, topic, partition), in its order, each with its code.

        One may be there more than once; a ForgetGroup names none.
        """
        if not self.accepted:
            return []
        if (lease := self.lease) is not None:
            return [(lease, self.code)]
        if self.entries is None or self.of_group:
            return []
        message = self.message
        answers = zip(message.entries, self.entries, strict=True)
        return [((message.group_id, entry[0], entry[1]), code) for entry, code in answers if code in codes.ACCEPTED]

    def shown(self) -> dict[str, object]:
        """With the keys of D2 that most types have, in their order."""
        line: dict[str, object] = {
            "log_time": self.log_time,
            "type": self.type,
            "accepted": self.accepted,
            "code": self.code,
            "epoch": self.epoch,
        }
        if self.entries is not None:
            line["entries"] = list(self.entries)
        if self.of_group:
            line["generation"] = self.generation
        if self.of_group and self.is_a(JoinGroup):
            line["member"] = self.member
        return line

    @property
    def judged(self) -> bool:
        """Whether it got as far as the rules of its type: E6's checks, the pause and the kind let it pass."""
        return self._read is not None and self.code not in codes.BEFORE_THE_PLANES

    def is_a(self, *kinds: builtins.type[Record]) -> bool:
        """Whether the record is of one of these types; False too if it was rejected before its type was known."""
        return any(self.type == each.__name__ for each in kinds)

    @property
    def record(self) -> Record | None:
        """The record, if it passed the check of its fields (E6). Built at every call."""
        return None if self._read is None else build(*self._read)
