"""Whether a member is well (:meth:`Marshal.health`): for probes, and for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

from kafka_marshal.client.breaker import FAILING, SAID_AFTER_MS
from kafka_marshal.engine.groups.member import MemberState
from kafka_marshal.engine.plane import HUNG, Checkpointing
from kafka_marshal.engine.settings import Why
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.lane import HANGS_MS, Handlers, HeldBack, HotKey, RateLimited, lasting
from kafka_marshal.engine.work.lanes import HELD_BACK_MS
from kafka_marshal.engine.work.stuck import Stuck
from kafka_marshal.types import due_of
from rationalizer.limits import MANY_HOLES, MAX_HOLES

if TYPE_CHECKING:
    from kafka_marshal.node.driver import Driver

FORKED = (
    "this process was forked from the one that made this Marshal: its leases and its threads are the parent's, which "
    "works on. Make a new Marshal in the child"
)


@dataclass(frozen=True, slots=True)
class Crowded:
    """A partition with more than half of the open messages that it may have (H5); ``str()`` is for people.

    Or one of the coordination topic, with those of all groups: workers add none to 100,000.
    """

    topic: str
    partition: int
    #: Open messages; of a batch, or neighbours that are alike, all together are one.
    open: int
    most: int
    group_id: str

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.open >= self.most

    def __str__(self) -> str:
        means = (
            "what fails for good can't be set aside any more, and then nothing more of the partition is delivered"
            if self.is_full
            else "at the limit nothing more is set aside, and the partition stops"
        )
        return (
            f"{self.topic} [{self.partition}] has {self.open:,} of the {self.most:,} open messages that it may have"
            f"{', of all groups' * (self.most == MANY_HOLES)}: {means}. Nothing is lost; other partitions continue. "
            "Mend what makes them fail, then redrive or discard some: kafka-marshal open-messages "
            f"{quote(self.group_id)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of a Marshal at one moment; ``str()`` of it is a text for people.

    Use ``ready`` for a readiness probe, ``needs_restart`` for a liveness probe, ``ok`` for alerts. An outage of Kafka
    makes ``ok`` false, but a restart of the member would not help.
    """

    #: It works, as far as this member can see.
    ok: bool
    #: One sentence or two each: what happened, what it means for the data, what to do.
    problems: tuple[str, ...]
    #: It has read the log to its end, and its heartbeats are sent; it may hold nothing.
    ready: bool
    #: It will not recover: only a new process, or a new Marshal, will work.
    needs_restart: bool
    #: Milliseconds since the background thread last ran its loop: at least once a second, and whenever there is work.
    #: The clock includes the time in which a machine or a process was stopped.
    turned_ago_ms: float
    #: It was closed, or is closing.
    closed: bool
    #: The error that has ended it; None: there is none.
    failure: Exception | None
    #: How many leases, or pieces of a coordinated group, it holds.
    leases: int
    #: The state of a coordinated group's member (``GroupConsumer.state``); "": it is not a member.
    state: str = ""
    #: What a member of a group that takes checkpoints does (``GroupConsumer.checkpoints.state``); "": it takes none.
    checkpoints: str = ""
    #: Partitions that are stuck though there is something to read. ``ok`` ignores them, as others continue, but not
    #: lost positions and a lack of room: these wait for an operator.
    stuck: tuple[Stuck, ...] = ()
    #: Partitions whose progress waits for one message that a handler of ``consumer.run`` has, or that failed; or for a
    #: batch whose transaction has not ended; or for messages that were in flight when it was taken away.
    held_back: tuple[HeldBack, ...] = ()
    #: How many handlers (threads or tasks) ``consumer.run`` has, and how many it should have: fewer is a problem.
    handlers: int = 0
    handlers_wanted: int = 0
    #: Keys of which ``consumer.run(…, order="key")`` handles so much that one handler is busy with each for more than
    #: half of the time: more handlers or members do not speed them up. ``ok`` ignores them.
    hot_keys: tuple[HotKey, ...] = ()
    #: Rates of ``consumer.run(…, rate=…)`` that are what limits now. ``ok`` ignores them.
    rates: tuple[RateLimited, ...] = ()
    #: Partitions of this member, and those of the coordination topic that they belong to, with more than half of the
    #: open messages that they may have. ``ok`` ignores them until the limit is reached: then it is a problem.
    crowded: tuple[Crowded, ...] = ()
    #: Why this member can't remove log that is older than the topic asks for (``kafka-marshal topic``); "": it can, or
    #: need not. ``ok`` ignores it: the log grows, and another member may do it.
    log_not_pruned: str = ""
    #: The group's strategy is set, to another one than this program names (``kafka-marshal group``); "": it is not.
    #: ``ok`` ignores it: the setting counts, and the member works.
    other_strategy: str = ""

    def __str__(self) -> str:
        state = "ok" if self.ok else "not ok" if not self.needs_restart else "not ok, needs a restart"
        what = "piece" if self.state else "lease"
        held = f"{self.state} " * bool(self.state) + f"{self.leases} {what}{'s' * (self.leases != 1)} held"
        head = f"{state}: {held}, last turn {self.turned_ago_ms / 1000:.1f} s ago"
        nearly = [found for found in self.crowded if not found.is_full]
        found = (*self.problems, *self.stuck, *self.held_back, *nearly, *self.hot_keys, *self.rates)
        texts = dict.fromkeys([*map(str, found), *filter(None, [self.other_strategy])])
        return "\n".join([head, *(f"- {text}" for text in texts)])


