"""Planted bugs in ``consumer.run(rate=…, priority=…)``: what begins, and when."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

PACING: tuple[Mutation, ...] = (
    Mutation("a try takes half a token", "Paced._next", "bucket.tokens -= 1.0", "bucket.tokens -= 0.5", "C14"),
    Mutation(
        "a low priority waits for ever",
        "Paced._levels",
        "if self._begins % AGING == 0:",
        "if self._begins % AGING == AGING:",
        "C14",
    ),
    Mutation(
        "the lowest priority is first",
        "Paced._levels",
        "levels = [level for level in reversed(range(LEVELS)) if self._turns[level]]",
        "levels = [level for level in range(LEVELS) if self._turns[level]]",
        "C14",
    ),
    Mutation(
        "each member has the whole rate of the group",
        "TokenBucket.per_ms",
        "return inf if self.rate is None else self.rate.per_second / 1000 / self.members",
        "return inf if self.rate is None else self.rate.per_second / 1000",
        "C14",
    ),
    Mutation(
        "a lane takes the token of a message that was set aside",
        "Paced._first",
        "if self._of.get(lane) is bucket:",
        "if True:",
        "C14",
    ),
    Mutation(
        "workers that asked in vain are not called again",
        "Paced.take",
        "calls = lane is not None and self._open > 0 and self._owed > 0",
        "calls = False",
        "C14",
    ),
)
