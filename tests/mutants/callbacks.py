"""Planted bugs in what members tell their users, and in what they do about handlers that hang."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

__all__ = ["CALLBACKS"]

_CONSUMER = "marshal/kafka_marshal/engine/work/consumer.py"

CALLBACKS: tuple[Mutation, ...] = (
    Mutation("nobody is told of a revocation", _CONSUMER, "self._call(Callback.REVOKE, assignment)", "pass", "C17"),
    Mutation("nobody is told of a loss", _CONSUMER, "self._call(Callback.LOST, assignment)", "pass", "T4"),
    Mutation(
        "work begins before on_assign has returned",
        _CONSUMER,
        "self._enter(assignment, Stage.ASSIGNING if assignment.callbacks_running else Stage.ACTIVE)",
        "self._enter(assignment, Stage.ACTIVE)",
        "P9",
    ),
    Mutation(
        "a release does not wait for on_revoke",
        _CONSUMER,
        "if assignment.stage is not Stage.REVOKING or assignment.callbacks_running or not assignment.lease.held:",
        "if assignment.stage is not Stage.REVOKING or not assignment.lease.held:",
        "C17",
    ),
    Mutation(
        "any callback's return counts as that of all",
        _CONSUMER,
        "assignment.callbacks_running -= 1",
        "assignment.callbacks_running = 0",
        "C17",
    ),
    Mutation(
        "a handler may take twice its time",
        _CONSUMER,
        "if oldest is not None and now >= oldest + timeout:",
        "if oldest is not None and now >= oldest + 2 * timeout:",
        "C14",
    ),
    Mutation(
        "who hangs keeps what else it has",
        "marshal/kafka_marshal/engine/work/delivery.py",
        "return now >= max(seen, default=0.0) + handler_timeout_ms",
        "return False",
        "C14",
    ),
    Mutation(
        "who hangs with what it lost claims more",
        _CONSUMER,
        "self.delivery.overdue()  # whoever had it in hand may hang: until a thread is back, it works on nothing else",
        "pass",
        "C14",
    ),
)
