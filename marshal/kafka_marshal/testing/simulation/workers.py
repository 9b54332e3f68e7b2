"""The built-in workers of a simulation: one for each way to receive messages in api.md, some with transactions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.handling import Retry
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.modes import Claims, Group, Transactions
from kafka_marshal.client.options import DEFAULT_BYTES_IN_FLIGHT
from kafka_marshal.client.ranges import RangeConsumer
from kafka_marshal.engine.policies import Balanced, Greedy, MaxClaims, Policy, ReleaseIfBehind, WholeTopic
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.errors import (
    ConfigurationError,
    GroupPausedError,
    HeldError,
    KafkaUnavailableError,
    LeaseError,
    StaleEpochError,
    TransactionError,
)
from kafka_marshal.testing.simulation.in_batches import work_in_batches
from kafka_marshal.testing.simulation.in_checkpoints import work_with_checkpoints
from kafka_marshal.testing.simulation.in_lanes import work_in_lanes
from kafka_marshal.testing.simulation.in_parks import work_in_parks
from kafka_marshal.testing.simulation.interrupting import Interrupted
from kafka_marshal.testing.simulation.ledger import OUTPUTS, output_partition
from kafka_marshal.testing.simulation.living import Host
from kafka_marshal.testing.simulation.process import FailedError, Job, Worker
from kafka_marshal.testing.simulation.scenario import Client, Counting
from kafka_marshal.types import T, TopicPartition

#: Choices of ``transaction_timeout`` (s).
TIMEOUTS = (1.0, 2.0, 5.0)
#: The share of blocks that end with an exception.
FAILING = 0.05
#: The share of handlers that take up to a heartbeat interval longer.
SLOW = 0.02


def work_in_transactions(job: Job, consumer: Consumer, lost: set[tuple[str, int]], at_once: int = 1) -> None:
    """Run until stopped; lost: partitions that were lost, maintained by callbacks.

    at_once: batches that are processed side by side, each in its own thread.
    """
    running: set[Batch] = set()

    def block(batch: Batch) -> None:
        try:
            _block(job, consumer, batch, lost)
        finally:
            running.discard(batch)

    for batch in consumer.batches(job.random.choice([5, 30]), timeout=0.05):
        lost.discard((batch.topic, batch.partition))
        job.received(batch)
        if at_once == 1:
            _block(job, consumer, batch, lost)
            continue
        running.add(batch)
        job.start(partial(block, batch))
        while len(running) >= at_once:
            job.sleep(0.005)


def _block(job: Job, consumer: Consumer, batch: Batch, lost: set[tuple[str, int]]) -> None:
    key = batch.topic, batch.partition
    try:
        with consumer.transaction(batch) as transaction:
            for message in batch:
                if key in lost:
                    raise FailedError
                job.handle(message)
                transaction.produce(OUTPUTS, _value(message), partition=output_partition(key))
            if job.random.random() < FAILING:
                raise FailedError
    except (FailedError, TransactionError, LeaseError, KafkaUnavailableError):
        return


def work_in_transactional_lanes(job: Job, marshal: Marshal, consumer: Consumer) -> None:
    """Run until stopped: many handlers, whose outputs wait for those before them."""
    chance, hi = job.random, job.heartbeat_interval_ms / 1000

    def handle(message: Message) -> None:
        attempt = Attempt.current()
        slow = chance.random() * hi if chance.random() < SLOW else 0.0
        value, partition = _value(message), output_partition((message.topic() or "", message.partition() or 0))
        if chance.random() < FAILING and not attempt.is_last:
            job.fail(message, slow)
            attempt.produce(OUTPUTS, f"{value} in vain", partition=partition)
            raise FailedError
        job.handle(message, slow)
        attempt.produce(OUTPUTS, value, partition=partition)

    retry = Retry(8, (0.02 * hi, 0.3 * hi), (FailedError,))
    while not marshal.stopping:
        consumer.run(handle, concurrency=chance.randint(2, 8), order=job.order, retry=retry)


def _value(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}/{message.offset()}"


#: Topic and partitions of the worker that claims by hand.
HAND_TOPIC = "by-hand"
HAND_PARTITIONS = 2

#: The handler timeout (HI) of the worker that hangs, and the most hangs of one of its processes.
HANDLER_INTERVALS = 2.0
HANGS = 2

#: The share of workers with lanes that have little memory, the share that ends without a release, and that memory.
SMALL_SHARE, TERMINATES_SHARE = 0.3, 0.2
SMALL_BYTES = 20_000

#: Batches that the worker has in transactions at a time.
AT_ONCE = 3

#: Workers that handle each message at once: what begins late was delivered late.
ONE_BY_ONE = frozenset({"iterate", "terminates", "explicit", "poll", "counts", "counts-explicit"})


def host_of(client: Client, hi_ms: float) -> Host:
    """The host of its processes, and what the checks may assume about them."""
    return Host(
        client.name,
        client.rate,
        is_iterating=client.worker in ONE_BY_ONE,
        in_lanes=client.worker in ("lanes", "parks", "shares-lanes", "transacts-in-lanes", "counts-lanes"),
        defers=client.worker in ("defer", "lanes", "parks", "transacts-at-once", "transacts-in-lanes"),
        shares=client.worker in ("shares", "shares-lanes"),
        fetch_ms=client.fetches_every * hi_ms,
    )


def policy_of(client: Client) -> Policy:
    """The policy by its name."""
    made: dict[str, Callable[[], Policy]] = {
        "balanced": Balanced,
        "greedy": Greedy,
        "max-claims": lambda: Balanced() & MaxClaims(3),
        "release-if-behind": lambda: Balanced() & ReleaseIfBehind(),
        "whole-topic": lambda: Balanced() & WholeTopic(),
    }
    return made[client.policy]()


def _consumer(
    job: Job,
    client: Client,
    marshal: Marshal,
    lost: set[tuple[str, int]] | None = None,
    auto_done: bool = True,
    begin: Callable[[Consumer, TopicPartition], object] | None = None,
    shares: bool = False,
    **more: object,
) -> Consumer:
    """The client's consumer; lost: maintained by its callbacks; begin: called with each assignment.

    shares: of a group: it may have some keys of a partition. more: other options.
    """
    gone = set() if lost is None else lost

    def on_lost(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone.update((x.topic, x.partition) for x in partitions)

    def on_assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone.difference_update((x.topic, x.partition) for x in partitions)
        if begin is not None:
            for assigned in partitions:
                begin(consumer, assigned)

    make = partial(
        _taker(job, client, marshal, shares),
        job.topics if job.random.random() < 0.8 else [f"^({'|'.join(job.topics)})$"],
        delivery=job.delivery,
        batch_size=job.random.choice([10, 20, 50, 50]),
        auto_done=auto_done,
        start="latest" if client.worker == "latest" else "earliest",
        on_assign=on_assign,
        on_lost=on_lost,
        **{"handler_timeout": job.random.choice([None, None, 8 * job.heartbeat_interval_ms / 1000]), **more},
    )
    return _made(job, make)


def _taker(job: Job, client: Client, marshal: Marshal, shares: bool = False) -> Callable[..., Consumer]:
    """The method that makes its consumer: one that claims, or a member of a coordinated group."""
    if job.strategy is not None:
        mode = Group(strategy=job.strategy, session_timeout=job.session_timeout, allow_key_share=shares)
        return partial(marshal.consumer, mode=mode)
    ahead = job.delivery == "at-most-once" and client.claims_ahead
    return partial(marshal.consumer, mode=Claims(policy=policy_of(client), claim_ahead=ahead))


def _made(job: Job, make: Callable[[], Consumer]) -> Consumer:
    """Make a consumer; if an interrupt kept one from its caller, retry until that one is closed."""
    while True:
        try:
            return job.again(make)
        except ConfigurationError:
            if not job.is_interrupted:
                raise
            job.sleep(0.05)


class _Patient:
    """A consumer whose calls are sometimes interrupted: each is repeated, as a user's loop does."""

    def __init__(self, job: Job, consumer: Consumer) -> None:
        self._job = job
        self._consumer = consumer

    def __iter__(self) -> Iterator[Message]:
        return self._through(lambda: iter(self._consumer))

    def batches(self, max_messages: int, timeout: float) -> Iterator[Batch]:
        return self._through(lambda: self._consumer.batches(max_messages, timeout))

    def _through(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        over = object()
        while True:
            things = begin()
            while True:
                try:
                    thing = self._job.call(next, things, over)
                except Interrupted:
                    break
                if thing is over:
                    return
                yield cast("T", thing)
                del thing

    def poll(self, timeout: float) -> Message | None:
        return self._job.again(self._consumer.poll, timeout)

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        return self._job.again(self._consumer.consume, num_messages, timeout)

    def done(self, message: Message) -> None:
        self._job.again(self._consumer.done, message)


def _calls(job: Job, consumer: Consumer) -> Consumer | _Patient:
    """The consumer for a loop."""
    return _Patient(job, consumer) if job.is_interrupted else consumer


def _iterate(job: Job, client: Client) -> None:
    with job.marshal() as marshal, _consumer(job, client, marshal) as consumer:
        while not marshal.stopping:
            for message in _calls(job, consumer):
                if job.random.random() < 0.002 and job.delivery == "at-least-once":
                    break  # messages in flight at a break are delivered again
                job.handle(message)


def _terminates(job: Job, client: Client) -> None:
    """Ends without a release and restarts soon: takes over from itself (C7)."""
    with job.marshal() as marshal, _consumer(job, client, marshal) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: marshal.terminate())
        for message in _calls(job, consumer):
            job.handle(message)


