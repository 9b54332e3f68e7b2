"""Faults on real brokers: workers in processes of their own, killed at numbered steps, and an account of every message.

points     fail points: kill -9 at a step of claim, at least once or at most once; usable around workers of your own
worker     one worker; lines: what it writes down
forkserver starts them by fork; fleet: fills their places, and decides how each ends
ground     brokers behind proxies, topics, a writer of numbered messages, and what goes wrong there
log        the coordination log, read beside the workers; history: what it says happened
check      what must hold of it all
campaign   one run; __main__: the command
"""

from kafka_marshal.testing.fail_points import POINTS, Doom, Moment, dying
from tests.campaigns.chaos.campaign import Options, Result, run_campaign
from tests.campaigns.chaos.check import Findings, Violation

__all__ = ["POINTS", "Doom", "Findings", "Moment", "Options", "Result", "Violation", "dying", "run_campaign"]