#: A message whose time has come is tried by then (ms), or within three heartbeat intervals.
OVERDUE_MS = 600_000

#: Why a partition is stuck until an operator acts.
_FOR_OPERATORS = frozenset({Why.NO_ROOM, Why.POSITION})


def examine(driver: Driver, *, closed: bool) -> Health:
    """Read a driver's state, from any thread, also in a signal handler: it takes no lock and waits for no thread."""
    now = driver.now_ms()
    failure = driver.engine.failure
    if driver.life.forked:
        ends = [FORKED]
    elif failure is not None:
        ends = [f"this Marshal has ended, and so has all that it held: {failure}"]
    elif closed:
        ends = []
    else:
        ends = list(_standing(driver, now))
    handlers, wanted = _handlers(driver)
    others = ["it is closed: it holds no lease and hands out nothing. Make a new Marshal to go on"] if closed else []
    if not closed and not driver.life.forked and failure is None:
        others.extend(_unwell(driver, now))
        if handlers < wanted:
            others.append(
                f"run(…) has {handlers} of {wanted} handlers: the others have ended by an error, or could not be "
                "started. The run ends as soon as the handlers that run have returned, and raises why. What was not "
                "done comes again"
            )
        others.extend(_failing(driver, now))
        others.extend(_overdue(driver, now))
    crowded = () if closed or ends else tuple(_crowded(driver, driver.engine.settings.group_id))
    stuck = tuple(one for each in list(driver.engine.consumers.values()) for one in each.positions.stuck.found)
    full = (*(one for one in crowded if one.is_full), *(one for one in stuck if one.why in _FOR_OPERATORS))
    problems = (*ends, *others, *map(str, full))
    state = next((str(member.state(now)) for member in list(driver.engine.groups.values())), "")
    is_beating = not _unanswered(driver, now) and state != MemberState.REDISCOVER
    return Health(
        ok=not problems,
        problems=problems,
        ready=driver.lock.started and is_beating and not driver.replica.tail.monitor.stalled and not (ends or closed),
        needs_restart=bool(ends),
        turned_ago_ms=max(0.0, now - driver.pulse.turned_at),
        closed=closed,
        failure=failure,
        leases=sum(lease.held for lease in list(driver.engine.book.leases.values()))
        + sum(len(member.pieces) for member in list(driver.engine.groups.values())),
        state=state,
        checkpoints=next((str(x.state) for x in _checkpoints(driver) if x.newest is not None), ""),
        stuck=stuck,
        held_back=tuple(one for each in list(driver.engine.consumers.values()) for one in held_back(each, now)),
        handlers=handlers,
        handlers_wanted=wanted,
        hot_keys=tuple(one for each in _all(driver) for one in hot_keys(each, now)),
        rates=tuple(one for each in _runs(driver) for one in each.limits),
        crowded=crowded,
        log_not_pruned=driver.upkeep.keeper.failing,
        other_strategy=next((member.other_strategy for member in list(driver.engine.groups.values())), ""),
    )


def _all(driver: Driver) -> list[ConsumerEngine]:
    return list(driver.engine.consumers.values())


def held_back(consumer: ConsumerEngine, now: float) -> tuple[HeldBack, ...]:
    """Partitions whose progress waits for one message or batch, also of before a loss (any thread; no lock)."""
    in_lanes, found = consumer.delivery.in_lanes, consumer.delivery.owed.held_back(now)
    if not in_lanes.lanes.is_ended or not consumer.settings.transactions:
        return (*in_lanes.held_back, *found)
    for key, assignment in sorted(consumer.assignments.copy().items()):
        run = min(list(assignment.tracker.runs.values()), key=lambda one: one.first, default=None)
        if run is not None and not assignment.over and now >= run.since + HELD_BACK_MS:
            in_hand, why = assignment.tracker.in_hand, "its batch, whose transaction has not ended"
            one = HeldBack(*key, run.first, None, now - run.since, in_hand, assignment.releasing, why=why)
            found.append(one)
    return tuple(found)


