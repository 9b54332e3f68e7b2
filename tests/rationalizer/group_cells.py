"""The table "Every record in every state" of the protocol, as pairs of a cell and a code that a log should reach."""

from __future__ import annotations

from tests.rationalizer.oracle import Judged, OracleWorld, judge
from tests.rationalizer.oracle.judging import gone_with, sender_of
from tests.rationalizer.oracle.layout import GROUP_TYPES, OF_COORDINATED_GROUPS, home_of_group
from tests.rationalizer.strategies import Entry

#: A record and the column it meets, or what it meets before any column; and its outcome.
Cell = tuple[str, str, str]

OF_MEMBERS = ("GroupHeartbeat", "LeaveGroup", "TopicsChanged", "CommitOffsets, id")
EMPTY, READY, STRANGER, MEMBER = "no such group", "READY", "members, no sender", "members, with sender"
COLUMNS = (EMPTY, READY, STRANGER, MEMBER)
#: What a JoinGroup meets in any state, and what only where there are other members.
JOIN = ("OK", "UNKNOWN_PARTITIONING_STRATEGY", "SESSION_TIMEOUT_TOO_HIGH", "TOO_MANY_PARTITIONS")
BESIDE_OTHERS = (*JOIN, "INCONSISTENT_PARTITIONING_STRATEGY")
ENTRIES = (
    "OK",
    "OFFSET_REGRESSION",
    "DUPLICATE_COMMIT",
    "NOT_ASSIGNED",
    "ILLEGAL_GENERATION",
    "ALREADY_STARTED",
    "INDIVIDUAL_COMMIT_NOT_ALLOWED",
    "OUT_OF_ORDER",
    "INDIVIDUAL_COMMIT_TOO_OLD",
    "MAX_INDIVIDUAL_COMMIT_REACHED",
)
LEASES = ("Heartbeat", "ClaimingPartition", "ReleasingPartition", "ClaimingMessages", "HeartbeatBatch", "CommitRanges")


def wanted() -> set[Cell]:
    """Every code that section 5 has for each cell. GROUP_FULL has a separate test: it takes 1,000 members."""
    found = {("JoinGroup", column, code) for column in (EMPTY, READY) for code in JOIN}
    found |= {("JoinGroup", STRANGER, code) for code in BESIDE_OTHERS}
    found |= {("JoinGroup", MEMBER, code) for code in (*BESIDE_OTHERS, "ALREADY_MEMBER", "replaced", "REPLACED")}
    found |= {("JoinGroup, id", column, "UNKNOWN_CONSUMER") for column in (EMPTY, READY, STRANGER)}
    found |= {("JoinGroup, id", MEMBER, code) for code in (*BESIDE_OTHERS, "ALREADY_MEMBER")}
    found |= {(name, column, "UNKNOWN_CONSUMER") for name in OF_MEMBERS for column in (EMPTY, READY, STRANGER)}
    found |= {("GroupHeartbeat", MEMBER, code) for code in ("OK", "ILLEGAL_GENERATION", "ILLEGAL_GENERATION, accepted")}
    found |= {("LeaveGroup", MEMBER, code) for code in ("OK", "ILLEGAL_GENERATION")}
    found |= {("TopicsChanged", MEMBER, code) for code in ("OK", "TOO_MANY_PARTITIONS")}
    found |= {("CommitOffsets, id", MEMBER, code) for code in ("OK", "PARTIAL", "ILLEGAL_GENERATION")}
    found |= {("CommitOffsets, id, entry", MEMBER, code) for code in ENTRIES}
    found |= {
        ("CommitOffsets", column, code) for column in (EMPTY, READY) for code in ("OK", "PARTIAL", "UNKNOWN_CONSUMER")
    }
    found |= {("CommitOffsets", STRANGER, code) for code in ("GROUP_ACTIVE", "UNKNOWN_CONSUMER")}
    found |= {
        ("CommitOffsets, entry", column, code)
        for column in (EMPTY, READY)
        for code in ("OK", "REPOSITIONED", "NOT_ASSIGNED")
    }
    found |= {("ConfigureGroup", column, "OK") for column in (EMPTY, READY, STRANGER)}
    found |= {("ConfigureGroup", STRANGER, "OK, rebalance"), ("ConfigureGroup", "elsewhere", "OK")}
    found |= {("ReleaseGroup", column, "OK") for column in (EMPTY, READY, STRANGER)}
    found |= {("ForgetGroup", column, "OK") for column in (EMPTY, READY)}
    found |= {("ForgetGroup", column, "GROUP_ACTIVE") for column in (READY, STRANGER)}
    found |= {(name, column, "WRONG_KIND") for name in LEASES for column in (READY, STRANGER)}
    found |= {(name, column, "OK") for name in ("Tick", "Upgrade") for column in ("anywhere",)}
    names = {name for name, _ in GROUP_TYPES.values()}
    found |= {(name, "claimed", "WRONG_KIND") for name in names}
    paused = names - {"LeaveGroup", "CommitOffsets"}
    found |= {(name, "paused", "PAUSED") for name in paused}
    found |= {
        (name, "paused", code) for name in ("LeaveGroup", "CommitOffsets, id") for code in ("OK", "UNKNOWN_CONSUMER")
    }
    found |= {(name, "elsewhere", "WRONG_PARTITION") for name in names - {"ConfigureGroup"}}
    found |= {(name, "anywhere", "MALFORMED") for name in names}
    return found | {("any", "level 1", code) for code in ("UNSUPPORTED_VERSION", "UNKNOWN_TYPE")}


