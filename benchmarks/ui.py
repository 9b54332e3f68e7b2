"""The page of a long history: first paint, and the slider's time to any moment.

    python -m benchmarks.ui [--records N] [--partitions N] [--short] [--json FILE]

A log of 8 CPs: 200 members share the partitions of one claimed group, each sends one heartbeat record per CP every 3 s;
every 30 s one is silent until its leases are stale, and others claim its partitions. It is folded into a history as in
the server, and opened in Chromium: from the address to the drawn map (`first paint`), and from setting a moment to its
drawn map (`slider`), at random moments. The same is measured while the log is still being read.

`oracle` compares random moments with a plain replay of all records up to there.

`around` writes a tenth of it into a real log, with its snapshots, and reads around random moments, as the server does
before it has read that far.
"""

from __future__ import annotations

import argparse
import marshal
import multiprocessing
import random
import resource
import shutil
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from msgpack import packb

from benchmarks.common import Row, bench_kafka, report
from kafka_marshal.ui.archive import Histories
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.server import SWITCH_S
from rationalizer import ClaimingPartition, HeartbeatBatch, World, route_lease
from rationalizer.limits import SNAPSHOT_INTERVAL
from tests.stored_snapshot import encode_snapshot

if TYPE_CHECKING:
    from playwright.sync_api import Page

GROUP, TOPIC, CPS = "delays-by-carrier", "flights", 8
MEMBERS, BEAT_MS, KILL_MS, INTERVAL_MS = 200, 3_000, 30_000, 6_000
BEGIN_MS = 1_764_100_000_000
MOMENTS = 60

Entry = tuple[int, int, bytes | None]


class Story:
    """The log in runs, the same each time."""

    def __init__(self, records: int, partitions: int) -> None:
        self.records = records
        self.partitions = partitions

    def runs(self) -> Iterator[tuple[int, list[Entry]]]:
        """Runs of records of one CP each, the CPs in step."""
        rng = random.Random(7)
        self.next = [0] * CPS
        self.written = 0
        cp_of = [route_lease(TOPIC, number, CPS) for number in range(self.partitions)]
        holder = [number % MEMBERS for number in range(self.partitions)]
        names = [(f"host-{n}/{n}/0.1.0/0", f"worker-{n}") for n in range(MEMBERS)]
        runs: list[list[Entry]] = [[] for _ in range(CPS)]
        epochs = [0] * self.partitions
        done = [0] * self.partitions
        now = BEGIN_MS

        def append(cp: int, record: list[Any]) -> int:
            runs[cp].append((self.next[cp], now, packb(record)))
            self.next[cp] += 1
            self.written += 1
            return self.next[cp] - 1

        def claim(number: int, member: int) -> int:
            record = [1, ClaimingPartition.TYPE, *names[member], GROUP, TOPIC, number, INTERVAL_MS]
            return append(cp_of[number], record)

        for number in range(self.partitions):
            epochs[number] = claim(number, holder[number])
        silent, since, killed = -1, 0, now
        while self.written < self.records:
            now += BEAT_MS
            held: dict[tuple[int, int], list[list[object]]] = {}
            for number, member in enumerate(holder):
                if member != silent:
                    done[number] += 30
                    entry = [TOPIC, number, epochs[number], done[number]]
                    held.setdefault((member, cp_of[number]), []).append(entry)
            for (member, cp), entries in held.items():
                append(cp, [1, HeartbeatBatch.TYPE, *names[member], GROUP, entries])
            if silent >= 0 and now - since > 2 * INTERVAL_MS + BEAT_MS:
                for number, member in enumerate(holder):
                    if member == silent:
                        heir = rng.choice([n for n in range(MEMBERS) if n != silent])
                        epochs[number], holder[number] = claim(number, heir), heir
                silent = -1
            elif silent < 0 and now - killed >= KILL_MS:
                silent, since, killed = rng.randrange(MEMBERS), now, now
                for number in rng.sample(range(self.partitions), min(12, self.partitions)):
                    claim(number, rng.randrange(MEMBERS))
            for cp, run in enumerate(runs):
                if run:
                    yield cp, run
            runs = [[] for _ in range(CPS)]
        self.end_ms = now


def write(story: Story, pipe: Connection) -> None:
    """Send the log in runs from another process, as a broker does."""
    for cp, run in story.runs():
        pipe.send_bytes(marshal.dumps((cp, run)))
    pipe.send_bytes(b"")


