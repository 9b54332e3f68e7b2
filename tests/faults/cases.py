"""Interrupted calls: every way to get messages, and every other public call. Each is an attempt for ``sweep``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from kafka_marshal import Admin, ClaimedLease, ConfigurationError, Consumer, HeldError, Hooks, Marshal, MarshalError
from kafka_marshal import Attempt as Attempt_
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.handling import Handler
from kafka_marshal.errors import ClosedError
from tests.faults.stories import (
    AGAIN_S,
    ANSWER_S,
    GROUP,
    HI,
    PARTITIONS,
    TOPIC,
    Story,
    answer,
    await_assigned,
    is_ours,
    member,
    memory_cluster,
)
from tests.interrupts import Interrupts, stacks

Attempt = Callable[[Interrupts], None]

#: No longer than a run takes: most interrupts occur in waits.
WAIT_S = 0.02


# Getting messages.


def iterate(story: Story, consumer: Consumer) -> None:
    for message in consumer:
        story.hand_out(message)
        if story.is_complete:
            break


def iterate_done(story: Story, consumer: Consumer) -> None:
    story.say_done()
    for message in consumer:
        story.will_do([story.hand_out(message)], partial(consumer.done, message))
        story.say_done()
        if story.is_complete:
            break


def poll(story: Story, consumer: Consumer) -> None:
    story.say_done()
    while not story.is_complete and not story.marshal.stopping:
        message = consumer.poll(WAIT_S)
        if message is not None:
            story.will_do([story.hand_out(message)], partial(consumer.done, message))
            story.say_done()


def consume(story: Story, consumer: Consumer) -> None:
    story.say_done()
    while not story.is_complete and not story.marshal.stopping:
        for message in consumer.consume(4, WAIT_S):
            story.will_do([story.hand_out(message)], partial(consumer.done, message))
        story.say_done()


def batches(story: Story, consumer: Consumer) -> None:
    story.say_done()
    for batch in consumer.batches(4, WAIT_S):
        story.will_do([story.hand_out(message) for message in batch.messages], batch.done)
        story.say_done()
        if story.is_complete:
            break


def batches_late(story: Story, consumer: Consumer) -> None:
    """A batch is done when the next one has arrived, as if other threads handled them."""
    for batch in consumer.batches(4, WAIT_S):
        before = len(story.pending)
        story.will_do([story.hand_out(message) for message in batch.messages], batch.done)
        if before:
            story.say_done(leave=1)
        if story.everything <= story.seen.keys():
            story.say_done()
            break


def run_threads(story: Story, consumer: Consumer) -> None:
    _run(story, consumer, partial(_handled, story))


def run_coroutines(story: Story, consumer: Consumer) -> None:
    async def handle(message: Any) -> None:
        await asyncio.sleep(0)
        _handled(story, message)

    _run(story, consumer, handle)


def _handled(story: Story, message: Any) -> None:
    story.hand_out(message)
    if story.is_complete:
        story.marshal.stop()


def _run(story: Story, consumer: Consumer, handle: Handler) -> None:
    """Messages whose handler has returned are done, whatever the result of the call."""

    def after(attempt: Attempt_, _seconds: float) -> None:
        message = attempt.message
        story.done.add((message.partition() or 0, message.offset() or 0))

    consumer.run(handle, concurrency=2, order="partition", hooks=[Hooks(after=after)])


def run_and_iterate(story: Story, consumer: Consumer) -> None:
    """A loop continues after an interrupted run."""
    (iterate if story.was_interrupted else run_threads)(story, consumer)


def delivering(loop: Callable[[Story, Consumer], None], **options: Any) -> Attempt:
    def attempt(interrupts: Interrupts) -> None:
        story = Story(**options)
        consumer = story.make_consumer()
        story.work(interrupts, lambda story: loop(story, consumer))
        story.check(consumer)

    return attempt


# Other calls of a consumer, followed by an uninterrupted loop.


def steering(act: Callable[[Story, Consumer], object], **options: Any) -> Attempt:
    def attempt(interrupts: Interrupts) -> None:
        story = Story(**options)
        consumer = story.make_consumer()
        await_assigned(consumer)
        story.interrupted(interrupts, lambda: act(story, consumer))
        story.work(Interrupts(None), lambda story: poll(story, consumer))
        story.check(consumer)

    return attempt


def pause_resume(_story: Story, consumer: Consumer) -> None:
    consumer.pause()
    consumer.assignment()
    consumer.resume()


def seek(story: Story, consumer: Consumer) -> None:
    story.skipped |= {(0, 0), (0, 1), (0, 2)}
    if consumer.assignment()[0].offset < 3:
        consumer.seek(TOPIC, 0, 3)


def look(story: Story, consumer: Consumer) -> None:
    _ = consumer.unprocessed, consumer.gaps, consumer.ignored_done, consumer.assignment()
    _ = story.marshal.world.leases(), story.marshal.world.log_time, story.marshal.alarms
    story.marshal.world.wait_for(lambda world: world.lease(TOPIC, 0), 1.0)


def make_consumer(interrupts: Interrupts) -> None:
    """Interrupted, it leaves no unreferenced consumer behind: another one of the same topic gets everything."""
    story = Story()
    consumer = again(lambda: story.interrupted(interrupts, story.make_consumer))
    story.work(Interrupts(None), lambda story: poll(story, consumer))
    story.check(consumer)


def again(call: Callable[[], Any]) -> Any:
    """Call until it succeeds: an interrupted call may need some intervals to be cleaned up."""
    until = time.monotonic() + AGAIN_S
    while True:
        try:
            return call()
        except MarshalError as error:
            assert time.monotonic() < until, (
                f"refused for {AGAIN_S:g} s, for what was interrupted is there still: {error}"
            )
            time.sleep(0.01)


def close_consumer(interrupts: Interrupts) -> None:
    story = Story()
    consumer = story.make_consumer()
    first = consumer.poll(AGAIN_S)
    assert first is not None
    story.will_do([story.hand_out(first)], partial(consumer.done, first))
    story.say_done()
    story.interrupted(interrupts, consumer.close)
    others_get_it(story)
    story.close()


def close_marshal(interrupts: Interrupts) -> None:
    story = Story()
    consumer = story.make_consumer()
    await_assigned(consumer)
    story.interrupted(interrupts, story.marshal.close)
    others_get_it(story)
    story.close()


def with_consumer(interrupts: Interrupts) -> None:
    """A user's program that ends with the interrupt: its ``with`` blocks have closed everything."""
    story = Story()

    def program() -> None:
        with story.marshal, story.make_consumer() as consumer:
            message = consumer.poll(AGAIN_S)
            assert message is not None
            consumer.done(message)

    story.interrupted(interrupts, program, once=True)
    story.marshal.close()  # __exit__ may have been interrupted
    others_get_it(story)
    story.close()


