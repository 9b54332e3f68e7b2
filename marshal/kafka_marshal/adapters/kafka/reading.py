"""What both readers need of a librdkafka consumer: fast reads, commands that never wait, a close that is safe.

``consume(n, timeout)`` waits until it has n messages *or* the timeout is over. Asking it for many would hold back the
first one; asking it for one at a time is slow. Hence :meth:`Reading.read`: first take what is there, and only if
nothing is there wait for one message and take what came with it.

confluent-kafka lets only one thread at a time into a consumer, and a thread that waits in ``poll`` keeps the others
out. So only the reading thread calls it while it reads: another thread leaves a command, which the reading thread
carries out within a slice. If no thread reads, the command is carried out at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import Message as KafkaMessage

from kafka_marshal.adapters.kafka.errors import LOGGER, Troubles, configuration_error
from kafka_marshal.errors import ClosedError


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a wait checks for commands, for a close() from another thread, and for errors passed to callbacks."""

    slice_s: float
    #: If nothing has come for this long, a wait checks less often, as each check costs some 50 microseconds: ever
    #: longer waits, each with the time (s) after which it begins.
    quiet: tuple[tuple[float, float], ...] = ()

    def wait_s(self, quiet_for_s: float) -> float:
        """How long one wait may last if nothing has come for this long."""
        return next((wait_s for after_s, wait_s in reversed(self.quiet) if quiet_for_s > after_s), self.slice_s)


#: The longest wait that wakes a thread once: confluent-kafka cuts longer ones into pieces of this, to look for Ctrl-C.
LONGEST_WAIT_S = 0.2

#: 200 checks a second cost two thirds of a percent of a core, 40 a fifth of that; a command then waits for up to 25 ms,
#: and in a member all of whose partitions have been silent for long, for up to 200 ms.
STEERED = Pace(0.005, ((1.0, 0.025), (5.0, 0.1), (15.0, LONGEST_WAIT_S)))

#: How long one look-up of a topic may hold up the readers if no broker answers.
WARM_UP_TIMEOUT_S = 0.25

#: With nothing to read, a wait ends when a command comes; librdkafka's callbacks are served this often.
STANDBY_S = 0.1

#: librdkafka takes milliseconds to end a client, or for ever (its issues 4514 and 5476): then it is left behind.
END_TIMEOUT_S = 5.0

#: librdkafka counts in whole milliseconds: a shorter wait is no wait, and waiting in such steps would be a busy loop.
SHORTEST_WAIT_S = 0.001


#: Messages taken, and what carries out the commands that are waiting.
Settle = Callable[[list[KafkaMessage], Callable[[], None]], list[KafkaMessage]]


