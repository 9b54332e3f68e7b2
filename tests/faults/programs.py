"""Programs as users write them: python programs.py NAME '{"bootstrap": …}'. A hang ends with all threads' stacks."""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kafka_marshal import Consumer, Marshal
from kafka_marshal.errors import ForkedError
from tests.interrupts import Alarms
from tests.modes import options_of

arguments: dict[str, Any] = json.loads(sys.argv[2])
TOPIC: str = arguments["topic"]

#: Programs whose whole output is compared take a longer one: a machine that pauses for a second costs no lease.
HI: int = arguments.get("hi", 500)

#: Time-out of a program.
HANGS_S: float = arguments.get("hangs_s", 8.0)


def make_marshal() -> Marshal:
    return Marshal(
        arguments["bootstrap"],
        group_id=arguments["group"],
        topic=arguments["coordination"],
        heartbeat_interval=HI / 1000,
    )


def make_consumer(marshal: Marshal) -> Consumer:
    made: Consumer = marshal.consumer([TOPIC], **options_of(arguments.get("options", {})))
    return made


# Alarms while messages are received.


class Account:
    """Received messages, and those marked as done."""

    def __init__(self, consumer: Consumer, messages: int) -> None:
        self.consumer = consumer
        self.messages = messages
        self.seen: Counter[int] = Counter()
        self.pending: list[Callable[[], object]] = []
        self.news_at = time.monotonic()

    def hand_out(self, offset: int) -> None:
        self.seen[offset] += 1
        self.news_at = time.monotonic()

    def say_done(self) -> None:
        while self.pending:
            self.pending[0]()
            self.pending.pop(0)

    @property
    def is_over(self) -> bool:
        """Whether all arrived or no more will: at most once, dropped messages never return."""
        return len(self.seen) == self.messages or time.monotonic() - self.news_at > arguments["quiet_s"]


def iterate(account: Account) -> None:
    for message in account.consumer:
        account.hand_out(message.offset() or 0)
        if account.is_over:
            break


def poll(account: Account) -> None:
    account.say_done()
    while not account.is_over:
        message = account.consumer.poll(0.05)
        if message is not None:
            account.hand_out(message.offset() or 0)
            account.pending.append(lambda message=message: account.consumer.done(message))  # type: ignore[misc]
            account.say_done()


def batches(account: Account) -> None:
    account.say_done()
    for batch in account.consumer.batches(50, 0.0):  # an alarm comes before a batch is full
        for message in batch:
            account.hand_out(message.offset() or 0)
        account.pending.append(batch.done)
        account.say_done()
        if account.is_over:
            break


def alarms() -> None:
    loop = {"iterate": iterate, "poll": poll, "batches": batches}[arguments["loop"]]
    marshal = make_marshal()
    consumer = make_consumer(marshal)
    account = Account(consumer, arguments["messages"])
    # A batch whose iterator was interrupted after delivery counts as dropped by the user.
    without = ("kafka_marshal.testing", "kafka_marshal.client.batch")
    with Alarms(arguments["longest_s"], seed=arguments["seed"], without=without) as ringing:
        while not account.is_over and len(ringing.fired) < 100_000:
            ringing.run(lambda: loop(account))
    consumer.close()
    lease = marshal.world.lease(TOPIC, 0)
    assert lease is not None
    marshal.close()
    result = {
        "rings": len(ringing.fired),
        "places": Counter(map(str, ringing.fired)).most_common(5),
        "seen": sorted(account.seen),
        "twice": sorted(offset for offset, times in account.seen.items() if times > 1),
        "stable": -1 if lease.stable is None else lease.stable,
        "ranges": lease.ranges,
        "granted": -1 if lease.granted is None else lease.granted,
        "unprocessed": consumer.unprocessed,
    }
    print(json.dumps(result), flush=True)


# Ends.


