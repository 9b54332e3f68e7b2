"""The cost of an idle watchdog, and what it does not receive."""

from __future__ import annotations

import time
from pathlib import Path

from tests.client.conftest import wait_until
from tests.watchdog.conftest import Watched

MAX_PSS_KB = 32 * 1024
MAX_IDLE_CPU = 0.001
IDLE_MS = 4_000


def pss_kb(pid: int) -> int:
    [line] = [x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Pss:")]
    return int(line.split()[1])


def cpu_s(pid: int) -> float:
    """Processor time of all threads (s), with nanosecond resolution."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def test_it_is_small_and_idle(watched: Watched) -> None:
    watched.scene.grow(watched.topic, 20)
    worker = watched.worker(hi=300)
    watchdog = worker.ready_watchdog()
    worker.do("claim", list(range(20)))
    # The worker sends ten heartbeats a second meanwhile, and the watchdog receives none of them.
    before, began = cpu_s(watchdog), time.monotonic()
    until = watched.watcher.world.log_time + IDLE_MS
    wait_until(lambda: watched.watcher.world.log_time > until)
    used = (cpu_s(watchdog) - before) / (time.monotonic() - began)
    assert used < MAX_IDLE_CPU
    assert pss_kb(watchdog) < MAX_PSS_KB


def test_secrets_are_in_neither_its_arguments_nor_its_environment(watched: Watched) -> None:
    config = {"sasl.username": "ann", "sasl.password": "hunter2", "ssl.key.password": "hunter2"}
    worker = watched.worker(config=config)
    watchdog = worker.ready_watchdog()
    arguments = Path(f"/proc/{watchdog}/cmdline").read_bytes()
    environment = Path(f"/proc/{watchdog}/environ").read_bytes()
    assert f"--worker={worker.process.pid}".encode() in arguments
    for secret in (b"hunter2", b"not-for-the-watchdog"):
        assert secret not in arguments + environment


def test_it_holds_nothing_of_the_workers_but_where_errors_go(watched: Watched, tmp_path: Path) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    links = {int(fd.name): str(fd.readlink()) for fd in Path(f"/proc/{watchdog}/fd").iterdir()}
    assert links[0] == links[1] == "/dev/null"
    of_worker = {str(fd.readlink()) for fd in Path(f"/proc/{worker.process.pid}/fd").iterdir() if int(fd.name) > 2}
    assert of_worker & {link for fd, link in links.items() if link != links[2]} <= {"anon_inode:[eventpoll]"}
    assert str(Path(f"/proc/{watchdog}/cwd").readlink()) == "/"
