"""A lease claimed by hand."""

from __future__ import annotations

from types import TracebackType

from kafka_marshal import arguments
from kafka_marshal.client.one_process import OneProcess, WithBlock
from kafka_marshal.engine.claims.leases import Answer, ManualLease
from kafka_marshal.errors import ConfigurationError, LeaseLostError
from kafka_marshal.node.driver import Driver

#: How long our record may take to come back through the log before the call fails, in heartbeat intervals.
ANSWER_INTERVALS = 2


class Lease(OneProcess, WithBlock):
    """One lease that this process holds; heartbeats are sent in the background until it is released or lost.

    Made by :meth:`Marshal.claim`. Any thread may use it. A ``with`` block releases it at its end.

    Attributes:
        topic, partition: what it is a lease of.
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
    def valid(self) -> bool:
        """Whether this process certainly holds it, by its own clock."""
        return self._driver.now_ms() < self._manual.lease.hand_out_until

    @property
    def last_offset(self) -> int | None:
        """Everything up to this offset is done, as far as the log knows; None: nothing is."""
        return self._driver.call(self._last_offset)

    def _last_offset(self) -> int | None:
        with self._driver.locked(step=False) as engine:
            lease = engine.peers.lease(self._manual.key)
            return None if lease is None or lease.progress.stable < 0 else lease.progress.stable

    def require(self) -> None:
        """Raise LeaseLostError unless the lease is valid. Call it before a step that can't be undone."""
        if not self.valid:
            self._driver.refuse_fork()
            raise LeaseLostError(self._lost_message())

    def heartbeat(self, last_offset: int | None = None) -> None:
        """Report that everything up to last_offset is done, and wait until the log has it."""
        self._driver.call(self._heartbeat, _checked(last_offset))

    def _heartbeat(self, last_offset: int | None) -> None:
        self.require()
        with self._driver.locked() as engine:
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
        with self._driver.locked() as engine:
            answer = engine.take(None, self._manual.grant, last_offset, self._driver.now_ms())
        self._await(answer, f"grant({last_offset})")

    def release(self, last_offset: int | None = None) -> None:
        """Release the lease, with everything up to last_offset done. Releasing one that is over does nothing."""
        self._driver.call(self._release, _checked(last_offset))

    def _release(self, last_offset: int | None) -> None:
        if self._manual.loss or self._manual.is_released:
            return
        with self._driver.locked() as engine:
            engine.take(None, self._manual.release, last_offset, self._driver.now_ms())
        with self._driver.condition:
            self._driver.wait_for(
                lambda: self._manual.is_released or bool(self._manual.loss),
                ANSWER_INTERVALS * self._manual.lease.heartbeat_interval_ms / 1000,
            )

    def _await(self, answer: Answer, what: str) -> None:
        timeout_s = ANSWER_INTERVALS * self._manual.lease.heartbeat_interval_ms / 1000
        with self._driver.condition:
            self._driver.wait_for(lambda: answer.accepted is not None, timeout_s)
            self._driver.check()
        if answer.accepted:
            return
        if answer.accepted is None:
            raise LeaseLostError(
                f"{self.topic} [{self.partition}]: the log did not show {what} within {timeout_s:g} s, and the "
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
            f"{self.topic} [{self.partition}]: the lease (epoch {self.epoch}) is not ours any more: {reason}. Do "
            "not go on "
            "with work under it; what was reported before stays done. Claim it again to go on"
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "valid" if self.valid else "over"
        return f"Lease({self.topic!r}, {self.partition}, epoch={self.epoch}, {state})"


def _checked(last_offset: int | None) -> int | None:
    return None if last_offset is None else arguments.a_whole("last_offset", last_offset)
