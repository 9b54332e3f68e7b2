"""Checkpoints of a group consumer: its arguments, what the program calls, and what is refused with them (section 7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any, Final, NamedTuple, TypeVar, cast

from kafka_marshal import arguments
from kafka_marshal.checkpoints import CheckpointPolicy
from kafka_marshal.client.base import Membership
from kafka_marshal.client.state_calls import StateCalls
from kafka_marshal.engine.effects import RestoreState, SaveState
from kafka_marshal.engine.groups.checkpoints.member import MemberCheckpoints
from kafka_marshal.engine.groups.client import GroupClient
from kafka_marshal.engine.settings import CheckpointOptions, ConsumerSettings
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.logs import log

__all__ = [
    "TAKES",
    "CheckpointingMember",
    "Checkpoints",
    "KeptCheckpoint",
    "check_with_checkpoints",
    "checked_checkpoints",
]

T = TypeVar("T")

#: Callback → its argument, for people.
TAKES: Final[Mapping[str, str]] = {"on_checkpoint": "checkpoint", "on_restore": "restore", "on_completed": "id"}

#: By their numbers in the log (X1).
_KINDS: Final = ("passing", "periodic", "pinned")


class KeptCheckpoint(NamedTuple):
    """A checkpoint that the group can go back to."""

    id: int
    #: When it was complete (log time, ms).
    log_time: int
    #: ``"passing"`` (taken for a hand-over, kept while it is the newest), ``"periodic"`` or ``"pinned"``.
    kind: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What a member knows of its group's checkpoints at one moment."""

    #: ``"SUBSCRIBED"`` (owns nothing), ``"POLLING"`` (delivers), ``"DRAINING"`` (a piece waits for what is in flight),
    #: ``"SAVING"``, ``"REACHED"`` (has answered, and waits: it leaves, or all hold), ``"CR_RESET_INITIATED"`` (goes
    #: back) or ``"RESET_COMPLETE"`` (has restored, and delivered nothing since).
    state: str
    #: The id of the newest complete one; None: the group takes none (yet).
    newest: int | None
    #: Ascending; the newest is the last.
    kept: tuple[KeptCheckpoint, ...]
    #: How long the last drain took, and the longest one: from the barrier to the last cut.
    drain_seconds: float
    drain_seconds_max: float


_NONE = Checkpoints("SUBSCRIBED", None, (), 0.0, 0.0)


def checked_checkpoints(
    policy: CheckpointPolicy | None, callbacks: Mapping[str, Any], *, ranges: bool = False
) -> CheckpointOptions | None:
    """How a member takes checkpoints; None: not at all. Raises ConfigurationError for what can't work.

    ranges: it takes ranges of offsets, and a cut waits for their end for as long as the barrier allows.
    """
    given = {name: callback for name, callback in callbacks.items() if callback is not None}
    for name, callback in given.items():
        arguments.a_function(name, callback, TAKES[name])
    if policy is None:
        if given:
            raise ConfigurationError(
                f"{' and '.join(given)} would never be called: this consumer takes no checkpoints. Nothing was "
                "claimed. Add checkpoints=CheckpointPolicy()"
            )
        return None
    arguments.an_instance("checkpoints", policy, CheckpointPolicy, "a CheckpointPolicy, such as CheckpointPolicy()")
    if "on_checkpoint" in given and "on_restore" not in given:
        log(
            logging.WARNING,
            "no_restore",
            "on_checkpoint saves state that nothing takes up: this consumer has no on_restore. After a hand-over, a "
            "loss or a rollback it continues at the checkpoint's position with whatever state is in memory then",
        )
    return CheckpointOptions(
        every_ms=None if policy.every is None else policy.every * 1000,
        keep=policy.keep,
        drain_ms=(policy.timeout if ranges else policy.drain) * 1000,
        timeout_ms=round(policy.timeout * 1000),
        hold=policy.hold,
        save_all=policy.save == "all",
        adopt=policy.adopt,
        has_callback="on_checkpoint" in given,
    )


def check_with_checkpoints(settings: ConsumerSettings) -> None:
    """Raises ConfigurationError for options that contradict checkpoints (X11, X20)."""
    if settings.group is None or settings.group.checkpoints is None:
        return
    if settings.at_most_once:
        raise ConfigurationError(
            "checkpoints are for delivery='at-least-once', which is the default: with state that goes back with the "
            "position each message counts once. At most once, progress moves before a message is handled, so no state "
            "would fit it. Nothing was claimed. Leave out delivery='at-most-once'"
        )
    if settings.transactions:
        raise ConfigurationError(
            "a group takes checkpoints or processes in transactions, not both: Kafka's offset moves with each "
            "transaction, and can't go back with a loss. Nothing was claimed. For state: checkpoints= alone. For "
            "output to Kafka, once for read_committed readers: transactions=True alone"
        )


