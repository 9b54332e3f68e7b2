"""The command, killed: ``python killed_redrive.py '{"bootstrap": …, "at": ["settle", "read", 2]}' redrive …``."""

from __future__ import annotations

import json
import sys

from kafka_marshal.admin import dead_letters, open_messages
from kafka_marshal.cli.app import run
from kafka_marshal.testing.fail_points import CallMoment, Doom, FailPoint, dying

arguments = json.loads(sys.argv[1])
step, moment, times = arguments["at"]
moments = {each.value: each for kind in (FailPoint, CallMoment) for each in kind}
open_messages.MOST_ENTRIES = dead_letters.MOST_LETTERS = 2
with dying(arguments["bootstrap"], Doom(step, moments[moment], times)):
    raise SystemExit(run(sys.argv[2:]))
