"""Planted bugs: each breaks one rule in one line, and the short forms of the proof must catch each of them.

``python -m tests.mutants`` (``make mutants``) plants them in a copy, one at a time, and runs there what is in
:mod:`tests.mutants.short`: the exhaustive search, logs compared with the oracle, the simulation, and interrupts and
faults around a consumer. No unit tests: the question is whether those would find a bug that was not foreseen.
(Except tests of a coordinated group's members on virtual time, after the simulation.)
"""

from __future__ import annotations

from tests.mutants.callbacks import CALLBACKS
from tests.mutants.faults import FAULTS
from tests.mutants.group_members import GROUP_MEMBERS
from tests.mutants.groups import GROUPS
from tests.mutants.lanes import LANES
from tests.mutants.members import MEMBERS
from tests.mutants.mutation import Mutation, StaleMutationError, apply, mutated
from tests.mutants.rules import RULES
from tests.mutants.short_cut import SHORT_CUT

__all__ = ["MUTATIONS", "QUICK", "Mutation", "StaleMutationError", "apply", "mutated"]

#: All of them.
MUTATIONS: tuple[Mutation, ...] = MEMBERS + GROUP_MEMBERS + LANES + CALLBACKS + FAULTS + RULES + SHORT_CUT + GROUPS

#: The fixed ones of CI, each caught within seconds. Together they need every part of the short forms except the tests
#: of groups' members, which CI runs anyway.
QUICK = frozenset(
    [
        "the epoch is ignored",
        "the balance drops a partition",
        "a torn read is not seen",
        "who lost it and got it back is not fenced",
        "a key goes on while its first message waits for its next try",
    ]
)
