"""What a group that takes checkpoints is given and gives: its policy, and the arguments of its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Literal

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.types import Key, Placed
from rationalizer.limits import MAX_KEY_HASH, NOTHING_DONE
from rationalizer.routing import key_hash

#: Periodic checkpoints that a group keeps at most, beside those that are pinned.
MOST_KEPT: Final = 64

#: Seconds of log time that a checkpoint may take: below it no member could answer, above it a member that hangs would
#: hold up leaving and hand-over for too long.
LEAST_TIMEOUT_S: Final = 0.1
MOST_TIMEOUT_S: Final = 3600.0

#: Seconds between two checkpoints: each costs one record, and one of every member.
LEAST_EVERY_S: Final = 0.1

#: The share of ``timeout`` that draining may take at most. The rest is for saving, and for the answer's way.
MOST_DRAIN_SHARE: Final = 0.9

#: Why pieces are restored: the member has *joined* (they had no owner), another member *handed over* at a checkpoint,
#: another was *lost*, or all went back by a *rollback* or because an operator set *positions*. *forked*: the group was
#: forked from another one, and the state is still that one's.
WhyRestored = Literal["joined", "handed_over", "lost", "rollback", "positions", "forked"]


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How a group takes checkpoints, at all its members or none: its progress moves only at one, with the state then.

    ``every``, ``keep`` and ``timeout`` are those of the member that begins one. The callbacks run on a separate thread.
    See docs/checkpoints.md.
    """

    #: Seconds between two periodic checkpoints. None: only the program, an operator or a hand-over begins one.
    every: float | None = 30.0
    #: Periodic checkpoints that are kept, 1 … 64. (Pinned ones are kept besides.)
    keep: int = 16
    #: A piece waits this long (s) for its messages in flight, then it is left for the next checkpoint. Set it above all
    #: but the slowest handlers; at most nine tenths of ``timeout``.
    drain: float = 10.0
    #: A checkpoint that takes longer (s) is complete with the members that have answered; with ``hold`` it ends.
    timeout: float = 60.0
    #: A checkpoint is one moment for all members, and complete only with all of them; if a member is lost, all go back.
    #: For members that see one another's effects. All members must agree; set ``handler_timeout`` below ``timeout``.
    hold: bool = False
    #: "changed": pieces in which something was done are saved. "all": every piece, for state that changes without
    #: messages.
    save: Literal["changed", "all"] = "changed"
    #: Join the group as it is: without checkpoints if it takes none, and never begin its first one.
    adopt: bool = False
    #: Saves the state of the pieces that it is given; a Future that it returns is waited for before the answer.
    on_checkpoint: Callable[[Checkpoint], object] | None = None
    #: Takes up the state of the pieces that it is given, after a loss, a hand-over or a rollback.
    on_restore: Callable[[Restore], object] | None = None
    #: Called with the id of a complete checkpoint.
    on_completed: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        if self.every is not None and arguments.seconds("every", self.every) < LEAST_EVERY_S:
            raise arguments.wrong(
                "every",
                f"None, or at least {LEAST_EVERY_S:g} seconds (each checkpoint costs a record of every member)",
                self.every,
            )
        arguments.a_whole("keep", self.keep, 1, MOST_KEPT)
        if not LEAST_TIMEOUT_S <= arguments.seconds("timeout", self.timeout) <= MOST_TIMEOUT_S:
            raise arguments.wrong(
                "timeout",
                f"{LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:g} seconds (a member that hangs holds up leaving and "
                "hand-over this long)",
                self.timeout,
            )
        most = self.timeout * MOST_DRAIN_SHARE
        if arguments.seconds("drain", self.drain) > most:
            raise arguments.wrong(
                "drain",
                f"at most {most:g} seconds, nine tenths of timeout ({self.timeout:g}): the rest is for saving",
                self.drain,
            )
        arguments.a_flag("hold", self.hold)
        arguments.one_of("save", self.save, ("changed", "all"))
        arguments.a_flag("adopt", self.adopt)


def has_key(lo: int, hi: int, key: bytes | str | None, offset: int | None) -> bool:
    """Whether a message is among the keys lo … hi. key: None: its offset counts."""
    if (lo, hi) == (0, MAX_KEY_HASH):
        return True
    if isinstance(key, str):
        key = key.encode()
    if (key is None and offset is None) or not isinstance(key, bytes | None):
        raise ConfigurationError(
            f"holds(key) takes a message's key, bytes or a string, not {key!r}: only some keys of the partition are "
            "here. Nothing was changed. Give holds(None, offset) for a message without a key"
        )
    return lo <= key_hash(key, offset or 0) <= hi


