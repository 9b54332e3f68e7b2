"""Records about shares and open messages in the words of scripts, and how a lease stands that has them.

    shares flights:0 [keys=0-1/2] [hi=1000] [start=100]   ClaimingShare: some keys, or batches
    settles flights:0 [done=10-19,21] [open=12-14*2,15(1/3)*1] [park=16(1/3)*5~ValueError] [take=50/999[/once]]
                                            SettlingMessages with the sender's epoch; epoch=nil: as an operator
    settles offsets flights:0 …             SettleOffsets; as=operator: as an operator
    settles … redo=yes                      of version 5: an operator opens what is done

An offset may have a key hash, (1/3) or (#7), and attempts, *2. seen= is the next offset unless named. singles=1..9
opens 1, 3 … 9, each by itself; settles offsets: with its offset as key hash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from rationalizer import ClaimingShare, Lease, Progress, Record, SettleOffsets, SettlingMessages, World
from rationalizer.holes import NO_KEY, NO_OWNER, Hole
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import Done, Opened, Parked, Take
from tests.tables.shares import SHARE_COLUMNS, SHARE_TRANSITIONS, ShareTransition

SPACE = MAX_KEY_HASH + 1
ENTRY = re.compile(r"(\d+)(?:-(\d+))?(?:\((.*?)\))?(?:\*(\d+))?(?:~(.*))?")
MANY_HOLES = 8

Key = tuple[str, str, int]
#: A cell of the table of shares, and how a record in it ended.
ShareCell = tuple[ShareTransition, str, str]

ROWS = {(row.record, row.nil_epoch): row for row in SHARE_TRANSITIONS}
#: The codes in the cells of a row; all others are of pauses, progress and values.
CODES = {key: {code for column in SHARE_COLUMNS for code in getattr(row, column)} for key, row in ROWS.items()}


@dataclass(frozen=True)
class Sharing:
    """What a script need not say, since the log has it."""

    #: The epoch that a sender (instance, client) has of a lease: of its share, or the lease's.
    epoch: Callable[[Key, tuple[str, str]], int] = lambda key, sender: 0
    next_offset: Callable[[], int] = lambda: 0
    member_id: Callable[[str, tuple[str, str]], str] = lambda group, sender: ""
    generation: Callable[[str], int] = lambda group: 0


def sharing_record_of(
    ids: tuple[str, str, str], verb: str, about: list[str], options: dict[str, str], known: Sharing
) -> Record | None:
    """The record that these words mean; None where they are not about shares or open messages."""
    if verb not in ("shares", "settles", "settles offsets"):
        return None
    sender, group = (ids[0], ids[1]), ids[2]
    topic, _, partition = about[0].partition(":")
    name = (topic, int(partition))
    if verb == "shares":
        lo, hi = _keys(options.pop("keys")) if "keys" in options else (None, None)
        start = int(options.pop("start")) if "start" in options else None
        return ClaimingShare(*ids, *name, int(options.pop("hi", "1000")), lo, hi, start)
    seen = int(options.pop("seen", known.next_offset()))
    done, opened, parked = _entries(options, verb == "settles offsets")
    redo = options.pop("redo", "no") == "yes"
    if verb == "settles":
        named = options.pop("epoch", str(known.epoch((group, *name), sender)))
        take = _take(options.pop("take")) if "take" in options else None
        epoch = None if named == "nil" else int(named)
        return SettlingMessages(*ids, *name, epoch, seen, done, opened, parked, take, redo)
    generation = int(options.pop("generation", known.generation(group)))
    member_id = "" if options.pop("as", "") == "operator" else options.pop("member", known.member_id(group, sender))
    return SettleOffsets(*ids, member_id, generation, seen, *name, done, opened, parked, redo)


def sharing_words_of(record: Record) -> str | None:
    """The same the other way; all is said."""
    if isinstance(record, ClaimingShare):
        words = ["shares", f"{record.topic}:{record.partition}", f"hi={record.heartbeat_interval_ms}"]
        words += [] if record.lo is None or record.hi is None else [f"keys=#{record.lo}-#{record.hi + 1}"]
        return " ".join([*words, *([] if record.start is None else [f"start={record.start}"])])
    if not isinstance(record, SettlingMessages | SettleOffsets):
        return None
    words = ["settles"] if isinstance(record, SettlingMessages) else ["settles offsets"]
    words += [f"{record.topic}:{record.partition}", f"seen={record.seen}"]
    words += [f"done={','.join(f'{first}-{last}' for first, last in record.done)}"] if record.done else []
    opened = [f"{first}-{last}{_key_words(key)}*{attempts}" for first, last, key, attempts in record.open]
    words += [f"open={','.join(opened)}"] if opened else []
    parked = [f"{offset}{_key_words(key)}*{attempts}~{reason}" for offset, key, attempts, reason in record.parked]
    words += [f"park={','.join(parked)}"] if parked else []
    words += ["redo=yes"] if record.redo else []
    if isinstance(record, SettleOffsets):
        words += [f"member={record.member_id}"] if record.member_id else ["as=operator"]
        return " ".join([*words, f"generation={record.generation}"])
    words.append(f"epoch={'nil' if record.epoch is None else record.epoch}")
    if record.take is not None:
        count, up_to, once = record.take
        words.append(f"take={count}/{up_to}{'/once' if once else ''}")
    return " ".join(words)


def _entries(options: dict[str, str], keyed: bool) -> tuple[Done, Opened, Parked]:
    done = tuple([(first, last) for first, last, *_ in _parts(options.pop("done", ""))])
    opened = tuple([(first, last, key, attempts) for first, last, key, attempts, _ in _parts(options.pop("open", ""))])
    opened += tuple([(at, at, at if keyed else None, 1) for at in _singles(options.pop("singles", ""))])
    parked = tuple([(first, key or 0, tries, why) for first, _, key, tries, why in _parts(options.pop("park", ""))])
    return done, opened, parked


def _parts(text: str) -> Iterable[tuple[int, int, int | None, int, str]]:
    for word in text.split(",") if text else ():
        found = ENTRY.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no entry: 10-19, 12(1/3)*2, 16(1/3)*5~ValueError")
        first, last, key, attempts, reason = found.groups()
        hashed = None if key is None else _edge(key)
        yield int(first), int(last or first), hashed, int(attempts or 0), reason or "Error"


def _singles(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last) + 1, 2) if text else range(0)


def _take(text: str) -> Take:
    count, up_to, *once = text.split("/")
    return int(count), int(up_to), once == ["once"]


def _keys(text: str) -> tuple[int, int]:
    low, high = text.split("-")
    return _edge(low), _edge(high) - 1


def _edge(text: str) -> int:
    return int(text[1:]) if text[0] == "#" else int(Fraction(text) * SPACE)


def _key_words(key: int | None) -> str:
    return "" if key is None else f"(#{key})"


def _edge_words(edge: int) -> str:
    near = Fraction(edge, SPACE).limit_denominator(12)
    return str(near) if int(near * SPACE) == edge else f"#{edge}"


# -- how it stands ---------------------------------------------------------------------------------------


def share_words(lease: Lease, log_time: int, name_of: Callable[[str, str], str]) -> list[str]:
    """shares=a1@1(0-1/2),b1@2:stale, and done=… where keys are at different places."""
    words = []
    parts = lease.progress.done_through
    if len(parts) > 1:
        done = [f"({_edge_words(lo)}-{_edge_words(hi + 1)}){'none' if at < 0 else at}" for lo, hi, at in parts]
        words.append(f"done={','.join(done) if len(done) <= MANY_HOLES else f'{len(done)} pieces'}")
    if lease.shares is None:
        return words
    found = []
    for share in lease.shares:
        keys = "" if share.by_batches else f"({_edge_words(share.lo)}-{_edge_words(share.hi + 1)})"
        stale = ":stale" if share.is_stale(log_time) else ""
        found.append(f"{name_of(share.instance_id, share.client_id)}@{share.epoch}{keys}{stale}")
    return [*words, f"shares={','.join(found) if len(found) <= MANY_HOLES else f'{len(found)} of them'}"]


def hole_words(progress: Progress) -> list[str]:
    """holes=10-19*1@3>2,120(1/3)*5@7~ValueError: attempts, since, owner, reason. again=12."""
    found = [_hole_words(hole) for hole in progress.open]
    again = [] if progress.again < 0 else [f"again={progress.again}"]
    if not found:
        return again
    return [f"holes={','.join(found) if len(found) <= MANY_HOLES else f'{len(found)} of them'}", *again]


def _hole_words(hole: Hole) -> str:
    offsets = f"{hole.first}" if hole.first == hole.last else f"{hole.first}-{hole.last}"
    key = "" if hole.key_hash == NO_KEY else f"({_edge_words(hole.key_hash)})"
    owner = "" if hole.owner == NO_OWNER else f">{hole.owner}"
    reason = "" if hole.reason is None else f"~{hole.reason}"
    return f"{offsets}{key}*{hole.attempts}@{hole.since}{owner}{reason}"


# -- the table -------------------------------------------------------------------------------------------


def share_cell_of(world: World, record: Record, log_time: int) -> tuple[ShareTransition, str] | None:
    """Where the table of shares has this record; None: another table says."""
    name = type(record).__name__
    row = ROWS.get((name, name in ("Heartbeat", "SettlingMessages") and getattr(record, "epoch", None) is None))
    if row is None or world.level < SHARING_LEVEL or world.group(record.group_id) is not None:
        return None
    lease = world.lease(record.group_id, getattr(record, "topic", ""), getattr(record, "partition", 0))
    column = "free" if lease is None else _column(lease, record, log_time)
    return (row, column) if getattr(row, column) else None


def _column(lease: Lease, record: Record, log_time: int) -> str:
    if lease.held:
        return "stale" if lease.is_stale(log_time) else "held"
    shares = list(lease.shares or ())
    if isinstance(record, ClaimingShare):
        shares = [share for share in shares if _overlaps(record, share.lo, share.hi, share.is_of)]
    if not shares:
        return "free"
    return "silent" if all(share.is_stale(log_time) for share in shares) else "shared"


def _overlaps(claim: ClaimingShare, lo: int, hi: int, is_of: Callable[[str, str], bool]) -> bool:
    if claim.lo is None or claim.hi is None or lo == NO_KEY:
        return (claim.lo is None) != (lo == NO_KEY) or (lo == NO_KEY and is_of(claim.instance_id, claim.client_id))
    return claim.lo <= hi and lo <= claim.hi
