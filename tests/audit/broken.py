"""Worlds that are each broken in one way, for the audit's seam `world_type`.

No log makes the real World do any of this, so that an audit of it could not show what the audit detects.
"""

from __future__ import annotations

from rationalizer import Lease, Outcome, World, codes


class Generous(World):
    """Grants every claim, even of a lease that another holds and that is fresh."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        message = outcome.message
        if outcome.code == codes.HELD and message is not None:
            lease = self.lease(message.group_id, message.topic, message.partition)
            assert lease is not None
            lease.client_id, lease.instance_id = message.client_id, message.instance_id
            lease.epoch, lease.last_beat = offset, self.log_time
            return Outcome(True, codes.OK, outcome.type, offset, outcome.log_time, None, _read=outcome._read)
        return outcome


class Split(World):
    """Answers HELD but gives the lease away: outcomes and state name different owners."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        message = outcome.message
        if outcome.code == codes.HELD and message is not None:
            lease = self.lease(message.group_id, message.topic, message.partition)
            assert lease is not None
            lease.client_id, lease.instance_id = message.client_id, message.instance_id
        return outcome


class Forgetful(World):
    """Accepts a last_offset below stable as the progress (by C5 it stays)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        if outcome.code == codes.OFFSET_REGRESSION and outcome.message is not None:
            lease = self._named(outcome)
            lease.progress.stable = outcome.message.last_offset
        return outcome

    def _named(self, outcome: Outcome) -> Lease:
        assert outcome.message is not None
        lease = self.lease(*outcome.message[4:7])
        assert lease is not None
        return lease


class Spendthrift(Forgetful):
    """Grants proposals below earlier grants (C12)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = World.apply(self, offset, timestamp_ms, value)
        if outcome.code == codes.PROPOSAL_TOO_LOW:
            epoch, log_time = outcome.epoch, outcome.log_time
            return Outcome(True, codes.OK, outcome.type, epoch, log_time, None, _read=outcome._read)
        return outcome


class Trusting(Forgetful):
    """Accepts heartbeats with an old epoch (C5, C9)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = World.apply(self, offset, timestamp_ms, value)
        if outcome.code == codes.FENCED and outcome.type == "Heartbeat":
            lease = self._named(outcome)
            lease.last_beat = self.log_time
            return Outcome(True, codes.OK, outcome.type, lease.epoch, outcome.log_time, None, _read=outcome._read)
        return outcome
