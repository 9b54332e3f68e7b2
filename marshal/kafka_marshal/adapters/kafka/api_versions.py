"""Learns from librdkafka which versions of Kafka's requests the brokers know: it reports them in debug lines only."""

from __future__ import annotations

import logging
import re

#: The debug category of these lines: some for each new connection.
CATEGORY = "feature"

_OFFERED = re.compile(r"ApiKey (?P<name>\w+) \(\d+\) Versions \d+\.\.(?P<newest>\d+)")

#: Request → the version that exactly once needs: OffsetFetch waits for pending offsets from 7 on (Kafka 2.5).
NEEDED = {"OffsetFetch": 7}


class ApiVersions:
    """What the brokers that one client has connected to lack."""

    def __init__(self, settings: dict[str, object]) -> None:
        """Have librdkafka report it, with these settings of a client."""
        asked = str(settings.get("debug", "")).strip()
        #: Whether the user wants lines for debugging.
        self._is_debugging = bool(asked)
        settings["debug"] = ",".join(filter(None, [asked, CATEGORY]))
        #: Why they are too old; None: nothing is known to be missing.
        self.lacking: str | None = None

    def take(self, level: int, line: str) -> bool:
        """Take a line of its log. Whether it was only asked for by us."""
        if level > logging.DEBUG:
            return False
        if (found := _OFFERED.search(line)) is not None:
            needed, newest = NEEDED.get(found["name"], 0), int(found["newest"])
            if newest < needed:
                self.lacking = f"they know {found['name']} up to version {newest}, and {needed} is needed"
        return not self._is_debugging
