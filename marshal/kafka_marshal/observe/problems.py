"""What is wrong with a group, in words: for `check`, and below the overview of `status`. Functions import readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from kafka_marshal.observe.rows import (
    DAY_MS,
    FOREIGN_COMMIT,
    NO_PROGRESS,
    GroupRow,
    LeaseRow,
    partitions_of,
    span_text,
    state_of,
)
from kafka_marshal.observe.text import count, span, time_text
from kafka_marshal.topic_names import is_lock
from kafka_marshal.types import due_of
from rationalizer.limits import MANY_HOLES, MAX_HOLES

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoints import CheckpointsRow
    from kafka_marshal.observe.holes import PlacedHole
    from kafka_marshal.observe.rows import AllSilent, MemberRow, PauseRow, WorkerRow
    from kafka_marshal.observe.view import LiveView
    from kafka_marshal.ports import Cluster

#: Kind → the group's state in `status`. Kinds are part of the JSON of `check` and `status`.
KINDS = {
    "position_lost": "position lost",
    "no_topic": "without a topic",
    "stuck": "stuck",
    "stuck_key": "held back",
    "deleted": "deleted unread",
    "unsaved": "can't save",
    "hung": "hung?",
    "old_cut": "cut too old",
    "stuck_batch": "batch hangs",
    "stuck_try": "wait for a try",
    "holes": "open messages near the limit",
    "parked": "set aside",
    "all_silent": "all silent",
    "gone": "gone",
    "no_holder": "without a holder",
    "paused": "paused for long",
    "pause_over": "pause is over",
    "members": "members too few",
    "lag": "behind",
    "silence": "silent",
}

#: A pause that has lasted for longer (ms) while messages wait is a problem: that of `release-group` ends before.
LONG_PAUSE_MS: Final = 300_000

#: The most ranges of partitions, and the most workers, that a text lists.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `amount`: the number of partitions, members or messages concerned."""

    group: str
    kind: str
    text: str
    amount: int
    partitions: list[LeaseRow]


def places(rows: Iterable[LeaseRow]) -> str:
    """The partitions in words: flights 1, 3-5, 6 (0-33%); delays 0."""
    found = []
    for topic, of_topic in groupby(sorted(rows, key=lambda row: (row.topic, row.partition)), lambda row: row.topic):
        runs: list[list[int]] = []
        parts: list[str] = []
        for row in of_topic:
            if row.place != str(row.partition):
                parts.append(row.place)
            elif runs and row.partition == runs[-1][-1] + 1:
                runs[-1][1:] = [row.partition]
            else:
                runs.append([row.partition])
        if is_lock(topic):
            found.append(topic)
            continue
        listed = [*("-".join(map(str, run)) for run in runs[:_LISTED]), *parts][:_LISTED]
        found.append(f"{topic} {', '.join(listed)}" + (", …" if len(runs) + len(parts) > _LISTED else ""))
    return "; ".join(found)


#: Of a hold group: which member it is can't be seen in its state.
_NEEDS_ALL: Final = (
    "In a hold group it takes all members: one can't save its state, does not answer, or has a handler that takes "
    "longer than drain; kafka-marshal checkpoints {} says which"
)

#: By piece, a member refuses only if it can save nothing (X13).
_NOT_SAVED: Final = "the store of states refuses or hangs (on_checkpoint raises, or does not return in time)"
_NOT_TAKEN: Final = "a state can't be saved, or a handler takes longer than drain"


def too_few(group: str, living: int, wanted: int) -> Problem:
    """The problem that fewer members are alive than required."""
    return Problem(group, "members", f"{count(living, 'member')} alive, fewer than {wanted:,}", living, [])


def deleted_text(rows: list[LeaseRow]) -> str:
    """Offsets that retention deleted before they were done: the lag does not count them."""
    offsets = sum(row.deleted for row in rows)
    return (
        f"{places(rows)}: {count(offsets, 'offset was', 'offsets were')} deleted (retention) that the group had not "
        "done: lost, and not in its lag; it continues where the log begins now"
    )


#: The reason of messages that workers did not survive, or did not end.
CRASHED: Final = "CRASHED"


def crowded(group: GroupRow) -> dict[tuple[str, int], int]:
    """Partitions with more than half of the open messages that they may have (H5) → how many."""
    counted: Counter[tuple[str, int]] = Counter()
    for row in group.leases:
        counted[row.topic, row.partition] += len(row.open)
    return {key: amount for key, amount in counted.items() if 2 * amount > MAX_HOLES}


