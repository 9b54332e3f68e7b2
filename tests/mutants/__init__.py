"""Planted bugs: each breaks one rule in one line, and the short forms of the proof must catch each of them.

``python -m tests.mutants`` (``make mutants``) plants them in a copy, one at a time, and runs there what is in
:mod:`tests.mutants.proofs`: the exhaustive search, logs compared with the oracle, the simulation, and interrupts and
faults around a consumer. No unit tests: the question is whether those would find a bug that is not in this list.
(The tests of members of coordinated groups on virtual time, and some of sinks, are among them.)
"""

from __future__ import annotations

from tests.mutants.audit import AUDIT
from tests.mutants.callbacks import CALLBACKS
from tests.mutants.checkpoint_members import CHECKPOINT_MEMBERS
from tests.mutants.checkpoints import CHECKPOINTS
from tests.mutants.faults import FAULTS
from tests.mutants.group_members import GROUP_MEMBERS
from tests.mutants.groups import GROUPS
from tests.mutants.lanes import LANES
from tests.mutants.lists import LISTS
from tests.mutants.members import MEMBERS
from tests.mutants.mutation import Mutation, StaleMutationError, apply, mutated
from tests.mutants.pacing import PACING
from tests.mutants.redo import REDO
from tests.mutants.rules import RULES
from tests.mutants.sharing import SHARING
from tests.mutants.short_cut import SHORT_CUT
from tests.mutants.sinks import SINKS
from tests.mutants.transactions import TRANSACTIONS
from tests.mutants.wait_stories import WAITS

__all__ = ["MUTATIONS", "Mutation", "StaleMutationError", "apply", "mutated"]

#: All of them.
MUTATIONS: tuple[Mutation, ...] = (
    *(MEMBERS + GROUP_MEMBERS + LANES + LISTS + WAITS + PACING + CALLBACKS + FAULTS + RULES + SHORT_CUT),
    *(GROUPS + CHECKPOINTS + CHECKPOINT_MEMBERS + SHARING + REDO + AUDIT + SINKS + TRANSACTIONS),
)
