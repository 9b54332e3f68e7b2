"""What our own threads do for the calls of user threads on a consumer (:mod:`kafka_marshal.node.serving`).

They carry out the steps of a pull (:mod:`kafka_marshal.engine.work.pull`): read, wait, pass a run to the user's thread.
What user threads do with the run is in :mod:`kafka_marshal.client.consumer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from kafka_marshal import arguments
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.base import Host, Membership, S
from kafka_marshal.client.batch import Look
from kafka_marshal.client.closing import Limit
from kafka_marshal.client.failures import say_in_hand, shortened
from kafka_marshal.client.fetcher import Fetcher
from kafka_marshal.client.handled import Handled
from kafka_marshal.client.handling import Retry, check_park
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.client.transactions import Transactions
from kafka_marshal.engine.effects import TakeOver
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Grant, Run
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.in_lanes import Finished
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.pull import AwaitGrant, End, Fetch, GrantedPull, Pull, Take, Wait, Wanted
from kafka_marshal.engine.work.run import Run as RunOf
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.serving import EndedError
from kafka_marshal.ports import Message
from kafka_marshal.types import Key
from rationalizer.levels import SHARING_LEVEL

#: With this number of messages delivered and none done, the program probably does not report what is done.
MANY = 1_000

#: With fewer, this long (ms) after a second call for messages: a handler may take a while. At once if the program has
#: dropped more than one: nobody can say any more that those are done.
LONG_MS = 60_000.0

#: Said again after this time (ms), with the count of then.
SAID_EVERY_MS = 600_000.0

#: What user threads report; the engine gets it in this order. Or what gives the engine an input.
Said = Message | Run | Finished | partial[object]


class Undone:
    """The messages of one consumer, until the first is done: they stay in flight, also if the program drops them."""

    def __init__(self) -> None:
        #: When it was said last, and when a second call for messages was first seen (own clock, ms).
        self._said_at = -inf
        self._since: float | None = None
        #: Cancelled calls: from when to when (own clock, ms) they may have taken messages that no task saw.
        self.cancelled: list[list[float]] = []

    def look(self, runs: Iterable[Run], before: float, now: float) -> str:
        """The warning; "": none is due. before: a message delivered since then may be on its way (own clock, ms)."""
        if now < self._said_at + SAID_EVERY_MS:
            return ""
        handed_out = dropped = 0
        calls: set[int] = set()
        for run in runs:
            handed_out += run.left
            dropped += 0 if run.has_left else len(run.dropped(before))
            calls.update(id(taken.out) for taken in run.taken if taken.out[0])
        if self._since is None and len(calls) > 1:
            self._since = now
        is_long = self._since is not None and now >= self._since + LONG_MS
        if handed_out < MANY and dropped < 2 and not is_long:
            return ""
        self._said_at = now
        return (
            f"poll(), consume() or batches() have delivered {handed_out:,} message(s), and none was ever reported as "
            "done. None is lost: they stay in flight, and come again after a restart or at the next owner. "
            f"At {MAX_IN_HAND_MESSAGES:,} of a partition, or half of max_bytes_in_flight, nothing "
            "more is delivered. Call consumer.done(message), or batch.done(), once it is handled; or iterate over "
            'the consumer, or use delivery="at-most-once"'
        )

    def since(self, before: float) -> float:
        """From when on messages that the program has dropped come again, though it reports none as done."""
        found = min((began for began, _ in self.cancelled), default=inf)
        self.cancelled = [each for each in self.cancelled if each[1] >= before]
        return found


#: Messages an iteration takes at a time. Those that it has not reached are not in flight, and can be given back.
RUN_SIZE = 10_000

#: close() checks this often (s) whether ``run`` has ended.
END_LOOK_S = 0.02

#: Reports of done messages wait for the next heartbeat or call; with this number the engine gets them at once.
SAID_AT_ONCE = 10_000


class FetchingConsumer(Membership[S]):
    """The part of a consumer that runs on our own threads."""

    def __init__(
        self,
        marshal: Host,
        driver: Driver,
        options: ConsumerOptions,
        config: Mapping[str, object],
    ) -> None:
        self._shared_bytes = marshal.max_bytes_shared_reads if options.settings.shares_keys else 0
        self._fetcher = Fetcher(self, driver, config, options.settings.max_bytes_in_flight)
        #: Its transactional producers; None: it does not process in transactions.
        self._transactions: Transactions | None = None
        if options.transactions is not None:
            self._transactions = Transactions(driver, options.transactions, config)
        #: Partitions whose messages may be reported as done one by one: in transactions, none.
        self._handed_out_of: Collection[Key] = self._fetcher.ever_fetched if self._transactions is None else ()
        self._undone = Undone()
        self._handled = Handled(driver.cluster.runtime.lock())
        #: The message in flight (or the first of the batch) when a loop was left.
        self._left: Message | None = None
        #: What user threads have reported as done, and the engine does not know yet.
        self._inbox: deque[Said] = deque()
        self._nudged = False
        super().__init__(marshal, driver, options, self._fetcher.partition_counts)
        self._leaving.settle = self._end_run

    @property
    def _kind(self) -> GroupKind:
        """How its partitions are assigned."""
        return "claimed" if self._options.settings.group is None else "coordinated"

    def _about(self) -> tuple[str, GroupKind, Callable[[], float], Look]:
        """What a batch says of its consumer: group, kind of it, the clock (ms), and what sinks have to know."""
        return self._marshal.group_id, self._kind, self._driver.now_ms, Look(self._driver, self._engine)

    @property
    def _delivery(self) -> Delivery:
        return self._engine.delivery

    def _may_leave(self, run: Run, now: float) -> bool:
        """Whether a message that was taken from a run may be delivered now (T4, T5)."""
        if self._closed or self._stop_signal:
            return False
        lease = run.assignment.lease
        return lease.may_hand_over(now) if self._options.settings.at_most_once else now < lease.hand_out_until

    def _say(self, what: Said) -> None:
        """Report a message or a whole run as done, a message as finished, for a transaction, or aside (any thread)."""
        if self._options.settings.at_most_once:
            return
        if self._driver.life.forked:
            self._driver.refuse_fork()
        self._inbox.append(what)
        if self._engine.schedule.is_moving:
            self._nudge()
        if len(self._inbox) == SAID_AT_ONCE:
            self._driver.call(self._hear)

    def _nudge(self) -> None:
        """If an assignment moves, pass reports on at once: a revocation may wait for them."""
        if self._engine.schedule.is_moving and not self._nudged:
            self._nudged = True
            self._driver.post(self._hear)

    def _hear(self) -> None:
        self._nudged = False
        with self._driver.locked():
            self._drain()  # reports that came after close()

    def park(self, message: Message, reason: str) -> None:
        """Set a message in flight aside in the group's log, for an operator; the others continue without it.

        For messages of ``poll``, ``consume``, ``batches()`` and loops; ``run`` has ``park=True``. reason: at most 64
        bytes, shown by ``kafka-marshal open-messages``. After its lease ended, this has no effect, and is counted in
        ``ignored_done``. Raises ConfigurationError below level 4 of the coordination topic, at most once, with
        transactions, in a group that takes checkpoints, and for a message that this consumer never delivered.
        """
        arguments.text("reason", reason)
        check_park(self._options, Retry(1), park=True, dead_letters=None, call="park(…)")
        key = message.topic() or "", -1 if (partition := message.partition()) is None else partition
        if key not in self._fetcher.ever_fetched:
            raise ConfigurationError(
                f"{key[0]} [{key[1]}]: this consumer has never had this partition, so it has not delivered this "
                "message. Nothing was set aside; call park() of the consumer that it came from"
            )
        self._require_sharing_level("park(…)")
        of = key, -1, offset_of(message), hash_of(message), 0, shortened(reason)
        self._say(partial(self._take, self._engine.park, *of))

    def _require_sharing_level(self, what: str) -> None:
        """Raise ConfigurationError if the coordination topic can't hold open messages yet (U6)."""
        level = min(world.level for world in list(self._driver.engine.worlds.values()))
        if level < SHARING_LEVEL:
            raise ConfigurationError(
                f"{what}: level {SHARING_LEVEL} of the coordination topic is needed, which is at level {level}. "
                "Nothing was delivered or set aside. Once all members have this release, raise it: kafka-marshal "
                "upgrade"
            )

    # Getting messages: our own threads, for a call of a user's thread (serving.py).

    def _drain(self) -> None:
        """Pass what user threads have reported to the engine; the lock is held."""
        number = self._engine.number
        if number not in self._driver.engine.consumers:
            while self._inbox:
                said = self._inbox.popleft()
                self._done_after_close += said.size if isinstance(said, RunOf) else 1
            return
        if (lanes := self._delivery.in_lanes.lanes) is not None and lanes.has_returned:
            self._take(self._delivery.in_lanes.returned)
        done: list[Message] = []
        finished: list[Finished] = []
        while self._inbox:
            said = self._inbox.popleft()
            if isinstance(said, Finished):
                finished.append(said)
                continue
            if not isinstance(said, RunOf | partial):
                done.append(said)
                continue
            if done:
                self._take(self._delivery.done, done)
                done = []
            if isinstance(said, partial):
                said()
            else:
                self._take(self._delivery.done_run, said)
        if done:
            self._take(self._delivery.done, done)
        if finished:
            self._take(self._delivery.finish, finished)
        if self._hand.in_doubt:
            self._take(self._hand.regather, self._engine)

    def _reclaim(self, before: float) -> None:
        """Deliver again what was delivered before that time (ms), and then dropped; the lock is held.

        A program that reports nothing as done continues, as with confluent-kafka: only what a cancelled call took comes
        again, and what a release would wait for.
        """
        if self._options.settings.at_most_once:
            return
        since = -inf
        settings = self._options.settings
        if not (self._delivery.is_done_said or settings.transactions) and settings.sharing is None:
            since = self._undone.since(before)
            runs = [run for x in self._engine.assignments.values() for run in x.tracker.runs.values() if run.is_marked]
            if text := self._undone.look(runs, before, self._driver.now_ms()):
                self._driver.engine.take(self._engine.number, self._engine.warn, text)
        self._take(self._delivery.reclaim, before, since)

    def _undo(self, run: Run | None) -> None:
        """Take back a run that did not reach the thread that asked for it, or that the thread has left."""
        if run is not None and not self._closed:
            with self._driver.locked(step=False):
                self._take(self._delivery.undo_run, run)

    def _serve_run(self, is_gone: Callable[[], bool]) -> Run | None:
        self._recall_hand()
        return self._pull(Pull(self._engine), is_gone, iterating=True)

    def _serve_batch(self, is_gone: Callable[[], bool], max_messages: int, timeout: float) -> Run | None:
        self._recall_hand()
        return self._pull(Pull(self._engine, fill_s=timeout), is_gone, max_messages)

    def _recall_hand(self) -> None:
        """Put back what ``poll`` has not taken yet: it comes first."""
        if self._hand.run is not None or self._hand.in_doubt:
            with self._driver.locked(step=False):
                self._take(self._hand.regather, self._engine)

    def _serve_hand(self, is_gone: Callable[[], bool], deadline: float | None, collected: Sequence[Run]) -> Run | None:
        hand, until = self._hand, inf if deadline is None else deadline
        if self._options.settings.at_most_once:
            return self._pull(GrantedPull(self._engine, hand, deadline=until, collected=collected), is_gone)
        with self._driver.locked(step=False):
            self._take(hand.settle, self._engine, bool(collected), hand.in_doubt)
        return self._pull(Pull(self._engine, hand, deadline=until, collected=collected), is_gone, hand.size)

    def _pull(
        self, pull: Pull, is_gone: Callable[[], bool], max_messages: int = RUN_SIZE, iterating: bool = False
    ) -> Run | None:
        """Carry out the pull step by step. Returns its run; None if the pull or the consumer ends."""
        fetcher, came, waited = self._fetcher, None, None
        while True:
            with self._driver.locked(step=False):
                if is_gone() or self._is_over():
                    return None
                wanted = Wanted(max_messages, iterating, self._driver.monotonic(), came, waited)
                step = self._take(pull.next, wanted)
                is_held_up = self._delivery.is_held_up(self._driver.now_ms())
            came = waited = None
            match step:
                case Take(run):
                    return run
                case Fetch(room, until):
                    came = fetcher.fill(room, is_gone)
                    if not came and until is not None:
                        waited = fetcher.await_cut(until) if is_held_up else fetcher.wait(until)
                case Wait(until):
                    waited = fetcher.wait(until)
                case AwaitGrant(grant):
                    self._await(pull, grant)
                case End():
                    return None

    def _await(self, pull: Pull, grant: Grant) -> None:
        """Wait until our replica has applied the ClaimingMessages (C13); meanwhile, fetch the next batch."""
        with self._driver.locked(step=False):
            room = self._take(pull.room) or 0  # None: closed since, by another thread
        self._fetcher.fill(room, lambda: grant.is_answered)
        with self._driver.condition:
            self._driver.wait_for(lambda: grant.is_answered, None)
        with self._driver.locked(step=False):
            self._take(pull.answered, grant)

    def _say_in_hand(self, error: Exception) -> None:
        found: Message | None = None
        if not (self._closed or self._driver.is_over or self._driver.life.forked):
            with suppress(EndedError):
                found = self._driver.call(self._first_undone)
        # Read last: a loop notes its message before it gives it back.
        left, self._left = self._left if found is None else found, None
        if left is not None:
            say_in_hand(error, left, self._marshal.config, self._driver.engine.settings)

    def _first_undone(self) -> Message | None:
        """The first message that user threads have taken and not done, of the first partition that has one."""
        with self._driver.locked(step=False):
            self._drain()
            for _, assignment in sorted(self._engine.assignments.items()):
                for run in assignment.tracker.runs.values():
                    if (found := run.first_undone) is not None:
                        return found
        return None

    # What the driver asks of it (ConsumerPort).

    def _fetch(self, changes: Mapping[Key, int | None]) -> None:
        """Carry out StartFetch and StopFetch."""
        if not self._closed:
            self._fetcher.fetch(changes)

    def _take_over(self, asked: TakeOver) -> None:
        if self._transactions is not None:
            self._transactions.take_over(asked)

    def _close_producer(self, key: Key, token: int) -> None:
        if self._transactions is not None:
            self._transactions.close_producer(key, token)

    def _look_at_ends(self) -> None:
        """Update ``_log_end`` from what the client knows, without a request to a broker (any thread; no wait)."""
        if not self._closed:
            self._fetcher.reader.look_at_ends()

    def _log_end(self, key: Key) -> int | None:
        """The log end, as of the last fetch."""
        return None if self._closed else self._fetcher.reader.high_watermark(*key)

    # Ending.

    def _end_run(self, limit: Limit) -> None:
        """Before the close: ``run`` begins nothing more; wait for its handlers, up to the limit (*blocking*)."""
        if (owner := self._delivery.in_lanes.owner) is None:
            return
        owner.is_ending = True
        with self._driver.condition:
            while not (owner.is_over or limit.is_over or self._driver.is_over):
                self._driver.condition.wait(END_LOOK_S)

    def _freed(self) -> None:
        if self._transactions is not None:
            self._transactions.end()
        self._fetcher.close()
