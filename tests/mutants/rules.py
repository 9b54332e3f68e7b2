"""Planted bugs in the rules: each breaks one of them, in the rationalizer or in the snapshots of its state."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

__all__ = ["RULES"]

_WORLD = "rationalizer/world.py"
_CLAIMS = "rationalizer/claims.py"
_LEASE = "rationalizer/lease.py"
_PROGRESS = "rationalizer/progress.py"
_INTERVALS = "rationalizer/intervals.py"

_HOLDER = "if lease is None or not lease.is_held_by(instance_id, client_id, epoch):"

RULES: tuple[Mutation, ...] = (
    # Time.
    Mutation(
        "stale at exactly 2 HI",
        _LEASE,
        "return log_time - self.last_beat > STALE_AFTER_INTERVALS * self.heartbeat_interval_ms",
        "return log_time - self.last_beat >= STALE_AFTER_INTERVALS * self.heartbeat_interval_ms",
        "C1",
    ),
    Mutation(
        "fresh at exactly HI",
        _LEASE,
        "if age < self.heartbeat_interval_ms:",
        "if age <= self.heartbeat_interval_ms:",
        "C1",
    ),
    Mutation(
        "stale only after 3 HI",
        "rationalizer/limits.py",
        "STALE_AFTER_INTERVALS: Final = 2",
        "STALE_AFTER_INTERVALS: Final = 3",
        "C1",
    ),
    Mutation(
        "wall clock instead of log time",
        _WORLD,
        "moment.log_time = self.log_time",
        'moment.log_time = int(__import__("time").time() * 1000)',
        "T2",
    ),
    Mutation(
        "log time is taken back",
        _WORLD,
        "if timestamp_ms > self.log_time:",
        "if timestamp_ms != self.log_time:",
        "T1",
        within="def _replay",
    ),
    Mutation(
        "log time is taken back, on the short cut only",
        _WORLD,
        "if timestamp_ms > self.log_time:",
        "if timestamp_ms != self.log_time:",
        "T1",
        within="def apply_many",
    ),
    Mutation(
        "malformed records do not move log time",
        _WORLD,
        "if timestamp_ms > self.log_time:",
        "if timestamp_ms > self.log_time and kind is not None:",
        "T1",
        within="def _replay",
    ),
    # Who holds what.
    Mutation(
        "the latest claim wins",
        _CLAIMS,
        "elif lease.held and not lease.is_stale(moment.log_time):",
        "elif lease.held and not lease.is_stale(moment.log_time) and lease.client_id == client_id:",
        "C4",
    ),
    Mutation(
        "any instance of the holder's client holds already",
        _CLAIMS,
        "mine = lease.client_id == client_id and lease.instance_id == instance_id",
        "mine = lease.client_id == client_id",
        "C3",
    ),
    Mutation(
        "the first holder's HI stays for ever",
        _CLAIMS,
        "lease.heartbeat_interval_ms = heartbeat_interval_ms",
        "lease.heartbeat_interval_ms = lease.heartbeat_interval_ms or heartbeat_interval_ms",
        "C2",
    ),
    Mutation(
        "epochs are counted, not offsets",
        _CLAIMS,
        "lease.epoch = moment.offset",
        "lease.epoch += 1",
        "C9",
        within="def _claiming_partition",
    ),
    Mutation(
        "a claim does not count as a beat",
        _CLAIMS,
        "lease.last_beat = moment.log_time",
        "lease.last_beat = lease.last_beat or moment.log_time",
        "C6",
        within="def _claiming_partition",
    ),
    Mutation(
        "the epoch is ignored",
        _LEASE,
        "return self.epoch == epoch and self.instance_id == instance_id and self.client_id == client_id",
        "return self.instance_id == instance_id and self.client_id == client_id",
        "C5",
    ),
    Mutation(
        "the instance is ignored",
        _LEASE,
        "return self.epoch == epoch and self.instance_id == instance_id and self.client_id == client_id",
        "return self.epoch == epoch and self.client_id == client_id",
        "C5",
    ),
    Mutation(
        "anybody's beat counts", _CLAIMS, _HOLDER, "if lease is None or not lease.held:", "C5", within="def _beat"
    ),
    Mutation(
        "a beat of anybody takes a lease over",
        _CLAIMS,
        "if lease.client_id != client_id or lease.instance_id == instance_id:",
        "if lease.instance_id == instance_id:",
        "C7",
    ),
    Mutation(
        "a lease that is not fresh is taken over",
        _CLAIMS,
        'if lease.freshness(moment.log_time) != "fresh":',
        'if lease.freshness(moment.log_time) == "stale":',
        "C7",
    ),
    Mutation(
        "a takeover keeps the epoch",
        _CLAIMS,
        "lease.epoch = moment.offset",
        "lease.epoch = max(lease.epoch, 0)",
        "C7",
        within="def _take_over",
    ),
    Mutation(
        "a release of an older epoch frees",
        _CLAIMS,
        _HOLDER,
        "if lease is None or lease.instance_id != instance_id:",
        "C8",
        within="def _releasing_partition",
    ),
    Mutation(
        "a release moves the last beat",
        _CLAIMS,
        "lease.instance_id = None",
        "lease.instance_id, lease.last_beat = None, moment.log_time",
        "C8",
        within="def _releasing_partition",
    ),
    # Pauses, forgetting.
    Mutation(
        "claims pass a pause",
        _WORLD,
        "if pause is not None and not pausing and kind.during_pause is DuringPause.REJECTED:",
        "if pause is not None and not pausing and kind.during_pause is DuringPause.REJECTED and kind.type != 2:",
        "C10",
    ),
    Mutation(
        "a pause is ignored",
        _WORLD,
        "pausing = pause is not None and pause.client_id == message[3]",
        "pausing = pause is not None",
        "C10",
    ),
    Mutation(
        "a pause lasts a millisecond longer",
        _WORLD,
        "if pause is not None and self.log_time >= pause.expires:  # log time never goes back",
        "if pause is not None and self.log_time > pause.expires:",
        "C10",
    ),
    Mutation(
        "a pause can't be changed",
        _WORLD,
        "self._pauses[group_id] = Pause(group_id, client_id, expires)",
        "self._pauses.setdefault(group_id, Pause(group_id, client_id, expires))",
        "C10",
    ),
    Mutation(
        "a pause is ignored on the short cut",
        _WORLD,
        "and (not pauses or group_id not in pauses)",
        "and (not pauses or group_id is not None)",
        "C10",
    ),
    Mutation(
        "an admin can only move positions forward",
        _CLAIMS,
        "if moment.pausing:",
        "if moment.pausing and last_offset > lease.progress.stable:",
        "C11",
    ),
    Mutation(
        "ranges survive a reposition",
        _PROGRESS,
        "self.intervals.clear()",
        "self.intervals.drop_through(offset)",
        "C11",
        within="def reposition",
    ),
    Mutation(
        "what was granted survives a reposition",
        _PROGRESS,
        "self.granted = NOTHING_DONE",
        "self.granted = min(self.granted, offset)",
        "C11",
    ),
    Mutation(
        "a group at work is forgotten",
        _CLAIMS,
        "self.leases[key].held and not self.leases[key].is_stale(log_time)",
        'self.leases[key].freshness(log_time) == "fresh"',
        "C16",
    ),
    Mutation(
        "the pause of a forgotten group stays",
        _WORLD,
        "self._pauses.pop(group_id, None)",
        "self._pauses.get(group_id)",
        "C16",
        within="def _forget_group",
    ),
    # Progress.
    Mutation(
        "what lies apart is merged, where much is stored",
        _INTERVALS,
        "if left < count and stored_firsts[left] <= last + 1:  # it touches what is stored",
        "if left < count:",
        "P3",
    ),
    Mutation(
        "one interval too many is kept",
        _PROGRESS,
        "if len(self.intervals) + growth - moves_stable > max_intervals:",
        "if len(self.intervals) + growth - moves_stable > max_intervals + 1:",
        "P5",
    ),
    Mutation(
        "a key range takes back what was done",
        _PROGRESS,
        "if piece_hi < lo or hi < piece_lo or offset <= done:",
        "if piece_hi < lo or hi < piece_lo:",
        "P8",
    ),
    Mutation(
        "a key range ends one hash early",
        _PROGRESS,
        "pieces.append((max(piece_lo, lo), min(piece_hi, hi), offset))",
        "pieces.append((max(piece_lo, lo), min(piece_hi, hi - 1), offset))",
        "P8",
    ),
    Mutation("progress goes back", _PROGRESS, "if offset < self.stable:", "if offset < self.granted:", "C5"),
    Mutation(
        "the offset that is stable already is a regression",
        _PROGRESS,
        "if offset < self.stable:",
        "if offset <= self.stable:",
        "C5",
    ),
    Mutation(
        "progress goes back on the short cut",
        _WORLD,
        "progress.stable <= done <= max_offset",
        "done <= max_offset",
        "C5",
    ),
    Mutation(
        "one range is forgotten on the short cut",
        _WORLD,
        "and not progress.intervals.firsts",
        "and len(progress.intervals) < 2",
        "P10",
    ),
    Mutation(
        "an older epoch counts on the short cut", _WORLD, "and lease.epoch == epoch", "and lease.epoch >= epoch", "C5"
    ),
    Mutation(
        "a stale holder is granted messages",
        _CLAIMS,
        "if lease.is_stale(moment.log_time):",
        "if not lease.held:",
        "C12",
        within="def _claiming_messages",
    ),
    Mutation(
        "the same messages are granted again",
        _PROGRESS,
        "if proposal <= self.stable:  # granted is never above stable",
        "if proposal < self.stable:",
        "C12",
    ),
    Mutation(
        "what is granted is not done",
        _PROGRESS,
        "self._raise_stable(proposal)",
        "self._raise_stable(self.stable)",
        "P2",
    ),
    Mutation(
        "what is granted is not remembered",
        _PROGRESS,
        "self.granted = proposal",
        "self.granted = max(self.granted, self.stable)",
        "C12",
    ),
    Mutation(
        "ranges up to stable are not too old",
        _PROGRESS,
        "below = bisect_right(lasts, self.stable)",
        "below = bisect_right(lasts, self.stable - 1)",
        "P4",
    ),
    Mutation(
        "ranges with a gap of one are merged",
        _INTERVALS,
        "gap_behind = [start - end > 1 for start, end in zip(islice(starts, 1, None), ends, strict=False)]",
        "gap_behind = [start - end > 2 for start, end in zip(islice(starts, 1, None), ends, strict=False)]",
        "P3",
    ),
    Mutation(
        "neighbouring ranges are not merged",
        _INTERVALS,
        "gap_behind = [start - end > 1 for start, end in zip(islice(starts, 1, None), ends, strict=False)]",
        "gap_behind = [start - end > 0 for start, end in zip(islice(starts, 1, None), ends, strict=False)]",
        "P3",
    ),
    Mutation(
        "stable stops before a range that touches it",
        _INTERVALS,
        "if place < len(self.firsts) and self.firsts[place] <= offset + 1:",
        "if place < len(self.firsts) and self.firsts[place] <= offset:",
        "P3",
    ),
    # Values and places.
    Mutation(
        "newer versions are read",
        "rationalizer/codec.py",
        "if version > level:",
        "if version > level + 1:",
        "E3",
    ),
    Mutation(
        "-1 is no last_offset",
        "rationalizer/wellformed.py",
        "_is_position = _between(NOTHING_DONE, MAX_OFFSET)",
        "_is_position = _between(0, MAX_OFFSET)",
        "E2",
    ),
    Mutation(
        "leases are routed by their topic alone",
        _WORLD,
        "route_lease(topic, partition, self.partitions) == self.partition",
        "route_lease(topic, 0, self.partitions) == self.partition",
        "L3",
    ),
    Mutation(
        "a batch with a refused entry is refused",
        _WORLD,
        "return codes.OK if passed == len(answer) else codes.PARTIAL, passed > 0, kind, message, answer",
        "return codes.OK if passed == len(answer) else codes.PARTIAL, passed == len(answer), kind, message, answer",
        "D2",
    ),
    # Snapshots.
    Mutation(
        "pauses that are over stay in the state",
        _WORLD,
        "return [pause for _, pause in sorted(self._pauses.items()) if self.log_time < pause.expires]",
        "return [pause for _, pause in sorted(self._pauses.items())]",
        "S1",
    ),
    Mutation(
        "log time is lost in a snapshot",
        _WORLD,
        "world.log_time = found.log_time",
        "world.log_time = max((lease.last_beat for lease in found.leases), default=0)",
        "S3",
    ),
    Mutation(
        "pauses are lost in a snapshot",
        _WORLD,
        "world._pauses[pause.group_id] = pause",
        "world._pauses.pop(pause.group_id, None)",
        "S3",
    ),
)