def make_marshal(interrupts: Interrupts) -> None:
    story = Story()
    made: Marshal = story.interrupted(interrupts, lambda: member(story.cluster, "b"))
    answer("Marshal.close()", made.close)
    story.close()


def others_get_it(story: Story) -> None:
    """Another member can claim all partitions while the first one lives."""
    other = member(story.cluster, "other")
    try:
        for partition in range(PARTITIONS):
            claim_free(other, partition).release()
    finally:
        answer("close() of another member", other.close)


def claim_free(marshal: Marshal, partition: int = 0) -> ClaimedLease:
    try:
        return marshal.claim(TOPIC, partition, timeout=AGAIN_S)
    except HeldError as error:
        raise AssertionError(f"leased for {AGAIN_S:g} s by who does not know of it: {error}") from error


# A signal handler that closes and returns.


def closing(
    loop: Callable[[Story, Consumer], None], close: Callable[[Story, Consumer], object], **options: Any
) -> Attempt:
    """It ends at every line, and so does the loop; others get the partitions at once."""

    def attempt(interrupts: Interrupts) -> None:
        story = Story(**options)
        consumer = story.make_consumer()
        await_assigned(consumer)
        interrupts.handler = lambda: close(story, consumer)
        with interrupts, suppress(ClosedError):
            loop(story, consumer)
        answer("Consumer.close()", consumer.close)
        story.check_nothing_lost(consumer)
        others_get_it(story)
        story.close()

    return attempt


