"""Hostile records: anything that a client with WRITE on the coordination topic could write, against the real product.

- :func:`run_offline`: straight into the replay. Nothing is raised, and the state is the same however the log is cut.
- :func:`tests.campaigns.fuzz.broker.fuzz_a_broker`: into a real log, at full speed, while workers work.
  They continue, and lose and repeat nothing.
- :class:`Author`: writes them; one seed is one log.

``python -m tests.campaigns fuzz`` (``make fuzz``) runs both from a command line.
"""

from __future__ import annotations

from tests.campaigns.fuzz.author import Author
from tests.campaigns.fuzz.campaign import OfflineReport, run_offline
from tests.campaigns.fuzz.story import Finding, Story, run_story

__all__ = ["Author", "Finding", "OfflineReport", "Story", "run_offline", "run_story"]
