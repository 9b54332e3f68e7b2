"""From the end of a leader until the one that waits has won, with the default heartbeat interval.

    python -m benchmarks.locks [--rounds N] [--only TEXT] [--json FILE]

The leader is a separate process, which releases, is stopped, or is killed; with a watchdog, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from statistics import median

from benchmarks.common import bench_kafka, new_log
from kafka_marshal import Marshal
from kafka_marshal.testing.simulate import where_it_ran

#: What ends the leader: a line it waits for, or a signal; and whether it has a watchdog.
ENDS: dict[str, tuple[signal.Signals | None, bool]] = {
    "release": (None, False),
    "kill -9, watchdog=True": (signal.SIGKILL, True),
    "kill -9": (signal.SIGKILL, False),
    "SIGSTOP": (signal.SIGSTOP, False),
}
#: How long the one that waits has waited: less than a heartbeat interval after its start it claims later (s).
WAITS_S = 4.0
#: A takeover that takes longer has failed (s).
LONGEST_S = 60.0


def lead(bootstrap: str, log: str, group: str, watchdog: bool) -> None:
    """The leader's process."""
    marshal = Marshal(bootstrap, group_id=group, client_id="a", topic=log, watchdog=watchdog)
    with marshal, marshal.lead("benchmark"):
        print("won", flush=True)
        sys.stdin.readline()


def taken_over(bootstrap: str, log: str, end: signal.Signals | None, watchdog: bool) -> float:
    """Seconds."""
    group, won = f"g-{uuid.uuid4().hex[:8]}", threading.Event()
    call = f"lead({bootstrap!r}, {log!r}, {group!r}, {watchdog})"
    command = [sys.executable, "-c", f"from benchmarks.locks import lead; {call}"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader,
        Marshal(bootstrap, group_id=group, client_id="b", topic=log) as marshal,
    ):
        assert leader.stdin is not None
        assert leader.stdout is not None
        assert leader.stdout.readline() == "won\n"

        def wait() -> None:
            with marshal.lead("benchmark", timeout=LONGEST_S):
                won.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(WAITS_S)
        began = time.monotonic()
        if end is None:
            leader.stdin.write("\n")
            leader.stdin.flush()
        else:
            leader.send_signal(end)
        assert won.wait(LONGEST_S), "no other has taken over"
        took = time.monotonic() - began
        waiting.join()
        leader.kill()
    return took


def main() -> None:
    """Measure, and print a line for each way to end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = []
    with bench_kafka() as bootstrap:
        log = new_log(bootstrap, 8)
        for name, (end, watchdog) in ENDS.items():
            if args.only in name:
                found = sorted(taken_over(bootstrap, log, end, watchdog) * 1000 for _ in range(args.rounds))
                rows.append({"end": name, "median_ms": median(found), "least_ms": found[0], "most_ms": found[-1]})
                print(f"{name:24} {median(found):9,.1f} ms  ({found[0]:,.1f} to {found[-1]:,.1f})", flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"benchmark": "locks", "machine": where_it_ran(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