def limit(group: GroupRow, rows: list[LeaseRow], amount: int, most: int, of: str = "a partition") -> Problem:
    """The problem that these have that many of the open messages that they may have."""
    means = "At the limit nothing more is set aside, and nothing of it is delivered until some are done"
    if amount >= most:
        means = (
            "What fails for good can't be set aside any more, and then nothing of it is delivered until some are done"
        )
    text = (
        f"{places(rows)}: {amount:,} of {most:,} open messages that {of} may have. {means}. Nothing is lost. Mend what "
        f"makes them fail, then redrive or discard some: kafka-marshal open-messages {quote(group.group)}"
    )
    return Problem(group.group, "holes", text, len(rows), rows)


def _full(group: GroupRow) -> Iterator[Problem]:
    """Partitions at the limit, of which nothing is delivered: no worker hangs."""
    for key, amount in crowded(group).items():
        if amount >= MAX_HOLES:
            yield limit(group, [row for row in group.leases if (row.topic, row.partition) == key], amount, MAX_HOLES)


def _crashed(group: GroupRow) -> Iterator[Problem]:
    """Messages that were set aside though no handler has failed with them: that is reported from the first one on."""
    amounts = [(row, sum(each.parked == CRASHED for each in row.open)) for row in group.leases]
    if rows := [row for row, amount in amounts if amount]:
        total = sum(amount for _, amount in amounts)
        text = (
            f"{places(rows)}: {count(total, 'message')} set aside as {CRASHED}: workers began each several times, and "
            "died or did not end. No worker gets them until you decide: kafka-marshal open-messages "
            f"{quote(group.group)} --parked lists them, redrive or discard ends them"
        )
        yield Problem(group.group, "parked", text, total, rows)


def problems_of(
    group: GroupRow,
    max_lag: int | None = None,
    max_silence_ms: int | None = None,
    min_members: int = 0,
    max_cut_ms: int | None = None,
    max_pause_ms: int = LONG_PAUSE_MS,
) -> list[Problem]:
    """All problems of the group, the worst first."""
    name = group.group
    old = list(_old_cuts(group, max_cut_ms))
    found = [*_full(group), *_unsaved(group), *_standing_still(group), *_held_back(group, old)]
    found += [*_members(group, max_silence_ms), *old, *_crashed(group)]
    if group.all_silent is not None and group.all_silent.members > 1:
        found = [_all_silent(group, group.all_silent), *(each for each in found if each.kind not in _OF_SILENT)]
    free = [row for row in group.unheld if row.client is None and not (row.no_topic or row.lost)]
    if free and not group.is_over:
        found.append(Problem(name, "no_holder", _unheld_text(group, free), len(free), free))
    deleted = [row for row in group.leases if row.deleted]
    if deleted:
        found.append(Problem(name, "deleted", deleted_text(deleted), len(deleted), deleted))
    for pause in group.pauses:
        if pause.is_over:
            text = (
                f"its pause by {pause.client} ended {span(-pause.left_ms)} ago, and nobody has written to the log "
                f"since: no worker runs. To end it for good: kafka-marshal release-group {quote(name)} --resume"
            )
            found.append(Problem(name, "pause_over", text, 1, []))
        elif pause.lasts_ms > max_pause_ms and group.known_lag:
            rows = [row for row in group.leases if row.lag]
            text = f"{pause_text(group, pause)}, longer than {span(max_pause_ms)}. If what it was for is done: "
            text += f"kafka-marshal release-group {quote(name)} --resume"
            found.append(Problem(name, "paused", text, 1, rows))
    if group.living < min_members:
        found.append(too_few(name, group.living, min_members))
    behind = group.known_lag
    if max_lag is not None and behind > max_lag:
        found.append(Problem(name, "lag", f"{count(behind, 'message')} behind, more than {max_lag:,}", behind, []))
    return found


def pause_text(group: GroupRow, pause: PauseRow) -> str:
    """A pause in words: what waits, and who is there to continue."""
    there = count(group.worker_count, "worker") if group.worker_count else "no worker"
    return (
        f"paused by {pause.client} for {span(pause.lasts_ms)}, {span(pause.left_ms)} left; "
        f"{count(group.known_lag, 'message')} waiting, {there} there"
    )