def column_of(world: OracleWorld, record: Judged, log_time: int) -> str:
    """The column of a record that reached the group's rules, after overdue members are removed (G8)."""
    group = world.groups.get(record.group)
    if group is None:
        return EMPTY
    sender = (
        sender_of(group, record) if record.type in OF_COORDINATED_GROUPS and record.type != "ConfigureGroup" else None
    )
    if sender is not None:
        return MEMBER
    buries = record.type in ("JoinGroup", "CommitOffsets", "ForgetGroup") and record.fields[:1] in ((), ("",))
    gone = gone_with(group, None, log_time) if buries else []
    return READY if len(gone) == len(group.members) else STRANGER


def cells_met(world: OracleWorld, entry: Entry) -> list[Cell]:
    """Apply one record; returns its cells."""
    _, stamp, value = entry
    level, record = world.level, judge(value, world.level, world.partition, world.partitions)
    log_time = max(world.log_time, stamp)
    column = column_of(world, record, log_time)
    pause = next((pause for pause in world.pauses() if pause.group == record.group), None)
    paused = pause is not None and pause.client != record.client and log_time < pause.expires
    known = world.groups.get(record.group)
    generation = 0 if known is None else known.generation
    senders = None if known is None or record.type != "JoinGroup" else sender_of(known, record)
    outcome = world.apply(*entry)
    name, code = record.type or "any", outcome.code
    if code in ("UNSUPPORTED_VERSION", "UNKNOWN_TYPE") and level == 1:
        return [("any", "level 1", code)]
    if code in ("MALFORMED", "WRONG_PARTITION"):
        return [(name, "anywhere" if code == "MALFORMED" else "elsewhere", code)]
    if code == "PAUSED" or (code == "WRONG_KIND" and name in OF_COORDINATED_GROUPS):
        return [(name, "paused" if code == "PAUSED" else "claimed", code)]
    if name in ("Tick", "Upgrade"):
        return [(name, "anywhere", code)]
    if home_of_group(record.group, world.partitions) != world.partition:
        return [(name, "elsewhere", code)] if name == "ConfigureGroup" else []
    if name in ("JoinGroup", "CommitOffsets") and record.fields[0] != "":
        name = f"{name}, id"
    found = [(name, column, code)]
    if paused:
        found.append((name, "paused", code))
    if name == "JoinGroup" and senders is not None and outcome.accepted and senders.instance != record.instance:
        found.append((name, column, "replaced"))
    if name == "GroupHeartbeat" and code == "ILLEGAL_GENERATION" and outcome.accepted:
        found = [(name, column, "ILLEGAL_GENERATION, accepted")]
    if name == "ConfigureGroup" and outcome.generation != generation:
        found.append((name, column, "OK, rebalance"))
    if outcome.of_a_group:
        found += [(f"{name}, entry", column, each) for each in outcome.entries or ()]
    return found