def hot_keys(consumer: ConsumerEngine, now: float) -> tuple[HotKey, ...]:
    """Its keys that take more than half of what one handler can do (any thread; no lock)."""
    in_lanes = consumer.delivery.in_lanes
    return (in_lanes.loops if in_lanes.lanes.is_ended else in_lanes.lanes).hot.at(now)


def _failing(driver: Driver, now: float) -> Iterator[str]:
    """Runs of which all tries fail, and the handlers that hang meanwhile: they hold the others up for a while."""
    for consumer in _all(driver):
        lanes = consumer.delivery.in_lanes.lanes
        if lanes.pace_ms is None or now < lanes.failing_since + SAID_AFTER_MS:
            continue
        lane = min(lanes.hanging(now - HELD_BACK_MS), key=lambda lane: lane.began, default=None)
        if lane is None or (message := lane.message) is None:
            yield FAILING
            continue
        yield (
            f"{FAILING}. The handler of {message.topic()} [{message.partition()}] offset {message.offset()} has not "
            f"returned for {lasting(now - lane.began)}: the others wait for it for {lasting(HANGS_MS)}, and then "
            "continue without it"
        )


def _overdue(driver: Driver, now: float) -> Iterator[str]:
    """Partitions with messages whose time has come, and that were not tried since (any thread; no lock)."""
    most = max(OVERDUE_MS, 3 * driver.engine.settings.heartbeat_interval_ms)
    for consumer in _all(driver):
        for key, assignment in sorted(consumer.assignments.copy().items()):
            progress = consumer.source.view.whole_progress(key) if assignment.lease.held else None
            holes = () if progress is None or progress.holes is None else tuple(progress.holes)
            log_time = consumer.source.view.log_time(assignment.lease.cp, now)
            if late := [x for x in holes if (due := due_of(x.reason)) is not None and log_time > due + most]:
                longest = max(log_time - (due_of(x.reason) or 0) for x in late)
                amount = "1 message that was" if len(late) == 1 else f"{len(late):,} messages that were"
                yield (
                    f"{key[0]} [{key[1]}] has {amount} to be tried by now, up to {lasting(longest)} ago, the first at "
                    f"offset {late[0].first}; later ones of the same keys wait behind. Nothing is lost. No handler is "
                    "free (more concurrency, or members), what delivers is paused, or rate= is too low; otherwise a "
                    "restart has them tried"
                )


def _crowded(driver: Driver, group_id: str) -> Iterator[Crowded]:
    """Partitions with more than half of the open messages that they may have (any thread; no lock)."""
    cps = set()
    for consumer in _all(driver):
        for key, assignment in sorted(consumer.assignments.copy().items()):
            if not assignment.lease.held:
                continue
            cps.add(assignment.lease.cp)
            progress = consumer.source.view.whole_progress(key)
            holes = None if progress is None else progress.holes
            if holes is not None and 2 * len(holes) > MAX_HOLES:
                yield Crowded(*key, len(holes), MAX_HOLES, group_id)
    for cp in sorted(cps):
        if 2 * (count := driver.replica.worlds[cp].hole_count()) > MANY_HOLES:
            yield Crowded(driver.replica.topic, cp, count, MANY_HOLES, group_id)


def _checkpoints(driver: Driver) -> list[Checkpointing]:
    return [each.checkpoints for each in list(driver.engine.groups.values()) if each.checkpoints is not None]


def _runs(driver: Driver) -> list[Handlers]:
    found = [each.delivery.in_lanes.lanes.handlers for each in _all(driver)]
    return [each for each in found if each is not None]


def _handlers(driver: Driver) -> tuple[int, int]:
    """How many handlers all runs have, and how many they should have."""
    counts = [each.count for each in _runs(driver)]
    return sum(there for there, _ in counts), sum(wanted for _, wanted in counts)


def _standing(driver: Driver, now: float) -> Iterator[str]:
    """Problems that end only with the process."""
    if driver.pulse.is_stalled(now):
        yield driver.pulse.stalled_text(now)
    for consumer in list(driver.engine.consumers.values()):
        if (refusal := consumer.source.failure) is not None:
            found = consumer.source.checkpoints
            why = "the log refuses it" if found is None or found.failed is None else "its state can't be restored"
            yield f"{why}, and it hands out nothing more: {refusal}"
    servants = driver.servants
    if servants.threads == 0:
        yield (
            "the threads that carry out calls of this Marshal are gone: calls wait without an answer, and nothing is "
            "handed out. What is in hand can't be reported as done and is repeated. Restart the process"
        )


