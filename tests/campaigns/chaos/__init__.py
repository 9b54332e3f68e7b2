"""Faults on real brokers: workers in separate processes, killed at numbered steps, and a check of every message.

worker     one worker; lines: its output
forkserver starts them by fork; fleet: replaces them, and decides how each ends
log        the coordination log, read beside the workers; history: what happened by the log
check      the invariants
campaign   one run: brokers behind proxies, topics, a writer of numbered messages, and their faults
"""

from kafka_marshal.testing.fail_points import POINTS, Doom, FailPoint, dying
from tests.campaigns.chaos.campaign import ChaosResult, Options, run_campaign
from tests.campaigns.chaos.check import Findings

__all__ = ["POINTS", "ChaosResult", "Doom", "Findings", "FailPoint", "Options", "dying", "run_campaign"]
