"""What messages that are slow hold back, and which were left behind with their handlers: for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kafka_marshal.ports import Message

#: Where one message is tried at a time, a handler that has worked for longer than this (ms) does not count.
HANGS_MS = 10_000.0


class HeldBack(NamedTuple):
    """A partition whose progress waits for one message, while later ones are done or wait."""

    topic: str
    partition: int
    #: The offset of the message that all others wait for, and its key.
    offset: int
    key: bytes | str | None
    #: For how long it has been with a handler, or waited for its next try (ms).
    for_ms: float
    #: How many messages of this partition are in flight.
    in_hand: int
    #: Why the partition is being released, which also waits for that message (``revoke_timeout``); "": it is not.
    releasing: str = ""
    #: In a run with transactions: how many later messages are handled, and how many bytes of output wait with them.
    finished: int = 0
    finished_bytes: int = 0
    #: What else it waits for: a transaction that is not committed yet; "": the message's handler.
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.topic} [{self.partition}]: held back at offset {self.offset} for {lasting(self.for_ms)} by "
            + (self.why or f"key {self.key!r}")
            + (
                f"; {self.finished:,} later message(s) are handled, and {self.finished_bytes:,} bytes of output wait "
                "with them"
            )
            * bool(self.finished)
            + (f"; it is to be released ({self.releasing}), which waits for that" * bool(self.releasing))
        )


def given_up(message: Message) -> str:
    """What holds a partition back where a message was taken away from a handler that has not returned."""
    return (
        f"key {message.key()!r}: a handler has had this message since before the partition was taken away "
        "(handler_timeout?), and has not returned; the key waits for it. Nothing is lost. Find out what it waits for, "
        "or restart the process"
    )


def lasting(ms: float) -> str:
    """A duration, for people: "12 s", "3 min", "5.5 h"."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class LeftBehind(NamedTuple):
    """Messages of a partition that a handler has not finished within ``handler_timeout``: others may have them."""

    topic: str
    partition: int
    #: Their offsets, and the key if it is one message.
    first: int
    last: int
    key: bytes | str | None
    #: Since when (ms, own clock) the handler has had them.
    since: float

    def text(self, now: float) -> str:
        """For people."""
        what = f"offset {self.first} (key {self.key!r})" if self.first == self.last else f"{self.first} to {self.last}"
        return (
            f"{self.topic} [{self.partition}] {what}: with a handler for {lasting(now - self.since)}, longer than "
            "handler_timeout. Nothing is lost: it is given to others, and what this handler reports later has no "
            "effect. Find out what it waits for; if it needs longer, raise handler_timeout"
        )
