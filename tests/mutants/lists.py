"""Planted bugs in ``consumer.run(handle, batch=…)``: what is begun together, how lists fail, and how long they wait."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_FULL = "return len(ones) >= (self._tries.options.batch or 1) or (bool(ones) and ones[0].lane.is_single)"
_DUE = "return self._tries.call.is_ending or any(one.lane.assignment.stage is not Stage.ACTIVE for one in self.ones)"
_BEFORE = "if ahead is not None and (before := failed.get(ahead) or not_now.get(ahead)) is not None:"
_PLACE = "place = what if isinstance(what, int) and 0 <= what < len(self.ones) else None"

LISTS: tuple[Mutation, ...] = (
    # Which messages.
    Mutation(
        "list: another one has messages of its keys",
        "Lanes.along",
        "behind.ahead, lane.behind = lane, behind",
        "pass",
        "C14",
    ),
    Mutation(
        "list: longer than batch=", "Gathered.is_full", _FULL, "return bool(ones) and ones[0].lane.is_single", "C14"
    ),
    Mutation(
        "list: without an order, one at a time",
        "Lanes.put",
        "if key is None and not by_partition:",
        "if key is None and by_key:",
        "C14",
    ),
    Mutation(
        "list: of a share, without the token of its batch",
        "Lanes.put",
        "lane.token = token",
        "pass",
        "B2",
    ),
    # How it fails.
    Mutation(
        "list: done, though a message of it was named",
        "Gathered.end",
        "self._settle(one, named.get(len(self.ones), error))",
        "self._settle(one, error)",
        "C14",
    ),
    Mutation("list: a place names nothing", "Gathered._named", _PLACE, "place = None", "C14"),
    Mutation(
        "list: a pair names nothing",
        "Gathered._named",
        "place = places.get(_where(what))",
        "place = None",
        "C14",
    ),
    Mutation(
        "list: it failed as a whole, and is tried as a whole again",
        "Gathered.end",
        "self._again(one, whole, is_single=True)",
        "self._again(one, whole, is_single=False)",
        "C14",
    ),
    Mutation(
        "list: what it has left behind produces after it has failed",
        "Gathered._again",
        "attempt._take_outputs()",
        "pass",
        "M4",
    ),
    Mutation(
        "list: what follows a message that is not deserialized is handled before it",
        "Gathered.prepare",
        _BEFORE,
        "if ahead is not None and (before := not_now.get(ahead)) is not None:",
        "C14",
    ),
    # How long it waits.
    Mutation(
        "list: linger is no limit",
        "Threads._gather",
        "until = runtime.monotonic() + self._tries.options.linger",
        "until = runtime.monotonic() + 3_600",
        "C14",
    ),
    Mutation(
        "list: it waits for nothing",
        "Threads._gather",
        "if not batch.ones or left <= 0 or batch.is_due:",
        "if True:",
        "C14",
    ),
    Mutation("list: a release waits for it", "Gathered.is_due", _DUE, "return self._tries.call.is_ending", "C8"),
    Mutation(
        "list: the end of the run waits for it",
        "Gathered.is_due",
        _DUE,
        "return any(one.lane.assignment.stage is not Stage.ACTIVE for one in self.ones)",
        "C14",
    ),
    # What does not go with it.
    Mutation(
        "list: in a group that takes checkpoints",
        "_check_batch",
        "if group is not None and group.checkpoints is not None:",
        "if False:",
        "X4",
    ),
    Mutation(
        "list: a record of no message is written by the first one's",
        "the_record",
        "if attempt is None and attempts.in_batch.get():",
        "if attempt is None and False:",
        "F3",
    ),
    Mutation(
        "list: records of it are not those of a handler",
        "the_records",
        "elif not any(given) and attempts.in_batch.get():",
        "elif False:",
        "F3",
    ),
    Mutation(
        "list: a last offset hides what fails",
        "refuse_out_of_order",
        "if attempts.in_batch.get():",
        "if False:",
        "F6",
    ),
)
