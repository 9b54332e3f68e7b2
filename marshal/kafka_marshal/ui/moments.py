"""Answers from a history: owners at a moment, members that waited, differences between two moments.

A moment is a log time, or an offset of one coordination partition; the others are then at that record's time. The state
at a moment is the one after all records up to it, as in `who`.
"""

from __future__ import annotations

import re
import shlex
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple

from kafka_marshal.instance import Instance
from kafka_marshal.logs import visible
from kafka_marshal.observe.ownership import Moment as Asked
from kafka_marshal.observe.ownership import ended_text, moment_text, span_json
from kafka_marshal.observe.rows import STATES, place_text
from kafka_marshal.observe.text import count, time_text
from kafka_marshal.ui.fold import GroupHistory, History, Pausing
from kafka_marshal.ui.index import KeySpans, Sample
from kafka_marshal.ui.shares import Sharing, gaps, shared_at, shared_text
from rationalizer import codes
from rationalizer.history import BEFORE, Span
from rationalizer.holes import NO_KEY
from rationalizer.limits import MAX_KEY_HASH, STALE_AFTER_INTERVALS

#: The most rows of a table in one answer; it contains their number, too.
LISTED: Final = 500

#: The most events that are read for one answer.
LOOKED_AT: Final = 5_000

#: A claim rejected longer ago (ms) is not waiting: clients repeat it every heartbeat interval.
WAITS_MS: Final = 15_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PLACE: Final = re.compile(r"([0-9]{1,10}):([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class Moment:
    """After all records up to this log time (ms); in one CP, if it is set, after its offset."""

    time: int
    cp: int = -1
    offset: int = 0


def parse_moment(text: str, holding: Callable[[int, int], History]) -> Moment:
    """ISO 8601 with an offset or Z, milliseconds since 1970, or CP:OFFSET. Raises ValueError, and errors of holding.

    holding: returns a history with that record.
    """
    if (place := _PLACE.fullmatch(text)) is not None:
        cp, offset = int(place[1]), int(place[2])
        history = holding(cp, offset)
        if cp not in history.worlds:
            raise ValueError(f"the log has no partition {cp}")
        return Moment(time_of(history, cp, offset), cp, offset)
    if text.isascii() and text.isdigit():
        return Moment(min(int(text), 2**62))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{visible(text)!r} is no moment: 2026-11-21T04:50:12Z, or CP:OFFSET such as 3:1200") from None
    if moment.tzinfo is None:
        raise ValueError(f"{visible(text)!r} does not say of which time zone it is: end it with Z, or +01:00")
    return Moment((moment - _EPOCH) // timedelta(milliseconds=1))


def time_of(history: History, cp: int, offset: int) -> int:
    """The log time (ms) of a CP after this offset: exact at an event, else that of a record shortly before."""
    offsets, times = history.marks[cp]
    index = bisect_right(offsets, offset) - 1
    found = times[index] if index >= 0 else 0
    columns = history.events.columns
    for by_cp in history.events.lists["all"].values():
        if (chosen := by_cp.get(cp)) is not None:
            at = bisect_right(chosen, offset, key=columns["offset"].__getitem__) - 1
            found = max(found, columns["time"][chosen[at]] if at >= 0 else 0)
    return found


def at_text(moment: Moment) -> dict[str, object]:
    """The moment for the page."""
    place = None if moment.cp < 0 else f"{moment.cp}:{moment.offset}"
    return {"time": moment.time, "text": time_text(moment.time), "place": place}


# -- who owned what --------------------------------------------------------------------------------------------


#: In place of the number of a span: a share, or keys that no sharer has.
SHARED: Final = -2


class Held(NamedTuple):
    """One partition, or a part of its keys, at a moment. `client` "": it is free."""

    client: str
    instance: str
    #: The heartbeat interval of a lease's holder, ms.
    interval_ms: int
    lo: int
    hi: int
    epoch: int
    #: The number of a closed span; −1: it is open, see `span`; SHARED: it is no span.
    number: int
    span: Span | None


@dataclass(frozen=True, slots=True)
class Cell:
    """The same with its partition, and its holder's freshness in the words of `status`."""

    topic: str
    partition: int
    lo: int
    hi: int
    client: str
    instance: str
    state: str
    epoch: int


def _held_at(history: History, found: KeySpans, moment: Moment) -> Sequence[Held]:
    """The owners of a partition: one, or one for each part of its keys; empty: it never had one."""
    if sharing := _sharing(found, moment):
        return _sharers(sharing)
    store = history.spans
    at, by_offset = (moment.offset, True) if moment.cp == found.cp else (moment.time, False)
    since = store.since_offset if by_offset else store.since
    held: list[Held] = []
    covered = 0
    columns = store.columns
    for index in range(found.ended(at, by_offset=by_offset), len(found.closed)):
        number = found.closed[index]
        if since[number] > at:
            continue
        owner, lo, hi = columns["owner"][number], columns["lo"][number], columns["hi"][number]
        who_has = ("", "") if owner < 0 else store.owners.pair(owner)
        held.append(Held(*who_has, store.interval[number], lo, hi, columns["epoch"][number], number, None))
        covered += hi - lo + 1
        if covered > MAX_KEY_HASH:
            return held
    for each in found.open:
        if (each.since_offset if by_offset else each.since) <= at:
            client_id, instance_id = (each.client_id, each.instance_id) if each.held else ("", "")
            interval_ms = found.pulse.interval_ms if each.is_lease and found.pulse is not None else 0
            held.append(Held(client_id, instance_id, interval_ms, each.lo, each.hi, each.epoch, -1, each))
    if len(held) > 1:
        held.sort(key=lambda each: each.lo)
    return held


def _sharing(found: KeySpans, moment: Moment) -> Sharing:
    is_exact = moment.cp == found.cp
    return shared_at(found, moment.offset if is_exact else moment.time, by_offset=is_exact)


def _sharers(sharing: Sharing) -> list[Held]:
    """Those that share a partition: by batches each has all keys."""
    held = [Held(client, instance, 0, max(0, lo), hi, 0, SHARED, None) for client, instance, lo, hi in sharing]
    if sharing[0][2] == NO_KEY:
        return [each._replace(hi=MAX_KEY_HASH) for each in held]
    free = [Held("", "", 0, lo, hi, 0, SHARED, None) for lo, hi in gaps(sharing)]
    return sorted([*held, *free], key=lambda each: each.lo)


#: A holder's freshness (C1), by number. Of a sharer it is not known: its beats are not kept.
FREE, SEEN, SILENT, GONE, UNKNOWN = range(5)
WORDS: Final = ("free", "seen", "silent", "gone", "unknown")


def _freshness(group: GroupHistory, found: KeySpans, held: Held, moment: Moment) -> int:
    if not held.client:
        return FREE
    if held.number == SHARED:
        return UNKNOWN
    offset = moment.offset if moment.cp == found.cp else -1
    if group.pulses and (pulse := group.pulses.get((held.client, held.instance))) is not None:
        # A member's heartbeats are for all its pieces.
        silence, interval = pulse.silence(moment.time, offset), pulse.interval(moment.time, offset)
        return GONE if silence > 2 * interval else SILENT if silence > interval else SEEN
    silence = 0 if found.pulse is None else found.pulse.silence(moment.time, offset)
    if silence < held.interval_ms:
        return SEEN
    return SILENT if silence <= STALE_AFTER_INTERVALS * held.interval_ms else GONE


def cells(history: History, group: GroupHistory, moment: Moment) -> list[Cell]:
    """All partitions of a group that ever had an owner, at that moment."""
    return [
        Cell(
            *found.key[1:],
            held.lo,
            held.hi,
            held.client,
            held.instance,
            WORDS[_freshness(group, found, held, moment)],
            held.epoch,
        )
        for found in group.ordered()
        for held in _held_at(history, found, moment)
    ]


def state(history: History, group: GroupHistory, moment: Moment) -> dict[str, Any]:
    """The ownership map: members, and for each topic the partitions, their owners' numbers and states."""
    topics, held, worst = _map_of(history, group, moment)
    names = {owner: history.owners.pair(owner) for owner in held}
    ordered = sorted(held, key=lambda owner: natural(names[owner]))
    places = {owner: index for index, owner in enumerate(ordered)}
    for topic in topics:
        topic["owners"] = [places.get(owner, -1) for owner in topic["owners"]]
        for sharers in topic["sharers"].values():
            sharers[:] = [(places[owner], freshness) for owner, freshness in sharers]
    return {
        "group": group.name,
        "kind": "coordinated" if group.is_coordinated else "claimed",
        "at": at_text(moment),
        "live": False,
        "states": list(WORDS),
        "members": [
            {**member_json(*names[owner]), "held": held[owner], "state": WORDS[worst[owner]]} for owner in ordered
        ],
        "topics": topics,
        "waiting": waiting(history, group, moment),
        "pauses": [
            {"client": each.client, "until": each.until, "text": _paused_text(each)}
            for each in group.pauses
            if each.since <= moment.time < each.until
        ],
        "problems": [],
        "notes": [],
    }


def _map_of(
    history: History, group: GroupHistory, moment: Moment
) -> tuple[list[dict[str, Any]], dict[int, int], dict[int, int]]:
    """The map's topics, with owners as numbers of the history; owner → partitions, and owner → its worst state.

    A slider requests ten thousand partitions ten times per second: those never shared are looked up inline.
    """
    topics: dict[str, dict[str, Any]] = {}
    held: dict[int, int] = {}
    worst: dict[int, int] = {}
    at, owners_of, interval_of, since_of = moment.time, history.spans.owner, history.spans.interval, history.spans.since
    is_claimed = not group.pulses
    for found in group.ordered():
        _, name, partition = found.key
        topic = topics.get(name)
        if topic is None:
            lists: dict[str, Any] = {"partitions": [], "places": {}, "sharers": {}, "owners": [], "states": []}
            topic = topics[name] = {"topic": name, **lists}
        pulse = found.pulse
        if found.is_shared or pulse is None or found.cp == moment.cp or not is_claimed:
            parts = _held_at(history, found, moment)
            if len(parts) > 1 and parts[0].hi == parts[1].hi:  # by batches: one cell
                owners = [history.owners(part.client, part.instance) for part in parts]
                topic["sharers"][len(topic["owners"])] = [(owner, UNKNOWN) for owner in owners]
                for owner in owners[1:]:
                    held[owner], worst[owner] = held.get(owner, 0) + 1, max(UNKNOWN, worst.get(owner, FREE))
                parts = parts[:1]
            for part in parts:
                freshness = _freshness(group, found, part, moment)
                owner = history.owners(part.client, part.instance) if part.client else -1
                if part.hi - part.lo != MAX_KEY_HASH:
                    topic["places"][len(topic["owners"])] = place_text(partition, part.lo, part.hi)
                _put(topic, partition, owner, freshness, held, worst)
            continue
        index = bisect_right(found.until, at)
        if index < len(found.until):
            number = found.closed[index]
            if since_of[number] > at:
                continue
            owner, interval_ms = owners_of[number], interval_of[number]
        elif found.open and found.open[0].since <= at:
            owner, interval_ms = found.owner, pulse.interval_ms
        else:
            continue
        if owner < 0:
            freshness = FREE
        elif (silence := pulse.silence(at)) < interval_ms:
            freshness = SEEN
        else:
            freshness = SILENT if silence <= STALE_AFTER_INTERVALS * interval_ms else GONE
        _put(topic, partition, owner, freshness, held, worst)
    return [topic for topic in topics.values() if topic["owners"]], held, worst


def _put(
    topic: dict[str, Any], partition: int, owner: int, freshness: int, held: dict[int, int], worst: dict[int, int]
) -> None:
    topic["partitions"].append(partition)
    topic["owners"].append(owner)
    topic["states"].append(freshness)
    if owner >= 0:
        held[owner] = held.get(owner, 0) + 1
        if freshness > worst.get(owner, FREE):
            worst[owner] = freshness


def _paused_text(each: Pausing) -> str:
    return visible(f"paused by {each.client} until {time_text(each.until)}")


def member_json(client: str, instance: str) -> dict[str, Any]:
    """A member for the map, without counts."""
    runs_at = Instance.parse(instance)
    return {
        "client": client,
        "instance": instance,
        "where": None if runs_at is None else str(runs_at),
        "release": None if runs_at is None else runs_at.release,
        "held": 0,
        "state": "seen",
    }


def natural(names: tuple[str, str]) -> list[tuple[int, int, str]]:
    """Sorts worker-2 before worker-10."""
    parts = re.split(r"([0-9]+)", names[0])
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts] + [(0, 0, names[1])]


# -- one partition ---------------------------------------------------------------------------------------------


def detail(history: History, group: GroupHistory, place: tuple[str, int], moment: Moment) -> dict[str, Any]:
    """One partition: the answer of `who` for that moment, and its spans around it."""
    found = group.keys.get(place)
    answers, text = [], []
    rows: list[Span] = []
    if found is not None:
        when = f"At {time_text(moment.time)}" if moment.cp < 0 else f"After offset {moment.offset}"
        sharing = _sharing(found, moment)
        if sharing:
            text.append(shared_text(when, sharing))
        for held in () if sharing else _held_at(history, found, moment):
            span = _span(history, group, found, held)
            pulse = group.pulses.get((held.client, held.instance)) or found.pulse
            interval = 0 if pulse is None else pulse.interval_ms
            offset = moment.offset if moment.cp == found.cp else -1
            last_beat = moment.time - (0 if pulse is None else pulse.silence(moment.time, offset))
            word = WORDS[_freshness(group, found, held, moment)]
            freshness = {STATES[key]: key for key in STATES}[word]
            asked = Asked(span, last_beat, interval, freshness)
            text.append(moment_text(when, asked, not span.is_lease))
            answers.append({**span_json(span), "state": word, "place": place_text(place[1], span.lo, span.hi)})
        around = _ended_before(history, found, moment)
        first, last = max(0, around - 30), around + 20
        is_lease = not group.is_coordinated
        rows = [history.spans.span(number, found.key, is_lease) for number in found.closed[first:last]]
        rows += found.open if last >= len(found.closed) else []
    offset = moment.offset if found is not None and moment.cp == found.cp else -1
    sampled = None if found is None else found.samples.at(moment.time, offset)
    return {
        "topic": place[0],
        "partition": place[1],
        "cp": None if found is None else found.cp,
        "text": "\n".join(visible(line) for each in text for line in each.splitlines())
        if text
        else "Nobody, as far as the log was read.",
        "answers": answers,
        "next": None if sampled is None else _next(sampled, group.name, place, moment),
        "spans": [_span_row(each, found) for each in rows],
        "spans_in_all": 0 if found is None else len(found.closed) + len(found.open),
    }


def _next(sampled: Sample, group: str, place: tuple[str, int], moment: Moment) -> dict[str, Any]:
    """The offset to read next, or its bounds, and the command that shows it exactly."""
    low, high = sampled.low + 1, sampled.high + 1
    exact = shlex.join(["kafka-marshal", "who", group, place[0], str(place[1]), "--at", time_text(moment.time)])
    return {
        "offset": low if low == high else None,
        "low": low,
        "high": high,
        "since": sampled.since,
        "until": sampled.until,
        "exact": None if low == high else visible(exact),
    }


def _ended_before(history: History, found: KeySpans, moment: Moment) -> int:
    """The number of spans of a partition that had ended."""
    at, by_offset = (moment.offset, True) if moment.cp == found.cp else (moment.time, False)
    return found.ended(at, by_offset=by_offset)


def _span(history: History, group: GroupHistory, found: KeySpans, held: Held) -> Span:
    if held.span is not None:
        return held.span
    return history.spans.span(held.number, found.key, not group.is_coordinated)


def _span_row(each: Span, found: KeySpans | None) -> dict[str, Any]:
    until = sys.maxsize if each.until_offset is None else each.until_offset
    shared = () if found is None or found.shares is None else found.shares.offsets
    return {
        **span_json(each),
        "client": each.client_id if each.held else None,
        "place": place_text(each.partition, each.lo, each.hi),
        "is_before": each.since == BEFORE,
        "shared": not each.held and any(each.since_offset <= offset < until for offset in shared),
    }


# -- waiting --------------------------------------------------------------------------------------------------


def waiting(history: History, group: GroupHistory, moment: Moment) -> list[dict[str, Any]]:
    """Waiting members: pieces that their owners were to release, and recently rejected claims."""
    found: list[dict[str, Any]] = []
    if group.is_coordinated:
        last = next((each for each in reversed(group.rebalances) if each.time <= moment.time), None)
        for each in () if last is None else last.waiting:
            key = group.keys.get((each.topic, each.partition))
            held = () if key is None else _held_at(history, key, moment)
            if any(part.lo <= each.lo <= part.hi and part.client == each.owner for part in held):
                found.append(waits_json(each.target, each.owner, each.topic, each.partition, str(each.partition)))
        return found[:LISTED]
    seen: set[str] = set()
    numbers = history.events.down_from("rejected", group.name, moment.time, moment.cp, moment.offset)
    for number in islice(numbers, LOOKED_AT):
        if history.events.time[number] < moment.time - WAITS_MS:
            break
        event = history.events[number]
        if event.code == codes.HELD and event.client not in seen:
            seen.add(event.client)
            found.append(
                {
                    "client": event.client,
                    "for": None,
                    "topic": event.topic,
                    "partition": event.partition,
                    "text": visible(f"{event.client} {event.what}: {event.why}"),
                }
            )
    return found[:LISTED]


def waits_json(target: str, owner: str, topic: str, partition: int, place: str) -> dict[str, Any]:
    """A member that waits until another one has released a piece."""
    text = f"{owner} is to release {topic}/{place}, then {target} gets it"
    return {"client": target, "for": owner, "topic": topic, "partition": partition, "text": visible(text)}


def diff(history: History, group: GroupHistory, first: Moment, second: Moment) -> dict[str, Any]:
    """Partitions with another owner, or another instance of it, at the second moment, and why."""
    changed: list[dict[str, Any]] = []
    amount = 0
    for found in group.ordered():
        place = found.key[1:]
        before, after = _held_at(history, found, first), _held_at(history, found, second)
        if [_identity(each) for each in before] == [_identity(each) for each in after]:
            continue
        amount += 1
        if len(changed) >= LISTED:
            continue
        begin, end = _ended_before(history, found, first), _ended_before(history, found, second)
        why = [ended_text(_span(history, group, found, each)) for each in before if each.number >= 0]
        changed.append(
            {
                "topic": place[0],
                "partition": place[1],
                "before": _owners(before, place[1]),
                "after": _owners(after, place[1]),
                "changes": abs(end - begin),
                "why": visible("; ".join(each for each in why if each)),
            }
        )
    return {
        "group": group.name,
        "from": at_text(first),
        "to": at_text(second),
        "changed": amount,
        "partitions": changed,
        "text": f"{count(amount, 'partition')} of {count(len(group.keys), 'partition')} had another owner",
    }


def _identity(held: Held) -> tuple[object, ...]:
    return held.lo, held.hi, held.client, held.instance, held.epoch if held.client else 0


def _owners(found: Sequence[Held], partition: int) -> str:
    if not found:
        return "nobody yet"
    if len(found) == 1:
        return visible(found[0].client) or "nobody"
    return ", ".join(
        f"{place_text(partition, each.lo, each.hi).partition(' ')[2]} {visible(each.client) or 'nobody'}".strip()
        for each in found
    )