def sigterm() -> None:
    """SIGTERM's handler closes objects in the middle of a wait for messages."""
    marshal = make_marshal()
    consumer = make_consumer(marshal)

    closed: list[bool] = []

    def close(*_: object) -> None:
        closed.append(True)
        for _time in range(arguments.get("times", 1)):
            (marshal if arguments["closes"] == "marshal" else consumer).close()

    signal.signal(signal.SIGTERM, close)
    print("waiting", flush=True)
    if arguments["loop"] == "iterate":
        for _ in consumer:
            pass
    elif arguments["loop"] == "batches":
        for batch in consumer.batches(10, 0.1):
            batch.done()
    else:
        while not closed:
            consumer.poll(0.2)
    marshal.close()
    print(json.dumps({"ended": "in order"}), flush=True)


def leave() -> None:
    """The interpreter ends without any close()."""
    marshal = make_marshal()
    consumer = make_consumer(marshal)
    for _ in range(3):
        message = consumer.poll(10)
        assert message is not None
        consumer.done(message)
    if arguments["by"] == "exit":
        sys.exit(0)
    if arguments["by"] == "error":
        raise ZeroDivisionError
    if arguments["by"] == "polling":  # a thread that ignores every end

        def poll_on() -> None:
            while True:
                consumer.poll(0.1)

        threading.Thread(target=poll_on, daemon=True).start()
    if arguments["by"] == "iterating":
        for _ in consumer:
            sys.exit(0)


class Keeper:
    """Closes its object during the interpreter's shutdown, when our threads are frozen."""

    def __init__(self, marshal: Marshal) -> None:
        self.marshal = marshal

    def __del__(
        self, write: Callable[[int, bytes], int] = os.write, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        self.marshal.close()
        write(1, b"finalizing: %d" % is_finalizing())


def ends() -> None:
    """The interpreter ends while a callback hangs, or a finalizer closes the Marshal then."""
    marshal = make_marshal()
    if arguments["by"] == "atexit":
        atexit.register(marshal.close)
    elif arguments["by"] == "destructor":
        late = ModuleType("late")  # finalized before earlier imports
        late.kept = Keeper(marshal)  # type: ignore[attr-defined]
        sys.modules["late"] = late
        del late
    assigned = threading.Event()

    def on_assign(*_: object) -> None:
        assigned.set()
        if arguments["by"] == "stuck":
            threading.Event().wait()

    def on_revoke(*_: object) -> None:
        print("revoked", flush=True)

    _kept = marshal.consumer([TOPIC], on_assign=on_assign, on_revoke=on_revoke)
    assert assigned.wait(10)


def forks() -> None:
    """A fork during a waiting call: the child's copy of the call ends, and so does close() there."""
    marshal = make_marshal()
    consumer = make_consumer(marshal)
    children: list[int] = []

    def fork(*_: object) -> None:
        children.append(os.fork())

    signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        consumer.poll(2.0)
    except ForkedError:
        assert children == [0]
    if children == [0]:
        marshal.close()
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 17
    marshal.close()


def interrupt() -> None:
    """Ctrl-C out of ``with`` blocks."""
    try:
        with make_marshal() as marshal, make_consumer(marshal) as consumer:
            print("waiting", flush=True)
            for _ in consumer:
                pass
    except KeyboardInterrupt:
        print(json.dumps({"ended": "by Ctrl-C"}), flush=True)


def polls() -> None:
    """Gets messages and checks health(); reports once it was stopped and is healthy again."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    logging.basicConfig(level=logging.WARNING)
    with make_marshal() as marshal, make_consumer(marshal) as consumer:
        consumer.poll(10)
        looked_at, was_stopped = time.monotonic(), False
        print("waiting", flush=True)
        while not ended:
            consumer.poll(0.02)
            before, looked_at = looked_at, time.monotonic()
            was_stopped = was_stopped or looked_at - before > 1.0
            if was_stopped and marshal.health().ok:
                print("well again", flush=True)
                was_stopped = False


faulthandler.dump_traceback_later(HANGS_S, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
if arguments.get("quiet"):
    logging.disable(logging.CRITICAL)
{each.__name__: each for each in (alarms, sigterm, leave, interrupt, polls, ends, forks)}[sys.argv[1]]()