#: What is said of members one by one, and only if they are not silent together.
_OF_SILENT: Final = ("stuck_key", "hung", "old_cut", "unsaved", "silence")


def _all_silent(group: GroupRow, found: AllSilent) -> Problem:
    rows = [row for row in group.leases if row.client is not None and (row.silence_ms or 0) <= found.most_ms]
    waiting = sum(row.lag or 0 for row in rows)
    text = (
        f"all {found.members} members silent since {time_text(found.since)} ({span(found.ms)}), and nothing else "
        f"came to their log: check Kafka, and the network to it. {_kafka_seen(found)}. They hold "
        f"{count(partitions_of(rows), 'partition')}, {waiting:,} waiting. More members would make it worse: first see "
        "whether their processes run, and their logs"
    )
    return Problem(group.group, "all_silent", text, found.members, rows)


def _kafka_seen(found: AllSilent) -> str:
    """What the command itself saw of Kafka."""
    if found.kafka_ms is None:
        return "This command read the log, and asked Kafka nothing else"
    return f"Kafka answered this command within {max(1, round(found.kafka_ms)):,} ms"


def _unheld_text(group: GroupRow, free: list[LeaseRow]) -> str:
    """Partitions without a holder, and what to do: a group whose workers have just died has not ended."""
    waiting = sum(row.lag or 0 for row in free)
    what = "keys" if all(row.place != str(row.partition) for row in free) else count(partitions_of(free), "partition")
    text = f"{what} without a holder ({places(free)})"
    if waiting:
        text += f", {count(waiting, 'message')} waiting"
    if group.members:
        return text
    seen = span_text(group.silent_ms, group.silent_at_least)
    text += f". No worker holds anything of the group{_heard(group.idle)}. Last seen {seen} ago"
    if not group.living and group.all_silent is None:
        text += ". Start its workers: they continue at its positions"
    if group.silent_ms > DAY_MS:
        text += f". If it is over: kafka-marshal forget-group {quote(group.group)} (its positions are lost then)"
    return text


def _unsaved(group: GroupRow) -> Iterator[Problem]:
    """Members that answer checkpoints, but can hand nothing in: one problem, since it has one cause."""
    checkpoints = group.checkpoints
    if checkpoints is None or not (checkpoints.unsaved or checkpoints.is_slow):
        return
    lacking, barrier = checkpoints.unsaved, checkpoints.barrier
    why = _NOT_TAKEN if checkpoints.hold else _NOT_SAVED
    if lacking:
        rows = [row for row in group.leases if checkpoints.is_unsaved(row.client, row.instance)]
        names = sorted(each.client for each in lacking)
        ms = max([each.since_ms for each in lacking] + [_cut_ms(checkpoints, row) for row in rows if row.waiting_ms])
        text = f"checkpoint {max(each.checkpoint for each in lacking)} was not saved by {_members_text(names)}, for "
        text += f"{span_text(ms, at_least=True)}: {why}"
    elif barrier is not None:
        names = list(barrier.waits_for)
        rows = [row for row in group.leases if row.client in names]
        text = f"checkpoint {barrier.id} has waited for {_members_text(names)} for {span(barrier.open_ms)}, of at most "
        text += f"{span(barrier.timeout_ms)}: {why}, or a handler takes long"
    text += (
        "; their logs say why. Nothing is lost: the next checkpoint that succeeds has it all. Until then leave them "
        "running: if one ends, what it did since its last checkpoint is done again"
    )
    yield Problem(group.group, "unsaved", text, len(names), rows)


def _members_text(names: list[str]) -> str:
    return f"{count(len(names), 'member')} ({', '.join(names[:_LISTED])}{', …' * (len(names) > _LISTED)})"


