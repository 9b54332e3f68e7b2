"""Section 7's table "Every record in every state", as pairs of a cell and a code that a log should reach."""

from __future__ import annotations

from dataclasses import dataclass

from tests.rationalizer.group_cells import Cell
from tests.rationalizer.oracle import Judged, OracleOutcome, OracleWorld, judge
from tests.rationalizer.oracle.checkpoint_rules import after_the_barrier
from tests.rationalizer.oracle.groups import Group
from tests.rationalizer.oracle.judging import Moment
from tests.rationalizer.oracle.layout import CHECKPOINT_TYPES, OF_COORDINATED_GROUPS, home_of_group
from tests.rationalizer.strategies import Entry

NAMES = tuple(name for name, _ in CHECKPOINT_TYPES.values())
EMPTY, NONE, SOME, OPEN = "no such group", "takes none", "takes some, no barrier open", "barrier open"
#: What an entry of an answer may be.
CUTS = (
    "OK",
    "OFFSET_REGRESSION",
    "DUPLICATE_COMMIT",
    "NOT_ASSIGNED",
    "ILLEGAL_GENERATION",
    "INDIVIDUAL_COMMIT_NOT_ALLOWED",
    "INDIVIDUAL_COMMIT_TOO_OLD",
    "MAX_INDIVIDUAL_COMMIT_REACHED",
)
#: Of type 27, by action; without and with an open barrier: with one, there are members.
KEEPS = (
    *("retire OK", "retire NEWEST_CHECKPOINT", "retire UNKNOWN_CHECKPOINT"),
    *("pin OK", "pin UNKNOWN_CHECKPOINT"),
    *("end GROUP_ACTIVE", "end UNKNOWN_CHECKPOINT"),
)
#: Records as ever, beside which a barrier stays open, or is closed before (X3).
WITNESSES = ("JoinGroup", "GroupHeartbeat", "LeaveGroup", "TopicsChanged", "CommitOffsets, id")


def wanted_of_checkpoints() -> set[Cell]:
    """Every code of each cell. TOO_MANY_CHECKPOINTS has a story: it takes 17 checkpoints.

    A barrier is open only while a member owns a piece, and G21's and X9's end find no members: they meet none.
    """
    found: set[Cell] = {("BeginCheckpoint", EMPTY, "UNKNOWN_CHECKPOINT")}
    found |= {("BeginCheckpoint", NONE, code) for code in ("OK", "UNKNOWN_CHECKPOINT", "GROUP_ACTIVE")}
    found |= {("BeginCheckpoint", SOME, code) for code in ("OK, opens", "OK, complete", "UNKNOWN_CHECKPOINT")}
    found |= {("BeginCheckpoint", OPEN, code) for code in ("UNKNOWN_CHECKPOINT", "BARRIER_OPEN")}
    found.add(("AnswerBarrier", EMPTY, "UNKNOWN_CONSUMER"))
    for column in (NONE, SOME, OPEN):
        codes = ("UNKNOWN_CONSUMER", "ILLEGAL_GENERATION", "NO_SUCH_BARRIER")
        found |= {("AnswerBarrier", column, code) for code in codes}
    answers = ("OK, opens", "OK, complete", "OK, ended", "ALREADY_ANSWERED", "PARTIAL")
    found |= {("AnswerBarrier", OPEN, code) for code in answers}
    found |= {("AnswerBarrier, entry", OPEN, code) for code in CUTS}
    found |= {("Rollback", column, "UNKNOWN_CHECKPOINT") for column in (EMPTY, NONE)}
    found |= {("Rollback", SOME, code) for code in ("OK", "ILLEGAL_GENERATION", "UNKNOWN_CHECKPOINT")}
    found |= {("Rollback", OPEN, code) for code in ("OK, ended", "ILLEGAL_GENERATION", "UNKNOWN_CHECKPOINT")}
    for column in (EMPTY, NONE):
        found |= {("KeepCheckpoint", column, f"{action} UNKNOWN_CHECKPOINT") for action in ("retire", "pin", "end")}
    found |= {("KeepCheckpoint", column, code) for column in (SOME, OPEN) for code in KEEPS}
    found.add(("KeepCheckpoint", SOME, "end OK"))
    starts = ("NO_SUCH_BARRIER", "OK", "ALREADY_STARTED", "NOT_ASSIGNED", "ILLEGAL_GENERATION")
    found |= {("CommitOffsets, id, entry", column, code) for column in (SOME, OPEN) for code in starts}
    found |= {("CommitOffsets", column, "GROUP_ACTIVE") for column in (SOME, OPEN)}
    found |= {("CommitOffsets, entry", SOME, code) for code in ("OK", "REPOSITIONED", "NOT_ASSIGNED")}
    found |= {(name, column, "OK") for name in WITNESSES[:-1] for column in (SOME, OPEN)}
    found |= {(name, "closed before", how) for name in WITNESSES for how in ("complete", "ended")}
    found |= {("AnswerBarrier", "closed before", how) for how in ("complete", "ended")}
    found |= {("ForgetGroup", column, "GROUP_ACTIVE") for column in (SOME, OPEN)} | {("ForgetGroup", SOME, "OK")}
    found |= {("ConfigureGroup", column, "OK") for column in (SOME, OPEN)}
    found |= {(name, "paused", "PAUSED") for name in ("Rollback", "KeepCheckpoint")}
    found |= {(name, "paused", "passes") for name in ("BeginCheckpoint", "AnswerBarrier")}
    found |= {(name, "elsewhere", "WRONG_PARTITION") for name in NAMES}
    found |= {(name, "anywhere", "MALFORMED") for name in NAMES}
    found |= {(name, "claimed", "WRONG_KIND") for name in NAMES}
    return found | {("any", "level 2", code) for code in ("UNSUPPORTED_VERSION", "UNKNOWN_TYPE")}


