"""Profiles of start, claim, hand-over, balance, idleness and replay: py-spy's stacks of one process each.

    python -m benchmarks.race.profile [--only claim,replay] [--seconds N] [--out DIR]

Each scene runs repeatedly for some seconds in its own process, under ``py-spy record``. Prints the functions by own and
cumulative time (of threads that hold Python's lock, without waits), and writes the stacks to out/profile-SCENE.txt
(for flamegraph.pl and speedscope). librdkafka's threads are not included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Barrier, Thread
from time import monotonic

from benchmarks.race.events.logs import replay
from benchmarks.race.grounds import Brokers, Grounds, new_name
from kafka_marshal import Marshal

ROOT = Path(__file__).parents[2]
RATE_HZ = 500
SHOWN = 12


def start(grounds: Grounds, coordination: str, until: float) -> None:
    """From the constructor to the first record, with 1,000 records of history."""
    topic = grounds.topic(2)
    grounds.fill(topic, 2, 100)
    while monotonic() < until:
        with (
            Marshal(grounds.bootstrap, group_id=new_name("group"), topic=coordination) as marshal,
            marshal.consumer([topic]) as consumer,
        ):
            consumer.poll(10)


def claim(grounds: Grounds, coordination: str, until: float) -> None:
    """Claims and releases by hand."""
    with Marshal(grounds.bootstrap, group_id=new_name("group"), topic=coordination) as marshal:
        while monotonic() < until:
            marshal.claim("profile", 1).release()


def handover(grounds: Grounds, coordination: str, until: float) -> None:
    """Two members of one process; one leaves, returns, leaves …"""
    topic, group = grounds.topic(20), new_name("group")
    grounds.fill(topic, 20, 2_000)
    with (
        Marshal(grounds.bootstrap, group_id=group, client_id="stays", topic=coordination) as stays,
        stays.consumer([topic]) as consumer,
    ):
        while monotonic() < until:
            with (
                Marshal(grounds.bootstrap, group_id=group, client_id="comes and goes", topic=coordination) as other,
                other.consumer([topic]) as second,
            ):
                while len(second.assignment()) < 10 and monotonic() < until:
                    second.poll(0.01)
            while len(consumer.assignment()) < 20 and monotonic() < until:
                consumer.poll(0.01)


def balance(grounds: Grounds, coordination: str, until: float) -> None:
    """Ten members of one process start together on 900 partitions and leave when shares are even."""
    topic = grounds.topic(900)
    while monotonic() < until:
        _even(grounds, coordination, topic, until)


def _even(grounds: Grounds, coordination: str, topic: str, until: float) -> None:
    group, members = new_name("group"), 10
    there = Barrier(members)

    def member(number: int) -> None:
        with (
            Marshal(grounds.bootstrap, group_id=group, client_id=f"w{number}", topic=coordination) as marshal,
            marshal.consumer([topic]) as consumer,
        ):
            while len(consumer.assignment()) != 900 // members and monotonic() < until:
                consumer.poll(0.05)
            there.wait()

    threads = [Thread(target=member, args=(number,)) for number in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def idle(grounds: Grounds, coordination: str, until: float) -> None:
    """100 leases, no messages."""
    with (
        Marshal(grounds.bootstrap, group_id=new_name("group"), topic=coordination) as marshal,
        marshal.consumer([grounds.topic(100)]) as consumer,
    ):
        consumer.poll(until - monotonic())


def big_log(grounds: Grounds, coordination: str, until: float) -> None:
    """The log once more from its beginning."""
    while monotonic() < until:
        replay(grounds.bootstrap, coordination)


#: Name → function, and the length of its log's history.
SCENES: Mapping[str, tuple[Callable[[Grounds, str, float], None], int]] = {
    "start": (start, 1_000),
    "claim": (claim, 0),
    "handover": (handover, 0),
    "balance": (balance, 0),
    "idle": (idle, 0),
    "replay": (big_log, 200_000),
}


def hottest(stacks: Sequence[str]) -> tuple[Counter[str], Counter[str], int]:
    """Samples in py-spy's raw stacks: in each function itself, at or below each function, and in total."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    total = 0
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        if not stack.strip() or "<frozen importlib" in stack:
            continue  # a thread without Python frames, and imports
        frames = [frame.rpartition(":")[0] or frame for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            below[frame] += int(count)
        total += int(count)
    return own, below, total


def show(name: str, stacks: Sequence[str]) -> str:
    """A table of the hottest functions."""
    own, below, total = hottest(stacks)
    if not total:
        return f"{name}: no samples"
    ours = [frame for frame, _ in below.most_common() if "kafka_marshal" in frame or "rationalizer" in frame]
    lines = [f"{name}: {total} samples", "   itself   below"]
    chosen = sorted({*[frame for frame, _ in own.most_common(SHOWN)], *ours[:SHOWN]}, key=lambda frame: -below[frame])
    lines.extend(f"  {own[frame] / total:7.1%} {below[frame] / total:7.1%}  {frame}" for frame in chosen)
    return "\n".join(lines)


def record(name: str, grounds: Grounds, seconds: float, out: Path) -> str:
    """Run a scene under py-spy; returns the table."""
    target = out / f"profile-{name}.txt"
    history = SCENES[name][1]
    coordination = grounds.coordination(history)
    scene = [sys.executable, "-m", "benchmarks.race.profile", "--scene", name, "--seconds", str(seconds)]
    scene += ["--bootstrap", grounds.bootstrap, "--coordination", coordination]
    # Without stopping the process for each sample, which with seventy threads would take all the time.
    spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--nonblocking", "--gil"]
    spy += ["--rate", str(RATE_HZ), "--format", "raw", "--output", str(target), "--"]
    done = subprocess.run([*spy, *scene], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.stderr.strip():  # of the scene, too: a failed worker is no profile
        print(done.stderr.strip(), file=sys.stderr)
    if done.returncode or not target.exists():
        raise SystemExit(f"py-spy failed on {name}: {done.stdout.strip()}")
    return show(name, target.read_text(encoding="utf-8").splitlines())


def main() -> None:
    """Profile all scenes, or (--scene, in the process under py-spy) run one."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m benchmarks.race.profile",
    )
    parser.add_argument("--only", default=",".join(SCENES), help="scenes, with commas (all: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", default="out")
    for hidden in ("--scene", "--bootstrap", "--coordination"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scene:
        play = SCENES[options.scene][0]
        play(Grounds(options.bootstrap), options.coordination, monotonic() + options.seconds)
        return
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    brokers = Brokers()
    try:
        for name in options.only.split(","):
            print(record(name, brokers.only("delay 0"), options.seconds, out.absolute()), end="\n\n", flush=True)
    finally:
        brokers.close()


if __name__ == "__main__":
    main()