def _standing_still(group: GroupRow) -> Iterator[Problem]:
    hung = {
        id(row)
        for member in group.members
        if member.is_still or group.is_unsaved(member.client, member.instance)
        for row in member.leases
    }
    hidden = {id(row) for row in group.leases} if group.all_silent is not None else hung
    still = [row for row in group.leases if row.stuck and not (id(row) in hidden and row.stuck.startswith(NO_PROGRESS))]
    for (kind, why), rows in _by_reason(still):
        text = f"{places(rows)}: {why}"
        if kind == "no_topic":
            text += (
                ". If you create it, positions of the deleted one must be set then (check says how). Where the group "
            )
            text += f"is over: kafka-marshal forget-group {quote(group.group)} (all of its positions are dropped)"
        if kind == "position_lost":
            # After a foreign commit the log still has the position: nothing need be repeated.
            keeps = FOREIGN_COMMIT in why
            named = _positions(rows) if keeps else (f"{name}=earliest" for name in _named(group, rows))
            where = " ".join(f"--partition {quote(name)}" for name in named)
            text += (
                ". Nothing of it is delivered until you say where to continue: kafka-marshal release-group "
                f"{quote(group.group)} {where}"
            )
        yield Problem(group.group, kind, text, len(rows), rows)


def _held_back(group: GroupRow, old: Iterable[Problem]) -> Iterator[Problem]:
    """One problem for each partition: progress elsewhere hides it from all figures of a worker."""
    hidden = {id(row) for problem in (*old, *_full(group)) for row in problem.partitions}
    for row in group.leases:
        if row.held_back and id(row) not in hidden:
            text = f"{places([row])}: {row.held_back}. See {row.client}'s log"
            advice = f". If its handler hangs: kafka-marshal evict {quote(group.group)} --member "
            advice += f"{quote(row.client or '')} --force ({_repeated(group)})"
            text += _waiting(group, [row]) or advice
            yield Problem(group.group, "stuck_key", text, 1, [row])


def _repeated(group: GroupRow) -> str:
    if group.checkpoints is None:
        return "what it has in hand is repeated"
    return "all since its last checkpoint is repeated; if its state can't be saved, that mends nothing"


def _waiting(group: GroupRow, rows: Iterable[LeaseRow]) -> str:
    """What to do about messages that fail again and again: "" if none is in the log."""
    if not any(row.awaits_tries for row in rows):
        return ""
    return (
        ". Messages of it, tried before or left by a member that lost them, wait for their next try; their keys wait, "
        "too. If they fail, its holder's log says why, and an eviction moves that elsewhere. kafka-marshal "
        f"open-messages {quote(group.group)} lists them, and says how to set one aside"
    )


def _old_cuts(group: GroupRow, most_ms: int | None) -> Iterator[Problem]:
    """Members with messages waiting in pieces whose last cut is older than three checkpoints, or than most_ms."""
    checkpoints = group.checkpoints
    if checkpoints is None:
        return
    old_below = checkpoints.old_below
    found: dict[str, list[LeaseRow]] = {}
    for row in group.leases:
        if not row.held or not row.lag or row.cut is None or row.waiting_ms is None:
            continue
        waited_ms = row.waiting_ms + row.as_of_ms
        is_old = old_below is not None and row.cut < old_below and waited_ms >= checkpoints.since_ms(old_below)
        refuses = bool(checkpoints.unsaved) if checkpoints.hold else group.is_unsaved(row.client, row.instance)
        is_told = refuses and most_ms is None
        if not is_told and (is_old or (most_ms is not None and _cut_ms(checkpoints, row) > most_ms)):
            found.setdefault(row.client or "", []).append(row)
    for client, rows in found.items():
        first = max(rows, key=lambda row: _cut_ms(checkpoints, row))
        since = f"since checkpoint {first.cut}" if first.cut else "so far"
        why = _NEEDS_ALL.format(quote(group.group))
        if not checkpoints.hold:
            why = (
                "Its state can't be saved, or a handler takes longer than the policy's drain, or hangs: see "
                f"{client}'s log, and kafka-marshal show "
                f"{quote(f'{first.topic}:{first.partition}:{first.position}')}"
            )
        text = (
            f"{places(rows)}: {client} has not handed {'it' if len(rows) == 1 else 'them'} in {since}, for over "
            f"{span(_cut_ms(checkpoints, first))}, and messages wait at offset {first.position}. {why}. "
            f"Nothing is lost; if {client} dies, what it did since then comes again"
        )
        yield Problem(group.group, "old_cut", text, len(rows), rows)


def _cut_ms(checkpoints: CheckpointsRow, row: LeaseRow) -> int:
    """How long (ms) what waits there was not handed in, at least."""
    return min(checkpoints.since_ms(row.cut or 0), (row.waiting_ms or 0) + row.as_of_ms)


