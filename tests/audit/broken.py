"""Worlds that are broken on purpose, each in one way, for the audit's seam `world_type`.

The real one can't be brought to any of this, so that an audit of it would never show whether the audit sees anything.
"""

from __future__ import annotations

from rationalizer import Lease, Outcome, World, codes


class Generous(World):
    """Grants every claim, also of a lease that another holds and is fresh in."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        message = outcome.message
        if outcome.code == codes.HELD and message is not None:
            lease = self.lease(message[4], message[5], message[6])
            assert lease is not None
            lease.client_id, lease.instance_id = message[3], message[2]
            lease.epoch, lease.last_beat = offset, self.log_time
            return Outcome(True, codes.OK, outcome.type, offset, outcome.log_time, None, _read=outcome._read)
        return outcome


class Split(World):
    """Says HELD, and gives the lease away all the same: outcomes and state name two owners."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        message = outcome.message
        if outcome.code == codes.HELD and message is not None:
            lease = self.lease(message[4], message[5], message[6])
            assert lease is not None
            lease.client_id, lease.instance_id = message[3], message[2]
        return outcome


class Forgetful(World):
    """Takes a last_offset below stable at its word (C5 says: the progress stays)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        if outcome.code == codes.OFFSET_REGRESSION and outcome.message is not None:
            lease = self._named(outcome)
            lease.progress.stable = outcome.message[8]
        return outcome

    def _named(self, outcome: Outcome) -> Lease:
        assert outcome.message is not None
        lease = self.lease(*outcome.message[4:7])
        assert lease is not None
        return lease


class Spendthrift(Forgetful):
    """Grants proposals that lie below what was granted before (C12)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = World.apply(self, offset, timestamp_ms, value)
        if outcome.code == codes.PROPOSAL_TOO_LOW:
            epoch, log_time = outcome.epoch, outcome.log_time
            return Outcome(True, codes.OK, outcome.type, epoch, log_time, None, _read=outcome._read)
        return outcome


class Trusting(Forgetful):
    """Lets beats with an epoch that is over count (C5, C9)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = World.apply(self, offset, timestamp_ms, value)
        if outcome.code == codes.FENCED and outcome.type == "Heartbeat":
            lease = self._named(outcome)
            lease.last_beat = self.log_time
            return Outcome(True, codes.OK, outcome.type, lease.epoch, outcome.log_time, None, _read=outcome._read)
        return outcome
