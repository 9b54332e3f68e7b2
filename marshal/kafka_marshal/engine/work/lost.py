"""Whether a position means anything in the log that is there (P11, P12), for those who look from outside."""

from __future__ import annotations

from kafka_marshal.engine.work.topic_mark import mark_of, split
from kafka_marshal.ports import TopicInfo
from rationalizer.progress import Progress

__all__ = ["POSITION_LOST", "why_lost"]

#: What each reason begins with.
POSITION_LOST = "position lost"


def why_lost(topic: TopicInfo, progress: Progress, log_end: int | None) -> str:
    """Why the position is not one of this topic's log; "" where it is. log_end None: not known."""
    ranges, topic_marks = split(progress.ranges)
    mark = mark_of(topic.topic_id)
    if topic_marks and mark is not None and topic_marks != {mark}:
        return f"{POSITION_LOST}: the topic was deleted and recreated"
    done_to = max([progress.stable, progress.granted, *(last for _, last in ranges)])
    if log_end is not None and done_to >= log_end:
        return f"{POSITION_LOST}: done up to {done_to}, but the log ends at {log_end}"
    return ""