def _named(group: GroupRow, rows: list[LeaseRow]) -> Iterator[str]:
    """Partitions as options of release-group; the topic alone for all of its partitions. At most the first eight."""
    whole = {row.topic for row in rows} - {row.topic for row in group.leases if row not in rows}
    yield from sorted(whole)
    yield from [f"{row.topic}:{row.partition}" for row in rows if row.topic not in whole][:_LISTED]


def _positions(rows: list[LeaseRow]) -> Iterator[str]:
    """Partitions with their positions in the log, as options of release-group. At most the first eight."""
    yield from [f"{row.topic}:{row.partition}={0 if row.stable is None else row.stable + 1}" for row in rows[:_LISTED]]


def _by_reason(rows: list[LeaseRow]) -> list[tuple[tuple[str, str], list[LeaseRow]]]:
    """(kind, reason) with the partitions, in the order of `KINDS`."""
    found: dict[tuple[str, str], list[LeaseRow]] = {}
    for row in rows:
        kind = "position_lost" if row.lost else "no_topic" if row.no_topic else "stuck"
        found.setdefault((kind, row.stuck), []).append(row)
    return sorted(found.items(), key=lambda item: (list(KINDS).index(item[0][0]), item[0][1]))


def _heard(idle: list[WorkerRow]) -> str:
    """Workers that hold nothing and may still run: without partitions they write no records."""
    last = sorted(idle, key=lambda run: run.silence_ms)[:_LISTED]
    return "".join(f"; {_name(run)} {run.doing}" for run in last) + ("; …" if len(idle) > _LISTED else "")


def _without_checkpoint(group: GroupRow) -> Iterator[Problem]:
    """In a hold group nothing moves while one member can't take part: the others do not hang."""
    hung = [row for member in group.members if member.is_still for row in member.leases]
    if group.checkpoints is not None and hung and not group.checkpoints.unsaved:
        text = (
            f"no checkpoint has been complete for {span(group.checkpoints.age_ms)}, messages wait, and progress moves "
            f"only at one. {_NEEDS_ALL.format(quote(group.group))}. Nothing is lost"
        )
        yield Problem(group.group, "hung", text, 1, hung)


def _members(group: GroupRow, max_silence_ms: int | None) -> Iterator[Problem]:
    from kafka_marshal.observe.meter import silence_text

    if group.is_hold:
        yield from _without_checkpoint(group)
    for member in sorted(group.members, key=lambda member: member.badness):
        locks = sum(row.is_lock for row in member.leases)
        amounts = (len(member.leases) - locks, "partition"), (locks, "lock")
        holds = f"holds {' and '.join(count(*each) for each in amounts if each[0])} ({places(member.leases)})"
        where, stood_ms = _name(member), member.last_heard.stood_ms
        silence = silence_text(member.silence_ms, stood_ms)
        if member.is_hung:
            text = f"{where} beats, but {member.hung_text}{'.' * member.awaits_tries} It {holds}"
            text += f", {member.lag or 0:,} waiting"
            if group.checkpoints is not None:
                text += ". Progress moves at checkpoints only: see its log first, its state may not be saved"
            text += _waiting(group, member.leases)
            yield Problem(group.group, "hung", text, 1, member.leases)
        elif member.state == "gone":
            together = group.all_silent
            if together is not None and member.silence_ms > together.most_ms:
                together = None
            if together is not None and together.members > 1:
                continue
            text = f"{where} is gone: silent for {silence}. It {holds}"
            if together is not None:
                text += (
                    f", {member.lag or 0:,} waiting. Nothing else came to the log since: check Kafka, and whether its "
                    f"process runs. {_kafka_seen(together)}"
                )
            elif not group.living and group.all_silent is None:
                text += (
                    f", {member.lag or 0:,} waiting. No other worker is alive: start one, it continues at their "
                    "positions"
                )
            yield Problem(group.group, "gone", text, 1, member.leases)
        elif max_silence_ms is not None and member.state != "unknown" and member.silence_ms - stood_ms > max_silence_ms:
            text = f"{where} is silent for {silence}, more than {span(max_silence_ms)}. It {holds}"
            yield Problem(group.group, "silence", text, 1, member.leases)


def _name(member: MemberRow | WorkerRow) -> str:
    runs_at = member.runs_at
    return member.client if runs_at is None else f"{member.client} ({runs_at})"


#: The most members that a text names.
_NAMED = 3


