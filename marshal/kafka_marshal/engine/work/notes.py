"""What one assignment has reported to the log, and what it knows of its partition's end."""

from __future__ import annotations


class Told:
    """What was reported to the log of an assignment, and when to resend it."""

    __slots__ = (
        "has_come",
        "mark_sent_at",
        "ranges",
        "ranges_due",
        "revoked_at",
        "start_beat",
        "start_beat_sent",
        "topic_id",
    )

    def __init__(self) -> None:
        #: The last_offset of the start beat (P9) under way; None: there is none.
        self.start_beat: int | None = None
        self.start_beat_sent: float = 0.0
        #: The ranges of the last CommitRanges, and when to resend them.
        self.ranges: list[tuple[int, int]] = []
        self.ranges_due: float = 0.0
        #: When the mark of its topic was sent (P12); None: not yet, or the log had it already.
        self.mark_sent_at: float | None = None
        #: The id of the topic in which it began; None: not known yet. The name may be that of another topic by now.
        self.topic_id: str | None = None
        #: Whether messages of it have come: the mark goes ahead of what will be done of them.
        self.has_come: bool = False
        #: Since when (own clock, ms) its release waits for messages in flight.
        self.revoked_at: float = 0.0


class Watch:
    """The known end of an assignment's log, and since when nothing has arrived; for StuckPartitions."""

    __slots__ = ("asked_at", "asked_end", "log_end", "look_up_at", "looked_up", "quiet")

    def __init__(self) -> None:
        #: The next offset at the last check, and since when it has been the next one.
        self.quiet: tuple[int, float] | None = None
        #: The position and time of the last look-up at the leader; when the next one is due (None: not at all).
        self.looked_up: tuple[int, float] = (-1, 0.0)
        self.look_up_at: float | None = None
        self.log_end: int | None = None
        #: The log end that the leader reported, and when it was last asked (or the position last moved).
        self.asked_end: int = 0
        self.asked_at: float = 0.0
