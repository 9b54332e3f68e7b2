"""Learns from librdkafka that a topic was recreated, before it delivers a message of the new one.

librdkafka fetches by topic id. If a topic was deleted and recreated it learns the new id and reads on at the old
position, without an error. It reports the change only in a debug line, which its queue delivers in order: before the
first message that it fetches by the new id.
"""

from __future__ import annotations

import logging
import re

#: The debug category of that line: some lines for each answer about topics, none for messages.
CATEGORY = "metadata"

_CHANGED = re.compile(r"Topic (?P<topic>\S+) changed id from \S+ to (?P<id>\S+)$")


class TopicIds:
    """The ids by which one client fetches. Called by the thread that reads."""

    def __init__(self, settings: dict[str, object]) -> None:
        """Have librdkafka report it, with these settings of a client."""
        asked = str(settings.get("debug", "")).strip()
        #: Whether the user wants lines for debugging.
        self._is_debugging = bool(asked)
        settings["debug"] = ",".join(filter(None, [asked, CATEGORY]))
        self._ids: dict[str, str] = {}
        self._recreated: dict[str, str] = {}

    def take(self, level: int, line: str) -> bool:
        """Take a line of its log. Whether it was only asked for by us."""
        if level > logging.DEBUG:
            return False
        if (found := _CHANGED.search(line)) is not None:
            topic, topic_id = found["topic"], found["id"]
            if self._ids.get(topic, topic_id) != topic_id:
                self._recreated[topic] = topic_id
            self._ids[topic] = topic_id
        return not self._is_debugging

    def take_recreated(self) -> dict[str, str]:
        """Topics that were recreated since the last call, with their new ids."""
        recreated = self._recreated
        if recreated:
            self._recreated = {}
        return recreated