def mixed_texts(group: GroupRow) -> list[str]:
    """What differs among the group's living members, in words; a rolling deploy may be why."""
    living = [member for member in group.members if member.state != "gone"]
    intervals: dict[int, list[str]] = {}
    sides: list[tuple[set[str], set[str]]] = []
    for member in living:
        intervals.setdefault(member.heartbeat_interval_ms, []).append(member.client)
        clients, topics = {member.client}, {row.topic for row in member.leases if not row.is_lock}
        if not topics:
            continue
        for side in [each for each in sides if each[1] & topics]:
            sides.remove(side)
            clients, topics = clients | side[0], topics | side[1]
        sides.append((clients, topics))
    found = []
    if len(intervals) > 1:
        each = "; ".join(f"{span(ms)}: {_some(names)}" for ms, names in sorted(intervals.items()))
        found.append(f"members have different heartbeat intervals ({each}): a longer one delays take-overs")
    if len(sides) > 1 and all(len(clients) > 1 for clients, _ in sides):
        each = "; ".join(f"{_some(topics)}: {_some(clients)}" for clients, topics in sides)
        found.append(f"no member holds partitions of all topics ({each}): two groups of one name?")
    for topic in sorted({row.topic for row in group.leases if row.sharers}):
        whole = {row.client for row in group.leases if row.topic == topic and row.held and not row.sharers}
        if names := {name for name in whole if name is not None}:
            found.append(f"{topic}: some partitions are shared, and {_some(names)} holds others whole: another mode?")
    return [f"{group.group}: {text}" for text in found]


def _some(names: set[str] | list[str]) -> str:
    return ", ".join(sorted(names)[:_NAMED]) + (", …" if len(names) > _NAMED else "")


# -- open messages -------------------------------------------------------------------------------------------

#: A batch whose worker beats may be in its hands for this long (ms), or three heartbeat intervals.
STUCK_BATCH_MS = 60_000

#: A message whose time has come is tried by then (ms), or within three heartbeat intervals: lanes wait for handlers,
#: and a partition for its next owner.
OVERDUE_MS = 600_000

#: A message that has failed this often, and waits for its next try, is named, however short that wait is.
MANY_TRIES = 10

#: The most batches whose age is looked up: the oldest of each worker.
_MOST_BATCHES = 500


def open_text(group: GroupRow) -> str:
    """The open messages of a group in words; "": there are none."""
    parts = []
    if group.parked:
        reasons = Counter(each.parked for row in group.leases for each in row.open if each.is_parked)
        parts.append(f"{group.parked:,} set aside ({', '.join(f'{n:,} {why}' for why, n in reasons.most_common(5))})")
    taken = sum(
        each.last - each.first + 1 for row in group.leases for each in row.open if each.holder and not each.is_parked
    )
    later = sum(each.until is not None for row in group.leases for each in row.open)
    waiting = group.open_messages - taken - later
    parts += [f"{waiting:,} waiting for the next try"] if waiting else []
    parts += [f"{later:,} waiting for their time"] if later else []
    parts += [f"{taken:,} in workers' batches"] if taken else []
    return ", ".join([*parts, *crowded_text(group)])


def crowded_text(group: GroupRow) -> list[str]:
    """In words, how near to its limit the fullest partition is; []: none has more than half of it."""
    most = max(crowded(group).values(), default=0)
    return [f"{most:,} of the {MAX_HOLES:,} that a partition may have open"] if most else []


