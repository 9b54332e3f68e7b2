"""Answers from a history: owners at a moment, members that waited, what differs between two; events, the timeline.

A moment is a log time, or an offset of one coordination partition; the others are then at that record's time. The state
at a moment is the one after all records up to it, as in `who`.
"""

from __future__ import annotations

import re
import shlex
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple

from kafka_marshal.instance import Instance
from kafka_marshal.observe.ownership import OwnershipAt, ended_text, moment_text, span_json
from kafka_marshal.observe.rows import STATES, place_text
from kafka_marshal.observe.text import count, span, time_text
from kafka_marshal.secret import visible
from kafka_marshal.ui.fold import GroupHistory, History, Pausing, Sharing
from kafka_marshal.ui.index import KeySpans, Sample
from rationalizer import codes
from rationalizer.history import BEFORE, End, Span
from rationalizer.holes import NO_KEY
from rationalizer.limits import MAX_KEY_HASH, STALE_AFTER_INTERVALS

#: The most rows of a table in one answer; it contains their number, too.
LISTED: Final = 500

#: The most events that are read for one answer.
LOOKED_AT: Final = 5_000

#: A claim rejected longer ago (ms) is not waiting: clients repeat it every heartbeat interval.
WAITS_MS: Final = 15_000

#: Changes of owners within this time (ms) belong to one rebalance of a claimed group.
BURST_MS: Final = 10_000

