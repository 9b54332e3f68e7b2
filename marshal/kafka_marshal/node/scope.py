"""Which CPs a driver reads: all, or the home of the one coordinated group of which it has a member (G2).

Nothing is kept of a CP that is not read any more. When it is needed again, a second replica determines its state from
snapshots, as at a start, and the working one takes it over. So it does not matter what happened to the log meanwhile,
and no heartbeat waits for it.
"""

from __future__ import annotations

import logging

from kafka_marshal.engine.engine import Engine
from kafka_marshal.errors import AuthenticationError, ClosedError, KafkaUnavailableError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.snapshot_upkeep import SnapshotUpkeep
from kafka_marshal.node.start import Begin
from kafka_marshal.ports import Cluster
from kafka_marshal.rate_limit import RateLimitedLog

#: Reading all CPs is tried again this long (ms) after it failed.
AGAIN_MS = 1_000.0


class Scope:
    """The partitions of the coordination topic that one driver reads."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        lock: EngineLock,
        rate_limited: RateLimitedLog,
        snapshots: SnapshotUpkeep,
        timeout_s: float,
    ) -> None:
        """timeout_s: how long a read of more CPs waits for Kafka; progress restarts the wait."""
        self._cluster = cluster
        self._replica = replica
        self._lock = lock
        self._rate_limited = rate_limited
        self._snapshots = snapshots
        self._timeout_s = timeout_s
        self._now_ms = cluster.runtime.now_ms
        #: Something other than a member of a coordinated group was used: all CPs are read from then on.
        self._is_wanted = False
        #: Only the home is read, or is about to be.
        self._is_narrow = False
        self._is_running = False
        self._again_at = 0.0

    def narrow(self) -> None:
        """Read the group's home only, if nothing else is needed (background thread; the lock is held)."""
        replica, engine = self._replica, self._lock.engine
        home = None if self._was_used() or self._is_narrow else _home_of(engine)
        if home is None or len(replica.worlds) == 1:
            return
        # Set before the check whether all are needed: read_all does both in the other order, without the lock.
        self._is_narrow = True
        if self._was_used():
            self._is_narrow = False
            return
        replica.leave([cp for cp in replica.worlds if cp != home])
        engine.take(None, engine.caught_up, self._now_ms())

    def _was_used(self) -> bool:
        return self._is_wanted

    def read_all(self) -> None:
        """Have all CPs read from now on, and wait until their state is determined (*blocking*, C15).

        Raises as a start does, ClosedError, and what has ended the engine.
        """
        self._is_wanted = True
        if not self._is_narrow:
            return
        condition = self._lock.condition
        with condition:
            while self._is_running and not self._is_over:
                condition.wait()
            if not self._replica.unread:
                return
            self._lock.check()
            self._is_running = True
        self._widen()

    @property
    def _is_over(self) -> bool:
        return self._lock.life.ended or self._lock.engine.failure is not None

    # A job of upkeep: for a member that looks into all CPs before it joins (G2).

    def is_due(self, now: float) -> bool:
        """Whether :meth:`run` is to be called now; the lock is held."""
        if self._is_running or not self._is_narrow or now < self._again_at or not _wants_all(self._lock.engine):
            return False
        self._is_running = True
        return True

    def run(self) -> None:
        """Read all CPs (*blocking*); no caller sees what this raises."""
        try:
            self._widen()
        except ClosedError:
            pass
        except (KafkaUnavailableError, AuthenticationError) as error:
            self._again_at = self._now_ms() + AGAIN_MS
            self._rate_limited.unanswered("not_looked_into", "scope", f"the group is not joined yet: {error}")
        except MarshalError as error:
            self._lock.fail(error)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            self._again_at = self._now_ms() + AGAIN_MS
            text = "the group is not joined yet: reading all of the coordination topic failed; it is tried again"
            log(logging.ERROR, "not_looked_into", text, error=error)

    # Both.

    def _widen(self) -> None:
        """Determine the state of the CPs that are not read, and continue to read them."""
        lock, replica = self._lock, self._replica
        try:
            unread = replica.unread  # no other thread changes it while this runs
            cluster, topic = self._cluster, replica.topic
            aside = Replica(cluster, topic, self._timeout_s, Begin.SNAPSHOT, only=unread, keeps_hashes=True)
            try:
                aside.catch_up(self._timeout_s, lambda read, there: lock.check(), report=False)
                with lock.condition:
                    lock.check()
                    replica.take_over(aside)
                    self._is_narrow = False
                    self._snapshots.report(aside.differences)
                    lock.engine.take(None, lock.engine.caught_up, self._now_ms())
                    lock.settle()
            finally:
                aside.close()
        finally:
            with lock.condition:
                self._is_running = False
                lock.condition.notify_all()


def _home_of(engine: Engine) -> int | None:
    """The only CP that this engine needs (G2); None: it needs others, too."""
    if not engine.groups or len(engine.groups) < len(engine.consumers) or engine.book.leases or engine.leases.manual:
        return None
    (client, *_) = engine.groups.values()  # all are of the Marshal's group
    return client.member.home if client.member.generation > 0 else None


def _wants_all(engine: Engine) -> bool:
    """Whether a member has to read all CPs before it joins: none has joined yet."""
    return any(client.failure is None and client.member.generation == 0 for client in engine.groups.values())
