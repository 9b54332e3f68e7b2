"""GroupConsumer: messages of the pieces that a coordinated group gives this member (section 5).

``GroupMember`` is the part that is the same whatever is delivered, messages or ranges of offsets. ``OffsetMirror``
commits a group's positions to the Kafka group of the same name, on separate threads.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from shlex import quote
from typing import Any, ClassVar, NamedTuple, NoReturn

from kafka_marshal import arguments
from kafka_marshal.client.base import ConsumerHost
from kafka_marshal.client.checkpointing import CheckpointingMember, StateCalls
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.engine import effects
from kafka_marshal.engine.groups.member import Membership, MemberState
from kafka_marshal.engine.groups.mirror import Mirror, Position
from kafka_marshal.engine.work.assignment import REPORTING, Assignment, live_stable
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.topic_mark import counts_in, kafka_counts
from kafka_marshal.engine.work.tracker import beyond
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError, KeyRangeError, MarshalError
from kafka_marshal.logs import Event, RateLimit, log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.jobs import LongJob
from kafka_marshal.ports import TopicInfo
from kafka_marshal.topic_names import named
from kafka_marshal.types import Committed, Key
from rationalizer import Outcome, Progress
from rationalizer.limits import MAX_METADATA_BYTES

#: The default timeout of ``commit`` (s).
COMMIT_TIMEOUT_S = 5.0

#: How many topics a log message names.
_SOME = 5


class MemberPiece(NamedTuple):
    """Key hashes lo … hi of a partition (all of them: the whole partition); epoch is its fencing token."""

    topic: str
    partition: int
    lo: int
    hi: int
    epoch: int
    #: Another member gets it next: this one finishes it, and releases it.
    revoked: bool


def _piece(piece: effects.Piece, callback: effects.Callback) -> MemberPiece:
    return MemberPiece(*piece.key, piece.lo, piece.hi, piece.token, callback is effects.Callback.REVOKE)


def _texts(metadata: object) -> Mapping[Key, str]:
    """What ``commit`` is to say beside the progress."""
    given = {} if metadata is None else arguments.a_mapping("metadata", metadata)
    for text in given.values():
        if not isinstance(text, str) or len(text.encode(errors="replace")) > MAX_METADATA_BYTES:
            raise ConfigurationError(
                f"metadata has {text!r:.80}, and takes texts of up to {MAX_METADATA_BYTES} bytes (UTF-8). Nothing was "
                "committed. Keep what is longer elsewhere, under a name that fits"
            )
    return dict(zip(arguments.partitions("metadata", list(given)), given.values(), strict=True))


class GroupMember(CheckpointingMember):
    """Beside the methods of its kind of consumer, those of a member: its generation, its state, its pieces."""

    _named: ClassVar[staticmethod[[effects.Piece, effects.Callback], Any]] = staticmethod(_piece)
    _share_said = False

    def __init__(self, marshal: ConsumerHost, driver: Driver, options: ConsumerOptions) -> None:
        """Follow the log from before this member is made."""
        self._driver = driver
        self._state_calls = StateCalls(driver, self, options.state_callbacks)
        with driver.condition:
            driver.listeners.append(self._applied)
        try:
            super().__init__(marshal, driver, options)
        except BaseException:
            self._listen_no_more()
            raise

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

    def pieces(self) -> list[MemberPiece]:
        """What this member works on, sorted."""
        return self._look(self._pieces)

    def commit(self, timeout: float = COMMIT_TIMEOUT_S, *, metadata: Mapping[Key, str] | None = None) -> None:
        """When this returns, the log has all that is done of this member's pieces.

        Without this call it is committed three times a session. Raises KafkaUnavailableError if the log does not show
        it within timeout seconds: then it is committed later, or the messages come again. Raises what ended the
        membership; ConfigurationError in a group that takes checkpoints, where progress moves only with them.

        ``metadata``: (topic, partition) → a text of at most 255 bytes, which replaces that of before and is kept beside
        the progress, for the next owner too: ``committed(…, ranges=True)`` has it (G14). Only for whole partitions that
        this member works on; ConfigurationError otherwise, and nothing was committed.
        """
        timeout = arguments.seconds("timeout", timeout)
        self._begin(None)
        self._refuse_commit()
        self._driver.call(self._carry_out_commit, timeout, _texts(metadata))

    def _state(self, now: float) -> str:
        is_over = self._closed or self._driver.is_over or self._driver.engine.failure is not None
        return str(MemberState.DOWN if is_over else self._member.state(now))

    def _pieces(self, now: float) -> list[MemberPiece]:
        held = self._member.pieces.values()
        return sorted(MemberPiece(*piece.key, *piece.span, piece.epoch, piece.stopped) for piece in held)

    def _epoch_of(self, key: Key) -> int:
        piece = self._member.pieces.get(key)
        return -1 if piece is None else piece.epoch

    def _progress_of(self, key: Key) -> Committed:
        return replace(super()._progress_of(key), metadata=self._member.view.metadata(key))

    def _carry_out_commit(self, timeout: float, texts: Mapping[Key, str]) -> None:
        engine, number = self._driver.engine, self._engine.number
        with self._driver.lock.locked():
            self._drain()
            if texts and (others := self._take(engine.describe, number, texts)):
                raise ConfigurationError(
                    f"commit(metadata=…): this member does not work on all of {named(*others[0])} now, or it has not "
                    "begun there. Nothing was committed by this call. Name partitions of pieces() of which a message "
                    "was done; of one whose keys are shared, no member can say it alone"
                )
            self._take(engine.commit, number)

        def is_shown() -> bool:
            return self._is_committed() and all(self._member.view.metadata(key) == texts[key] for key in texts)

        with self._driver.condition:
            is_over = self._driver.wait_for(lambda: is_shown() or self._member.failure is not None, timeout)
            self._driver.lock.check()
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


PiecesCallback = Callable[["GroupConsumer", list[MemberPiece]], object]


class GroupConsumer(GroupMember, Consumer):
    """A member of a coordinated group, and a Consumer. Made by ``marshal.consumer(…, mode=Group())``."""

    def __init__(self, marshal: ConsumerHost, driver: Driver, options: ConsumerOptions) -> None:
        self._offset_mirror: OffsetMirror | None = None
        super().__init__(marshal, driver, options)
        if options.mirror_offsets:
            self._offset_mirror = OffsetMirror(driver, self._member.member, self._engine)
            self._leaving.before, self._leaving.after = self._offset_mirror.before_release, self._offset_mirror.last

    def _freed(self) -> None:
        if self._offset_mirror is not None:
            with self._driver.condition:
                self._offset_mirror.end()
        super()._freed()

    def _require_sharing_level(self, what: str) -> None:
        super()._require_sharing_level(what)
        group = self._member.member.group
        if group is not None and not group.settings.accept_individual_commit:
            name = self._driver.engine.settings.group_id
            raise KeyRangeError(
                f"{what}: the setting accept_individual_commit of group {name!r} is off, so the log settles no message "
                "by itself. Nothing was delivered or set aside. Run without it, or switch the setting on: "
                f"kafka-marshal group {quote(name)} --set accept_individual_commit=true",
                kip_number=88,
            )

    def assign(self, partitions: object = None) -> NoReturn:
        """Refuse (ConfigurationError): the group assigns partitions."""
        raise ConfigurationError(
            "assign() is not possible in a coordinated group: the group assigns its members' partitions, and moves as "
            "few as possible. Nothing was changed. Choose a strategy=; a claimed group (marshal.consumer) has "
            "policies, and marshal.claim(topic, partition) claims one partition by hand"
        )

    def seek(self, topic: str, partition: int, offset: int, *, force: bool = False) -> None:
        """Go forward to offset; as :meth:`Consumer.seek`. ConfigurationError in a group that takes checkpoints."""
        if self._takes_checkpoints:
            raise ConfigurationError(
                "seek() is not possible in a group that takes checkpoints: a position is the group's, and belongs to "
                "the state that was saved with it. Nothing was changed. rollback() goes back with the state; "
                f"kafka-marshal release-group {quote(self._marshal.group_id)} sets positions alone; "
                "start= says where a new group begins"
            )
        super().seek(topic, partition, offset, force=force)


#: How long one commit may take (s).
MIRROR_TIMEOUT_S = 10.0

#: How long the last commit, which close() waits for, may take (s).
LAST_TIMEOUT_S = 1.0

#: A failure that continues is logged this often (ms).
SAID_EVERY_MS = 3_600_000.0


class OffsetMirror(LongJob):
    """A job of the driver's upkeep, until ``end``: one request at a time, as an older one must not arrive last."""

    def __init__(self, driver: Driver, member: Membership, consumer: ConsumerEngine) -> None:
        self._driver = driver
        self._group_id = member.settings.group_id
        self._mirror = Mirror(member, lambda key: _live(consumer, key))
        self._repeats = RateLimit(SAID_EVERY_MS)
        with driver.condition:
            driver.upkeep.jobs.append(self)

    def _has_work(self, now: float) -> bool:
        return now >= self._mirror.next_at

    def _work(self) -> None:
        """Commit what is due; what this raises is only logged."""
        self._commit(MIRROR_TIMEOUT_S)

    def _failed(self, error: Exception) -> None:
        log(logging.ERROR, "mirror_failed", "mirroring offsets failed; it is tried again", error=error)

    def _ended(self) -> None:
        with self._driver.condition:
            super()._ended()
            self._driver.condition.notify_all()

    def before_release(self) -> None:
        """Note what is owned now: it is released next, and ``last`` commits it; the lock is held."""
        self._mirror.note_owned()

    def last(self, timeout_s: float) -> None:
        """Commit what is due after the release, and end (*blocking*, for about timeout_s at most)."""
        until = self._driver.monotonic() + min(LAST_TIMEOUT_S, timeout_s)
        with self._driver.condition:
            self.end()
            self._driver.wait_for(lambda: not self._is_running, min(LAST_TIMEOUT_S, timeout_s))
            if self._is_running:
                return
            self._is_running = True
        left_s = until - self._driver.monotonic()
        if left_s > 0:
            self._commit(left_s)

    def end(self) -> None:
        """Leave the driver's upkeep; a second call does nothing. The lock is held."""
        jobs = self._driver.upkeep.jobs
        jobs[:] = [job for job in jobs if job is not self]

    def _commit(self, timeout_s: float) -> None:
        positions: Mapping[Key, Position] = {}
        until = self._driver.monotonic() + timeout_s
        try:
            if due := self._due():
                infos = self._driver.cluster.topic_info({topic for topic, _ in due}, timeout_s)
                positions = self._still_due(due, infos)
                left_s = max(0.001, until - self._driver.monotonic())
                self._driver.cluster.commit_for_group(self._group_id, positions, left_s)
            self._succeeded(positions)
        except MarshalError as error:
            self._refused(positions, error)
        except Exception as error:  # noqa: BLE001 - logged with its traceback; a fault here must not end the mirror
            self._failed(error)
            self._note_failure(positions)

    def _due(self) -> Collection[Key]:
        with self._driver.condition:
            return self._mirror.due(self._driver.now_ms())

    def _still_due(self, keys: Collection[Key], infos: Mapping[str, TopicInfo]) -> dict[Key, Position]:
        """The positions of these keys that are still due: they may have changed during the look-up of topics."""

        def counts(key: Key, progress: Progress) -> bool:
            """Whether the topic is still the one that the position is of (P12), and the log's position counts (M3)."""
            info = infos.get(key[0])
            is_there = info is not None and key[1] < info.partitions and counts_in(info.topic_id, progress)
            return is_there and not kafka_counts(progress)

        with self._driver.condition:
            return self._mirror.due(self._driver.now_ms(), keys, counts)

    def _succeeded(self, positions: Mapping[Key, Position]) -> None:
        with self._driver.condition:
            was_failing = self._mirror.is_failing
            self._mirror.committed(positions, self._driver.now_ms())
        if was_failing and positions:
            self._repeats = RateLimit(SAID_EVERY_MS)  # the next failure is logged
            text = "offsets of group %r are committed to Kafka's consumer group of that name again"
            log(logging.INFO, "mirror_back", text, self._group_id)

    def _refused(self, positions: Mapping[Key, Position], error: MarshalError) -> None:
        self._note_failure(positions)
        if self._driver.is_over or self._repeats.due(type(error).__name__, self._driver.now_ms()) is None:
            return
        log(
            logging.WARNING,
            "mirror_failed",
            "offsets of group %r are not committed to Kafka's consumer group of that name (mirror_offsets): %s "
            "Nothing is lost, and the members go on: their progress is in the coordination topic. The lag that other "
            "tools show for this group is stale. It is tried again, at least once a minute. If consumers of Kafka's "
            "own are in that group, stop them: Kafka takes no offsets from outside while it has members",
            self._group_id,
            error,
        )

    def _note_failure(self, positions: Mapping[Key, Position]) -> None:
        with self._driver.condition:
            self._mirror.failed(positions, self._driver.now_ms())


def _live(consumer: ConsumerEngine, key: Key) -> int | None:
    """Up to where all is done, if the log shows it only at the next checkpoint."""
    checkpoints = consumer.source.checkpoints
    return None if checkpoints is None or checkpoints.newest is None else live_stable(consumer, key)