#: The most causes, and the most clients, in the text of a rebalance.
NAMED: Final = 6

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PLACE: Final = re.compile(r"([0-9]{1,10}):([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class Moment:
    """After all records up to this log time (ms); in one CP, if it is set, after its offset."""

    time: int
    cp: int = -1
    offset: int = 0

    def within(self, cp: int) -> int:
        """The offset of this moment in this CP; −1: its log time decides there."""
        return self.offset if cp == self.cp else -1


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


class HeldPart(NamedTuple):
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


def held_at(history: History, found: KeySpans, moment: Moment) -> Sequence[HeldPart]:
    """The owners of a partition: one, or one for each part of its keys; empty: it never had one."""
    if sharing := _sharing(found, moment):
        return _sharers(sharing)
    store = history.spans
    offset = moment.within(found.cp)
    by_offset, at = offset >= 0, moment.time if offset < 0 else offset
    held: list[HeldPart] = []
    covered = 0
    columns = store.columns
    since = columns["since_offset" if by_offset else "since"]
    for index in range(found.ended(moment.time, offset), len(found.closed)):
        number = found.closed[index]
        if since[number] > at:
            continue
        owner, lo, hi = columns["owner"][number], columns["lo"][number], columns["hi"][number]
        who_has = ("", "") if owner < 0 else store.owners.pair(owner)
        held.append(HeldPart(*who_has, columns["interval"][number], lo, hi, columns["epoch"][number], number, None))
        covered += hi - lo + 1
        if covered > MAX_KEY_HASH:
            return held
    for each in found.open:
        if (each.since_offset if by_offset else each.since) <= at:
            client_id, instance_id = (each.client_id, each.instance_id) if each.held else ("", "")
            interval_ms = found.pulse.interval_ms if each.is_lease and found.pulse is not None else 0
            held.append(HeldPart(client_id, instance_id, interval_ms, each.lo, each.hi, each.epoch, -1, each))
    if len(held) > 1:
        held.sort(key=lambda each: each.lo)
    return held


def _sharing(found: KeySpans, moment: Moment) -> Sharing:
    """Who shared it at that moment; (): it was not shared, or that is too long ago."""
    number = 0 if found.shares is None else found.shares.before(moment.time, moment.within(found.cp))
    sharing: Sharing = found.shares.values[number - 1] if found.shares is not None and number else ()
    return sharing


def _sharers(sharing: Sharing) -> list[HeldPart]:
    """Those that share a partition: by batches each has all keys."""
    held = [HeldPart(client, instance, 0, max(0, lo), hi, 0, SHARED, None) for client, instance, lo, hi in sharing]
    if sharing[0][2] == NO_KEY:
        return [each._replace(hi=MAX_KEY_HASH) for each in held]
    free = [HeldPart("", "", 0, lo, hi, 0, SHARED, None) for lo, hi in _gaps(sharing)]
    return sorted([*held, *free], key=lambda each: each.lo)


def _shared_text(when: str, sharing: Sharing) -> str:
    """Who shared it at that moment, in a sentence."""
    by_batches = sharing[0][2] == NO_KEY
    names = [
        client if by_batches else f"{client} {place_text(0, lo, hi).partition(' ')[2] or '(all)'}"
        for client, _, lo, hi in sorted(sharing, key=lambda each: (each[2], each[0]))
    ]
    return f"{when}: shared by {'batches' if by_batches else 'keys'}: {', '.join(names)}."


def _gaps(sharing: Sharing) -> list[tuple[int, int]]:
    """The keys that no sharer by keys had."""
    found, begin = [], 0
    for _, _, lo, hi in sorted(sharing, key=lambda each: each[2]):
        if lo > begin:
            found.append((begin, lo - 1))
        begin = hi + 1
    return [*found, (begin, MAX_KEY_HASH)] if begin <= MAX_KEY_HASH else found


#: A holder's freshness (C1), by number. Of a sharer it is not known: its beats are not kept.
FREE, SEEN, SILENT, GONE, UNKNOWN = range(5)
WORDS: Final = ("free", "seen", "silent", "gone", "unknown")


def freshness_of(group: GroupHistory, found: KeySpans, held: HeldPart, moment: Moment) -> int:
    """How fresh its holder is at that moment: a number of `WORDS`."""
    if not held.client:
        return FREE
    if held.number == SHARED:
        return UNKNOWN
    offset = moment.within(found.cp)
    if group.pulses and (pulse := group.pulses.get((held.client, held.instance))) is not None:
        # A member's heartbeats are for all its pieces.
        silence, interval = pulse.silence(moment.time, offset), pulse.interval(moment.time, offset)
        return GONE if silence > 2 * interval else SILENT if silence > interval else SEEN
    silence = 0 if found.pulse is None else found.pulse.silence(moment.time, offset)
    if silence < held.interval_ms:
        return SEEN
    return SILENT if silence <= STALE_AFTER_INTERVALS * held.interval_ms else GONE


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
    at, spans = moment.time, history.spans.columns
    owners_of, interval_of, since_of = spans["owner"], spans["interval"], spans["since"]
    is_claimed = not group.pulses
    for found in group.ordered():
        _, name, partition = found.key
        topic = topics.get(name)
        if topic is None:
            lists: dict[str, Any] = {"partitions": [], "places": {}, "sharers": {}, "owners": [], "states": []}
            topic = topics[name] = {"topic": name, **lists}
        pulse = found.pulse
        if found.is_shared or pulse is None or found.cp == moment.cp or not is_claimed:
            parts = held_at(history, found, moment)
            if len(parts) > 1 and parts[0].hi == parts[1].hi:  # by batches: one cell
                owners = [history.owners(part.client, part.instance) for part in parts]
                topic["sharers"][len(topic["owners"])] = [(owner, UNKNOWN) for owner in owners]
                for owner in owners[1:]:
                    held[owner], worst[owner] = held.get(owner, 0) + 1, max(UNKNOWN, worst.get(owner, FREE))
                parts = parts[:1]
            for part in parts:
                freshness = freshness_of(group, found, part, moment)
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
            text.append(_shared_text(when, sharing))
        for held in () if sharing else held_at(history, found, moment):
            owned = _span(history, group, found, held)
            pulse = group.pulses.get((held.client, held.instance)) or found.pulse
            interval = 0 if pulse is None else pulse.interval_ms
            last_beat = moment.time - (0 if pulse is None else pulse.silence(moment.time, moment.within(found.cp)))
            word = WORDS[freshness_of(group, found, held, moment)]
            freshness = {STATES[key]: key for key in STATES}[word]
            asked = OwnershipAt(owned, last_beat, interval, freshness)
            text.append(moment_text(when, asked, not owned.is_lease))
            answers.append({**span_json(owned), "state": word, "place": place_text(place[1], owned.lo, owned.hi)})
        around = _ended_before(found, moment)
        first, last = max(0, around - 30), around + 20
        is_lease = not group.is_coordinated
        rows = [history.spans.span(number, found.key, is_lease) for number in found.closed[first:last]]
        rows += found.open if last >= len(found.closed) else []
    sampled = None if found is None else found.samples.at(moment.time, moment.within(found.cp))
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


def _ended_before(found: KeySpans, moment: Moment) -> int:
    """The number of spans of a partition that had ended."""
    return found.ended(moment.time, moment.within(found.cp))


def _span(history: History, group: GroupHistory, found: KeySpans, held: HeldPart) -> Span:
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
            held = () if key is None else held_at(history, key, moment)
            if any(part.lo <= each.lo <= part.hi and part.client == each.owner for part in held):
                found.append(waits_json(each.target, each.owner, each.topic, each.partition, str(each.partition)))
        return found[:LISTED]
    seen: set[str] = set()
    columns, names = history.events.columns, history.names
    numbers = history.events.down_from("rejected", group.name, moment.time, moment.cp, moment.offset)
    for number in islice(numbers, LOOKED_AT):
        if columns["time"][number] < moment.time - WAITS_MS:
            break
        client = names[columns["client"][number]]
        if names[columns["code"][number]] == codes.HELD and client not in seen:
            seen.add(client)
            topic, partition = history.events.place_of(number)
            text = visible("{} {}: {}".format(client, *history.events.words_of(number)))
            found.append({"client": client, "for": None, "topic": topic, "partition": partition, "text": text})
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
        before, after = held_at(history, found, first), held_at(history, found, second)
        if [_identity(each) for each in before] == [_identity(each) for each in after]:
            continue
        amount += 1
        if len(changed) >= LISTED:
            continue
        begin, end = _ended_before(found, first), _ended_before(found, second)
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


def _identity(held: HeldPart) -> tuple[object, ...]:
    return held.lo, held.hi, held.client, held.instance, held.epoch if held.client else 0


def _owners(found: Sequence[HeldPart], partition: int) -> str:
    if not found:
        return "nobody yet"
    if len(found) == 1:
        return visible(found[0].client) or "nobody"
    return ", ".join(
        f"{place_text(partition, each.lo, each.hi).partition(' ')[2]} {visible(each.client) or 'nobody'}".strip()
        for each in found
    )


# -- what happened ---------------------------------------------------------------------------------------------


def _event_json(history: History, number: int) -> dict[str, Any]:
    row, names = history.events.row(number), history.names
    topic, partition = history.events.place_of(number)
    what, why = history.events.words_of(number)
    return {
        "time": row["time"],
        "at": f"{row['cp']}:{row['offset']}",
        "group": names[row["group"]] or None,
        "client": visible(names[row["client"]]),
        "type": names[row["type"]] or None,
        "code": names[row["code"]],
        "accepted": bool(row["accepted"]),
        "changed": row["changed"],
        "topic": topic or None,
        "partition": partition,
        "what": visible(what),
        "why": visible(why),
    }


def events(
    history: History, name: str, moment: Moment, which: str, place: tuple[str, int] | None, limit: int
) -> list[dict[str, Any]]:
    """A group's last events up to that moment. which: "all", "changed", "rejected"; place: only this partition."""
    numbers = history.events.down_from(which, name, moment.time, moment.cp, moment.offset)
    if place is not None:
        wanted = history.events.place(*place)
        keys = history.events.columns["key"]
        numbers = (each for each in islice(numbers, LOOKED_AT) if keys[each] == wanted)
    return [_event_json(history, number) for number in islice(numbers, limit)]


def events_since(history: History, name: str, sent: dict[int, int]) -> list[dict[str, Any]]:
    """A group's last events at or beyond these offsets, the oldest first."""
    offsets, times = history.events.columns["offset"], history.events.time
    found: list[int] = []
    for cp, chosen in sorted(history.events.lists["all"].get(name, {}).items()):
        begin = bisect_left(chosen, sent.get(cp, 0), key=offsets.__getitem__)
        found += chosen[max(begin, len(chosen) - LISTED) :]
    found.sort(key=times.__getitem__)
    return [_event_json(history, number) for number in found[-LISTED:]]


def neighbour(history: History, name: str, moment: Moment, *, forward: bool) -> dict[str, Any] | None:
    """The next or the previous event that changed owners; None: there is none."""
    columns = history.events.columns

    def place(number: int) -> tuple[int, int, int]:
        return columns["time"][number], columns["cp"][number], columns["offset"][number]

    here = (moment.time, moment.cp, moment.offset)
    found: int | None = None
    if forward:
        if moment.cp < 0:
            here = (moment.time, len(history.worlds), 0)
        found = history.events.first_beyond("changed", name, here)
    else:
        for number in history.events.down_from("changed", name, moment.time):
            if found is not None and columns["time"][number] < columns["time"][found]:
                break
            if place(number) < here and (found is None or place(number) > place(found)):
                found = number
    return None if found is None else _event_json(history, found)


def rebalances(history: History, group: GroupHistory, moment: Moment, limit: int) -> list[dict[str, Any]]:
    """The last rebalances up to that moment, the newest first; of a claimed group, changes close together."""
    if not group.is_coordinated:
        return list(islice(_bursts(history, group, moment), limit))
    past = [each for each in group.rebalances if each.time <= moment.time][-limit:]
    return [
        {
            "time": each.time,
            "until": None,
            "generation": each.generation,
            "why": visible(each.why) or "-",
            "members": each.members,
            "moved": each.moved,
            "vacant": None if each.vacant_ms is None else span(each.vacant_ms),
            "at": f"{group.home}:{each.generation}",
        }
        for each in reversed(past)
    ]


def _bursts(history: History, group: GroupHistory, moment: Moment) -> Iterator[dict[str, Any]]:
    columns = history.events.columns
    burst: list[int] = []
    numbers = history.events.down_from("changed", group.name, moment.time, moment.cp, moment.offset)
    for number in islice(numbers, LOOKED_AT):
        if burst and columns["time"][burst[-1]] - columns["time"][number] > BURST_MS:
            yield _burst_json(history, group, burst)
            burst = []
        burst.append(number)
    if burst:
        yield _burst_json(history, group, burst)


_VERBS: Final = {
    "ClaimingPartition": "claimed",
    "ReleasingPartition": "released",
    "Heartbeat": "took over",
    "ForgetGroup": "forgot the group:",
}

#: These give a partition to a client.
_TAKES: Final = ("ClaimingPartition", "Heartbeat")


def _ended_by(history: History, group: GroupHistory, number: int) -> Span | None:
    """The span that this event ended; None: there was none."""
    columns = history.events.columns
    key = columns["key"][number]
    found = group.keys.get(history.events.places[key]) if key >= 0 else None
    if found is None:
        return None
    at, offset = columns["time"][number], columns["offset"][number]
    for index in range(bisect_left(found.until, at), found.ended(at)):
        if found.until_offset[index] == offset:
            return history.spans.span(found.closed[index], found.key, True)
    return None


def _vacant_ms(before: Span) -> int | None:
    """How long (ms) it had no owner: since the owner's last heartbeat, or its release; None: not known."""
    since = before.last_beat if before.held else before.since
    return None if since == BEFORE or before.until is None else max(0, before.until - since)


def _burst_json(history: History, group: GroupHistory, burst: list[int]) -> dict[str, Any]:
    columns, names = history.events.columns, history.names
    takes = {number for number in burst if names[columns["type"][number]] in _TAKES}
    ended = {number: found for number in burst if (found := _ended_by(history, group, number)) is not None}
    # The record of an eviction is the owner's release, but the owner did not write it.
    evicted = {number for number, each in ended.items() if each.ended is End.EVICTED}
    done = Counter(
        (names[columns["client"][number]], names[columns["type"][number]]) for number in burst if number not in evicted
    )
    releases_first = sorted(done.most_common(), key=lambda each: each[0][1] in _TAKES)  # they let others claim
    words = [f"{client} {_VERBS.get(kind, kind)} {amount}" for (client, kind), amount in releases_first]
    known = (_vacant_ms(each) for number, each in ended.items() if number in takes)
    vacant = max((each for each in known if each is not None), default=None)
    why = [_some(each, separator) for each, separator in ((_causes(ended.values()), "; "), (words, ", ")) if each]
    last = burst[0]
    return {
        "time": columns["time"][burst[-1]],
        "until": columns["time"][last],
        "generation": None,
        "why": visible(": ".join(why)),
        "members": len({columns["client"][number] for number in burst}),
        "moved": sum(columns["changed"][number] for number in takes) or len(burst),
        "vacant": None if vacant is None else span(vacant),
        "at": f"{columns['cp'][last]}:{columns['offset'][last]}",
    }


def _causes(ended: Iterable[Span]) -> list[str]:
    """Why owners lost partitions, in the words of a coordinated group's rebalance."""
    silent: dict[str, int] = {}
    others: dict[str, None] = {}
    for each in ended:
        if each.ended is End.EVICTED:
            others[f"{each.client_id} was evicted by {each.ended_by}"] = None
        elif each.ended is End.RESTARTED:
            others[f"{each.client_id} restarted"] = None
        elif each.ended is End.REPLACED and (silence_ms := _vacant_ms(each)) is not None:
            silent[each.client_id] = max(silence_ms, silent.get(each.client_id, 0))
    longest = sorted(silent, key=silent.__getitem__, reverse=True)
    return [*others, *(f"{client} was silent for {span(silent[client])}" for client in longest)]


def _some(texts: list[str], separator: str) -> str:
    return separator.join(texts[:NAMED]) + (f"{separator}…" if len(texts) > NAMED else "")


def timeline(group: GroupHistory, end: int) -> dict[str, Any]:
    """Messages done, owners changed and records rejected up to this log time (ms), in buckets, and pauses."""
    return {
        "begin": group.series.begin,
        "width": group.series.width_ms,
        "end": _reported_until(group, end),
        **group.series.lists(),
        "pauses": [[each.since, each.until, visible(each.client)] for each in group.pauses[-LISTED:]],
        "rebalances": [each.time for each in group.rebalances[-2 * LISTED :]],
        "home": group.home,
        "checkpoints": [] if group.checkpoints is None else group.checkpoints.ticks(2 * LISTED),
    }


def checkpoints(group: GroupHistory, moment: Moment, limit: int) -> dict[str, Any]:
    """The last checkpoints up to that moment, and what the newest of them had of each piece."""
    found = group.checkpoints
    if found is None:
        return {"checkpoints": [], "pieces": []}
    offset = moment.within(group.home)
    pieces = list(found.pieces(moment.time, offset))
    handed_in = {(each["topic"], each["partition"]) for each in pieces}
    for key in group.ordered():
        sampled = key.samples.at(moment.time, offset)
        if key.key[1:] not in handed_in and sampled is not None:
            topic, partition = key.key[1:]
            place = {"topic": topic, "partition": partition, "place": str(partition)}
            pieces.append({**place, "cut": None, "next": sampled.low + 1})
    pieces.sort(key=lambda each: (each["topic"], each["partition"]))
    return {"checkpoints": found.listed(group.home, moment.time, offset, limit), "pieces": pieces[:LISTED]}


def _reported_until(group: GroupHistory, end: int) -> int:
    """The log time (ms) up to which all live owners have reported their progress."""
    pulses = [found.pulse for found in group.keys.values() if found.pulse is not None and found.owner >= 0]
    if group.is_coordinated:
        owners = {(each.client_id, each.instance_id) for found in group.keys.values() for each in found.open}
        pulses = [pulse for names, pulse in group.pulses.items() if names in owners]
    return min((pulse.last for pulse in pulses if 0 <= end - pulse.last <= pulse.interval_ms), default=end)