def _explicit(job: Job, client: Client) -> None:
    with job.marshal() as marshal, _consumer(job, client, marshal, auto_done=False) as made:
        consumer = _calls(job, made)
        for message in consumer:
            job.handle(message)
            consumer.done(message)


def _poll(job: Job, client: Client) -> None:
    with job.marshal() as marshal, _consumer(job, client, marshal) as made:
        consumer = _calls(job, made)
        while not marshal.stopping:
            message = consumer.poll(0.2)
            if message is not None:
                job.handle(message)
                consumer.done(message)


def _consume(job: Job, client: Client) -> None:
    """Several at a time, done in any order; messages of lost leases are skipped."""
    lost: set[tuple[str, int]] = set()
    with job.marshal() as marshal, _consumer(job, client, marshal, lost) as made:
        consumer = _calls(job, made)
        while not marshal.stopping:
            lost.clear()  # before the call, as leases may be lost while it waits
            messages = consumer.consume(job.random.choice([3, 20]), 0.2)
            job.received(messages)
            if job.delivery == "at-least-once":
                job.random.shuffle(messages)
            while messages:  # none is kept: skipped messages of lost leases are given back by that (C18, G20)
                message = messages.pop(0)
                if job.delivery == "at-most-once" or (message.topic(), message.partition()) not in lost:
                    job.handle(message)
                    consumer.done(message)
                del message


