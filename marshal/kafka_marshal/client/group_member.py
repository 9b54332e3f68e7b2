"""The part of a coordinated group's member that is the same whatever it delivers: messages, or ranges of offsets."""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from kafka_marshal import arguments
from kafka_marshal.client.checkpointing import CheckpointingMember
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.client.state_calls import StateCalls
from kafka_marshal.engine import effects
from kafka_marshal.engine.groups.member import MemberState
from kafka_marshal.engine.work.assignment import REPORTING, Assignment
from kafka_marshal.engine.work.tracker import beyond
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.logs import Event, log
from kafka_marshal.node.driver import Driver
from kafka_marshal.types import Key
from rationalizer import Outcome

#: The default timeout of ``commit`` (s).
COMMIT_TIMEOUT_S = 5.0

#: How many topics a log message names.
_SOME = 5


class Piece(NamedTuple):
    """Key hashes lo … hi of a partition (all of them: the whole partition); epoch is its fencing token."""

    topic: str
    partition: int
    lo: int
    hi: int
    epoch: int
    #: Another member gets it next: this one finishes it, and releases it.
    revoked: bool


def _piece(piece: effects.Piece, callback: effects.Callback) -> Piece:
    return Piece(*piece.key, piece.lo, piece.hi, piece.token, callback is effects.Callback.REVOKE)


class GroupMember(CheckpointingMember):
    """Beside the methods of its kind of consumer, those of a member: its generation, its state, its pieces."""

    _named: ClassVar[staticmethod[[effects.Piece, effects.Callback], Any]] = staticmethod(_piece)
    _share_said = False

    def _join_in(self, driver: Driver, options: ConsumerOptions) -> None:
        """Follow the log from before this member is made."""
        self._driver = driver
        self._state_calls = StateCalls(driver, self, options.state_callbacks)
        with driver.condition:
            driver.listeners.append(self._applied)

    def _freed(self) -> None:
        self._listen_no_more()
        super()._freed()

    def _listen_no_more(self) -> None:
        with self._driver.condition, suppress(ValueError):  # it may end twice
            self._driver.listeners.remove(self._applied)

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        """Log that this member has joined (a listener of the driver; its lock is held)."""
        settings, message = self._driver.engine.settings, outcome.message
        if outcome.member is None or (message.instance_id, message.client_id, message.group_id) != settings.ids:
            return
        text = f"member {outcome.member} of the group, generation {outcome.generation}"
        self._driver.effects.events.say(Event.MEMBER, text, member=outcome.member, generation=outcome.generation)
        self._look_at_shares()

    def _look_at_shares(self) -> None:
        """Warn once if this member allows key sharing but its group does not (the driver's lock is held)."""
        options, group = self._options.settings.group, self._member.member.group
        if options is None or not options.allow_key_share or self._share_said or group is None:
            return
        topics = sorted({topic for topic, _ in self._engine.subscription.partitions})
        if topics and not set(topics) & set(group.settings.accept_range_fetch):
            self._share_said = True
            name = shlex.quote(self._driver.engine.settings.group_id)
            log(
                logging.WARNING,
                "key_share_refused",
                "allow_key_share=True has no effect: the group's setting accept_range_fetch names none of the topics "
                "%s, so each partition has one member. kafka-marshal group %s --set accept_range_fetch=%s",
                ", ".join(topics[:_SOME]) + (" …" if len(topics) > _SOME else ""),
                name,
                ",".join(topics[:_SOME]),
            )

    @property
    def generation(self) -> int:
        """The group's generation: the offset of the record that began it; 0 before the first."""
        return self._look(lambda now: self._member.member.generation)

    @property
    def member_id(self) -> str:
        """The id that the group gave this member; "": it is not a member at present."""
        return self._look(lambda now: self._member.member.member_id)

    @property
    def state(self) -> str:
        """``"STARTUP"``, ``"PART_OF_GROUP"``, ``"REDISCOVER"`` (not proven at present) or ``"DOWN"``."""
        return self._look(self._state)

    def pieces(self) -> list[Piece]:
        """What this member works on, sorted."""
        return self._look(self._pieces)

    def commit(self, timeout: float = COMMIT_TIMEOUT_S) -> None:
        """When this returns, the log has all that is done of this member's pieces.

        Without this call it is committed three times a session. Raises KafkaUnavailableError if the log does not show
        it within timeout seconds: then it is committed later, or the messages come again. Raises what ended the
        membership; ConfigurationError in a group that takes checkpoints, where progress moves only with them.
        """
        timeout = arguments.seconds("timeout", timeout)
        self._begin(None)
        self._refuse_commit()
        self._driver.call(self._carry_out_commit, timeout)

    def _state(self, now: float) -> str:
        is_over = self._closed or self._driver.is_over or self._driver.engine.failure is not None
        return str(MemberState.DOWN if is_over else self._member.state(now))

    def _pieces(self, now: float) -> list[Piece]:
        held = self._member.pieces.values()
        return sorted(Piece(*piece.key, *piece.span, piece.epoch, piece.stopped) for piece in held)

    def _epoch_of(self, key: Key) -> int:
        piece = self._member.pieces.get(key)
        return -1 if piece is None else piece.epoch

    def _carry_out_commit(self, timeout: float) -> None:
        with self._driver.locked():
            self._drain()
            self._take(self._driver.engine.commit, self._engine.number)
        with self._driver.condition:
            is_over = self._driver.wait_for(lambda: self._is_committed() or self._member.failure is not None, timeout)
            self._driver.check()
            if self._member.failure is not None:
                raise self._member.failure
            if not is_over:
                raise KafkaUnavailableError(
                    f"commit(): the log has not shown within {timeout:g} s what is done. Nothing is lost: it is "
                    "committed with the next heartbeat that gets through, or the messages come again"
                )

    def _is_committed(self) -> bool:
        """Whether the log shows all that is done; the lock is held."""
        return self._member.reports.is_committed and not any(map(self._has_islands, self._engine.assignments.values()))

    def _has_islands(self, assignment: Assignment) -> bool:
        """Whether something beyond a gap is done that the log does not know yet (P6)."""
        is_reported = assignment.stage in REPORTING and assignment.lease.held and not self._engine.at_most_once
        progress = self._member.view.progress(assignment.key)
        return is_reported and progress is not None and bool(beyond(assignment.tracker.done.ranges, progress.ranges))