class CheckpointingMember(Membership[Any]):
    """The part of a member that takes checkpoints, whatever it delivers."""

    #: Calls the user's callbacks.
    _state_calls: StateCalls

    @property
    def _member(self) -> GroupClient:
        return cast("GroupClient", self._engine.source)

    def _look(self, found: Callable[[float], T]) -> T:
        def look() -> T:
            with self._driver.locked(step=False):
                return found(self._driver.now_ms())

        return self._driver.call(look)

    # The program's calls.

    def checkpoint(self) -> None:
        """Begin a checkpoint of the group now, and return at once.

        Nothing more is delivered here until the log has answered, so this member's cut is at this place: what was
        delivered before is in the checkpoint once it is done. If one is being taken already, that one serves. Raises
        ConfigurationError if the consumer was made without ``checkpoints=``.
        """
        self._refuse_without_checkpoints("checkpoint()")
        self._begin(None)
        if self._adopts_none():
            raise ConfigurationError(
                f"checkpoint(): group {self._marshal.group_id!r} takes no checkpoints (yet), and this member was made "
                "with adopt=True. Nothing was changed. commit() commits what is done; kafka-marshal checkpoints "
                f"{quote(self._marshal.group_id)} --start has the group take them"
            )
        self._driver.call(self._carry_out_checkpoint)

    def rollback(self, to: int | None = None) -> None:
        """Have all members go back to the newest checkpoint, or to the one with this id, and return at once.

        What was done since is done again, with state that ``on_restore`` takes from there; checkpoints after it are
        dropped. A ``done`` of a message in flight has no effect any more. Raises ConfigurationError if the group has no
        such checkpoint (``checkpoints.kept`` names them), or if the consumer was made without ``checkpoints=``.
        """
        self._refuse_without_checkpoints("rollback()")
        to = None if to is None else arguments.a_whole("to", to)
        self._begin(None)
        self._driver.call(self._carry_out_rollback, to)

    @property
    def checkpoints(self) -> Checkpoints:
        """What this member knows of the group's checkpoints, now."""
        self._refuse_without_checkpoints("checkpoints")
        return self._look(self._checkpoints)

    def _checkpoints(self, now: float) -> Checkpoints:
        found = self._member.checkpoints
        if found is None:
            return _NONE
        kept = tuple(KeptCheckpoint(number, log_time, _KINDS[kind]) for number, log_time, kind in found.kept)
        return Checkpoints(str(found.state), found.newest, kept, found.drain_seconds, found.drain_seconds_max)

    def _carry_out_rollback(self, to: int | None) -> None:
        kept = {each.id for each in self._look(self._checkpoints).kept}
        if not kept or (to is not None and to not in kept):
            there = f"it has {', '.join(map(str, sorted(kept)))}" if kept else "it takes none (yet)"
            what = "checkpoint" if to is None else f"checkpoint {to}"
            raise ConfigurationError(
                f"rollback(): group {self._marshal.group_id!r} has no {what} to go back to: {there}. Nothing was "
                f"changed. kafka-marshal checkpoints {quote(self._marshal.group_id)} lists them"
            )
        with self._driver.locked():
            if (found := self._ready()) is not None:
                self._take(found.go_back, to)

    def _carry_out_checkpoint(self) -> None:
        with self._driver.locked():
            if (found := self._ready()) is not None:
                self._take(found.take)

    def _ready(self) -> MemberCheckpoints | None:
        self._drain()
        self._driver.check()
        if self._member.failure is not None:
            raise self._member.failure
        return self._member.checkpoints

    # What is refused.

    def _refuse_commit(self) -> None:
        if self._takes_checkpoints and not self._adopts_none():
            raise ConfigurationError(
                "commit() is not possible in a group that takes checkpoints: progress moves only at one, together with "
                "the state that belongs to it. Nothing was changed. Call checkpoint(), which begins one now"
            )

    def _refuse_without_checkpoints(self, what: str) -> None:
        if not self._takes_checkpoints:
            raise ConfigurationError(
                f"{what} is for a group that takes checkpoints, and this consumer was made without them. Nothing was "
                "changed. Add checkpoints=CheckpointPolicy() to marshal.group_consumer, at all members; without, "
                "commit() commits what is done"
            )

    @property
    def _takes_checkpoints(self) -> bool:
        """Whether it was made with ``checkpoints=``."""
        options = self._options.settings.group
        return options is not None and options.checkpoints is not None

    def _adopts_none(self) -> bool:
        """Whether it was made with ``adopt=True``, and its group takes no checkpoints."""
        options = self._options.settings.group
        adopts = options is not None and options.checkpoints is not None and options.checkpoints.adopt
        return adopts and self._look(self._checkpoints).newest is None

    # What the engine asks for (the lock is held).

    def _save_state(self, asked: SaveState) -> None:
        self._state_calls.save(asked)

    def _restore_state(self, asked: RestoreState) -> None:
        self._state_calls.restore(asked)

    def _completed(self, checkpoint: int) -> None:
        self._state_calls.completed(checkpoint)
        self._state_calls.reopen()