def read(story: Story, archive: Histories) -> float:
    """Fold the log into the archive; returns processor seconds."""
    history = archive.whole = History(CPS)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(story, theirs), daemon=True)
    writer.start()
    spent, done = 0.0, 0
    while received := ours.recv_bytes():
        cp, run = marshal.loads(received)
        began = time.thread_time()
        history.take(cp, run)
        spent += time.thread_time() - began
        done += len(run)
        archive.progress = (done, story.records)
    writer.join()
    archive.finished()
    return spent


def serve(archive: Histories) -> str:
    """Serve it; the address."""
    import uvicorn

    from kafka_marshal.ui.server import application

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(application(archive, None, None), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    while not server.started:
        time.sleep(0.01)
    return url


def limit(name: str, found: float, most: float | None, unit: str) -> Row:
    """A figure and its upper limit."""
    ratio = 0.0 if most is None else found / most if most else found
    target = None if most is None else float(most > 0)
    return Row(name, found, most or 0.0, ratio, target, unit, at_most=True)


# -- in the browser ----------------------------------------------------------------------------------------------

_DRAWN = """() => {
  const maps = performance.getEntriesByName("map");
  return maps.length ? maps[maps.length - 1].startTime + maps[maps.length - 1].duration : null;
}"""

_SLIDE = """(at) => new Promise((done) => {
  const before = performance.getEntriesByName("map").length;
  const began = performance.now();
  const range = document.querySelector("input[type=range]");
  range.value = at;
  range.dispatchEvent(new Event("input", { bubbles: true }));
  const look = () => {
    const maps = performance.getEntriesByName("map");
    if (maps.length > before) requestAnimationFrame(() => done(performance.now() - began));
    else setTimeout(look, 1);
  };
  look();
})"""


def paint(page: Page, url: str) -> float:
    """Time from the address to the drawn map (ms)."""
    page.goto("about:blank")
    page.goto(f"{url}#group={GROUP}")
    page.wait_for_function(_DRAWN)
    return float(page.evaluate(_DRAWN))


def slide(page: Page, begin: int, end: int, times: int) -> list[float]:
    """Times from setting random moments to their drawn maps (ms, sorted)."""
    rng = random.Random(11)
    return sorted(float(page.evaluate(_SLIDE, rng.randrange(begin, end))) for _ in range(times))


def ask(url: str, begin: int, end: int, times: int) -> list[float]:
    """The server's part of these times (ms, sorted)."""
    rng, found = random.Random(11), []
    for _ in range(times):
        query = urllib.parse.urlencode({"group": GROUP, "at": rng.randrange(begin, end)})
        began = time.perf_counter()
        with urllib.request.urlopen(f"{url}api/state?{query}") as answer:
            answer.read()
        found.append((time.perf_counter() - began) * 1000)
    return sorted(found)


def oracle(story: Story, history: History, moments: int) -> int:
    """Number of partitions that differ from a plain replay at random moments."""
    from kafka_marshal.ui.moments import Moment
    from tests.ui.cells import cells

    rng = random.Random(13)
    begin, end = BEGIN_MS, max(world.log_time for world in history.worlds.values())
    at = sorted(rng.randrange(begin, end) for _ in range(moments))
    worlds = {cp: World(cp, CPS) for cp in range(CPS)}
    words = {"fresh": "seen", "unknown": "silent", "stale": "gone", "free": "free"}
    differ = 0
    runs = iter(story.runs())
    waiting: tuple[int, list[Entry]] | None = next(runs, None)
    for moment in at:
        while waiting is not None and waiting[1][0][1] <= moment:
            worlds[waiting[0]].apply_many(waiting[1])
            waiting = next(runs, None)
        leases = [lease for world in worlds.values() for lease in world.leases()]
        truth = {
            lease.partition: (lease.client_id or "", lease.epoch, words[lease.freshness(moment)]) for lease in leases
        }
        said = {
            cell.partition: (cell.client, cell.epoch, cell.state)
            for cell in cells(history, history.groups[GROUP], Moment(moment))
        }
        differ += sum(truth.get(key) != said.get(key) for key in truth.keys() | said.keys())
    return differ


def around(story: Story, moments: int) -> list[float]:
    """Times from requesting an unread moment to its answer (s, sorted), of a log with snapshots."""
    from kafka_marshal.adapters.kafka import KafkaCluster
    from kafka_marshal.node.coordination_topic import create_snapshots_topic, required_settings
    from kafka_marshal.observe.log import Source
    from kafka_marshal.ui.archive import read_around

    with bench_kafka() as bootstrap:
        topic, cluster = "__marshal", KafkaCluster(bootstrap, {})
        cluster.create_topic(
            topic, CPS, 1, required_settings(1), 10
        )  # without markers: epochs are offsets of the story
        create_snapshots_topic(cluster, topic, CPS, 1, 10)
        log, snapshots = (cluster.appender(name, delivery_timeout_ms=60_000) for name in (topic, f"{topic}_snapshots"))
        worlds = {cp: World(cp, CPS) for cp in range(CPS)}
        for cp, run in story.runs():
            world = worlds[cp]
            for _, _, value in run:
                log.append(cp, value or b"", None)
                world.apply(world.next_offset, world.next_offset, value)
                if world.next_offset % SNAPSHOT_INTERVAL == 0:
                    assert log.flush(60) == 0
                    for part in encode_snapshot(world):
                        snapshots.append(cp, part, None)
        assert log.flush(60) + snapshots.flush(60) == 0
        stamps: list[int] = []
        tail = cluster.tail(topic, {0: worlds[0].next_offset // 2})
        while len(stamps) < moments:
            stamps += [stamp for _, stamp, _ in tail.read(1.0).records.get(0, ())[::500]]
        tail.close()
        found = []
        source = Source(topic, 10.0, lambda: (bootstrap, {}))
        for stamp in stamps[:moments]:
            began = time.perf_counter()
            assert read_around(source, stamp, None, lambda: False) is not None
            found.append(time.perf_counter() - began)
        cluster.close()
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, help="10,000,000; short: 200,000")
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--short", action="store_true", help="a fiftieth of it: does it run")
    parser.add_argument("--moments", type=int, default=20, help="moments that are compared with a replay; 0: none")
    parser.add_argument("--json", help="write the rows here, too")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    story = Story(args.records or (200_000 if args.short else 10_000_000), args.partitions)
    archive = Histories("__marshal", is_live=False)
    sys.setswitchinterval(SWITCH_S)
    spent: list[float] = []
    reading = threading.Thread(target=lambda: spent.append(read(story, archive)), daemon=True)
    reading.start()
    url = serve(archive)
    rows: list[Row] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        while archive.progress[0] < story.records // 4:
            time.sleep(0.1)
        rows.append(limit("first paint while the log is read", paint(page, url), 1000, "ms"))
        early = slide(page, BEGIN_MS, archive.reached(), 20)
        rows.append(limit("slider while the log is read, median", early[10], 100, "ms"))
        reading.join()
        begin, end = archive.bounds()
        paints = sorted(paint(page, url) for _ in range(5))
        rows.append(limit("first paint", paints[2], 1000, "ms"))
        found = slide(page, begin, end, MOMENTS)
        rows.append(limit("slider, median", found[MOMENTS // 2], 100, "ms"))
        rows.append(limit("slider, 95 of 100", found[MOMENTS * 95 // 100], 100, "ms"))
        rows.append(limit("slider, slowest", found[-1], 100, "ms"))
        browser.close()
    served = ask(url, begin, end, MOMENTS)
    rows.append(limit("… of that the server's, median", served[MOMENTS // 2], 100, "ms"))
    rows.append(limit("records folded in a second of processor", archive.progress[0] / spent[0], None, "records/s"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(limit("memory of the server", memory, None, "MiB"))
    assert archive.whole is not None
    rows.append(limit("owners that the history keeps", float(len(archive.whole.spans)), None, "spans"))
    if args.moments:
        wrong = oracle(story, archive.whole, args.moments)
        rows.append(limit("partitions that differ from a replay", float(wrong), 0, f"of {args.moments} moments"))
    waited = around(Story(story.records // 10, args.partitions), 5)
    rows.append(limit("a moment that is not read yet, from the snapshots before it", waited[2], None, "s"))
    report(
        "ui", rows, args.json, records=f"{archive.progress[0]:,}", partitions=f"{args.partitions:,}", members=MEMBERS
    )


if __name__ == "__main__":
    main()