class _Piece(Placed):
    """Some keys of a partition, or all."""

    __slots__ = ()
    lo: int
    hi: int

    def holds(self, key: bytes | str | None, offset: int | None = None) -> bool:
        """Whether a message with this key (a str: in UTF-8) is one of this piece's.

        offset: of a message without a key, which belongs to a piece by its offset.
        """
        return has_key(self.lo, self.hi, key, offset)


@dataclass(frozen=True, slots=True)
class CheckpointPiece(_Piece):
    """Key hashes lo … hi of a partition (all of them: the whole partition), whose state is to be saved."""

    topic: str
    partition: int
    lo: int
    hi: int
    _: KW_ONLY
    #: The group whose state it is; ``save`` of a store names the state by it.
    group_id: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.topic, self.partition, self.lo, self.hi))


@dataclass(frozen=True, slots=True)
class RestorePiece(_Piece):
    """Key hashes lo … hi of a partition (all of them: the whole partition), and where they continue."""

    topic: str
    partition: int
    lo: int
    hi: int
    #: The fencing token under which the member has it.
    epoch: int
    #: The offset that comes next: all below it is done, or gone.
    position: int
    #: Offsets beyond the position that are done, too, as inclusive intervals.
    ranges: tuple[tuple[int, int], ...]
    #: (lo, hi, id) of each part: the checkpoint id under which its state was saved; None: none was.
    states: tuple[tuple[int, int, int | None], ...]
    _: KW_ONLY
    #: The group whose state it is; ``load`` of a store finds the state by it. Of a fork that has not saved its own, the
    #: group that was forked.
    group_id: str
    #: (lo, hi, offset) of each part: done through this offset, as the checkpoint sees it; −1: nothing is.
    done_through: tuple[tuple[int, int, int], ...]
    #: Where the group began on this partition: the offset before its first; −1: at its beginning.
    initial: int
    #: (lo, hi, group) of each part whose state was saved by the group from which this one was forked.
    groups: tuple[tuple[int, int, str], ...] = ()

    @classmethod
    def of(
        cls,
        group_id: str,
        key: Key,
        span: tuple[int, int],
        epoch: int,
        position: int,
        ranges: tuple[tuple[int, int], ...],
        states: Iterable[tuple[int, int, int]],
        groups: tuple[tuple[int, int, str], ...],
        done_through: tuple[tuple[int, int, int], ...],
        initial: int,
    ) -> RestorePiece:
        """As the log says it. states: id 0: none was saved. groups: of a fork; those that cover all name the group."""
        covered = sum(hi - lo + 1 for lo, hi, _ in groups)
        named = {"group_id": groups[0][2] if covered > span[1] - span[0] else group_id, "groups": groups}
        saved = tuple((lo, hi, state or None) for lo, hi, state in states)
        return cls(*key, *span, epoch, position, ranges, saved, done_through=done_through, initial=initial, **named)  # type: ignore[arg-type]

    @property
    def untouched(self) -> tuple[tuple[int, int], ...]:
        """Key ranges, both inclusive, of which nothing is done: there is no state, and none is missing."""
        if self.ranges and all(state is None for _, _, state in self.states):
            return ()  # done before the group took checkpoints, and it is not known of which keys
        return tuple((lo, hi) for lo, hi, through in self.done_through if through in (NOTHING_DONE, self.initial))

    def __iter__(self) -> Iterator[Any]:
        yield from (self.topic, self.partition, self.lo, self.hi)
        yield from (self.epoch, self.position, self.ranges, self.states)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What ``on_checkpoint`` is given: save the state of these pieces under this id.

    Called as pieces drain, so several times for one id, each piece once. Nothing of these pieces is in flight; messages
    of other pieces may be. They continue when the call returns, or its coroutine ends; a Future that it returns is
    awaited before the answer. If it raises, they are left for the next checkpoint.
    """

    #: The log offset of the record that began it.
    id: int
    #: Those that changed, or go to another member.
    pieces: tuple[CheckpointPiece, ...]
    #: The member leaves the group at this checkpoint.
    leaving: bool = False
    #: (topic, partition) → ids under which states are still needed. What is older than ``id`` and not there can be
    #: deleted (``collect``), of partitions in ``pieces``.
    needed: Mapping[Key, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restore:
    """What ``on_restore`` is given: take the state of these pieces from the checkpoint; what they had is void."""

    #: The newest complete checkpoint, from which they are restored.
    checkpoint: int
    why: WhyRestored
    pieces: tuple[RestorePiece, ...]
    #: (topic, partition) → the offset that comes next, of all partitions of the group.
    positions: Mapping[Key, int]