def _defer(job: Job, client: Client) -> None:
    """Defers some messages and marks others as done meanwhile, so that there are gaps."""
    lost: set[tuple[str, int]] = set()
    aside: list[tuple[float, Message]] = []
    ripe: list[tuple[float, Message]] = []
    hi = job.heartbeat_interval_ms / 1000

    def begin(consumer: Consumer, assigned: TopicPartition) -> None:
        """Drop messages of a lease that was lost while the loop below was busy (seeds 1004480, 9007429)."""
        drop({(assigned.topic, assigned.partition)})

    def drop(partitions: set[tuple[str, int]]) -> None:
        for entries in (aside, ripe):
            entries[:] = [entry for entry in entries if (entry[1].topic(), entry[1].partition()) not in partitions]

    with job.marshal() as marshal, _consumer(job, client, marshal, lost, begin=begin) as consumer:
        while not marshal.stopping:
            message = consumer.poll(hi / 4)
            drop(lost)
            ripe += [entry for entry in aside if entry[0] <= job.monotonic()]
            aside[:] = [entry for entry in aside if entry not in ripe]
            if message is not None and job.random.random() < 0.2:
                aside.append((job.monotonic() + job.random.uniform(0.3, 2.0) * hi, message))
            elif message is not None:
                ripe.append((0.0, message))
            while ripe:
                _, one = ripe.pop(0)
                if (one.topic(), one.partition()) not in lost:
                    job.handle(one)
                    consumer.done(one)
                del one


def _batches(job: Job, client: Client) -> None:
    lost: set[tuple[str, int]] = set()
    with job.marshal() as marshal, _consumer(job, client, marshal, lost) as consumer:
        for batch in _calls(job, consumer).batches(job.random.choice([5, 30]), timeout=0.05):
            lost.discard((batch.topic, batch.partition))
            job.received(batch)
            for message in batch:
                if job.delivery == "at-least-once" and (batch.topic, batch.partition) in lost:
                    break
                job.handle(message)
            else:
                batch.done()
            del batch  # one of a lost lease that is kept stays in flight: an evicted member would not join again


