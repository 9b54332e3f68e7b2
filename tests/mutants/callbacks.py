"""Planted bugs in callbacks to users and in the treatment of hanging handlers."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

CALLBACKS: tuple[Mutation, ...] = (
    Mutation(
        "nobody is told of a revocation", "revoke", "self._consumer.call(Callback.REVOKE, assignment)", "pass", "C17"
    ),
    Mutation(
        "nobody is told of a loss",
        "Revocation.lost",
        "self._consumer.call(Callback.REVOKE if reason == Loss.HANDED_OVER else Callback.LOST, assignment)",
        "pass",
        "T4",
    ),
    Mutation(
        "work begins before on_assign has returned",
        "assign",
        "self._consumer.enter(assignment, Stage.ASSIGNING if assignment.callbacks_running else Stage.ACTIVE)",
        "self._consumer.enter(assignment, Stage.ACTIVE)",
        "P9",
    ),
    Mutation(
        "a release does not wait for on_revoke",
        "Revocation.try_finish",
        "if assignment.stage is not Stage.REVOKING or assignment.callbacks_running or not assignment.lease.held:",
        "if assignment.stage is not Stage.REVOKING or not assignment.lease.held:",
        "C17",
    ),
    Mutation(
        "any callback's return counts as that of all",
        "called",
        "assignment.callbacks_running -= 1",
        "assignment.callbacks_running = 0",
        "C17",
    ),
    Mutation(
        "a handler may take twice its time",
        "_step_one",
        "if oldest is not None and now >= oldest + timeout:",
        "if oldest is not None and now >= oldest + 2 * timeout:",
        "C14",
    ),
    Mutation(
        "who hangs keeps what else it has",
        "is_hung",
        "return now >= max(seen, default=0.0) + handler_timeout_ms",
        "return False",
        "C14",
    ),
    Mutation(
        "who hangs with what it lost claims more",
        "Revocation.lost",
        "self._consumer.delivery.overdue()",
        "pass",
        "C14",
    ),
)
