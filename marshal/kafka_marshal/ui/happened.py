"""Answers from a history: events and rebalances up to a moment, and the timeline."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from kafka_marshal.logs import visible
from kafka_marshal.observe.text import span
from kafka_marshal.ui.fold import GroupHistory, History
from kafka_marshal.ui.index import Event
from kafka_marshal.ui.moments import LISTED, LOOKED_AT, Moment
from rationalizer.history import BEFORE, End, Span

#: Changes of owners within this time (ms) belong to one rebalance of a claimed group.
BURST_MS: Final = 10_000

#: The most causes, and the most clients, in the text of a rebalance.
NAMED: Final = 6


def _event_json(found: Event) -> dict[str, Any]:
    return {
        "time": found.time,
        "at": f"{found.cp}:{found.offset}",
        "group": found.group or None,
        "client": visible(found.client),
        "type": found.type or None,
        "code": found.code,
        "accepted": found.accepted,
        "changed": found.changed,
        "topic": found.topic or None,
        "partition": found.partition,
        "what": visible(found.what),
        "why": visible(found.why),
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
    return [_event_json(history.events[number]) for number in islice(numbers, limit)]


def events_since(history: History, name: str, sent: dict[int, int]) -> list[dict[str, Any]]:
    """A group's last events at or beyond these offsets, the oldest first."""
    offsets, times = history.events.columns["offset"], history.events.time
    found: list[int] = []
    for cp, chosen in sorted(history.events.lists["all"].get(name, {}).items()):
        begin = bisect_left(chosen, sent.get(cp, 0), key=offsets.__getitem__)
        found += chosen[max(begin, len(chosen) - LISTED) :]
    found.sort(key=times.__getitem__)
    return [_event_json(history.events[number]) for number in found[-LISTED:]]


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
    return None if found is None else _event_json(history.events[found])


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
    for index in range(bisect_left(found.until, at), found.ended(at, by_offset=False)):
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
    words = [f"{client} {_VERBS.get(kind, kind)} {amount}" for (client, kind), amount in _given_away_first(done)]
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


def _given_away_first(done: Counter[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    """Releases first: they let others claim."""
    return sorted(done.most_common(), key=lambda each: each[0][1] in _TAKES)


def _some(texts: list[str], separator: str) -> str:
    return separator.join(texts[:NAMED]) + (f"{separator}…" if len(texts) > NAMED else "")


def timeline(group: GroupHistory, end: int) -> dict[str, Any]:
    """Messages done, owners changed and records rejected up to this log time (ms), in buckets, and pauses."""
    return {
        "begin": group.series.begin,
        "width": group.series.width_ms,
        "end": _reported_until(group, end),
        **{name: list(sums) for name, sums in group.series.sums.items()},
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
    offset = moment.offset if moment.cp == group.home else -1
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
