"""Groups as they are now, as in `status --watch`: one thread reads the log and looks up log ends."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from kafka_marshal.admin.open_messages import OpenMessage, describe, messages_of, state_of
from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.instance import Instance
from kafka_marshal.logs import log
from kafka_marshal.observe.holes import PlacedHole, holdings_of
from kafka_marshal.observe.log import Source
from kafka_marshal.observe.payload import short
from kafka_marshal.observe.problems import Problem, open_text, problems_of
from kafka_marshal.observe.rows import GroupRow, LeaseRow, WorkerRow, evicted_text, partitions_held, partitions_of
from kafka_marshal.observe.text import count, span, time_text
from kafka_marshal.observe.view import LiveView
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.secret import visible
from kafka_marshal.types import Sharer
from kafka_marshal.ui.archive import Histories
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.folding import RETRY_S
from kafka_marshal.ui.moments import member_json, natural, waits_json
from rationalizer.holes import Hole
from rationalizer.limits import MAX_KEY_HASH

#: The interval of pictures (s); if they are slow, they take at most a fifth of the time.
INTERVAL_S: Final = 1.0
SHARE: Final = 5

#: How often it is checked whether the topic was recreated (s).
CHECK_S: Final = 10.0

#: A broker has this long to answer before the page says that it does not (s).
PATIENCE_S: Final = 2.0

#: Points of lag and rate of each group: one hour.
POINTS: Final = 3_600

STATES: Final = ("free", "seen", "silent", "gone", "never claimed", "not assigned", "unknown")


class Live:
    """The newest picture of every group, and the last hour's lag and rate. Any thread may ask."""

    def __init__(self, source: Source, archive: Histories) -> None:
        self._source = source
        self._archive = archive
        self.groups: dict[str, GroupRow] = {}
        #: Group → its open messages, if there are any.
        self.holdings: dict[str, list[PlacedHole]] = {}
        #: group → (broker's time, lag or None, messages a second or None)
        self.points: dict[str, deque[tuple[int, int | None, float | None]]] = {}
        self.notes: list[str] = []
        #: Why there are no new pictures; "": there are.
        self.problem: str = ""
        self.progress: tuple[int, int] = (0, 0)
        self.now_ms: int = 0
        self._taken = 0
        self._texts: dict[str, tuple[int, str]] = {}
        self._problems: dict[str, tuple[GroupRow, list[Problem]]] = {}
        #: The server ends: streams end, too.
        self.ended: bool = False
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        archive.on_change = self.notify

    def run(self, stop: threading.Event) -> None:
        """Read the log and take pictures until `stop` is set (*blocking*)."""
        while not stop.is_set():
            try:
                self._follow(stop)
            except Exception as error:  # noqa: BLE001  (whatever it is: it is shown, and tried again)
                self.problem = f"What is shown is from before: {visible(str(error))}"
                if not isinstance(error, MarshalError):
                    log(logging.ERROR, "live_failed", "reading the log failed; it is tried again", error=error)
                self.notify()
                stop.wait(RETRY_S)

    def _follow(self, stop: threading.Event) -> None:
        cluster = self._source.connect()
        try:
            view = LiveView(cluster, self._source.topic, self._source.timeout)
            try:
                if not self._archive.complete:
                    recent = History(len(view.worlds), view.worlds)
                    self._archive.recent = recent
                    view.observers.append(recent.see)
                view.catch_up(self._show)
                view.learn_time()
                view.patience_s = PATIENCE_S
                self._watch(view, cluster, stop)
            finally:
                view.replica.close()
        finally:
            cluster.close()

    def _show(self, done: int, of_all: int) -> None:
        self.progress = (done, of_all)

    def end(self) -> None:
        """End all streams."""
        self.ended = True
        self.notify()

    def _watch(self, view: LiveView, cluster: Cluster, stop: threading.Event) -> None:
        wait_s, checked = 0.0, time.monotonic()
        while not stop.is_set():
            view.watch(wait_s, until=stop.is_set)
            if self._archive.complete:
                view.observers.clear()
            began = time.monotonic()
            try:
                view.outage = False
                if began - checked > CHECK_S:
                    topics = cluster.topic_info([self._source.topic], view.patience_s)
                    view.replica.check(topics.get(self._source.topic))
                    checked = began
                view.look_at_data()
                self.problem = ""
            except KafkaUnavailableError as error:
                view.outage = True
                self.problem = f"Kafka does not answer; what is shown is from before. {visible(str(error))}"
            self._take(view)
            wait_s = INTERVAL_S if view.outage else max(INTERVAL_S, SHARE * (time.monotonic() - began))

    def _take(self, view: LiveView) -> None:
        found = {each.group: each for each in view.groups()}
        self.now_ms = view.clock.now_ms()
        for name, group in found.items():
            speeds = [row.speed for row in group.leases if row.speed is not None]
            points = self.points.setdefault(name, deque(maxlen=POINTS))
            points.append((self.now_ms, group.lag, sum(speeds) if speeds else None))
        self.notes = view.notes_on_upgrades()
        self.holdings = {
            name: holdings_of(view.worlds, name)
            for name, group in found.items()
            if any(row.open for row in group.leases)
        }
        self.groups = found
        self._taken += 1
        self.notify()

    # -- streams that wait -------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wake all streams (any thread)."""
        for loop, event in list(self._waiting):
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # its loop is closed
                self._waiting.discard((loop, event))

    def subscribe(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """An event that `notify` sets (in a running loop), and a function that unsubscribes."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        self._waiting.add(entry)
        return entry[1], lambda: self._waiting.discard(entry)

    # -- what there is -----------------------------------------------------------------------------------------

    def state_text(self, name: str) -> str | None:
        """The state of a group as JSON, built once per picture; None: there is no such group."""
        made = self._texts.get(name)
        taken, group = self._taken, self.groups.get(name)
        if group is None:
            return None
        if made is None or made[0] != taken:
            made = self._texts[name] = (taken, json.dumps(self._state(group), separators=(",", ":")))
        return made[1]

    def problem_counts(self) -> dict[str, int]:
        """Group → the number of its problems, if there are any."""
        return {name: amount for name, group in list(self.groups.items()) if (amount := len(self._problems_of(group)))}

    def sharing(self, name: str, place: TopicPartition) -> dict[str, Any]:
        """Who shares a partition, and what is open of it. Raises LookupError: there is no such group."""
        group = self.groups.get(name)
        if group is None:
            raise LookupError(f"no group {visible(name)} is known now")
        return sharing(group, self.holdings.get(name, ()), place, self.now_ms)

    def open_message(self, name: str, place: TopicPartition, offset: int, *, with_key: bool) -> dict[str, Any]:
        """One open message, as `open-messages` has it (*blocking*). Raises LookupError if it is not open.

        with_key: its key is read from its topic, too.
        """
        holdings = (each for each in self.holdings.get(name, ()) if each.key == place)
        found = next((each for each in holdings if each.hole.first <= offset <= each.hole.last), None)
        if found is None:
            raise LookupError("It is not open any more: done, discarded, or its position was moved.")
        one = found._replace(hole=found.hole._replace(first=offset, last=offset))
        cluster = self._source.connect()
        try:
            log_name, patience_s = self._source.topic, self._source.timeout
            (message,) = describe(
                *(cluster, log_name, list(messages_of(name, [one])), lambda _: one.cp, patience_s),
                keys=with_key,
                lost={(row.topic, row.partition): row.stuck for row in self.groups[name].leases if row.lost},
            )
        finally:
            cluster.close()
        return open_message_json(message, one.cp, with_key=with_key)

    def _problems_of(self, group: GroupRow) -> list[Problem]:
        """The problems of a group, found once per picture."""
        made = self._problems.get(group.group)
        if made is None or made[0] is not group:
            made = self._problems[group.group] = (group, problems_of(group))
        return made[1]

    def _state(self, group: GroupRow) -> dict[str, Any]:
        members: dict[tuple[str, str], dict[str, Any]] = {}
        for each in group.members:
            names = (each.client, each.instance or "")
            members[names] = {
                **member_json(*names),
                "held": len(each.leases),
                "state": each.state,
                "lag": each.lag,
                "hung": each.is_hung,
                "draining": each.asked_ms is not None,
                "evicted": "" if each.heard is None or not each.heard.evictor else visible(evicted_text(each.heard)),
            }
        ordered = sorted(members, key=natural)
        numbers = {names: index for index, names in enumerate(ordered)}
        behind = "lag is not known" if group.lag is None else f"{count(group.lag, 'message')} behind"
        return {
            "group": group.group,
            "kind": group.kind or None,
            "at": {"time": self.now_ms, "text": time_text(self.now_ms), "place": None},
            "live": True,
            "states": list(STATES),
            "state": group.state,
            "generation": group.generation,
            "members": [members[names] for names in ordered],
            "idle": [_idle_json(run) for run in group.idle],
            "topics": _topics(group.leases, numbers, self.now_ms),
            "waiting": [
                waits_json(row.goes_to or "", row.client or "", row.topic, row.partition, row.place)
                for row in group.moving
            ],
            "pauses": [
                {
                    "client": each.client,
                    "until": each.expires,
                    "text": f"paused by {each.client}, {'over' if each.is_over else span(each.left_ms) + ' left'}",
                }
                for each in group.pauses
            ],
            "problems": [{"kind": each.kind, "text": visible(each.text)} for each in self._problems_of(group)],
            "notes": self.notes,
            "headline": f"{partitions_held(group.leases)}/{partitions_of(group.leases)} partitions held by "
            f"{count(group.worker_count, 'member')}, {behind}"
            + (f", {group.parked:,} set aside" if group.parked else ""),
            "lag": group.lag,
        }


def _idle_json(run: WorkerRow) -> dict[str, Any]:
    """A worker that was heard in the last minutes and holds nothing, as a member."""
    return {
        **member_json(run.client, run.instance),
        "state": "idle",
        "doing": visible(run.doing),
        "silent": run.is_silent,
        "waits": run.is_waiting,
        "heard": f"{span(run.silence_ms)} ago",
    }


def _topics(rows: list[LeaseRow], numbers: dict[tuple[str, str], int], now_ms: int) -> list[dict[str, Any]]:
    topics: dict[str, dict[str, Any]] = {}
    for row in rows:
        topic = topics.get(row.topic)
        if topic is None:
            lists: dict[str, Any] = {name: [] for name in ("partitions", "owners", "states", "lags", "nexts")}
            few: dict[str, Any] = {name: {} for name in ("places", "stuck", "sharers", "parked")}
            topic = topics[row.topic] = {"topic": row.topic, **few, **lists}
        if why := row.held_back or row.stuck:
            topic["stuck"][len(topic["owners"])] = visible(why)
        if row.place != str(row.partition):
            topic["places"][len(topic["owners"])] = row.place
        if row.parked:
            topic["parked"][len(topic["owners"])] = row.parked
        if row.sharers:  # by batches: (member, state) of each
            topic["sharers"][len(topic["owners"])] = [
                (numbers.get((each.client_id, each.instance_id), -1), STATES.index(sharer_state(each, row, now_ms)))
                for each in row.sharers
            ]
        topic["partitions"].append(row.partition)
        topic["owners"].append(-1 if row.client is None else numbers.get((row.client, row.instance or ""), -1))
        topic["states"].append(STATES.index(row.state))
        topic["lags"].append(row.lag)
        topic["nexts"].append(row.next)
    return list(topics.values())


# -- one partition as it is now ------------------------------------------------------------------------------

#: The most sharers and open messages, and the most batches of one sharer, in one answer; it says how many more.
LISTED: Final = 100
BATCHES: Final = 5


def sharing(group: GroupRow, holdings: Sequence[PlacedHole], place: tuple[str, int], now_ms: int) -> dict[str, Any]:
    """Who shares a partition, and what is open of it. `mode`: whole, keys or batches; of `whole` no sharers are listed.

    holdings: of the group. now_ms: the broker's time.
    """
    rows = [row for row in group.leases if (row.topic, row.partition) == place]
    holes = [each.hole for each in holdings if each.key == place]
    by_batches = any(row.sharers for row in rows)
    is_whole = all(row.lo == 0 and row.hi == MAX_KEY_HASH for row in rows)
    mode = "batches" if by_batches else "whole" if is_whole else "keys"
    if by_batches:
        sharers = [_by_batches(each, row, holes, now_ms) for row in rows for each in row.sharers]
    else:
        sharers = [_by_keys(row) for row in rows] if mode == "keys" else []
    listed = sorted((hole for hole in holes if state_of(hole) != "acquired"), key=lambda hole: not hole.is_parked)
    names = list(dict.fromkeys(each["client"] for each in sharers if each["client"] is not None))
    return {
        "topic": place[0],
        "partition": place[1],
        "mode": mode,
        "text": "" if mode == "whole" else f"Shared by {mode}: {visible(', '.join(names[:LISTED])) or 'nobody'}.",
        "sharers": sharers[:LISTED],
        "more_sharers": max(0, len(sharers) - LISTED),
        "open": visible(open_text(replace(group, leases=rows))),
        "messages": [_hole_json(hole) for hole in listed[:LISTED]],
        "more_messages": max(0, len(listed) - LISTED),
        "command": visible(shlex.join(["kafka-marshal", "open-messages", group.group, f"{place[0]}:{place[1]}"])),
    }


def sharer_state(sharer: Sharer, row: LeaseRow, now_ms: int) -> str:
    """Its freshness by the broker's clock, in the words of `status`."""
    silence_ms = max(0, now_ms - sharer.last_beat)
    return replace(row, silence_ms=silence_ms, heartbeat_interval_ms=sharer.heartbeat_interval_ms).state


def _by_batches(sharer: Sharer, row: LeaseRow, holes: Sequence[Hole], now_ms: int) -> dict[str, Any]:
    batches = sorted((hole for hole in holes if hole.owner == sharer.epoch), key=lambda hole: hole.since)
    names, silence_ms = (sharer.client_id, sharer.instance_id), max(0, now_ms - sharer.last_beat)
    return _sharer_json(*names, None, sharer.epoch, sharer_state(sharer, row, now_ms), silence_ms, batches)


def _by_keys(row: LeaseRow) -> dict[str, Any]:
    keys = row.place.partition(" ")[2].strip("()") or "all"
    return _sharer_json(row.client, row.instance, keys, row.epoch, row.state, row.silence_ms, ())


def _sharer_json(
    client: str | None,
    instance: str | None,
    keys: str | None,
    epoch: int | None,
    state: str,
    silence_ms: int | None,
    batches: Sequence[Hole],
) -> dict[str, Any]:
    runs_at = Instance.parse(instance)
    return {
        "client": client,
        "instance": instance or "",
        "where": None if runs_at is None else str(runs_at),
        "keys": keys,
        "epoch": epoch,
        "state": state,
        "heard": "" if silence_ms is None else f"{span(silence_ms)} ago",
        "batches": [{"first": x.first, "last": x.last, "deliveries": x.attempts} for x in batches[:BATCHES]],
        "more_batches": max(0, len(batches) - BATCHES),
    }


def _hole_json(hole: Hole) -> dict[str, Any]:
    return {
        "first": hole.first,
        "last": hole.last,
        "state": state_of(hole),
        "deliveries": hole.attempts,
        "reason": None if hole.reason is None else visible(hole.reason),
        "since": hole.since,
    }


def open_message_json(message: OpenMessage, cp: int, *, with_key: bool) -> dict[str, Any]:
    """An open message as text, never markup. `at`: the record that says so, as a moment."""
    is_read = with_key and not (message.gone or message.unread)
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "state": message.state,
        "deliveries": message.delivery_count,
        "reason": None if message.reason is None else visible(message.reason),
        "at": f"{cp}:{message.since}",
        "time": message.time,
        "client": None if message.client is None else visible(message.client),
        "key": visible(short(message.key)) if is_read else None,
        "gone": message.gone,
        "unread": visible(message.unread),
    }
