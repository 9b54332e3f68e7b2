"""Fenced sinks with several writers: shares that are cut again and again, stale tokens, kills, stops and rewinds.

:mod:`coordinator` gives out tokens and work, :mod:`member` writes, :mod:`account` compares the users' rows with what
the coordinator knows. No Kafka.
"""

from tests.campaigns.sinks.campaign import Figures, Options, run_campaign

__all__ = ["Figures", "Options", "run_campaign"]