def close_the_consumer(story: Story, consumer: Consumer) -> None:
    consumer.close()
    story.marshal.stop()  # ends loops of poll()


def close_the_marshal(story: Story, _consumer: Consumer) -> None:
    story.marshal.close()


# Leases claimed by hand.


def claim(interrupts: Interrupts) -> None:
    """Interrupted, it leaves no unreferenced lease behind."""
    story = Story()
    leases: list[ClaimedLease] = []
    story.interrupted(interrupts, lambda: leases.append(story.marshal.claim(TOPIC, 0, timeout=1.0)), once=True)
    for lease in leases:
        assert lease.valid
        lease.release()
    others_get_it(story)
    again(lambda: story.marshal.claim(TOPIC, 0, timeout=1.0)).release()
    story.close()


def claim_in_with(interrupts: Interrupts) -> None:
    story = Story()
    leases: list[ClaimedLease] = []

    def program() -> None:
        with story.marshal.claim(TOPIC, 0, timeout=1.0) as lease:
            leases.append(lease)
            lease.heartbeat(1)

    story.interrupted(interrupts, program, once=True)
    for lease in leases:
        lease.release()  # __exit__ may have been interrupted
    others_get_it(story)
    story.close()


#: An answer that the log does not show within two of these ends the lease: that of a stopped machine, too.
LONG_HI = 2_000


def leased(act: Callable[[ClaimedLease], object]) -> Attempt:
    def attempt(interrupts: Interrupts) -> None:
        story = Story(hi=LONG_HI)
        lease = story.marshal.claim(TOPIC, 0, timeout=1.0)
        story.interrupted(interrupts, lambda: act(lease))
        answer("a call of another thread", lambda: (lease.last_offset, story.marshal.world.leases()))
        answer("Lease.release()", lease.release)
        others_get_it(story)
        story.close()

    return attempt


def grant(lease: ClaimedLease) -> None:
    with suppress(ConfigurationError):  # interrupted, it may still have been granted
        lease.grant(3)


# Ranges.


def ranging(*, gives_back: bool = False, **options: Any) -> Attempt:
    def attempt(interrupts: Interrupts) -> None:
        story = Story(**options)
        consumer = story.marshal.ranges([TOPIC], **options)
        backs: list[Any] = []

        def loop(story: Story) -> None:
            story.say_done()
            while not story.is_complete and not story.marshal.stopping:
                while backs:
                    consumer.give_back([backs[0]])
                    backs.pop()
                taken = consumer.take(4, timeout=WAIT_S)
                if gives_back and taken and not story.seen:
                    backs.append(taken.pop())
                for given in taken:
                    story.will_do(story.hand_out_range(given), partial(consumer.done, [given]))
                story.say_done()

        story.work(interrupts, loop)
        story.check(consumer)

    return attempt


# Admins.

#: Longer than any test, so that a remaining pause is noticed.
EXPIRES_S = 600.0


def an_admin(cluster: MemoryCluster, client_id: str) -> Admin:
    return Admin.on_cluster(lambda: cluster.connect(client_id), client_id=client_id, heartbeat_interval=HI / 1000)


def administering(
    act: Callable[[Admin], object], check: Callable[[Admin], object] = lambda _: None, leased: bool = False
) -> Attempt:
    """Interrupted anywhere, it leaves no thread, pause or lease behind, and another admin can continue."""

    def attempt(interrupts: Interrupts) -> None:
        before = set(threading.enumerate())
        cluster = memory_cluster()
        if leased:
            dead = member(cluster)
            dead.claim(TOPIC, 0).heartbeat(1)
            dead.terminate()
        try:
            with interrupts:
                act(an_admin(cluster, "ops"))
        except BaseException as error:
            if not isinstance(error, interrupts.exception):  # type: ignore[arg-type]
                raise
        other = an_admin(cluster, "other")
        until = time.monotonic() + AGAIN_S
        while pauses := other.pauses(GROUP):
            assert time.monotonic() < until, f"still paused after {AGAIN_S:g} s: {pauses}"
            time.sleep(0.005)
        check(other)
        with other.pause(GROUP, EXPIRES_S) as pause:
            assert pause.wait_released(AGAIN_S) is not None
        assert other.pauses(GROUP) == []
        while left := sorted(each.name for each in set(threading.enumerate()) - before if is_ours(each)):
            assert time.monotonic() < until + ANSWER_S, f"threads are left: {left}\n{stacks()}"
            time.sleep(0.005)

    return attempt


