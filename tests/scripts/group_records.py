"""The records of coordinated groups in the language of scripts, and the display of a group.

    joins flights:4 trips:2 [session=1000] [strategy=sticky] [seen=9] [shares] [pattern=^f] [member=""]
                                        JoinGroup without a member_id; topics with their partitions
    joins again flights:4               the same with the sender's member_id
    beats                               GroupHeartbeat
    leaves                              LeaveGroup
    sees flights:6 trips:0              TopicsChanged
    commits offsets flights:0>9         CommitOffsets: `flights:0>9~text` also keeps a text, `flights:0[4-6,9-9]` are
                                        ranges, `flights:0(0-1/2)>9` is about the first half of all key hashes
    lets go flights:0>9                 the same with action 1
    starts flights:0>9                  with action 2; one record may have all three, one after the other
    sets flights:0>9                    CommitOffsets without a member_id: what a pausing client sets
    configures [max_session_timeout_ms=5000] [accept_range_fetch=flights,trips] [accept_individual_commit=no] …

    begins [after=9] [timeout=1000] [keep=3] [hold]     BeginCheckpoint, after the newest
    answers flights:0>9 [barrier=9] [leaving]           AnswerBarrier to the open one; `refuses` is answer 0
    rolls back [to=9]                                   Rollback, to the newest
    retires, pins, ends [9]                             KeepCheckpoint, of the newest

    appends NameOfType field="x" …      a type without its own words; values as in JSON, without spaces

    commits offsets flights:0>9 cuts=99 the same entry for 99 single hashes: 0, 2, 4 …

Each may have generation= (else the group's), member= (else the sender's; a1's or any text), in_order=yes. A range of
key hashes begins with the first number and ends before the second: fractions of the whole, or #99 for the hash 99.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from rationalizer import (
    AnswerBarrier,
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    GroupHeartbeat,
    JoinGroup,
    KeepCheckpoint,
    LeaveGroup,
    Record,
    Rollback,
    TopicsChanged,
)
from rationalizer.groups.checkpoints import Version
from rationalizer.groups.group import Group, Member, PartitionProgress, Settings
from rationalizer.groups.pieces import Piece
from rationalizer.levels import FIRST_LEVEL, GROUPS_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.progress import Progress
from rationalizer.state import MEMBER, PARTITION, Part
from rationalizer.wire.records import KINDS, Setting
from rationalizer.wire.wellformed import (
    COMMIT,
    END,
    LET_GO,
    PASSING,
    PIN,
    PINNED,
    REACHED,
    REACHED_AND_LEAVES,
    REFUSED,
    RETIRE,
    START,
)
from tests.scripts.sharing_records import hole_words

KEEPING = {"retires": RETIRE, "pins": PIN, "ends": END}
ACTIONS = {"answers": COMMIT, "commits offsets": COMMIT, "lets go": LET_GO, "starts": START, "sets": COMMIT}
SPACE = MAX_KEY_HASH + 1
ENTRY = re.compile(
    r"(?P<topic>[^:]+):(?P<partition>\d+)(\((?P<keys>.*?)\))?(>(?P<through>-?\d+))?(\[(?P<ranges>.*?)\])?"
)


@dataclass(frozen=True)
class Groups:
    """What a script need not say, since the log has it: a sender's member_id, a group's generation, the next offset."""

    member_id: Callable[[str, tuple[str, str]], str] = lambda group, sender: ""
    generation: Callable[[str], int] = lambda group: 0
    next_offset: Callable[[], int] = lambda: 0
    #: The member_id that the script's name has; any other text is its own.
    named: Callable[[str, str], str] = lambda group, name: name
    #: The newest checkpoint, and the open barrier; 0: there is none.
    newest: Callable[[str], int] = lambda group: 0
    barrier: Callable[[str], int] = lambda group: 0


def group_record_of(
    ids: tuple[str, str, str], verb: str, about: list[str], options: dict[str, str], known: Groups
) -> Record | None:
    """The record that these words mean; None where they are not about a coordinated group."""
    sender, group = (ids[0], ids[1]), ids[2]
    without = {"joins": "", "sets": ""}.get(verb)
    own = known.member_id(group, sender) if without is None else without
    if verb == "configures":
        return ConfigureGroup(*ids, tuple((name, _setting(name, options.pop(name))) for name in list(options)))
    member_id = known.named(group, options.pop("member")) if "member" in options else own
    if verb in ("joins", "joins again"):
        return JoinGroup(
            *ids,
            member_id,
            int(options.pop("seen", known.next_offset())),
            int(options.pop("session", "1000")),
            options.pop("strategy", "sticky"),
            "shares" in about,
            options.pop("pattern", ""),
            _topics(word for word in about if word != "shares"),
        )
    if verb == "sees":
        return TopicsChanged(*ids, member_id, _topics(about))
    if verb == "appends":
        kind = next((kind for kind in KINDS.values() if kind.name == about[0]), None)
        return None if kind is None else kind.build(*ids, [json.loads(options.pop(name)) for name in kind.field_names])
    if verb == "begins":
        after = int(options.pop("after", known.newest(group)))
        timeout, keep = int(options.pop("timeout", "1000")), int(options.pop("keep", "3"))
        return BeginCheckpoint(*ids, after, timeout, keep, "hold" in about)
    if verb in KEEPING:
        return KeepCheckpoint(*ids, int(about[0]) if about else known.newest(group), KEEPING[verb])
    generation = int(options.pop("generation", "0" if verb == "sets" else known.generation(group)))
    if verb == "beats" and not about:
        return GroupHeartbeat(*ids, member_id, generation)
    if verb == "leaves":
        return LeaveGroup(*ids, member_id, generation)
    if verb == "rolls back":
        return Rollback(*ids, generation, int(options.pop("to", "0")))
    if verb in ("answers", "refuses"):
        words = [word for word in about if word != "leaving"]
        answer = REFUSED if verb == "refuses" else REACHED_AND_LEAVES if "leaving" in about else REACHED
        barrier = int(options.pop("barrier", known.barrier(group)))
        return AnswerBarrier(*ids, member_id, generation, barrier, answer, tuple(_entries("answers", words)))
    if verb not in ACTIONS:
        return None
    in_order = options.pop("in_order", "no") == "yes"
    entries = _cuts(about, int(options.pop("cuts"))) if "cuts" in options else _entries(verb, about)
    return CommitOffsets(*ids, member_id, generation, in_order, tuple(entries))


def group_words_of(record: Record, known: Groups) -> str | None:
    """The same the other way; what the log has is not said."""
    group, sender = record.group_id, (record.instance_id, record.client_id)
    own = known.member_id(group, sender)
    match record:
        case JoinGroup():
            words = ["joins", *_counts(record.topics), f"session={record.session_timeout_ms}"]
            words += [f"strategy={record.strategy}", f"seen={record.seen}", *["shares"] * record.allow_key_share]
            words += [f"pattern={record.pattern}"] if record.pattern else []
            if record.member_id and record.member_id == own:
                words[0] = "joins again"
            elif record.member_id:
                words.append(f"member={record.member_id}")
            return " ".join(words)
        case TopicsChanged(member_id=member_id):
            return " ".join(["sees", *_counts(record.topics), *_member(member_id, own)])
        case GroupHeartbeat(member_id=member_id) | LeaveGroup(member_id=member_id):
            verb = "beats" if isinstance(record, GroupHeartbeat) else "leaves"
            return " ".join([verb, *_member(member_id, own), *_generation(record.generation, known.generation(group))])
        case CommitOffsets(member_id=member_id):
            words = [_entry_words(record.entries, "sets" if not member_id else "commits offsets")]
            words += ["in_order=yes"] if record.in_order else []
            words += _member(member_id, own) if member_id else []
            return " ".join([*words, *_generation(record.generation, known.generation(group) if member_id else 0)])
        case BeginCheckpoint(after=after):
            words = ["begins", *([] if after == known.newest(group) else [f"after={after}"])]
            words += [f"timeout={record.timeout_ms}", f"keep={record.keep}", *["hold"] * record.hold]
            return " ".join(words)
        case AnswerBarrier(member_id=member_id, barrier=barrier):
            words = [_entry_words(record.entries, "refuses" if record.answer == REFUSED else "answers")]
            words += ["leaving"] * (record.answer == REACHED_AND_LEAVES)
            words += [] if barrier == known.barrier(group) else [f"barrier={barrier}"]
            words += _member(member_id, own)
            return " ".join([*words, *_generation(record.generation, known.generation(group))])
        case Rollback():
            words = ["rolls back", *([f"to={record.checkpoint}"] if record.checkpoint else [])]
            return " ".join([*words, *_generation(record.generation, known.generation(group))])
        case KeepCheckpoint(checkpoint=checkpoint):
            verb = next(verb for verb, action in KEEPING.items() if action == record.action)
            return " ".join([verb, *([] if checkpoint == known.newest(group) else [str(checkpoint)])])
        case ConfigureGroup():
            return " ".join(["configures", *(f"{name}={_setting_words(value)}" for name, value in record.settings)])
    kind = KINDS[record.TYPE]
    if kind.level == GROUPS_LEVEL or kind.level == FIRST_LEVEL:
        return None
    values = zip(kind.field_names, record.own_fields(), strict=True)
    return " ".join(["appends", kind.name, *(f"{name}={json.dumps(value)}" for name, value in values)])


# -- words of a record -----------------------------------------------------------------------------------


def _topics(words: Iterable[str]) -> tuple[tuple[str, int], ...]:
    pairs = (word.rsplit(":", 1) for word in words)
    return tuple((topic, int(count)) for topic, count in pairs)


def _counts(topics: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{topic}:{count}" for topic, count in topics]


def _member(member_id: str, own: str) -> list[str]:
    return [] if member_id == own else [f"member={member_id}"]


def _generation(generation: int, present: int) -> list[str]:
    return [] if generation == present else [f"generation={generation}"]


def _setting(name: str, text: str) -> Setting:
    if name == "strategy":
        return None if text == "none" else text
    if name == "accept_range_fetch":
        return tuple(text.split(",")) if text else ()
    return text == "yes" if text in ("yes", "no") else int(text)


def _setting_words(value: Setting) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _entries(verb: str, words: list[str]) -> list[CommitEntry]:
    found, action = list[CommitEntry](), ACTIONS[verb]
    rest = list(words)
    while rest:
        for length in (2, 1):
            other = ACTIONS.get(" ".join(rest[:length]))
            if other is not None:
                action = other
                del rest[:length]
                break
        else:
            found.append(_entry(rest.pop(0), action))
    return found


def _entry(word: str, action: int) -> CommitEntry:
    text, tilde, metadata = word.partition("~")
    parts = ENTRY.fullmatch(text)
    if parts is None:
        raise ValueError(f"{word!r} is no entry: flights:0(0-1/2)>9, or flights:0[4-6,9-9]~text")
    lo, hi = _keys(parts["keys"]) if parts["keys"] else (0, MAX_KEY_HASH)
    spans = [span.split("-") for span in parts["ranges"].split(",")] if parts["ranges"] else []
    return CommitEntry(
        parts["topic"],
        int(parts["partition"]),
        lo,
        hi,
        action,
        None if parts["through"] is None else int(parts["through"]),
        tuple((int(first), int(last)) for first, last in spans),
        metadata if tilde else None,
    )


def _cuts(about: list[str], count: int) -> list[CommitEntry]:
    """The entry for this number of single hashes: 0, 2, 4 …"""
    first = _entry(about[0], COMMIT)
    return [first._replace(lo=key, hi=key) for key in range(0, 2 * count, 2)]


def _entry_words(entries: tuple[CommitEntry, ...], verb: str) -> str:
    words, action = [verb], COMMIT
    verbs = {COMMIT: "commits offsets", LET_GO: "lets go", START: "starts"}
    for entry in entries:
        if entry.action != action:
            action = entry.action
            words = [verbs[action]] if words == ["commits offsets"] else [*words, verbs[action]]
        keys = "" if (entry.lo, entry.hi) == (0, MAX_KEY_HASH) else f"({_keys_words(entry.lo, entry.hi)})"
        through = "" if entry.through is None else f">{entry.through}"
        ranges = f"[{','.join(f'{first}-{last}' for first, last in entry.ranges)}]" if entry.ranges else ""
        text = "" if entry.metadata is None else f"~{entry.metadata}"
        words.append(f"{entry.topic}:{entry.partition}{keys}{through}{ranges}{text}")
    return " ".join(words)


def _keys(text: str) -> tuple[int, int]:
    low, high = text.split("-")
    return _edge(low), _edge(high) - 1


def _edge(text: str) -> int:
    return int(text[1:]) if text[0] == "#" else int(Fraction(text) * SPACE)


def _keys_words(lo: int, hi: int) -> str:
    return f"{_edge_words(lo)}-{_edge_words(hi + 1)}"


def _edge_words(edge: int) -> str:
    near = Fraction(edge, SPACE).limit_denominator(12)
    return str(near) if int(near * SPACE) == edge else f"#{edge}"


# -- how a group stands ----------------------------------------------------------------------------------


def group_words(group: Group, log_time: int, name_of: Callable[[Member], str]) -> list[str]:
    """A line about the group, one for each member, and one for each partition that has pieces or progress."""
    topics = "".join(f" {topic}:{count}" for topic, count in sorted(group.counts.items()))
    settings = [
        f" {name}={_setting_words(value)}"
        for name in Settings.__slots__
        if (value := getattr(group.settings, name)) != getattr(Settings(), name)
    ]
    head = f"{group.group_id} {group.state(log_time)} generation={group.generation}"
    head += f" {group.strategy}:{topics}" if group.strategy else ""
    names = {slot: name_of(member) for slot, member in group.members.items()}
    lines = [head + "".join(settings)]
    lines += [f"  {_member_line(group, member, names[slot], log_time)}" for slot, member in group.members.items()]
    for each in group.assigned():
        words = [f"  {each.topic}:{each.partition}", *(_piece_words(piece, names) for piece in each.pieces)]
        words += [] if each.pieces else ["nobody"]
        words += [] if each.progress is None else _done_words(each.progress, each.versions is not None)
        lines.append(" ".join([*words, *added_words(PARTITION, each)]))
        lines += [f"    {_version_words(version)}" for version in each.versions or ()]
    return lines


def checkpoint_words(group: Group, name_of: Callable[[Member], str]) -> list[str]:
    """What is kept, and the open barrier."""
    checkpoints = group.checkpoints
    if checkpoints is None:
        return ["takes no checkpoints"]
    kinds = {PASSING: " passing", PINNED: " pinned"}
    kept = [f"{each.id}{kinds.get(each.kind, '')} ({each.log_time})" for each in checkpoints.kept]
    lines = [" ".join(["checkpoints", *["hold"] * checkpoints.hold, f"keep={checkpoints.keep}:", ", ".join(kept)])]
    barrier = checkpoints.barrier
    if barrier is not None:
        words = [f"barrier {barrier.id}", *["passing"] * barrier.passing]
        words += [f"opened={barrier.opened}", f"timeout={barrier.timeout_ms}", f"waits for {barrier.waiting}"]
        for slot, answer in sorted(barrier.answers.items()):
            said = {REFUSED: "refused", REACHED: "reached", REACHED_AND_LEAVES: "reached and leaves"}[answer.answer]
            words.append(f"{name_of(group.members[slot])} {said} at {answer.generation}")
        lines.append(" ".join(words[:1]) + " " + ", ".join(words[1:]))
    return lines


def _version_words(version: Version) -> str:
    states = version.states
    saved = [
        f"{'' if len(states) == 1 else f'({_keys_words(lo, hi)})'}{checkpoint or 'none'}"
        for lo, hi, checkpoint in states
    ]
    words = [f"@{version.checkpoint}", f"saved={','.join(saved)}", *_progress_words(version.progress)]
    words += [] if version.metadata is None else [f"metadata={version.metadata!r}"]
    return " ".join(words)


def added_words(part: Part, thing: object) -> list[str]:
    """What later levels added to a part of the state, where it has another value than its default."""
    return [f"{name}={value}" for name, value in part.added(thing)]


def counts_of(group: Group, name_of: Callable[[Member], str]) -> str:
    """How many whole partitions each member owns, and should."""
    found = []
    for slot, member in group.members.items():
        owned, wanted = (
            sum(getattr(topic, which).count(slot) for topic in group.pieces.values()) for which in ("owners", "targets")
        )
        found.append(f"{name_of(member)} {owned}{f' -> {wanted}' if wanted != owned else ''}")
    return ", ".join(found)


def _member_line(group: Group, member: Member, name: str, log_time: int) -> str:
    words = [name, f"slot={member.slot}", f"session={member.session_timeout_ms}"]
    words.append(f"silent={log_time - member.last_beat}")
    words += ["overdue"] * member.is_overdue(log_time) + ["shares"] * member.allow_key_share
    words += [f"joined={member.joined}"] if member.joined != member.slot else []
    words += [f"pattern={member.pattern}"] if member.pattern else []
    if member.pattern or member.topics != group.counts.keys():
        words.append(f"topics={','.join(sorted(member.topics))}")
    return " ".join([*words, *added_words(MEMBER, member)])


def _piece_words(piece: Piece, names: dict[int, str]) -> str:
    keys = "" if piece.whole else f"({_keys_words(piece.lo, piece.hi)}) "
    text = f"{keys}{names[piece.owner]} since={piece.since}"
    if piece.target == piece.owner:
        return text
    return f"{text} -> {names.get(piece.target, 'nobody')} revoked={piece.revoked}"


def _done_words(kept: PartitionProgress, dated: bool) -> list[str]:
    words = _progress_words(kept.progress)
    words += [f"initial={kept.initial}"] if kept.initial >= 0 else []
    words += [f"metadata={kept.metadata!r}"] if kept.metadata is not None and not dated else []
    return words + hole_words(kept.progress)


def _progress_words(progress: Progress) -> list[str]:
    parts = progress.done_through
    done = [
        f"{'' if len(parts) == 1 else f'({_keys_words(lo, hi)})'}{'none' if offset < 0 else offset}"
        for lo, hi, offset in parts
    ]
    words = [f"done={','.join(done) if len(done) <= 6 else f'{len(done)} pieces'}"]
    ranges = progress.ranges
    if ranges:
        words.append(f"ranges={','.join(f'{first}-{last}' for first, last in ranges)}")
    return words