def _fenced(job: Job, client: Client) -> None:
    """As in api.md: the database's last offset decides what is written."""
    with job.marshal() as marshal, _consumer(job, client, marshal) as consumer:
        for batch in _calls(job, consumer).batches(job.random.choice([5, 30]), timeout=0.05):
            job.sleep(len(batch) * job.random.uniform(0.0005, 0.004) * job.slowness)
            try:
                with job.database.transaction() as tx:
                    last = tx.fence(batch.topic, batch.partition, batch.epoch)
                    tx.write(message for message in batch if (message.offset() or 0) > last)
                    tx.set_last(batch.topic, batch.partition, max(last, batch.last_offset))
            except StaleEpochError:
                continue
            batch.done()


def _ahead(job: Job, client: Client) -> None:
    """Seeks behind the database's last offset when a partition is assigned, instead of filtering each batch."""
    begins: dict[tuple[str, int, int], int] = {}

    def begin(consumer: Consumer, assigned: TopicPartition) -> None:
        topic, partition, position, epoch = assigned
        try:
            with job.database.transaction() as tx:
                last = tx.fence(topic, partition, epoch)
        except StaleEpochError:
            return
        if last + 1 >= position:
            try:
                consumer.seek(topic, partition, last + 1)
            except ConfigurationError:  # it is assigned no more
                return
            begins[topic, partition, epoch] = last + 1

    with job.marshal() as marshal, _consumer(job, client, marshal, begin=begin) as consumer:
        for batch in consumer.batches(job.random.choice([5, 30]), timeout=0.05):
            if batch.first_offset < begins.get((batch.topic, batch.partition, batch.epoch), 0):
                raise RuntimeError(f"{batch} was delivered behind a seek")
            job.sleep(len(batch) * job.random.uniform(0.0005, 0.004) * job.slowness)
            try:
                with job.database.transaction() as tx:
                    tx.fence(batch.topic, batch.partition, batch.epoch)
                    tx.write(batch)
                    tx.set_last(batch.topic, batch.partition, batch.last_offset)
            except StaleEpochError:
                continue
            batch.done()


def _holds_back(job: Job, client: Client) -> None:
    """Pauses some partitions for a while and keeps their leases."""
    held: dict[tuple[str, int], int] = {}
    hi = job.heartbeat_interval_ms / 1000
    iterates = job.random.random() < 0.5

    def hold(consumer: Consumer, chosen: TopicPartition) -> None:
        topic, partition, _, epoch = chosen
        consumer.pause([(topic, partition)])
        held[topic, partition] = epoch
        if _has(consumer, topic, partition, epoch):
            job.sleep(job.random.uniform(0.3, 3.0) * hi)
        del held[topic, partition]
        consumer.resume([(topic, partition)])

    with job.marshal() as marshal, _consumer(job, client, marshal) as consumer:
        for message in consumer if iterates else _polled(consumer, marshal):
            topic, partition = message.topic() or "", message.partition() or 0
            if (topic, partition) in held and _has(consumer, topic, partition, held[topic, partition]):
                raise RuntimeError(f"{topic} [{partition}] is paused, and offset {message.offset()} was delivered")
            open_ones = [x for x in consumer.assignment() if (x.topic, x.partition) not in held]
            if open_ones and job.random.random() < 0.05:
                chosen = job.random.choice(open_ones)
                held[chosen.topic, chosen.partition] = -1
                job.start(partial(hold, consumer, chosen))
            job.handle(message)
            if not iterates:
                consumer.done(message)


def _polled(consumer: Consumer, marshal: Marshal) -> Iterator[Message]:
    while not marshal.stopping:
        if (message := consumer.poll(0.1)) is not None:
            yield message


def _has(consumer: Consumer, topic: str, partition: int, epoch: int) -> bool:
    """Whether this assignment still exists."""
    return any((x.topic, x.partition, x.epoch) == (topic, partition, epoch) for x in consumer.assignment())


def _of(said: TopicPartition) -> tuple[str, int, int]:
    """(topic, partition, token) of a lease or of a piece of a coordinated group."""
    return said.topic, said.partition, said.epoch