def look_while_paused(admin: Admin) -> None:
    with admin.pause(GROUP, EXPIRES_S) as pause:
        pause.wait_released(AGAIN_S)
        pause.check()
        _ = pause.in_hand(), pause.signs_of_life, pause.seconds_left


def reposition(admin: Admin) -> None:
    with admin.pause(GROUP, EXPIRES_S) as pause:
        pause.wait_released(AGAIN_S)
        pause.reposition({(TOPIC, partition): 3 for partition in range(PARTITIONS)})


def check_moved_whole(admin: Admin) -> None:
    stable = [lease.stable for lease in admin.progress(GROUP)]
    assert stable in ([], [None], [None] * PARTITIONS, [2] * PARTITIONS), f"moved in a part: {stable}"


def evict_and_resume(admin: Admin) -> None:
    admin.evict(GROUP, TOPIC, 0, force=True)
    admin.resume(GROUP)


ONCE: dict[str, Any] = {"delivery": "at-most-once", "batch_size": 4}
ONCE_RANGES: dict[str, Any] = {"delivery": "at-most-once"}

CASES: dict[str, Attempt] = {
    "iterate": delivering(iterate),
    "iterate, auto_done=False": delivering(iterate_done, auto_done=False),
    "poll": delivering(poll),
    "consume": delivering(consume),
    "batches": delivering(batches),
    "batches, done later": delivering(batches_late),
    "run: threads": delivering(run_threads),
    "run: coroutines": delivering(run_coroutines),
    "run, then iterate": delivering(run_and_iterate),
    "at most once: iterate": delivering(iterate, **ONCE),
    "at most once: poll": delivering(poll, **ONCE),
    "at most once: consume": delivering(consume, **ONCE),
    "at most once: batches": delivering(batches, **ONCE),
    "claim_ahead: iterate": delivering(iterate, claim_ahead=True, **ONCE),
    "claim_ahead: poll": delivering(poll, claim_ahead=True, **ONCE),
    "claim_ahead: batches": delivering(batches, claim_ahead=True, **ONCE),
    "pause, assignment, resume": steering(pause_resume),
    "at most once: pause, assignment, resume": steering(pause_resume, **ONCE),
    "seek": steering(seek),
    "world and properties": steering(look),
    "Marshal()": make_marshal,
    "Marshal.consumer()": make_consumer,
    "Consumer.close()": close_consumer,
    "Marshal.close()": close_marshal,
    "with marshal, consumer": with_consumer,
    "a handler closes the consumer: iterate": closing(iterate, close_the_consumer),
    "a handler closes the consumer: poll": closing(poll, close_the_consumer),
    "at most once: a handler closes the consumer: iterate": closing(iterate, close_the_consumer, **ONCE),
    "at most once: a handler closes the consumer: poll": closing(poll, close_the_consumer, **ONCE),
    "at most once: a handler closes the marshal: batches": closing(batches, close_the_marshal, **ONCE),
    "at most once: a handler closes the consumer: consume": closing(consume, close_the_consumer, **ONCE),
    "claim": claim,
    "with claim": claim_in_with,
    "Lease.heartbeat()": leased(lambda lease: lease.heartbeat(2)),
    "Lease.grant()": leased(grant),
    "Lease.release()": leased(lambda lease: lease.release(2)),
    "ranges": ranging(),
    "ranges, give_back": ranging(gives_back=True),
    "at most once: ranges": ranging(**ONCE_RANGES),
    "Admin.pause()": administering(look_while_paused),
    "Pause.reposition()": administering(reposition, check_moved_whole),
    "Admin.forget()": administering(lambda admin: admin.forget(GROUP)),
    "Admin.evict(), resume()": administering(evict_and_resume, leased=True),
}