def open_problems(
    cluster: Cluster, view: LiveView, group: GroupRow, max_parked: int | None = None, max_parked_ms: int | None = None
) -> list[Problem]:
    """All problems of the group's open messages (*blocking*): ages are read from the log."""
    from kafka_marshal.observe.holes import holdings_of

    name = group.group
    holdings = holdings_of(view.worlds, name)
    rows = {(row.topic, row.partition): row for row in group.leases}
    parked = [each for each in holdings if each.hole.is_parked and each.key in rows]
    listed = f"kafka-marshal open-messages {quote(name)} --parked lists them, redrive or discard ends them"
    found = []
    if max_parked is not None and len(parked) > max_parked:
        text = f"{count(len(parked), 'message')} set aside, more than {max_parked:,}. {listed}"
        found.append(Problem(name, "parked", text, len(parked), _rows(rows, parked)))
    if max_parked_ms is not None and parked:
        old, unknown = _older(cluster, view, parked, max_parked_ms)
        if unknown := _may_be_older(cluster, view, unknown, max_parked_ms):
            text = (
                f"{count(len(unknown), 'message')} set aside, and whether for more than {span(max_parked_ms)} can't be "
                f"known: the records that say since when were pruned, and the messages are older. {listed}"
            )
            found.append(Problem(name, "parked", text, len(unknown), _rows(rows, unknown)))
        if old:
            age = span(max(age for _, age in old))
            text = f"{count(len(old), 'message')} set aside for more than {span(max_parked_ms)}, up to {age}. {listed}"
            found.append(Problem(name, "parked", text, len(old), _rows(rows, [each for each, _ in old])))
    if group.all_silent is None:  # else no member can log what it does
        found += _stuck_batches(cluster, view, group, holdings)
        if not group.is_paused:
            found += [*_stuck_tries(cluster, view, group, holdings), *_overdue(view, group, holdings)]
    found += [limit(group, [rows[key]], x, MAX_HOLES) for key, x in crowded(group).items() if x < MAX_HOLES]
    for cp in sorted({row.cp for row in group.leases if row.cp is not None}):
        if 2 * (amount := view.worlds[cp].hole_count()) > MANY_HOLES:
            of = f"all groups together in {view.replica.topic} [{cp}]"
            found.append(limit(group, [row for row in group.leases if row.cp == cp], amount, MANY_HOLES, of))
    return found


def _rows(rows: dict[tuple[str, int], LeaseRow], holdings: Sequence[PlacedHole]) -> list[LeaseRow]:
    return [rows[key] for key in dict.fromkeys(each.key for each in holdings)]


def _older(
    cluster: Cluster, view: LiveView, holdings: Sequence[PlacedHole], most_ms: int
) -> tuple[list[tuple[PlacedHole, int]], list[PlacedHole]]:
    """Those that are as they are for longer than this, with their age (ms); and those of which it can't be known.

    One whose record was pruned is as old as the first record that is left, or older.
    """
    from kafka_marshal.observe.holes import read_at

    log = view.replica.topic
    wanted: dict[tuple[str, int], set[int]] = {}
    for each in holdings:
        wanted.setdefault((log, each.cp), set()).add(each.hole.since)
    times = read_at(cluster, wanted, _time_of, view.patience_s).found
    pruned = [each for each in holdings if (log, each.cp, each.hole.since) not in times]
    cps = {each.cp for each in pruned}
    marks = cluster.watermarks([(log, cp) for cp in sorted(cps)], view.patience_s) if cps else {}
    firsts = read_at(cluster, {key: [low] for key, (low, _) in marks.items()}, _time_of, view.patience_s).found
    latest = {cp: view.worlds[cp].log_time for cp in cps} | {cp: time for (_, cp, _), time in firsts.items()}
    now_ms, ages = view.silence.now_ms(), []
    for each in holdings:
        time = times.get((log, each.cp, each.hole.since), latest.get(each.cp, 0))
        ages.append((each, now_ms - time - view.silence.stood_ms(view.worlds[each.cp], time)))
    found = [(each, age) for each, age in ages if age > most_ms]
    certain = {id(each) for each, _ in found}
    return found, [each for each in pruned if id(each) not in certain]


def _may_be_older(cluster: Cluster, view: LiveView, holdings: Sequence[PlacedHole], most_ms: int) -> list[PlacedHole]:
    """Those whose message is older than this: none is set aside before it is written."""
    from kafka_marshal.observe.holes import read_at

    wanted: dict[tuple[str, int], set[int]] = {}
    for each in holdings:
        wanted.setdefault(each.key, set()).add(each.hole.first)
    times = read_at(cluster, wanted, _time_of, view.patience_s).found if wanted else {}
    now_ms = view.silence.now_ms()
    return [each for each in holdings if now_ms - times.get((*each.key, each.hole.first), 0) > most_ms]


def _time_of(message: Any) -> int:
    time_ms: int = message.timestamp()[1]
    return time_ms


