"""Planted bugs in ``consumer.run``: order, retries, and returned messages (C14, T4)."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_DONE_WHEN_BEGUN = 'current.set(attempt); self.consumer._say(cast("Message", message))'
_OPEN = "return now < until and offset <= self.up_to and offset not in self.unlogged"
_DUE = "while self._retries and (self._retries[0][0] <= now or self._retries[0][1] != self._retries[0][2].timer):"

LANES: tuple[Mutation, ...] = (
    # Order.
    Mutation(
        "a key goes on while its first message waits for its next try",
        "Lanes._not_done",
        "if lane.assignment.over or self._is_skipped(lane):",
        "if lane.assignment.over or lane.rest:",
        "C14",
    ),
    Mutation(
        "a partition that comes back does not wait for the handlers that it left",
        "Lanes._partition_of",
        "if partition is None:",
        "if partition is None or partition.assignment is not assignment:",
        "C14",
    ),
    Mutation(
        "messages without a key are alike",
        "Lanes.put",
        "key: Hashable = message.key() if by_key else None",
        "key: Hashable = offset_of(message)",
        "C14",
    ),
    # What is done.
    Mutation("done before it is handled", "Tries.attempt", "current.set(attempt)", _DONE_WHEN_BEGUN, "C14"),
    Mutation(
        "what failed is done",
        "Tries._put_aside",
        "self._returned(lane, self.lanes.failed(lane, due, self.call))",
        'self.consumer._say(cast("Message", lane.message)); '
        "self._returned(lane, self.lanes.failed(lane, due, self.call))",
        "C14",
    ),
    # Forgotten lanes.
    Mutation(
        "a lane is forgotten when its handler fails",
        "Lanes.failed",
        "self._set_timer(lane, due)",
        "pass",
        "C14",
    ),
    Mutation(
        "a lane that was parked is forgotten",
        "Lanes.reopened",
        "(found if self._is_open(lane, now) else partition.parked).append(lane)",
        "pass",
        "C14",
    ),
    Mutation(
        "what is recalled is forgotten",
        "InLanes._split",
        "self._put_back(assignment, messages, covers_from)",
        "pass",
        "C14",
    ),
    Mutation(
        "what a running lane has besides is not recalled",
        "Lanes.recall",
        "found += lane.rest",
        "pass",
        "C14",
    ),
    Mutation(
        "a handler that was left behind wakes a run that is over",
        "Lanes._go_on",
        "if self.owner is not owner or self.is_ended or lane.ahead is not None:",
        "if self.is_ended or lane.ahead is not None:",
        "C14",
    ),
    # What comes back.
    Mutation("nothing is given back when a run ends", "Runner._drain", "self._give_back()", "pass", "C14"),
    Mutation(
        "a partition that is let go waits for the next try",
        "InLanes.returned",
        "self.recall(assignment, keep=True)",
        "pass",
        "C10",
    ),
    Mutation(
        "a partition that comes back is lost to the same handler at once",
        "Lanes.oldest",
        "times = (lane.began + self._grace_ms for lane in running if lane.assignment is assignment)",
        "times = (lane.began + self._grace_ms for lane in running)",
        "T4",
    ),
    # What hangs.
    Mutation(
        "what a pause that is over has asked for is let go",
        "Revocation.is_moot",
        "return not consumer.source.still_lets_go(lease, assignment.releasing, now)",
        "return False",
        "C10",
    ),
    Mutation(
        "what is taken back stays stopped",
        "Revocation.take_back",
        "assignment.lease.resume()",
        "pass",
        "C10",
    ),
    Mutation(
        "a partition that is let go waits for a handler for ever",
        "Revocation.time_out",
        "if assignment.over or now < self.expires_at(assignment, now):",
        "if assignment.over or self.expires_at(assignment, now) > 0:",
        "C17",
    ),
    # When.
    Mutation("a retry ignores its due", "Lanes.due", _DUE, "while self._retries:", "C14"),
    Mutation(
        "the number of tries is not reset",
        "Lanes._go_on",
        "lane.number, lane.since, lane.is_single = 1, 0.0, False",
        "lane.since, lane.is_single = 0.0, False",
        "C14",
    ),
    Mutation(
        "handlers begin when the lease may be over",
        "Partition.may_begin",
        _OPEN,
        "return offset <= self.up_to and offset not in self.unlogged",
        "T4",
    ),
    Mutation(
        "lanes that were begun count as ready",
        "Lanes.begin",
        "self.ready -= lane.number == 1",
        "self.ready -= lane.message is None",
        "C14",
    ),
)