def _unwell(driver: Driver, now: float) -> Iterator[str]:
    """Problems that may pass, or that must be fixed elsewhere."""
    interval_ms = driver.engine.settings.heartbeat_interval_ms
    if driver.servants.refusal:
        yield (
            f"no further thread could be started to carry out calls ({driver.servants.refusal}): a call waits until "
            "the one before has ended. Nothing is lost. Raise the limit of threads of this process or container"
        )
    call = driver.effects.callbacks.running
    if call is not None and now - call.began_at > interval_ms:
        yield driver.effects.callbacks.late_text(call, now)
    if unanswered := _unanswered(driver, now):
        yield unanswered
    if deaf := driver.replica.tail.monitor.stalled:
        yield (
            f"{deaf}. Meanwhile its own heartbeats prove nothing here, and it hands out nothing more once its leases, "
            "or its session, run out. It reads again with a new client by itself; where that does not help, this "
            "Marshal ends, and others take over what it held"
        )
    if waits := list(driver.effects.events.waits.values()):
        others = f" ({len(waits) - 1} more wait so)" if len(waits) > 1 else ""
        yield f"{waits[0].rstrip('.')}{others}. Nothing of it is delivered until then; it continues by itself"
    if driver.upkeep.guard.harm:
        yield driver.upkeep.guard.harm
    if back := driver.replica.checks.back:
        yield back
    if driver.engine.leases.draining:
        yield (
            "an operator has asked it to hand over (kafka-marshal drain): it releases what it holds when what is in "
            "hand is done, and claims nothing more. Nothing is lost. End the process; a new one claims again"
        )
    for consumer in list(driver.engine.consumers.values()):
        yield from (left.text(now) for left in consumer.delivery.left_behind)
        if absent := consumer.subscription.absent:
            yield (
                f"the cluster has no topic {' and no topic '.join(absent)}: nothing of it is read. Is the name right? "
                "Once it is there it is read by itself; positions that the group had in it are lost then, and must be "
                "set (kafka-marshal check says how)"
            )
        if consumer.schedule.let_go_why == HUNG:
            yield (
                f"{HUNG} (consumer of {', '.join(sorted(consumer.subscription.topics))}): its partitions are released, "
                "and it claims nothing until one comes back. What they have in hand is repeated, here or elsewhere. "
                "Find out what they wait for, or restart the process"
            )
        elif not consumer.source.takes_checkpoints and (owed := consumer.delivery.owed.held_back(now)):
            topic, partition, offset, _, for_ms = owed[0][:5]
            yield (
                f"{topic} [{partition}] was taken away {lasting(for_ms)} ago, and the program still has messages of "
                f"it, from offset {offset} on: nothing is taken up here before they have come back. Nothing is lost. "
                "If a handler hangs, find out what it waits for, or restart the process. If a loop has skipped a "
                "batch, call its done(), which commits nothing any more, or drop it"
            )
    yield from _membership(driver, now)
    for cp, level in driver.replica.stopped():
        yield (
            f"partition {cp} of {driver.replica.topic} was raised to protocol level {level}, which this release does "
            "not know: its leases in it have ended, and it works on in the others. Install a release that supports it"
        )


def _unanswered(driver: Driver, now: float) -> str:
    """What Kafka does not answer: appends; or, of a member that appends nothing, anything. "": it does."""
    failures, away = driver.effects.appends.failures, driver.effects.events.away(now)
    sessions = [member.session_timeout_ms for member in list(driver.engine.groups.values())]
    longest_ms = max([2 * driver.engine.settings.heartbeat_interval_ms, *sessions])
    # A member that holds nothing may append nothing for hours, and so never learn that appends succeed again.
    if (failing := failures.failing) is None or (now - failures.failed_at > longest_ms and not away):
        return away
    reason, since = failing
    return (
        f"appends to {driver.replica.topic} have failed for {(now - since) / 1000:.1f} s: {reason}. Leases that "
        "can't be proven, and a coordinated group's member that can't, hand out nothing and end by themselves; "
        "what is done meanwhile is repeated if others take over. It goes on by itself when appends succeed again"
    )


_UNSAVED = "on_checkpoint fails or hangs: check the store of states"
_UNDONE = "messages in flight are not done in time"


def _membership(driver: Driver, now: float) -> Iterator[str]:
    """Why a member of a coordinated group works on nothing at present, or its checkpoints lack something."""
    for member in list(driver.engine.groups.values()):
        if member.state(now) is MemberState.REDISCOVER:
            yield (
                "its own clock can't prove that it is a member still: the log has shown no heartbeat of this process "
                f"in time (session: {member.session_timeout_ms / 1000:g} s). Nothing is handed out meanwhile. It goes "
                "on by itself when the log answers; if others take it for dead by then, what is in hand is repeated "
                "there"
            )
        count, since, is_unsaved = (0, now, False) if member.checkpoints is None else member.checkpoints.lacking
        if count > 1:
            yield (
                f"its last {count} checkpoints, for {lasting(now - since)}, lack some or all of its pieces; the lines "
                f"logged say which ones and why: {_UNSAVED if is_unsaved else _UNDONE}. "
                "Nothing is lost; if this member ends, what it did since their last cuts is done again"
            )