def column_of(group: Group | None) -> str:
    """The column of a record that reached the group's rules."""
    if group is None:
        return EMPTY
    if group.checkpoints is None:
        return NONE
    return SOME if group.checkpoints.barrier is None else OPEN


def end_of(before: Group | None, after: Group | None) -> str | None:
    """How the barrier that was open ended: complete, ended, or neither."""
    was = None if before is None else before.checkpoints
    now = None if after is None else after.checkpoints
    if was is None or was.barrier is None or now is None or now.barrier == was.barrier:
        return None
    if now.is_kept(was.barrier.id):
        return "complete"
    return "ended" if now.barrier is None else None


@dataclass(frozen=True)
class Before:
    """What a record meets."""

    level: int
    record: Judged
    #: The group, and the state on which the record is judged (X3).
    known: Group | None
    judged: Group | None
    paused: bool


def meeting(world: OracleWorld, entry: Entry) -> Before:
    """What the record is about to meet."""
    offset, stamp, value = entry
    record, log_time = judge(value, world.level, world.partition, world.partitions), max(world.log_time, stamp)
    known = world.groups.get(record.group)
    pause = next((pause for pause in world.pauses() if pause.group == record.group), None)
    paused = pause is not None and pause.client != record.client and log_time < pause.expires
    judged = known
    if record.code is None and record.type in OF_COORDINATED_GROUPS and world.kind(record.group) == "coordinated":
        judged = after_the_barrier(known, record, Moment(world.partition, offset, log_time))
    return Before(world.level, record, known, judged, paused)


def checkpoint_cells_met(met: Before, world: OracleWorld) -> list[Cell]:
    """The cells of the world's last record."""
    outcome, level, record = world.outcomes[-1], met.level, met.record
    name, code = record.type or "any", outcome.code
    if level == 2 and code in ("UNSUPPORTED_VERSION", "UNKNOWN_TYPE"):
        return [("any", "level 2", code)]
    if code in ("MALFORMED", "WRONG_PARTITION"):
        return [(name, "anywhere" if code == "MALFORMED" else "elsewhere", code)]
    if code in ("PAUSED", "WRONG_KIND"):
        return [(name, "paused" if code == "PAUSED" else "claimed", code)]
    if level < 3 or record.code is not None or home_of_group(record.group, world.partitions) != world.partition:
        return []
    return _cells(met, outcome, world.groups.get(record.group))


def _cells(met: Before, outcome: OracleOutcome, after: Group | None) -> list[Cell]:
    record, judged, code = met.record, met.judged, outcome.code
    name, column = record.type or "", column_of(judged)
    if name in ("JoinGroup", "CommitOffsets") and record.fields[0] != "":
        name = "CommitOffsets, id" if record.type == "CommitOffsets" else name
    found: list[Cell] = [(f"{name}, entry", column, each) for each in outcome.entries or ()]
    if name == "KeepCheckpoint":
        code = f"{('retire', 'pin', 'end')[record.fields[1]]} {code}"
    if code == "OK" and name in ("BeginCheckpoint", "AnswerBarrier") and column in (SOME, OPEN):
        ended = end_of(judged, after) or ("complete" if column_of(after) == SOME else "opens")
        code = f"OK, {ended}"
    if name == "Rollback" and code == "OK" and column == OPEN:
        code = f"OK, {end_of(judged, after)}"
    found.append((name, column, code))
    if outcome.accepted and (how := end_of(met.known, judged)) is not None:
        found.append((name, "closed before", how))
    if met.paused and outcome.accepted:
        found.append((name, "paused", "passes"))
    return found