class Reading:
    """A librdkafka consumer with one reading thread, and any number of others that enqueue commands."""

    def __init__(
        self,
        name: str,
        settings: dict[str, object],
        troubles: Troubles,
        pace: Pace = STEERED,
    ) -> None:
        """Open the consumer (nothing is sent yet). name says in errors what this reads."""
        self.name = name
        self._pace = pace
        self.troubles = troubles
        self._turn = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._end: threading.Thread | None = None
        #: Rung for a reading thread that waits with nothing to read.
        self._bell = threading.Event()
        #: Whether there is anything to read; where not, the consumer need not be asked.
        self.is_assigned: Callable[[], bool] = lambda: True
        self._quiet_since = time.monotonic()
        #: What may block for a moment and so is left to the reading thread: called after commands, before it waits.
        self.before_wait: Callable[[], None] | None = None
        try:
            self.consumer: Consumer = Consumer(settings)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error

    def check_open(self) -> None:
        """Raise ClosedError once close() was called."""
        if self._closing:
            raise ClosedError(f"The {self.name} was closed; nothing more is read from it. Open a new one.")

    def enqueue_command(self, command: Callable[[], None]) -> None:
        """Have command called with the consumer free: now, or by the reading thread within a slice. Never waits."""
        self.check_open()
        self._commands.append(command)
        self._bell.set()
        self._serve_if_free()

    def warm_up(self, look: Callable[[], object]) -> None:
        """Have look() make the consumer connect and learn leaders, in a separate thread.

        No other thread uses the consumer before it is done: reads, commands and a close wait for it.
        """
        self._turn.acquire()
        threading.Thread(target=self._warm_up, args=(look,), daemon=True).start()

    def _warm_up(self, look: Callable[[], object]) -> None:
        try:
            look()
        finally:
            self._turn.release()
        self._serve_if_free()

    def use(self, work: Callable[[], object]) -> None:
        """Call work with the consumer free (*blocking*: a look-up or a read has to end first)."""
        self.check_open()
        with self._turn:
            work()

    def _serve_if_free(self) -> None:
        while self._commands and self._turn.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self._turn.release()

    def _serve(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if not self._closing:
                command()

    def read(self, limit: int, timeout_s: float, settle: Settle | None = None) -> list[KafkaMessage]:
        """Up to limit messages, error messages among them; waits up to timeout_s for the first.

        Returns early and empty when librdkafka passes an error to a callback.

        settle: called if commands came in while messages were taken; carries them out, and returns the messages that
        still belong to the assignment.
        """
        with self._turn:
            messages = self._read(limit, timeout_s)
            if messages and self._commands and settle is not None:
                messages = settle(messages, self._serve)
        self._serve_if_free()
        return messages

    def _read(self, limit: int, timeout_s: float) -> list[KafkaMessage]:
        deadline = time.monotonic() + timeout_s
        self._prepare()
        messages = self.consumer.consume(limit, 0)
        while not messages and (remaining := deadline - time.monotonic()) > 0 and not self.troubles.pending:
            first = self._wait(remaining)
            if first is not None:
                messages = [first, *self.consumer.consume(limit - 1, 0)] if limit > 1 else [first]
            else:
                self._prepare()
        if messages:
            self._quiet_since = time.monotonic()
        return messages

    def _wait(self, remaining_s: float) -> KafkaMessage | None:
        """Wait for one message, until it is time to look up."""
        if not self.is_assigned():
            self._bell.wait(min(STANDBY_S, remaining_s))
            return self.consumer.poll(0)
        slice_s = self._pace.wait_s(time.monotonic() - self._quiet_since)
        # Rounded up: else the fraction of a millisecond that librdkafka leaves out would be one more wait.
        return self.consumer.poll(math.ceil(min(slice_s, remaining_s) / SHORTEST_WAIT_S) * SHORTEST_WAIT_S)

    def _prepare(self) -> None:
        """Between two waits: end if closed, carry out commands, and what they left to be done."""
        self.check_open()
        if self._bell.is_set():
            self._bell.clear()
        self._serve()
        if self.before_wait is not None:
            self.before_wait()

    def close(self) -> None:
        """Free the consumer; waits for a read in another thread to leave (at most a slice). Idempotent.

        By another thread: one that waits for librdkafka sees no signal, and may do so for ever.
        """
        self._closing = True
        self._bell.set()
        with self._turn:
            if self._end is not None:
                return
            self._end = threading.Thread(target=self.consumer.close, name=f"end of a {self.name}", daemon=True)
            try:
                self._end.start()
            except RuntimeError:  # the interpreter ends, or the limit of threads: this one will do
                self.consumer.close()
                return
            self._end.join(END_TIMEOUT_S)
        if self._end.is_alive():
            LOGGER.error(
                "the %s has not ended %g s after its close: librdkafka hangs (its issues 4514 and 5476), with a "
                "connection and some threads. Nothing is lost or repeated; they end with the process, which continues",
                self.name,
                END_TIMEOUT_S,
            )


def partition_of(message: KafkaMessage) -> int | None:
    """The partition that an error message is about, None for all of the topic or the whole client."""
    partition = message.partition()
    # An error without a topic has the partition 0, which means nothing.
    return partition if message.topic() is not None and partition is not None and partition >= 0 else None
