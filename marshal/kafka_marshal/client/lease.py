"""A lease claimed by hand, and how it is claimed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from shlex import quote

from kafka_marshal import arguments
from kafka_marshal.client.one_process import OneProcess, WithBlock
from kafka_marshal.client.view import lease_info
from kafka_marshal.engine.claims.leases import Acceptance, ManualLease
from kafka_marshal.engine.claims.queues import TURN_SHARE
from kafka_marshal.engine.work.topic_mark import kafka_counts
from kafka_marshal.errors import (
    ClaimTimeoutError,
    ConfigurationError,
    GroupPausedError,
    HeldError,
    LeaseLostError,
    MarshalError,
    coordinated_group,
)
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.topic_names import is_lock, named
from rationalizer import ClaimingPartition, InvalidRecordError, Progress, codes
from rationalizer.holes import Hole

#: Refusals that no waiting ends.
_FINAL = (codes.WRONG_KIND, codes.UPGRADE_REQUIRED)


def serve_claim(
    is_gone: Callable[[], bool], driver: Driver, topic: str, partition: int, timeout: float | None
) -> ClaimedLease:
    """Carry out ``Marshal.claim`` on one of our threads. is_gone: the caller has left. Raises the same errors.

    timeout: None: wait without a limit.
    """
    key = (topic, partition)
    driver.lock.check()
    driver.upkeep.scope.read_all()
    deadline = inf if timeout is None else driver.monotonic() + timeout
    if not is_lock(topic):
        _check_partition(driver, topic, partition)
    with driver.condition:
        # While our earlier release is under way, the lease is neither ours nor free.
        is_going = driver.engine.book.is_releasing
        driver.wait_for(lambda: is_gone() or not is_going(key), timeout)
    with driver.lock.locked() as engine:
        driver.lock.check()
        _check_lease_name(driver, topic, partition)
        if is_going(key):
            raise ClaimTimeoutError(
                f"{named(*key)}: this Marshal has released this lease, and the log does not show it yet. "
                "Nothing was claimed; claim it again"
            )
        if key in engine.book.leases:
            driver.upkeep.levels.check(engine.book.leases[key].cp)  # whose leases are over, though they are still there
            more = ""
            if is_lock(topic):
                more = ". It is a lock among members; threads of one member need another one besides"
            raise ConfigurationError(f"{named(*key)}: this Marshal has, or is getting, this lease already{more}")
        manual = engine.take(None, engine.leases.claim, key, driver.now_ms())
    answer_s = 2 * driver.engine.settings.heartbeat_interval_ms / 1000
    if is_lock(topic) and manual.lease.pending.claim_sent_at is None:
        _await_turn(driver, manual, driver.monotonic() + answer_s)
    with driver.condition:
        # Wait for one answer of the log in any case: timeout=0 means one try.
        driver.wait_for(lambda: manual.is_proven or bool(manual.refusal or manual.loss), answer_s)
        driver.wait_for(
            lambda: is_gone() or manual.is_proven or bool(manual.loss) or manual.refusal in _FINAL,
            None if timeout is None else max(0.0, deadline - driver.monotonic()),
        )
        driver.lock.check()
    with driver.lock.locked() as engine:
        held = engine.leases.peers.lease(key)
        refused = manual.is_proven and held is not None and kafka_counts(held.progress)
        in_the_way = _in_the_way(held.progress) if manual.is_proven and held is not None else []
        if manual.is_proven and not refused and not in_the_way:
            return ClaimedLease(driver, manual)
        engine.take(None, manual.release, None, driver.now_ms())
        if in_the_way and not refused:
            raise _open(engine.settings.group_id, topic, partition, in_the_way)
        if refused:
            raise _transactional(engine.settings.group_id, topic, partition)
        driver.upkeep.levels.check(manual.lease.cp)
        raise _refusal(driver, manual)


def _await_turn(driver: Driver, manual: ManualLease, until: float) -> None:
    """Others have asked for a free lock before. The background thread may not know yet when our turn comes."""
    turn_s = driver.engine.settings.heartbeat_interval_ms / 1000 * TURN_SHARE

    def is_answered() -> bool:
        return manual.is_proven or bool(manual.refusal or manual.loss)

    while not (is_answered() or manual.lease.pending.claim_sent_at) and driver.monotonic() < until:
        with driver.condition:
            driver.wait_for(is_answered, turn_s / 4)
        with driver.lock.locked():
            pass  # what is due was done


def _check_partition(driver: Driver, topic: str, partition: int) -> None:
    """Refuse a partition that its topic does not have: there would never be a message under that lease."""
    try:
        info = driver.cluster.topic_info([topic], LOOKUP_TIMEOUT_S).get(topic)
    except MarshalError as error:
        log(
            logging.DEBUG,
            "not_looked_up",
            "claim of %s [%s]: the topic was not looked up: %s",
            topic,
            partition,
            error,
        )
        return
    if info is not None and partition >= info.partitions:
        raise ConfigurationError(
            f"{topic} [{partition}] does not exist: {topic!r} has {info.partitions} partition(s), 0 to "
            f"{info.partitions - 1}. Nothing was claimed"
        )


def _check_lease_name(driver: Driver, topic: str, partition: int) -> None:
    try:
        settings = driver.engine.settings
        ClaimingPartition(*settings.ids, topic, partition, settings.heartbeat_interval_ms)
    except InvalidRecordError as error:
        raise ConfigurationError(f"this names no partition that could be claimed: {error}") from error


def _transactional(group_id: str, topic: str, partition: int) -> ConfigurationError:
    return ConfigurationError(
        f"{topic} [{partition}]: the group processes it in transactions: Kafka's offset counts, which may be ahead of "
        "the log's. A lease claimed by hand knows nothing of it; it was released, and nothing was done. Use "
        "consumer([…], exactly_once=Transactions()). Or give up exactly once, and set its position: "
        f"kafka-marshal release-group {quote(group_id)} --partition {topic}:{partition}=OFFSET"
    )


def _in_the_way(progress: Progress) -> list[Hole]:
    """Open messages that a caller who reads from the position on would miss, or handle though they are set aside."""
    return [hole for hole in progress.open if not hole.is_parked or hole.last > progress.stable]


def _open(group_id: str, topic: str, partition: int, holes: Sequence[Hole]) -> ConfigurationError:
    first = holes[0]
    which = f"offset {first.first}" if first.first == first.last else f"offsets {first.first} to {first.last}"
    more = f", and {len(holes) - 1:,} more" if len(holes) > 1 else ""
    return ConfigurationError(
        f"{topic} [{partition}]: messages are open in it ({which}{more}): they wait for another try, or are set aside "
        "ahead of its position. Who reads it under a lease claimed by hand would miss the ones, and handle the others; "
        f"it was released, and nothing was done. Let a worker with consumer([{topic!r}]) handle them. Or give them up: "
        f"kafka-marshal discard {quote(group_id)} {topic}:{partition}:{first.first}"
    )


def _refusal(driver: Driver, manual: ManualLease) -> Exception:
    where = named(*manual.key)
    group_id = driver.engine.settings.group_id
    world = driver.replica.worlds[manual.lease.cp]
    if manual.refusal == codes.WRONG_KIND:
        return coordinated_group(group_id)
    pause = world.pause(group_id)
    if manual.refusal == codes.PAUSED and pause is not None:
        return GroupPausedError(
            f"{where}: the group is paused by {pause.client_id!r} until log time {pause.expires}. Nothing was "
            "claimed; "
            f"a dead admin's pause ends with kafka-marshal release-group {quote(group_id)} --resume",
            client_id=pause.client_id,
            expires=pause.expires,
        )
    held = world.lease(group_id, *manual.key)
    sharer = None if held is None or held.held else held.longest
    if sharer is not None:
        return HeldError(
            f"{where}: shared by {sharer.client_id!r}, and maybe others. Nothing was claimed. It falls free when all "
            "of them have released it, or are silent for two heartbeat intervals",
            holder=sharer.client_id or "",
            since=sharer.last_beat,
            freshness=sharer.freshness(world.log_time),
        )
    if held is not None and held.held:
        info = lease_info(held, world)
        return HeldError(
            f"{where}: held by {info.client_id!r} (epoch {info.epoch}, {info.freshness}, last beat at log time "
            f"{info.last_beat}). Nothing was claimed. It falls free when its holder releases it or is silent for "
            f"{2 * info.heartbeat_interval_ms} ms",
            holder=info.client_id or "",
            since=info.last_beat,
            freshness=info.freshness,
        )
    return ClaimTimeoutError(
        f"{where}: the log did not answer the claim in time. Should it be granted later, it is released at once"
    )


#: How long our record may take to come back through the log before the call fails, in heartbeat intervals.
ANSWER_INTERVALS = 2


class ClaimedLease(OneProcess, WithBlock):
    """One lease that this process holds; heartbeats are sent in the background until it is released or lost.

    Made by :meth:`Marshal.claim`. Any thread may use it. A ``with`` block releases it at its end.

    Attributes:
        topic, partition: what it is a lease of; of a lock ``lock:NAME`` and 0.
        epoch: the fencing token. Store it with every write to an outside system, and refuse older ones there.
    """

    def __init__(self, driver: Driver, manual: ManualLease) -> None:
        self._driver = driver
        self._manual = manual
        self.topic: str
        self.partition: int
        self.topic, self.partition = manual.key
        self.epoch: int = manual.lease.epoch
        #: Its Marshal, kept alive by this reference.
        self._keeps: object = None

    @property
    def token(self) -> int:
        """The fencing token: the epoch, which grows with each owner."""
        return self.epoch

    @property
    def valid(self) -> bool:
        """Whether this process certainly holds it, by its own clock."""
        return self._driver.now_ms() < self._manual.lease.hand_out_until

    @property
    def _is_over(self) -> bool:
        """Whether it was lost or released. One that is neither may be in doubt, and valid again later."""
        return bool(self._manual.loss) or self._manual.is_released

    @property
    def last_offset(self) -> int | None:
        """Everything up to this offset is done, as far as the log knows; None: nothing is."""
        return self._driver.call(self._last_offset)

    def _last_offset(self) -> int | None:
        with self._driver.lock.locked(step=False) as engine:
            lease = engine.peers.lease(self._manual.key)
            return None if lease is None or lease.progress.stable < 0 else lease.progress.stable

    def require(self) -> None:
        """Raise LeaseLostError unless the lease is valid. Call it before a step that can't be undone."""
        if not self.valid:
            self._driver.life.refuse_fork()
            raise LeaseLostError(self._lost_message())

    def heartbeat(self, last_offset: int | None = None) -> None:
        """Report that everything up to last_offset is done, and wait until the log has it."""
        self._driver.call(self._heartbeat, _checked(last_offset))

    def _heartbeat(self, last_offset: int | None) -> None:
        self.require()
        with self._driver.lock.locked() as engine:
            answer = engine.take(None, self._manual.beat, last_offset, self._driver.now_ms())
        self._await(answer, f"heartbeat({last_offset})")

    def grant(self, last_offset: int) -> None:
        """Claim all messages up to last_offset, at most once: no other member will ever get them.

        Process them only after this has returned. Raises ConfigurationError if some of them were granted or done
        before, LeaseLostError if this process does not hold the lease any more.
        """
        self._driver.call(self._grant, arguments.a_whole("last_offset", last_offset))

    def _grant(self, last_offset: int) -> None:
        self.require()
        with self._driver.lock.locked() as engine:
            answer = engine.take(None, self._manual.grant, last_offset, self._driver.now_ms())
        self._await(answer, f"grant({last_offset})")

    def release(self, last_offset: int | None = None) -> None:
        """Release the lease, with everything up to last_offset done. Releasing one that is over does nothing."""
        self._driver.call(self._release, _checked(last_offset))

    def _release(self, last_offset: int | None) -> None:
        if self._manual.loss or self._manual.is_released:
            return
        with self._driver.lock.locked() as engine:
            engine.take(None, self._manual.release, last_offset, self._driver.now_ms())
        with self._driver.condition:
            self._driver.wait_for(
                lambda: self._manual.is_released or bool(self._manual.loss),
                ANSWER_INTERVALS * self._manual.lease.heartbeat_interval_ms / 1000,
            )

    def _await(self, answer: Acceptance, what: str) -> None:
        timeout_s = ANSWER_INTERVALS * self._manual.lease.heartbeat_interval_ms / 1000
        with self._driver.condition:
            self._driver.wait_for(lambda: answer.accepted is not None, timeout_s)
            self._driver.lock.check()
        if answer.accepted:
            return
        if answer.accepted is None:
            raise LeaseLostError(
                f"{named(self.topic, self.partition)}: the log did not show {what} within {timeout_s:g} s, and the "
                "lease (epoch "
                f"{self.epoch}) ends meanwhile. It may or may not have been written; treat it as not done"
            )
        if answer.code == "PROPOSAL_TOO_LOW":
            raise ConfigurationError(
                f"{self.topic} [{self.partition}]: {what} was rejected: offsets up to there were granted or done "
                "before, so "
                "they are not yours. Nothing changed"
            )
        raise LeaseLostError(f"{what} was rejected ({answer.code or 'fenced'}). {self._lost_message()}")

    def _lost_message(self) -> str:
        reason = self._manual.loss or ("it was released" if self._manual.is_released else "it can't be proven in time")
        return (
            f"{named(self.topic, self.partition)}: the lease (epoch {self.epoch}) is not ours any more: {reason}. Do "
            "not go on "
            "with work under it; what was reported before stays done. Claim it again to go on"
        )

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "valid" if self.valid else "over"
        return f"ClaimedLease({self.topic!r}, {self.partition}, epoch={self.epoch}, {state})"


def _checked(last_offset: int | None) -> int | None:
    return None if last_offset is None else arguments.a_whole("last_offset", last_offset)