def _stuck_batches(
    cluster: Cluster, view: LiveView, group: GroupRow, holdings: Sequence[PlacedHole]
) -> Iterator[Problem]:
    """Batches that a worker has had for long, though it beats."""
    sharers = {
        (row.topic, row.partition, each.epoch): each
        for row in group.leases
        for each in row.sharers
        if state_of(view.silence.now_ms() - each.last_beat, each.heartbeat_interval_ms) == "seen"
    }
    owned = [each for each in holdings if (*each.key, each.hole.owner) in sharers]
    owned.sort(key=lambda each: (*each.key, each.hole.owner, each.hole.since))
    oldest = [next(of_one) for _, of_one in groupby(owned, key=lambda each: (*each.key, each.hole.owner))]
    rows = {(row.topic, row.partition): row for row in group.leases}
    for each, age in _older(cluster, view, oldest[:_MOST_BATCHES], STUCK_BATCH_MS)[0] if oldest else ():
        sharer = sharers[*each.key, each.hole.owner]
        if age <= 3 * sharer.heartbeat_interval_ms:
            continue
        text = (
            f"{places([rows[each.key]])}: {sharer.client_id} has had offsets {each.hole.first} to {each.hole.last} for "
            f"{span(age)} and beats: a handler hangs? Nothing is lost, and other workers continue. handler_timeout "
            f"gives such messages to others; to end it now, restart {sharer.client_id}"
        )
        yield Problem(group.group, "stuck_batch", text, 1, [rows[each.key]])


def _stuck_tries(
    cluster: Cluster, view: LiveView, group: GroupRow, holdings: Sequence[PlacedHole]
) -> Iterator[Problem]:
    """Messages whose next try has not been logged for long, or that fail for ever."""
    rows = {(row.topic, row.partition): row for row in group.leases if row.held}
    waiting = sorted([x for x in holdings if x.hole.is_free and x.key in rows], key=lambda each: each.hole.since)
    old = _older(cluster, view, waiting[:_MOST_BATCHES], STUCK_BATCH_MS)[0] if waiting else []
    known = {id(each) for each, _ in old}
    failing = [each for each in waiting if each.hole.attempts >= MANY_TRIES and id(each) not in known]
    if old:
        some = _rows(rows, [each for each, _ in old])
        amount, age = count(len(old), "message waits", "messages wait"), span(max(age for _, age in old))
        text = (
            f"{places(some)}: {amount} for the next try, for up to {age}, and later ones of the same keys behind: a "
            "handler hangs, or what the handlers need is away. Nothing is lost. See the workers' logs and health(). "
            f"kafka-marshal open-messages {quote(group.group)} lists them, and says how to set one aside"
        )
        yield Problem(group.group, "stuck_try", text, len(old), some)
    if failing:
        some, most = _rows(rows, failing), max(each.hole.attempts for each in failing)
        text = (
            f"{places(some)}: {count(len(failing), 'message has', 'messages have')} failed {MANY_TRIES} times or more "
            f"(up to {most:,}), and later ones of the same keys wait. Nothing is lost. Mend what makes them fail, see "
            f"the workers' logs; kafka-marshal open-messages {quote(group.group)} lists them, and says how to set one "
            "aside"
        )
        yield Problem(group.group, "stuck_try", text, len(failing), some)


def _overdue(view: LiveView, group: GroupRow, holdings: Sequence[PlacedHole]) -> Iterator[Problem]:
    """Messages whose time has come, and that no worker has tried since (U2)."""
    rows = {(row.topic, row.partition): row for row in group.leases}
    late: list[tuple[PlacedHole, int]] = []
    now_ms = view.silence.now_ms()
    for each in holdings:
        if (due := due_of(each.hole.reason)) is not None and (row := rows.get(each.key)) is not None:
            most = max(OVERDUE_MS, 3 * (row.heartbeat_interval_ms or 0))
            if now_ms - due - view.silence.stood_ms(view.worlds[each.cp], due) > most:
                late.append((each, now_ms - due))
    for held in (True, False):
        if of_them := [(each, ms) for each, ms in late if rows[each.key].held is held]:
            some = _rows(rows, [each for each, _ in of_them])
            amount, ms = count(len(of_them), "message was", "messages were"), max(ms for _, ms in of_them)
            text = f"{places(some)}: {amount} to be tried by now, up to {span(ms)} ago, and later ones of the same "
            text += "keys wait behind. Nothing is lost. "
            text += (
                "Their worker has no handler free, does not deliver (pause, rate=), or is of a release that knows no "
                "RetryAfter: see its log and health()"
                if held
                else "No worker has them: start one, and it tries them at once"
            )
            text += f". kafka-marshal open-messages {quote(group.group)} lists them as later, redrive has them tried"
            yield Problem(group.group, "stuck_try", text, len(of_them), some)