class _Callbacks:
    """Checks a consumer's callbacks against the messages that it delivers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._hi = job.heartbeat_interval_ms / 1000
        #: (topic, partition) → epoch: assigned, neither revoked nor lost.
        self._open: dict[tuple[str, int], int] = {}
        #: Revoked; may still be lost until the release.
        self._revoked: dict[tuple[str, int], int] = {}
        #: Gone when on_revoke returned: on_lost must follow.
        self._owed: set[tuple[str, int]] = set()
        self._hangs = 0
        self.wrong = ""

    def on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for topic, partition, epoch in map(_of, partitions):
            if (topic, partition) in self._open:
                self.wrong = f"{topic} [{partition}] was assigned again, and neither revoked nor lost before"
            if (topic, partition) in self._owed:
                self.wrong = f"{topic} [{partition}] was released before on_revoke returned"
            if self._revoked.get((topic, partition)) == epoch:  # the revocation was withdrawn before the release (G18)
                del self._revoked[topic, partition]
            self._job.sleep(self._job.random.uniform(0.0, 0.1) * self._hi)
            self._open[topic, partition] = epoch

    def on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for topic, partition, epoch in map(_of, partitions):
            self._ends(topic, partition, epoch, "revoked")
            self._revoked[topic, partition] = epoch
            self._job.sleep(self._job.random.uniform(0.0, 0.08) * self._hi)
            if not _has(consumer, topic, partition, epoch):
                self._owed.add((topic, partition))

    def on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for topic, partition, epoch in map(_of, partitions):
            self._owed.discard((topic, partition))
            if self._revoked.pop((topic, partition), None) != epoch:
                self._ends(topic, partition, epoch, "lost")

    def _ends(self, topic: str, partition: int, epoch: int, how: str) -> None:
        if self._open.pop((topic, partition), None) != epoch:
            self.wrong = f"{topic} [{partition}], epoch {epoch}, was {how}, and was not assigned before"

    def check_assigned(self, message: Message) -> None:
        """A delivered message is of an assigned partition, or, at most once, of the rest of a grant."""
        key = (message.topic() or "", message.partition() or 0)
        if key not in self._open and (self._job.delivery == "at-least-once" or key not in self._revoked):
            self.wrong = f"{message.topic()} [{message.partition()}] was delivered, and is not assigned"

    def hang(self, consumer: Consumer, message: Message) -> None:
        """Sometimes hang for longer than the handler timeout: then all leases must be given up."""
        topic, partition = message.topic() or "", message.partition() or 0
        epoch = self._open.get((topic, partition), -1)
        if self._hangs < HANGS and self._job.random.random() < 0.01:
            self._hangs += 1
            over = self._job.monotonic() + HANDLER_INTERVALS * self._hi
            while self._job.monotonic() < over:
                self._job.sleep(0.1 * self._hi)
            for _ in range(15):  # in slices: a stop of the process, however long, counts as one
                self._job.sleep(0.1 * self._hi)
            if _has(consumer, topic, partition, epoch) or self._open:
                self.wrong = f"{topic} [{partition}] or another is held still, an HI after its handler's time was over"

    def end(self) -> None:
        """Check a closed consumer."""
        if self._open and not self.wrong:
            self.wrong = f"the consumer is closed, and of {sorted(self._open)} it got neither on_revoke nor on_lost"
        self.check()

    def check(self) -> None:
        if self.wrong:
            raise RuntimeError(self.wrong)


def _callbacks(job: Job, client: Client) -> None:
    """Checks its callbacks, which take their time; some of its handlers hang."""
    callbacks, timeout = _Callbacks(job), HANDLER_INTERVALS * job.heartbeat_interval_ms / 1000
    with job.marshal() as marshal:
        with _taker(job, client, marshal)(
            job.topics,
            delivery=job.delivery,
            handler_timeout=timeout,
            on_assign=callbacks.on_assign,
            on_revoke=callbacks.on_revoke,
            on_lost=callbacks.on_lost,
        ) as consumer:
            for message in _polled(consumer, marshal):
                callbacks.check_assigned(message)
                callbacks.check()
                job.handle(message)
                callbacks.hang(consumer, message)
                consumer.done(message)
        callbacks.end()


def _lanes(job: Job, client: Client) -> None:
    """Many parallel handlers, in order by key or partition."""
    most = SMALL_BYTES if job.random.random() < SMALL_SHARE else DEFAULT_BYTES_IN_FLIGHT
    timeout = job.random.choice([None, HANDLER_INTERVALS * job.heartbeat_interval_ms / 1000])
    make = partial(_consumer, handler_timeout=timeout, max_bytes_in_flight=most)
    with job.marshal() as marshal, make(job, client, marshal) as consumer:
        if job.random.random() < TERMINATES_SHARE:
            signal.signal(signal.SIGTERM, lambda *_: marshal.terminate())
        work_in_lanes(job, marshal, consumer, timeout)


def _parks(job: Job, client: Client) -> None:
    """Many parallel handlers; what always fails is set aside."""
    with job.marshal() as marshal, _consumer(job, client, marshal, shares=True, handler_timeout=None) as consumer:
        work_in_parks(job, marshal, consumer)


def _transacts(job: Job, client: Client) -> None:
    """Outputs and progress in one transaction for each batch, or for blocks of messages that handlers have finished."""
    lost: set[tuple[str, int]] = set()
    make = partial(_consumer, exactly_once=Transactions(timeout=job.random.choice(TIMEOUTS)))
    with job.marshal() as marshal, make(job, client, marshal, lost) as consumer:
        if client.worker == "transacts-in-lanes":
            work_in_transactional_lanes(job, marshal, consumer)
        else:
            work_in_transactions(job, consumer, lost, AT_ONCE if client.worker == "transacts-at-once" else 1)


def _by_hand(job: Job, client: Client) -> None:
    with job.marshal() as marshal:
        while not marshal.stopping:
            partition = job.random.randrange(HAND_PARTITIONS)
            try:
                with marshal.claim(HAND_TOPIC, partition, timeout=1.0) as lease:
                    for _ in range(job.random.randint(1, 20)):
                        offset = -1 if lease.last_offset is None else lease.last_offset
                        lease.require()
                        if job.delivery == "at-most-once":
                            lease.grant(offset + 1)
                        job.handle(MemoryMessage(HAND_TOPIC, partition, offset + 1, None, b"", (1, 0)))
                        lease.heartbeat(offset + 1)
                        job.sleep(job.random.random() * job.heartbeat_interval_ms / 1000)
            except (HeldError, GroupPausedError, LeaseError):
                job.sleep(0.1)


def _ranges(job: Job, client: Client) -> None:
    """As Spark does: offsets, not messages; some ranges are given back, some stay open while others are done."""
    kept: list[OffsetRange] = []
    once, mode = job.delivery == "at-most-once", Claims(policy=policy_of(client))
    with job.marshal() as marshal, marshal.ranges(job.topics, delivery=job.delivery, mode=mode) as consumer:
        while not marshal.stopping:
            taken = consumer.take(job.random.choice([5, 40]), timeout=0.2)
            for new in taken:
                for old in kept:
                    same = (new.topic, new.partition, new.epoch) == (old.topic, old.partition, old.epoch)
                    if same and old.first <= new.last and new.first <= old.last:
                        raise RuntimeError(f"{new} was delivered while {old} was open")
            for given in [*kept, *taken]:
                chance = job.random.random()
                if chance < 0.3 and given not in kept:
                    kept.append(given)
                    continue
                kept = [x for x in kept if x != given]
                if (chance < 0.8 or once) and _handle_range(job, consumer, given):
                    consumer.done([given], flush=chance < 0.5)
                else:
                    consumer.give_back([given])
            if job.random.random() < 0.3:
                consumer.look_ahead()
        consumer.give_back(kept)


def _handle_range(job: Job, consumer: RangeConsumer, given: OffsetRange) -> bool:
    """Handle a range; returns whether its lease held to the end."""
    done = {offset for first, last in given.done for offset in range(first, last + 1)}
    for offset in range(given.first, given.last + 1):
        if offset not in done:
            if not consumer.is_valid(given):
                return False
            job.handle(MemoryMessage(given.topic, given.partition, offset, None, b"", (1, 0)))
    return True


_WORKERS: dict[str, Callable[[Job, Client], None]] = {
    "iterate": _iterate,
    "latest": _iterate,  # from where the logs end when the group first gets them
    "terminates": _terminates,
    "explicit": _explicit,
    "poll": _poll,
    "consume": _consume,
    "defer": _defer,
    "batches": _batches,
    "fenced": _fenced,
    "ahead": _ahead,
    "holds-back": _holds_back,
    "callbacks": _callbacks,
    "lanes": _lanes,
    "parks": _parks,
    **dict.fromkeys(("transacts", "transacts-at-once", "transacts-in-lanes"), _transacts),
    **dict.fromkeys(("shares", "shares-lanes"), work_in_batches),
    "by-hand": _by_hand,
    "ranges": _ranges,
}


def built_in(client: Client, counting: Counting | None = None) -> Worker:
    """The worker that a client runs; counting: how its group takes checkpoints."""
    if counting is not None:
        return lambda job: work_with_checkpoints(job, client, counting)
    worker = _WORKERS[client.worker]
    return lambda job: worker(job, client)
